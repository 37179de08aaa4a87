"""Tiny models of Megatron-Core on the CPU, over gloo: the same weights in any layout, and its own forward as oracle.

Three stand-ins let it run without a GPU: the device is the CPU, and nothing is kept of a GPU's random numbers.
"""

from __future__ import annotations

import copy
import hashlib
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from megatron.core import parallel_state as ps
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import distributed

import mmpack as mp
from mmpack.adapters.megatron import attach, packed_logprobs, pad_multiple
from mmpack.families import FAMILIES, get_family
from mmpack.families.register import register_family

VOCAB = 512
FAMILY = replace(  # Qwen2.5-VL with few ids
    get_family("qwen2_5_vl"),
    name="few_ids",
    model_types=("few_ids",),
    vocab_size=VOCAB,
    image_token_id=500,
    video_token_id=501,
    vision_start_id=502,
    vision_end_id=503,
    pad_token_id=504,
)
if FAMILY.name not in FAMILIES:
    register_family(FAMILY)
TEXT = {"schema_version": "1", "family": FAMILY.name, "media": [], "modality_spans": []}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_ffn_hidden_size": 32,
}
CPU = torch.device("cpu")
_KNOWN: dict[str, Any] = {}  # what the oracle said of the same samples


def stand_in() -> None:
    """Let Megatron take the CPU for its GPU."""
    torch.cuda.current_device = lambda: CPU
    torch.cuda.Stream = torch.cuda.current_stream = MagicMock()
    torch.cuda.stream = lambda stream: nullcontext()
    torch.cuda.synchronize = lambda *args: None
    torch.Tensor.record_stream = lambda self, stream: None
    torch.Tensor.cuda = lambda self, *a, **k: self
    for name in ("zeros", "empty", "tensor"):
        setattr(torch, name, _here(getattr(torch, name)))
    megatron_random.CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()
    WrappedTorchNorm.__new__ = _norm
    DotProductAttention.__init__ = _local_core
    token_dispatcher.maybe_move_tensor_to_cpu = lambda x, as_numpy=False, **k: (
        x.numpy() if as_numpy and torch.is_tensor(x) else x
    )
    moe_utils.te_general_gemm = None  # 0.16.1 forgets it without Transformer Engine
    megatron_random._get_all_rng_states = lambda: ()
    megatron_random._set_all_rng_states = lambda *states: None
    megatron_random._fork_rng = nullcontext


def _norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
    """torch's, whose gradients sequence parallel ranks add up, as Transformer Engine's and Apex' norms say."""
    made = torch.nn.RMSNorm(hidden_size, eps)
    made.weight.sequence_parallel = config.sequence_parallel
    return made


def _local_core(
    self: Any, config: Any, *args: Any, _own: Any = DotProductAttention.__init__, **kwargs: Any
) -> None:
    """Megatron's own leaves context parallelism to Transformer Engine's; here it is never run so."""
    config = copy.copy(config)
    config.context_parallel_size = 1
    _own(self, config, *args, **kwargs)


def _here(make: Any) -> Any:
    if hasattr(make, "__wrapped__"):
        return make

    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = CPU
        return make(*args, **kwargs)

    return made


def start(**sizes: Any) -> None:
    """Groups of these sizes: tp, pp, vpp, cp, ep. Those before are left."""
    stand_in()
    if ps.model_parallel_is_initialized():
        ps.destroy_model_parallel()
    ps.initialize_model_parallel(
        sizes.get("tp", 1),
        sizes.get("pp", 1),
        sizes.get("vpp"),
        context_parallel_size=sizes.get("cp", 1),
        expert_model_parallel_size=sizes.get("ep", 1),
        expert_tensor_parallel_size=1,
    )


def config_of(
    sizes: dict[str, Any], kind: Any = TransformerConfig, **options: Any
) -> TransformerConfig:
    given = {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "use_cpu_initialization": True,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "mrope_section": [4, 2, 2],
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_dropout_fusion": False,
        "tensor_model_parallel_size": sizes.get("tp", 1),
        "pipeline_model_parallel_size": sizes.get("pp", 1),
        "virtual_pipeline_model_parallel_size": sizes.get("vpp"),
        "context_parallel_size": sizes.get("cp", 1),
        "expert_model_parallel_size": sizes.get("ep", 1),
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": sizes.get("sp", False),
        "overlap_p2p_comm": "vpp" in sizes,
        "batch_p2p_comm": "vpp" not in sizes,
        "pipeline_dtype": torch.float32,
        "moe_token_dispatcher_type": "alltoall",
        "variable_seq_lengths": True,
        "finalize_model_grads_func": finalize_model_grads,
    }
    return kind(**given | options)


