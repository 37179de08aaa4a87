"""verl's training engine on mmpack's packed, prefix-shared batches: it replaces `FSDPEngineWithLMHead.forward_step`.

A micro-batch comes as nested tensors (input_ids [B, j], position_ids [B, 4, j]); what goes to verl's loss are nested
log_probs and entropy [B, j], at the row before each response token as verl has them, 0 everywhere else. Which rows
are a micro-batch: micro_batches.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from mmpack.adapters.checks import refuse_on
from mmpack.adapters.handle import Handle
from mmpack.adapters.micro_batches import bins
from mmpack.adapters.processed_media import media_of_inputs
from mmpack.adapters.response_lists import KEPT_IDS, response_lists, scored_lists
from mmpack.adapters.row_sample import prompt_group, row_sample
from mmpack.adapters.transformers import attach
from mmpack.adapters.transformers.attention import refuse_unpackable
from mmpack.adapters.transformers.inputs import inputs_of
from mmpack.adapters.transformers.rope import pack_shared, rope_rules
from mmpack.adapters.transformers.routes import num_experts
from mmpack.adapters.transformers.ulysses.make import row_split
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.adapters.verl.micro_batches import budget_of, calling, most_of
from mmpack.errors import ArgumentError, ModelError
from mmpack.families import Family, family_of_config
from mmpack.ops.logprobs.selected import selected_logprobs
from mmpack.packing.batch import PackedBatch
from mmpack.schema.routes import compact_routes, layers_with_experts
from mmpack.schema.sample import Sample

FUSED = ("forward_with_torch_backend", "forward_with_triton_backend")  # verl's, without logits
Rows = dict[str, torch.Tensor]  # name -> a value for each loss token [N]


class EngineHandle(Handle):
    """A verl engine whose forward is mmpack's, and whose micro-batches are bins of mmpack's plan."""

    def __init__(self, engine: Any):
        super().__init__(engine, "verl engine", "forward_step", "forward_backward_batch")
        self.refuse()
        self.loop = calling(type(engine).forward_backward_batch, prepare_micro_batches=self.bins)
        self.within = getattr(engine, "own_rows", nullcontext)
        self.waiting: list[tuple[Any, list[Sample]]] = []  # micro-batches that were planned
        self.start()

    def refuse(self) -> None:
        """Raise ModelError for an engine that can't go through mmpack."""
        refuse_unsupported(self.owner)
        refuse_unpackable(_model(self.owner))

    def asked(self) -> tuple[Family, int]:
        """The model's family, and how many experts it has."""
        model = _model(self.owner)
        return family_of_config(model.config), num_experts(model)

    @property
    def sharing_ranks(self) -> int:
        """How many ranks share the rows of a micro-batch."""
        return int(self.owner.ulysses_sequence_parallel_size)

    def shares(self) -> bool:
        """Whether rows of a prompt are laid out once."""
        return not rope_rules(_model(self.owner).model)

    def samples_in(self, micro_batch: Any) -> list[Sample]:
        """Those of a micro-batch, which were planned or come from elsewhere."""
        if self.waiting and self.waiting[0][0] is micro_batch:
            return self.waiting.pop(0)[1]
        return samples_of(micro_batch, *self.asked())

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """verl's own loop over micro-batches, which are `bins`."""
        try:
            with self.within():
                return self.loop(self.owner, data.copy(), loss_function, forward_only)
        finally:
            self.waiting = []

    def bins(self, data: Any, dp_group: Any, **_: Any) -> tuple[list[Any], list[list[int]]]:
        """In the place of verl's `prepare_micro_batches`; returns the same: micro-batches, and the rows of each."""
        from verl.utils import tensordict_utils as tu

        samples = samples_of(data, *self.asked())
        most = budget_of(data, self.sharing_ranks)
        indices = bins(samples, most, most_of(dp_group), self.shares())
        tu.assign_non_tensor(data, use_dynamic_bsz=True)  # verl then puts rows back in order
        parts = [tu.index_select_tensor_dict(data, rows) for rows in indices]
        own = [[samples[b] for b in rows] for rows in indices]
        self.waiting = list(zip(parts, own, strict=True))
        return parts, indices

    def forward_step(
        self, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """One forward of a micro-batch (a TensorDict of verl's workers) and its loss, as verl's own `forward_step`.

        Returns: the loss, and `model_output` (log_probs, entropy, …: nested [B, j]), `loss`, `metrics`.
        """
        batch = pack_shared(self.samples_in(micro_batch), _model(self.owner))
        out = forward_step(self.owner, micro_batch, batch, loss_function)
        self.stats.update(batch.stats)
        return out


def use(engine: Any) -> EngineHandle:
    """Let an initialized verl engine compute logprobs, losses and gradients through mmpack, from now on.

    FSDP's, VeOmni's or Megatron's.

    `use(engine)` for good, `with use(engine): …`, or `handle.stop()`. In a configuration:
    `actor_rollout_ref.model.external_lib=mmpack.adapters.verl.enable`. verl's own functions are not replaced.
    Raises: ModelError where verl's model would bypass mmpack's attention or logits (use_remove_padding of Qwen2-VL and
    Qwen2.5-VL, Ulysses, fused kernels; `enable` builds it without), and for an engine that is used already; LayoutError
    (MM006) for an unknown family.
    """
    if isinstance(getattr(engine, "module", None), list):  # of chunks
        from mmpack.adapters.verl.megatron import MegatronHandle

        return MegatronHandle(engine)
    return EngineHandle(engine)


def refuse_unsupported(engine: Any) -> None:
    """Raise ModelError for settings of an engine that mmpack's forward can't obey."""
    if getattr(engine, "module", None) is None:
        raise ModelError("verl engine: it has no model yet. Fix: call engine.initialize() first")
    model = _model(engine)
    decoder, forward = model.get_decoder(), type(model).forward.__name__
    attention = [m for name, m in decoder.named_modules() if name.endswith(".self_attn")]
    replaced = any(type(m).forward.__module__.startswith("verl.") for m in attention)
    sliced = type(decoder).forward.__module__.startswith("verl.")
    build = "let mmpack.adapters.verl.enable build the model (external_lib)"
    options = (
        ("Ulysses of verl's text model", sliced, build),
        ("use_fused_kernels", forward in FUSED, build),
        ("enable_activation_offload", engine.model_config.enable_activation_offload, "turn it off"),
        ("verl's own attention (use_remove_padding)", replaced, build),
    )
    refuse_on("verl engine", options)


def forward_step(
    engine: Any, micro_batch: Any, batch: PackedBatch, loss_function: Callable[..., Any] | None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """See `EngineHandle.forward_step`."""
    from verl.utils.device import get_device_id, get_device_name
    from verl.workers.engine.utils import detach_tree

    micro_batch = micro_batch.to(get_device_id())
    batch = batch.to(micro_batch["input_ids"].device)
    dtype = getattr(engine, "_autocast_dtype", torch.bfloat16)
    full = dtype == torch.float32
    with nullcontext() if full else torch.autocast(get_device_name(), dtype=dtype):
        output = _nested(
            micro_batch["input_ids"], batch, _values(engine, batch, micro_batch, loss_function)
        )
        if loss_function is None:
            loss, metrics = torch.tensor(1.0, device=batch.device), {}
        else:
            group = engine.get_data_parallel_group()
            loss, metrics = loss_function(model_output=output, data=micro_batch, dp_group=group)
    about = {"model_output": detach_tree(output), "loss": loss.detach().item(), "metrics": metrics}
    # FSDP averages over all ranks, and those that share rows have gradients of their own rows only
    return loss * engine.ulysses_sequence_parallel_size, about


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
        sample = row_sample(
            f"verl engine: row {b}",
            ids[start:stop],
            media_of_inputs(given, family, f"verl engine: row {b}"),
            scored,
            family,
            response_start=stop - start - counts[b],
            sample_id=str(b),
            group_id="",
            kept_ids=lists,
            routed_experts=taken,
            position_ids=np.broadcast_to(
                own[-family.position_rows :] if own.ndim > 1 else own,
                (family.position_rows, stop - start),
            ).astype(np.int64),
        )
        out.append(replace(sample, group_id=prompt_group(sample, stop - start - counts[b])))
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


def _values(
    engine: Any, batch: PackedBatch, micro_batch: Any, loss_function: Callable[..., Any] | None
) -> Rows:
    """log_probs [N], and what else the micro-batch asks for. Only the rows that are read get logits."""
    from verl.utils import tensordict_utils as tu

    def flag(name: str) -> Any:
        return tu.get_non_tensor_data(data=micro_batch, key=name, default=False)

    model = _model(engine)
    split = row_split(batch, model, engine.ulysses_parallel_group, "verl engine")
    own = batch if split is None else split.own_loss(batch)
    rows, inverse = own.loss_rows_unique.long(), own.loss_row_inverse.long()
    temperature = _temperature(micro_batch["temperature"])
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, args: (args[0][:, rows],))
    try:  # the outermost module is called: FSDP gathers what it needs there
        with attach(model):
            inputs = inputs_of(batch, model, "auto", None, None, split)
            logits = engine.module(**inputs, **getattr(engine, "asked", {})).logits[0]
    finally:
        hook.remove()
    values: Rows = {}
    entropy = flag("calculate_entropy")
    if entropy or not flag("distillation_only"):
        found = selected_logprobs(
            logits,
            own.loss_targets,
            rows=own.loss_row_inverse,
            temperature=temperature,
            entropy=entropy,
            support=own.kept_ids,
        )
        pair = found if isinstance(found, tuple) else (found,)
        values = dict(zip(("log_probs", "entropy"), pair, strict=False))
    if flag("calculate_sum_pi_squared"):
        from verl.utils.torch_functional import calculate_sum_pi_squared_from_logits

        values["sum_pi_squared"] = calculate_sum_pi_squared_from_logits(logits / temperature)[
            inverse
        ]
    if flag("distillation_use_topk"):
        assert loss_function is not None
        at = _places(micro_batch["input_ids"], batch)
        at = at if split is None else at[torch.from_numpy(split.owner == split.rank).to(at.device)]
        values |= _distilled((logits / temperature)[inverse], micro_batch, at, loss_function)
    if split is None:
        return values
    names = list(values)
    gathered = split.gather(torch.stack([values[name].float() for name in names], 1))
    return dict(zip(names, gathered.unbind(1), strict=True))


def _distilled(
    logits: torch.Tensor, micro_batch: Any, at: torch.Tensor, loss_function: Callable[..., Any]
) -> Rows:
    """What verl's top-k loss makes of logits [N, V] and the teacher's rows `at` these tokens."""
    from verl.utils.ulysses import (
        get_ulysses_sequence_parallel_group,
        set_ulysses_sequence_parallel_group,
    )

    ends = torch.tensor([0, len(at)], device=at.device)
    teacher = {
        name: torch.nested.nested_tensor_from_jagged(micro_batch[name].values()[at], ends)
        for name in ("teacher_logprobs", "teacher_ids")
    }
    group = get_ulysses_sequence_parallel_group()
    set_ulysses_sequence_parallel_group(None)  # or verl would cut the teacher's rows again
    try:
        made = loss_function(student_logits=logits[None], data=teacher)
    finally:
        set_ulysses_sequence_parallel_group(group)
    return {name: values[0] for name, values in made.items()}


def _nested(input_ids: Any, batch: PackedBatch, values: Rows) -> Rows:
    """Values [N] as nested [B, j]: that of token t stands at t - 1."""
    at = _places(input_ids, batch)
    out = {}
    for name, own in values.items():
        flat = own.new_zeros(input_ids.values().shape[0]).index_copy(0, at, own)
        out[name] = torch.nested.nested_tensor_from_jagged(flat, input_ids.offsets())
    return out


def _places(input_ids: Any, batch: PackedBatch) -> torch.Tensor:
    """[N]: the place of each loss token's row, the one before it, in the values of nested ids."""
    ends = input_ids.offsets()
    counts = torch.tensor(batch.loss_counts, device=ends.device)
    return torch.repeat_interleave(ends[:-1], counts) + batch.loss_token_index.long() - 1


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
