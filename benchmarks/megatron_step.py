"""A step of a 7B-shaped Qwen2.5-VL by Megatron-Core on two GPUs: packs, shared and plain, beside Megatron's padding.

    CUDA_DEVICE_MAX_CONNECTIONS=1 python benchmarks/megatron_step.py
    .venv-megatron/bin/python benchmarks/megatron_step.py --tiny --ranks 2   # on a CPU, by gloo: what is checked

Tensor parallel with sequence parallelism on `geo`'s samples, a prompt per micro-batch; then context parallel on one
pack of 64k rows, which Megatron's own local attention has not. A step is Megatron's schedule with its DDP: forward,
loss, backward with layers recomputed, gradients reduced. mbridge's model, on local specs: no Transformer Engine.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as sequence parallelism wants it

import gpu
import several
import torch
from torch import distributed

import mmpack as mp
from benchmarks.step.models import MODELS, VOCABULARY
from benchmarks.step.workloads import WORKLOADS, draw, tiny

NAME = "megatron_step"
SHAPE = MODELS["qwen2.5-vl-7b"]
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TINY_TOWER = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96}
TINY_TOWER |= {"fullatt_block_indexes": [1], "out_hidden_size": 128}
STEPS = 2  # timed, after one micro-batch of each way
FURTHEST = 0.1  # rms of log-probabilities in bf16; rows of other samples, seen by mistake, are off by more than 1
TP, CP = "TP 2, sequence parallel", "CP 2"


def main() -> None:
    options = gpu.arguments(
        NAME,
        ranks={"type": int, "help": "processes: 2"},
        only={"choices": [TP, CP], "help": "one of the two layouts"},
        tiny={"action": "store_true", "help": "a small model and small packs"},
    )
    several.measured(NAME, measure, options)


def measure(device: torch.device, options: Any) -> several.Rows:
    from mmpack.adapters.megatron import attach

    if device.type == "cpu":  # by the stand-ins of the tests
        file = Path(__file__).resolve().parents[1] / "tests" / "support" / "megatron_models.py"
        spec: Any = importlib.util.spec_from_file_location("stand_ins", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.stand_in()
    rows: several.Rows = []
    for layout in [options.only] if options.only else [TP, CP]:
        several.tell(device, f"building for {layout}")
        model = build(layout, device, options.tiny)
        prompts = samples_of(4 if layout == TP else 7, device, options.tiny)
        ways: dict[str, tuple[Callable[..., Any], list[Any]]] = {}
        if layout == TP:
            ways["Megatron, padded"] = (
                padded,
                [mp.pad(g, side="right", pad_to_multiple_of=2) for g in prompts],
            )
        groups = prompts if layout == TP else [[s for own in prompts for s in own]]
        for share, name in ((True, "mmpack, shared"), (False, "mmpack, plain")):
            packs = [mp.pack(g, share_prefix=share, pad_to_multiple_of=2) for g in groups]
            ways[name] = attached, packs
        first: Any = None
        for name, (forward, batches) in ways.items():
            several.tell(device, f"{layout}: {name}")
            batches = [batch.to(device) for batch in batches]
            with attach(model):
                row, logprobs = timed(model, forward, batches, device)
            first = logprobs if first is None else first
            row["logprobs_off_rms"] = float((logprobs - first).square().mean().sqrt())
            gpu.require(row["logprobs_off_rms"] < FURTHEST, f"{layout}, {name}: {row}")
            rows.append({"layout": layout, "way": name} | row)
            several.say(rows[-1])
        del model
        gc.collect()  # partial functions of an attached model hold it
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for layout in (TP, CP):  # beside the slowest
        of = [row for row in rows if row["layout"] == layout]
        for row in of:
            row["speed_up"] = max(r["seconds"] for r in of) / row["seconds"]
    return rows


def samples_of(prompts: int, device: torch.device, small: bool) -> list[list[mp.Sample]]:
    """Those of `geo`, by prompt."""
    workload = replace(WORKLOADS["geo"], prompts=prompts)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    samples, _ = draw(tiny(workload) if small else workload, SHAPE.family, dtype)
    groups: dict[str, list[mp.Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return list(groups.values())


def build(layout: str, device: torch.device, small: bool) -> Any:
    """mbridge's model in Megatron's DDP, with random weights: the same on all ranks that hold them."""
    from mbridge.models.qwen2_5_vl.attention import Qwen2_5VLSelfAttention
    from mbridge.models.qwen2_5_vl.model import Qwen2_5VLModel
    from mbridge.models.qwen2_5_vl.transformer_config import get_vision_projection_config
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import ModelType
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if ps.model_parallel_is_initialized():
        ps.destroy_model_parallel()
    tp, cp = (2, 1) if layout == TP else (1, 2)
    ps.initialize_model_parallel(tp, context_parallel_size=cp)
    half = device.type == "cuda"
    if half:
        model_parallel_cuda_manual_seed(0)
    # local layers ask for Apex' norm where rows are split, and for Transformer Engine where attention is
    WrappedTorchNorm.__new__ = _norm
    DotProductAttention.__init__ = partial_init(DotProductAttention.__init__)
    own = (
        Qwen2_5VLSelfAttention.forward
    )  # mbridge 0.15.1 knows fewer arguments than Megatron-Core has
    if own.__name__ != "told_less":

        def told_less(self: Any, *args: Any, rotary_pos_cos_sin: Any = None, **kwargs: Any) -> Any:
            return own(self, *args, **kwargs)

        Qwen2_5VLSelfAttention.forward = told_less
    text = SHAPE.text | (TINY | {"num_key_value_heads": 2} if small else {})
    seen = SHAPE.vision | (TINY_TOWER if small else {})
    width = text["hidden_size"] // text["num_attention_heads"]
    config = TransformerConfig(
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        ffn_hidden_size=text["intermediate_size"],
        num_attention_heads=text["num_attention_heads"],
        num_query_groups=text["num_key_value_heads"],
        mrope_section=[4, 6, 6] if small else text["rope_parameters"]["mrope_section"],
        kv_channels=width,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,  # whose kernel is built with Megatron-LM
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
        pipeline_dtype=torch.bfloat16 if half else torch.float32,
        use_cpu_initialization=not half,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        context_parallel_size=cp,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        finalize_model_grads_func=finalize_model_grads,
    )
    tower = deepcopy(config)
    tower.num_layers, tower.hidden_size = seen["depth"], seen["hidden_size"]
    tower.num_attention_heads = tower.num_query_groups = seen["num_heads"]
    tower.kv_channels = seen["hidden_size"] // seen["num_heads"]
    tower.ffn_hidden_size, tower.add_bias_linear = seen["intermediate_size"], True
    tower.fullatt_block_indexes, tower._qwen2_5_vl_window_size = seen["fullatt_block_indexes"], 112
    tower.temporal_patch_size, tower.patch_size, tower.in_channels = 2, 14, 3
    tower.spatial_merge_size, tower.seq_length = 2, 1
    tower.sequence_parallel, tower.context_parallel_size = False, 1
    merger = get_vision_projection_config(deepcopy(tower), seen["hidden_size"], 2)
    merger.hidden_size = config.hidden_size
    torch.manual_seed(0)
    model = Qwen2_5VLModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        VOCABULARY,
        32_768,
        tower,
        get_vit_layer_with_local_spec(),
        merger,
        MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        language_rotary_base=1_000_000,
    )
    model.model_type = ModelType.encoder_or_decoder
    model = model.to(device)
    if half:
        model = Float16Module(config, model)
    with torch.no_grad():  # whatever rank made them
        for p in model.parameters():
            if not getattr(p, "tensor_model_parallel", False):
                distributed.broadcast(p, 0)
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
    ).train()


def _norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Any:
    made = torch.nn.RMSNorm(hidden_size, eps)
    made.weight.sequence_parallel = config.sequence_parallel
    return made


def partial_init(own: Any) -> Any:
    if own.__name__ == "local_core":
        return own

    def local_core(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        config = deepcopy(config)
        config.context_parallel_size = 1
        own(self, config, *args, **kwargs)

    return local_core


def attached(model: Any, batch: Any) -> torch.Tensor:
    from mmpack.adapters.megatron import packed_logprobs

    found: torch.Tensor = packed_logprobs(model, batch)
    return found


def padded(model: Any, batch: Any) -> torch.Tensor:
    """Log-probabilities [N] by Megatron's own forward of [B, S]: pictures once per sample, logits of every row."""
    from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

    from mmpack.packing.pixels import float_pixels

    whole = model
    while not hasattr(whole, "language_model"):
        whole = whole.module
    media = batch.media_order
    pixels = float_pixels(batch, media)
    grids = torch.tensor([batch.media[i].grid_thw for i in media], device=pixels.device)
    features = whole.vision_model(vision_data=pixels, grid_thw=grids)
    rows = whole.language_model.embedding(input_ids=batch.input_ids, position_ids=None)
    rows = rows.transpose(0, 1).clone()
    rows[batch.input_ids == whole.image_token_id] = features.to(rows.dtype)
    rows = scatter_to_sequence_parallel_region(rows.transpose(0, 1).contiguous())
    count = batch.input_ids.shape[1]
    mask = torch.ones(1, 1, count, count, dtype=torch.bool, device=pixels.device).triu(1)
    labels = batch.input_ids.roll(-1, 1)
    losses = whole.language_model(
        None, batch.position_ids[1:], mask, decoder_input=rows, labels=labels
    )
    return -losses.flatten()[batch.loss_rows.long()]


def timed(
    model: Any, forward: Callable[..., torch.Tensor], batches: list[Any], device: torch.device
) -> tuple[dict[str, Any], torch.Tensor]:
    """Seconds of a step, memory of the fullest rank, and log-probabilities of all loss tokens."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    found: list[torch.Tensor] = []

    def loss_of(logprobs: torch.Tensor) -> Any:
        found.append(logprobs.detach())
        weights = torch.linspace(-1, 1, len(logprobs), device=device)
        return (logprobs * weights).mean(), {}

    def forward_step(data: Any, model: Any) -> Any:
        return forward(model, next(data)), loss_of

    def step(batches: list[Any]) -> None:
        found.clear()
        model.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=batches[0].input_ids.shape[-1],
            micro_batch_size=1,
            forward_only=False,
        )

    step(batches[:1])
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = several.seconds(partial(step, batches), STEPS, device)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    most = torch.tensor([peak], dtype=torch.float64, device=device)
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    rows = sum(batch.input_ids.numel() for batch in batches)
    return {"rows": rows, "seconds": seconds, "peak_bytes": int(most)}, torch.cat(found)


if __name__ == "__main__":
    main()