def build(sizes: dict[str, Any], position: str = "mrope", **options: Any) -> list[Any]:
    """This rank's chunks, in Megatron's DDP, in training; weights follow from their names."""
    config = config_of(sizes, **options)
    chunks = []
    for stage in range(sizes.get("vpp") or 1):
        at = {"vp_stage": stage} if sizes.get("vpp") else {"vp_stage": None}
        chunk = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False, **at),
            vocab_size=VOCAB,
            max_sequence_length=128,
            position_embedding_type=position,
            rotary_base=10000,
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, **at),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, **at),
            **at,
        )
        chunks.append(wrapped(chunk, config))
    return chunks


def wrapped(chunk: Any, config: Any) -> Any:
    with torch.no_grad():
        for name, p in chunk.named_parameters():
            p.copy_(own_part(drawn(name_of(name, chunk), whole_shape(p, name)), p, name))
    return DistributedDataParallel(config, DistributedDataParallelConfig(), chunk).train()


def name_of(name: str, chunk: Any) -> str:
    """The same on every layout: layers and experts by their numbers in the whole model."""
    parts = name.split(".")
    language = getattr(chunk, "language_model", chunk)
    if "vision_model" not in parts and "layers" in parts:
        at = parts.index("layers") + 1
        parts[at] = str(language.decoder.layers[int(parts[at])].layer_number - 1)
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        each = language.config.num_moe_experts // ps.get_expert_model_parallel_world_size()
        parts[at] = str(int(parts[at]) + each * ps.get_expert_model_parallel_rank())
    return ".".join(parts)


def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    seed = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
    made = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    made = torch.from_numpy(made * (0.3 if "router" in name else 0.08))
    return made + 1 if "norm" in name and "bias" not in name else made


def is_split(p: Any) -> bool:
    return bool(getattr(p, "tensor_model_parallel", False)) and getattr(p, "partition_dim", -1) >= 0


def whole_shape(p: Any, name: str) -> tuple[int, ...]:
    shape = list(p.shape)
    if is_split(p) and "local_experts" not in name:
        shape[p.partition_dim] *= ps.get_tensor_model_parallel_world_size()
    return tuple(shape)


def own_part(whole: torch.Tensor, p: Any, name: str) -> torch.Tensor:
    """This tensor parallel rank's; of a gated product both halves are split."""
    if whole.shape == p.shape:
        return whole
    size, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
    if "linear_fc1" in name and "projection" not in name:
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, p.partition_dim)[rank]


def text_samples(groups: int = 1, seed: int = 0, equal: int | None = None) -> list[mp.Sample]:
    """Four responses for each of some prompts."""
    rng = np.random.default_rng(seed)
    out = []
    for g in range(groups):
        prompt = rng.integers(0, 500, 9).tolist()
        for k in range(4):
            own = rng.integers(0, 500, equal or int(rng.integers(3, 9))).tolist()
            span = {"start": 9, "stop": 9 + len(own), "kind": "response"}
            part = {
                "sample_id": f"{seed}.{g}/{k}",
                "group_id": f"{seed}.{g}",
                "input_ids": prompt + own,
            }
            out.append(mp.Sample.from_dict(TEXT | part | {"loss_spans": [span]}))
    return out


def with_routes(samples: list[mp.Sample], seed: int = 0) -> list[mp.Sample]:
    """The samples with two of four experts for each token of two layers; tokens of a prompt have the same."""
    rng = np.random.default_rng(seed)
    prompts: dict[str, np.ndarray] = {}
    for sample in samples:
        own = rng.permuted(np.tile(np.arange(4), (len(sample.input_ids), 2, 1)), axis=2)[..., :2]
        own = own.astype(np.uint8)
        prompt = prompts.setdefault(sample.group_id, own[:9])
        own[:9] = prompt
        sample.routed_experts, sample.schema_version = own, "2"
    return samples


def weights_of(targets: torch.Tensor) -> torch.Tensor:
    """Of the loss: any that follow from the tokens."""
    return torch.sin(targets.float())


def alone(model: Any, *samples: mp.Sample) -> torch.Tensor:
    """Log-probabilities of loss tokens by Megatron's own forward, with its own mask, positions and replay.

    Several samples, which have one length, are one batch.
    """
    ids = torch.stack([torch.as_tensor(s.input_ids) for s in samples])
    count = ids.shape[1]
    places = torch.arange(count).expand(3, len(ids), count)
    mrope = model.module.position_embedding_type == "mrope"
    mask = torch.triu(torch.ones(1, 1, count, count, dtype=torch.bool), 1)
    if samples[0].routed_experts is not None:
        routes = torch.as_tensor(samples[0].routed_experts.astype(np.int64))
        RouterReplay.set_replay_data(list(routes.unbind(1)))
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    out = model(ids, places if mrope else places[0], mask)
    made = []
    for sample, own, logits in zip(samples, ids, out, strict=True):
        where = torch.as_tensor(sample.loss_indices)
        made.append(logits[where - 1].log_softmax(-1).gather(1, own[where, None])[:, 0])
    return torch.cat(made)


