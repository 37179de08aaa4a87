"""verl's training engine on mmpack's packed, prefix-shared batches: it replaces `FSDPEngineWithLMHead.forward_step`.

A micro-batch comes as nested tensors (input_ids [B, j], position_ids [B, 4, j]); what goes to verl's loss are nested
log_probs and entropy [B, j], at the row before each response token as verl has them, 0 everywhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from mmpack.adapters.checks import refuse_on
from mmpack.adapters.handle import Handle
from mmpack.adapters.processed_media import media_of_inputs
from mmpack.adapters.response_lists import KEPT_IDS, response_lists, scored_lists
from mmpack.adapters.row_sample import row_sample
from mmpack.adapters.transformers import attach, model_inputs
from mmpack.adapters.transformers.attention import refuse_unpackable
from mmpack.adapters.transformers.rope import pack_shared
from mmpack.adapters.transformers.routes import num_experts
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import ArgumentError, ModelError
from mmpack.families import Family, family_of_config
from mmpack.ops.logprobs.selected import selected_logprobs
from mmpack.packing.batch import PackedBatch
from mmpack.schema.routes import compact_routes, layers_with_experts
from mmpack.schema.sample import Sample

REFUSED = ("distillation_use_topk", "distillation_only", "calculate_sum_pi_squared")


class EngineHandle(Handle):
    """A verl engine whose forward is mmpack's."""

    def __init__(self, engine: Any):
        super().__init__(engine, "forward_step", "verl engine")
        refuse_unsupported(engine)
        refuse_unpackable(_model(engine))
        self.start()

    def forward_step(
        self, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """See `forward_step`."""
        return forward_step(self.owner, micro_batch, loss_function, self.stats)


def use(engine: Any) -> EngineHandle:
    """Let an initialized verl FSDP engine compute logprobs, losses and gradients through mmpack, from now on.

    `use(engine)` for good, `with use(engine): …`, or `handle.stop()`. In a configuration:
    `actor_rollout_ref.model.external_lib=mmpack.adapters.verl.enable`. verl's own functions are not replaced.
    Raises: ModelError where verl would bypass mmpack's attention (use_remove_padding of Qwen2-VL and Qwen2.5-VL,
    Ulysses, fused kernels), and for an engine that is used already; LayoutError (MM006) for an unknown family.
    """
    return EngineHandle(engine)


def refuse_unsupported(engine: Any) -> None:
    """Raises ModelError for settings of an engine that mmpack's forward can't obey."""
    if getattr(engine, "module", None) is None:
        raise ModelError("verl engine: it has no model yet. Fix: call engine.initialize() first")
    replaced = any(
        type(m).forward.__module__.startswith("verl.")
        for name, m in _model(engine).get_decoder().named_modules()
        if name.endswith(".self_attn")
    )
    ulysses = engine.engine_config.ulysses_sequence_parallel_size > 1
    own = "set actor_rollout_ref.model.use_remove_padding=False, mmpack packs by itself"
    options = (
        ("ulysses_sequence_parallel_size", ulysses, "set it to 1"),
        ("use_fused_kernels", engine.model_config.use_fused_kernels, "turn it off"),
        ("enable_activation_offload", engine.model_config.enable_activation_offload, "turn it off"),
        ("verl's own attention", replaced, own),
    )
    refuse_on("verl engine", options)


def forward_step(
    engine: Any, micro_batch: Any, loss_function: Callable[..., Any] | None, stats: Counter[str]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """One forward of a micro-batch (a TensorDict of verl's workers) and its loss, as verl's own `forward_step`.

    Args: `stats` counts what the packed batch has.
    Returns: the loss, and `model_output` (log_probs, entropy: nested [B, j]), `loss`, `metrics`.
    """
    from verl.utils import tensordict_utils as tu
    from verl.utils.device import get_device_id, get_device_name
    from verl.workers.engine.utils import detach_tree

    def flag(name: str) -> Any:
        return tu.get_non_tensor_data(data=micro_batch, key=name, default=False)

    wanted = [name for name in REFUSED if flag(name)]
    if wanted:
        raise ModelError(
            f"verl engine: {wanted[0]} needs logits of every row. Fix: turn it off in verl's config"
        )
    model = _model(engine)
    experts = num_experts(model)
    samples = samples_of(micro_batch, family_of_config(model.config), experts)
    micro_batch = micro_batch.to(get_device_id())
    batch = pack_shared(samples, model).to(micro_batch["input_ids"].device)
    dtype = getattr(engine, "_autocast_dtype", torch.bfloat16)
    full = dtype == torch.float32
    with nullcontext() if full else torch.autocast(get_device_name(), dtype=dtype):
        values = _logprobs(
            engine, batch, _temperature(micro_batch["temperature"]), flag("calculate_entropy")
        )
        output = _nested(micro_batch["input_ids"], batch, values)
        if loss_function is None:
            loss, metrics = torch.tensor(1.0, device=batch.device), {}
        else:
            group = engine.get_data_parallel_group()
            loss, metrics = loss_function(model_output=output, data=micro_batch, dp_group=group)
    stats.update(batch.stats)
    about = {"model_output": detach_tree(output), "loss": loss.detach().item(), "metrics": metrics}
    return loss, about


def samples_of(micro_batch: Any, family: Family, experts: int = 0) -> list[Sample]:
    """The rows of a worker's TensorDict: nested ids and positions, every response token scored, as verl does.

    `response_mask` and the loss are verl's. Where rows carry `kept_ids`, a list of ids per response token (a Ragged, a
    dict of `offsets` and `ids`, or lists), logprobs and entropy are over these; an empty list, of a token that came
    back, gives 0. With `experts` in the model, samples have the `routed_experts` of `enable_rollout_routing_replay`.
    What came back after the last recorded row is not scored: it gives 0.

    Raises: ModelError without responses; ArgumentError for lists that don't fit, and a sampled token without routes.
    """
    if "responses" not in micro_batch:
        raise ModelError(
            "verl engine: the batch has no responses. Fix: use mmpack for actor and reference only"
        )
    inputs = micro_batch.get("multi_modal_inputs", None)
    kept = micro_batch.get(KEPT_IDS, None)
    positions = micro_batch["position_ids"]
    ends = micro_batch["input_ids"].offsets().tolist()
    ids = micro_batch["input_ids"].values().cpu().numpy()
    places = positions.values().cpu().numpy()  # [4, sum of j], or [sum of j]
    counts = _response_lengths(micro_batch)
    routes = _routes(micro_batch, ends, experts)
    out = []
    for b, (start, stop) in enumerate(pairwise(ends)):
        own = places[..., start:stop]
        scored = np.arange(start, stop) >= stop - counts[b]
        taken = routes[b]
        if taken is not None:  # what came back after the last response has none, and is in no loss
            last = _last_recorded(taken)
            _refuse_unrecorded(micro_batch, b, last + 1 - (stop - start - counts[b]))
            scored &= np.arange(stop - start) <= last + 1
        given = None if inputs is None else getattr(inputs[b], "data", inputs[b])
        lists = None
        if kept is not None:
            lists = response_lists(
                getattr(kept[b], "data", kept[b]), counts[b], f"verl engine: row {b}"
            )
            tokens = np.flatnonzero(scored[stop - start - counts[b] :])
            lists = scored_lists(lists, tokens, ids[stop - counts[b] : stop][tokens])
        out.append(
            row_sample(
                f"verl engine: row {b}",
                ids[start:stop],
                media_of_inputs(given, family, f"verl engine: row {b}"),
                scored,
                family,
                response_start=stop - start - counts[b],
                sample_id=str(b),
                group_id=str(b),
                kept_ids=lists,
                routed_experts=taken,
                position_ids=np.broadcast_to(
                    own[-family.position_rows :] if own.ndim > 1 else own,
                    (family.position_rows, stop - start),
                ).astype(np.int64),
            )
        )
    return out


def _routes(micro_batch: Any, ends: list[int], experts: int) -> list[np.ndarray | None]:
    """[j, layers with experts, k] of each row, where verl's rollout recorded them and the model has experts."""
    given = micro_batch.get("routed_experts", None) if experts else None
    if given is None:
        return [None] * (len(ends) - 1)
    flat = layers_with_experts(given.values().cpu().numpy())  # rollouts have dense layers too
    return [compact_routes(flat[a:b], experts) for a, b in pairwise(ends)]


def _last_recorded(routes: np.ndarray) -> int:
    """The last row that is not all zeros; verl pads with these."""
    recorded = np.flatnonzero(routes.any(axis=(1, 2)))
    return int(recorded[-1]) if len(recorded) else -1


def _refuse_unrecorded(micro_batch: Any, b: int, last: int) -> None:
    """Raise ArgumentError for a sampled token after response token `last`, the one that the last recorded row gave."""
    mask = micro_batch.get("response_mask", None)
    if mask is None:
        return
    sampled = np.flatnonzero(mask[b].cpu().numpy())
    late = sampled[sampled > last]
    if len(late):
        raise ArgumentError(
            f"verl engine: row {b}: response token {late[0]} was sampled, and routed_experts has nothing there. "
            "Fix: use a rollout that returns routes of every call, or enable_rollout_routing_replay=False"
        )


def _response_lengths(micro_batch: Any) -> list[int]:
    prompts, responses = micro_batch["prompts"], micro_batch["responses"]
    if responses.is_nested:
        return [int(n) for n in responses.offsets().diff().tolist()]
    mask = micro_batch["attention_mask"][:, prompts.shape[1] :]
    return [int(n) for n in mask.sum(dim=1).tolist()]


def _logprobs(
    engine: Any, batch: PackedBatch, temperature: float, entropy: bool
) -> dict[str, torch.Tensor]:
    """log_probs [N], and entropy [N] if asked for. Only the rows that are read get logits."""
    model = _model(engine)
    head = model.get_output_embeddings()
    rows = batch.loss_rows_unique.long()
    hook = head.register_forward_pre_hook(lambda _, args: (args[0][:, rows],))
    try:  # the outermost module is called: FSDP gathers what it needs there
        with attach(model):
            logits = engine.module(**model_inputs(batch, model)).logits[0]
    finally:
        hook.remove()
    values = selected_logprobs(
        logits,
        batch.loss_targets,
        rows=batch.loss_row_inverse,
        temperature=temperature,
        entropy=entropy,
        support=batch.kept_ids,
    )
    if isinstance(values, tuple):
        return dict(zip(("log_probs", "entropy"), values, strict=True))
    return {"log_probs": values}


def _nested(
    input_ids: Any, batch: PackedBatch, values: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Values [N] as nested [B, j]: that of token t stands at t - 1."""
    ends = input_ids.offsets()
    counts = torch.tensor(batch.loss_counts, device=ends.device)
    at = torch.repeat_interleave(ends[:-1], counts) + batch.loss_token_index.long() - 1
    out = {}
    for name, own in values.items():
        flat = own.new_zeros(input_ids.values().shape[0]).index_copy(0, at, own)
        out[name] = torch.nested.nested_tensor_from_jagged(flat, ends)
    return out


def _temperature(given: Any) -> float:
    values = (
        {float(t) for t in given.tolist()} if isinstance(given, torch.Tensor) else {float(given)}
    )
    if len(values) > 1:
        raise ModelError(
            "verl engine: the rows of a micro-batch have several temperatures. Fix: use one temperature"
        )
    return values.pop()


def _model(engine: Any) -> Any:
    module = engine.module
    wrapped = isinstance(module, FullyShardedDataParallel)  # FSDP1; FSDP2 keeps the model's class
    return unwrap(module.module if wrapped else module, "verl engine")