def step(chunks: list[Any], batches: list[Any], **asked: Any) -> list[torch.Tensor]:
    """One step of Megatron's schedule; the log-probabilities of each micro-batch, on the last stage."""
    found: list[torch.Tensor] = []

    def loss_of(batch: Any, logprobs: torch.Tensor) -> Any:
        found.append(logprobs.detach())
        return (logprobs * weights_of(batch.loss_targets)).sum(), {}

    def forward_step(batches: Any, model: Any) -> Any:
        batch = next(batches)
        return packed_logprobs(model, batch, **asked), partial(loss_of, batch)

    scheduled(chunks, batches, forward_step)
    return found


def scheduled(chunks: list[Any], batches: list[Any], forward_step: Any) -> None:
    """Forward and backward of micro-batches by Megatron's schedule."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks],
        model=chunks,
        num_microbatches=len(batches),
        seq_length=len(batches[0].input_ids),
        micro_batch_size=1,
        forward_only=False,
    )


def gradients(chunks: list[Any]) -> dict[str, torch.Tensor]:
    return {
        name_of(name, chunk.module): p.main_grad.clone()
        for chunk in chunks
        for name, p in chunk.module.named_parameters()
    }


def by_samples(
    batches: list[list[mp.Sample]], position: str = "mrope", together: bool = False, **options: Any
) -> Any:
    """Oracle in one process: log-probabilities of each micro-batch, and the mean gradient, by Megatron's own forward.

    `together`: samples, of one length, in one padded batch, over which Megatron balances experts.
    """
    start()
    RouterReplay.clear_global_router_replay_instances()
    plain = {name: value for name, value in options.items() if not name.startswith("recompute")}
    (model,) = build({}, position, **plain)
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / len(batches))
    found = []
    for samples in batches:
        groups = [samples] if together else [[s] for s in samples]
        logprobs = torch.cat([alone(model, *own) for own in groups])
        targets = torch.cat(
            [torch.as_tensor(s.input_ids)[torch.as_tensor(s.loss_indices)] for s in samples]
        )
        ((logprobs * weights_of(targets)).sum() / len(batches)).backward()
        found.append(logprobs.detach())
    return found, gradients([model])


def assert_same(found: list[torch.Tensor], chunks: list[Any], wanted: Any, told: Any = "") -> None:
    logprobs, whole = wanted
    for own, right in zip(found, logprobs, strict=True) if found else ():
        torch.testing.assert_close(own, right, rtol=0, atol=1e-5, msg=lambda m: f"{told}: {m}")
    for chunk in chunks:
        for name, p in chunk.module.named_parameters():
            right = own_part(whole[name_of(name, chunk.module)], p, name)
            off = (p.main_grad - right).norm() / right.norm().clamp(min=1e-6)
            assert off < 2e-5, (told, name, float(off))


def packs(batches: list[list[mp.Sample]], model: Any, share: bool = True) -> list[Any]:
    multiple = pad_multiple(model)
    return [
        mp.pack(samples, share_prefix=share, pad_to_multiple_of=multiple) for samples in batches
    ]


def check_layout(
    sizes: dict[str, Any],
    batches: Any = None,
    wanted: Any = None,
    make: Any = build,
    **options: Any,
) -> None:
    """One step of micro-batches on this layout, against their samples alone."""
    if batches is None:
        batches = [text_samples(2, seed) for seed in range(2)]
        plain = {name: value for name, value in options.items() if "recompute" not in name}
        wanted = _KNOWN[repr(plain)] = _KNOWN.get(repr(plain)) or by_samples(batches, **plain)
    wanted = wanted or by_samples(batches, **options)
    start(**sizes)
    chunks = make(sizes, **{k: v for k, v in options.items() if k != "together"})
    data = ps.get_data_parallel_world_size()
    mine = list(range(ps.get_data_parallel_rank(), len(batches), data))
    with attach(chunks):
        found = step(chunks, packs([batches[i] for i in mine], chunks[0]))
    assert_same(
        found, chunks, ([wanted[0][i] for i in mine], wanted[1]), (sizes, distributed.get_rank())
    )
