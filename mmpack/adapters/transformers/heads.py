"""The head that a model's logits come from now: a plain Linear is read by its weight, any other is run.

PEFT puts modules of its own there: a copy that is trained (`modules_to_save`), or a Linear with an adapter. A Linear
with a hook that is not a framework's, or with a forward that was put in the place of its own, is run too.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmpack.adapters.transformers.ulysses.split import KEYWORD as ROW_SPLIT
from mmpack.adapters.transformers.ulysses.split import RowSplit
from mmpack.adapters.transformers.unwrap import is_parallel
from mmpack.errors import ArgumentError, ModelError, kind_of
from mmpack.families import family_of_config
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.listed import ListedLogprobs, linear_listed_logprobs, listed_logprobs
from mmpack.ops.logprobs.selected import selected_logprobs
from mmpack.ops.logprobs.support import Support
from mmpack.packing.batch import Batch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# ---- a vocabulary that ranks share ------------------------------------------------------------------


class Head(NamedTuple):
    """What `linear_selected_logprobs` takes of a head and its input."""

    hidden: Tensor  # [T, H], whole
    weight: Tensor  # [V / ranks, H]
    bias: Tensor | None
    group: ProcessGroup | None  # None: the weight is whole


def is_split(head: Any) -> bool:
    """Whether a DTensor holds the head's weight now."""
    return _is_dtensor(getattr(head, "weight", None))


def local_head(head: Any, hidden: Tensor) -> Head:
    """The head of a Linear whose forward runs; hidden [..., H] as that forward gets it.

    Raises: ModelError for a weight that is not split by rows, or not evenly.
    """
    weight, bias = head.weight, head.bias
    if _is_dtensor(hidden):
        hidden = _whole(hidden)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    if not _is_dtensor(weight):
        return Head(hidden, weight, bias, None)
    group = _ranks_of(weight)
    if bias is not None and _is_dtensor(bias):
        bias = bias.to_local()
    return Head(hidden, weight.to_local(), bias, group)


def refuse_split(head: Any) -> None:
    """Raise ModelError for a head that must be run, and is split."""
    if is_split(head):
        raise ModelError(
            f"packed_logprobs: the head is {type(head).__name__} with an adapter, a hook or a forward of its own, and "
            "its vocabulary is split over ranks. Fix: put none on the head, or don't split it"
        )


def layouts_of(hook: Any) -> bool:
    """Whether a hook is the one that `parallelize_module` lays a module's output out with."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.tensor.")


def _ranks_of(weight: Any) -> ProcessGroup | None:
    from torch.distributed.tensor import Replicate, Shard

    placement = weight.placements[0] if len(weight.placements) == 1 else None
    if placement == Replicate():
        return None
    ranks, vocab = weight.device_mesh.size(), weight.shape[0]
    if placement != Shard(0):
        raise ModelError(
            f"packed_logprobs: the head's weight is laid out as {tuple(weight.placements)}. "
            "Fix: use ColwiseParallel(), which splits the vocabulary, or don't split the head"
        )
    if vocab % ranks:
        raise ModelError(
            f"packed_logprobs: {ranks} ranks don't divide the head's {vocab} ids. "
            f"Fix: call model.resize_token_embeddings(pad_to_multiple_of={ranks}), or don't split the head"
        )
    group: ProcessGroup = weight.device_mesh.get_group()
    return group


def refuse_rows(hidden: Tensor, rows: int) -> None:
    """Raise ModelError for hidden states [..., H] of other than all `rows`."""
    if (found := hidden.shape[:-1].numel()) != rows:
        raise ModelError(
            f"packed_logprobs: the head gets {found} of the batch's {rows} rows. Fix: give it every row, after "
            "sequence-parallel layers by ColwiseParallel(input_layouts=Shard(1))"
        )


def _whole(x: Any) -> Tensor:
    """Every row on each rank. The gradient that comes back is whole on each, and needs no sum."""
    from torch.distributed.tensor import Replicate

    everywhere = [Replicate()] * len(x.placements)
    out: Tensor = x.redistribute(placements=everywhere).to_local(grad_placements=everywhere)
    return out


def _is_dtensor(x: Any) -> bool:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


CHUNK = 1024  # loss tokens whose logits exist at once
# whose hooks and forwards say nothing of logits: they gather weights, move them, lay outputs out
FRAMEWORKS = ("torch.", "transformers.", "accelerate.", "deepspeed.", "mmpack.")


def head_of(whole: Any) -> Any:
    """The module whose forward makes the logits; of PEFT's `modules_to_save` the copy that is in use."""
    head = whole.get_output_embeddings()
    while type(head).__name__ == "ModulesToSaveWrapper":
        active, copies = head.active_adapters, head.modules_to_save
        used = active and not head.disable_adapters and all(name in copies for name in active)
        head = copies[active[0]] if used else head.original_module
    return head


def logit_cap(whole: Any) -> float | None:
    """The bound that the model's forward puts on what its head makes, cap · tanh(logits / cap), if it does so."""
    name = family_of_config(whole.config).logit_cap
    return None if name is None else getattr(whole.config.get_text_config(), name)


def logits_by(head: Any, cap: float | None) -> Callable[[Any], Tensor]:
    """Hidden states [n, H] -> logits: by the head's forward as it is now, hooks, and the cap, as the model's forward.

    Forward and hooks get [1, n, …]. Without pre-hooks, which `read_in_forward` and `read_hidden` have run.
    """
    own, hooks = head.forward, _own_hooks(head)

    def logits_of(hidden: Tensor) -> Tensor:
        given = (hidden[None],)
        out = own(*given)
        for hook, keywords in hooks:
            made = hook(head, given, {}, out) if keywords else hook(head, given, out)
            out = out if made is None else made
        out = out[0]
        return out if cap is None else torch.tanh(out / cap) * cap

    return logits_of


def read_in_forward(
    model: Any, whole: Any, head: Any, read: Callable[[Any], Tensor], inputs: Mapping[str, Any]
) -> Tensor:
    """What `read` makes of the hidden states that come to the head in `model(**inputs)`.

    All of the model's forward runs, with hooks and wrappers. DDP and FSDP watch what the outermost forward returns;
    FSDP has the weights whole only in it. Complex numbers pass as they are; real ones are cast to a policy's
    output_dtype. Raises ModelError where the forward changes what its head made, or does not run it: that is for
    logits, and these are none.
    """
    made: list[tuple[Tensor, Tensor]] = []
    split: RowSplit | None = inputs.get(ROW_SPLIT)
    rows = inputs["input_ids"].shape.numel() if split is None else split.counts[split.rank]

    def read_as_logits(hidden: Tensor) -> Tensor:
        refuse_rows(hidden, rows)
        values = read(hidden)
        made.append((values, torch.complex(values, torch.zeros_like(values))))
        return made[-1][1]

    def check(module: Any, args: Any, output: Any) -> None:
        _refuse_changed(getattr(output, "logits", None), made)

    outermost = model.module if is_parallel(model) else model
    with forward_of(head, read_as_logits, read_by_weight(head)), uncapped(whole), _eager(outermost):
        hook = outermost.register_forward_hook(check)
        try:
            values: Tensor = model(**inputs).logits
        finally:
            hook.remove()
    return values.real.contiguous()


def read_hidden(head: Any, read: Callable[[Any], Tensor], hidden: Tensor) -> Tensor:
    """What `read` makes of hidden states, after the head's pre-hooks."""
    with forward_of(head, read, read_by_weight(head)):
        values: Tensor = head(hidden)
    return values


def _refuse_changed(logits: Any, made: list[tuple[Tensor, Tensor]]) -> None:
    why = "does not run its head"
    if made:
        values, given = made[-1]
        if torch.is_tensor(logits) and (logits.shape, logits.dtype) == (given.shape, given.dtype):
            known = not given.is_inference() and given._version == 0
            if known and logits.data_ptr() == given.data_ptr():
                return
            if torch.equal(logits.real.to(values.device), values):  # moved, or copied
                return
        why = "changes the logits that its head makes"
    raise ModelError(
        f"packed_logprobs: the model's forward {why}, and here the head makes logprobs, no logits. Fix: pass "
        "model(**model_inputs(batch, model)).logits to mp.selected_logprobs, or move the change into the head"
    )


@contextlib.contextmanager
def forward_of(module: Any, forward: Callable[..., Any], inner: bool = True) -> Iterator[None]:
    """Another forward within the block; of the hooks on its output only frameworks' stay, without tensor parallel's.

    The module may have a forward of its own already, as transformers' `tp_plan` sets it. `inner`: accelerate's hook,
    which puts weights in place before the forward, stays around the other one.
    """
    name = "_old_forward" if inner and _is_aligned(module) else "forward"
    own, hooks = vars(module).get(name), module._forward_hooks
    setattr(module, name, forward)
    foreign = [hook for hook, _ in _own_hooks(module)]
    module._forward_hooks = OrderedDict(
        (k, h) for k, h in hooks.items() if not (layouts_of(h) or h in foreign)
    )
    try:
        with _eager(module):
            yield
    finally:
        module._forward_hooks = hooks
        delattr(module, name)
        if own is not None:
            setattr(module, name, own)


@contextlib.contextmanager
def _eager(module: Any) -> Iterator[None]:
    """The module's own call within the block, where `module.compile()` put another in its place."""
    compiled = vars(module).pop("_compiled_call_impl", None)  # its class has None
    try:
        yield
    finally:
        if compiled is not None:
            module._compiled_call_impl = compiled


def has_own_forward(module: Any) -> bool:
    """Whether a module's forward is its class's, or a framework's, and no hook of somebody's own is on its output."""
    return not _own_hooks(module) and all(
        map(_is_framework, (module.forward, type(module).forward))
    )


def read_by_weight(head: Any) -> bool:
    """Whether the head's weight and bias say all: a Linear's, without a hook or a forward of somebody's own."""
    own = None if _is_aligned(head) else vars(head).get("forward")
    return is_linear(head) and not _own_hooks(head) and (own is None or _is_framework(own))


def _own_hooks(module: Any) -> list[tuple[Callable[..., Any], bool]]:
    """The hooks on its output that are not a framework's, and whether they take keywords."""
    keywords = module._forward_hooks_with_kwargs
    return [(h, k in keywords) for k, h in module._forward_hooks.items() if not _is_framework(h)]


def _is_aligned(module: Any) -> bool:
    """Whether accelerate's own hooks are around its forward."""
    hook = vars(module).get("_hf_hook")
    hooks = getattr(hook, "hooks", [hook])
    return "_old_forward" in vars(module) and all(
        type(h).__module__.startswith("accelerate.") for h in hooks
    )


def _is_framework(function: Any) -> bool:
    """Whether a hook or a forward, and what it wraps, is a framework's own code."""
    while function is not None:
        code = getattr(function, "__func__", function)
        home = getattr(code, "__globals__", {}).get("__name__", type(code).__module__)
        if not home.startswith(FRAMEWORKS):
            return False
        function = getattr(code, "__wrapped__", None)
    return True


@contextlib.contextmanager
def uncapped(whole: Any) -> Iterator[None]:
    """The model's forward leaves what its head makes as it is, within the block."""
    cap, name = logit_cap(whole), family_of_config(whole.config).logit_cap
    if cap is None:
        yield
        return
    config = whole.config.get_text_config()
    setattr(config, str(name), None)
    try:
        yield
    finally:
        setattr(config, str(name), cap)


class Asked(NamedTuple):
    """What is read at a batch's loss tokens in addition to their logprobs; see `packed_logprobs`."""

    temperature: float = 1.0
    entropy: bool = False
    memory_budget: int | None = None  # of a head that is read by its weight
    kept_ids: bool = True  # over those of the batch, if it has some
    teachers: bool = False  # also logprobs of all ids that `batch.teachers` scored, over all ids


def reader(
    head: Any, batch: Batch, asked: Asked, cap: float | None = None
) -> Callable[[Any], Tensor]:
    """Hidden states [..., H] of the batch's rows -> values by this head, one after the other.

    They are logprobs [N], and entropies [N] if asked for; with teachers those of each list before the entropies, and
    then, where the first are not over the kept ids, those that are. `cap`: of the model's logits; they are made then,
    unless ranks share the vocabulary.
    """
    # taken now: the caller may exchange it
    logits_of, plain = logits_by(head, cap), read_by_weight(head)
    kept = batch.kept_ids if asked.kept_ids else None
    _check_kept(kept, len(batch.loss_targets))

    def by_weight(hidden: Tensor) -> Tensor:
        return values_by_weight(local_head(head, hidden), batch, asked, cap)

    def of_chunk(
        hidden: Tensor, rows: Tensor, targets: Tensor, lists: dict[str, Any], kept: Any
    ) -> tuple[Tensor, ...]:
        given = logits_of(hidden.index_select(0, rows)), targets
        listed = functools.partial(listed_logprobs, *given, lists, temperature=asked.temperature)
        selected = functools.partial(selected_logprobs, *given, temperature=asked.temperature)
        return tuple(_values(asked, kept, listed, selected))

    def by_logits(hidden: Tensor) -> Tensor:
        """Score a chunk of loss tokens at a time, and again in backward, so that no more logits exist."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        chunks = _chunks(batch, kept)
        made = [checkpoint(of_chunk, flat, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.cat([torch.cat(parts) for parts in zip(*made, strict=True)])

    def read(hidden: Any) -> Tensor:
        # when its forward runs: FSDP2 gathers its weight then, and tensor parallel does not
        if plain and (cap is None or is_split(head)):
            return by_weight(hidden)
        refuse_split(head)
        return by_logits(hidden)

    return read


def values_by_weight(own: Head, batch: Batch, asked: Asked, cap: float | None = None) -> Tensor:
    """What `reader` reads, by a head's weight."""
    given = own.hidden, own.weight, batch.loss_targets
    options: dict[str, Any] = {
        "rows": batch.loss_rows,
        "bias": own.bias,
        "temperature": asked.temperature,
        "rows_unique": batch.loss_rows_unique,
        "row_inverse": batch.loss_row_inverse,
        "softcap": cap,
        "group": own.group,
    }
    more = options | {"memory_budget": asked.memory_budget}
    all_ids: Callable[..., ListedLogprobs] = linear_listed_logprobs
    listed = functools.partial(all_ids, *given, batch.teachers, **more)
    own_options = options if asked.teachers else more
    selected = functools.partial(linear_selected_logprobs, *given, **own_options)
    kept = batch.kept_ids if asked.kept_ids else None
    return torch.cat(_values(asked, kept, listed, selected))


def _values(
    asked: Asked, kept: Any, listed: Callable[..., ListedLogprobs], selected: Callable[..., Any]
) -> list[Tensor]:
    """In the order that `reader` says."""
    if not asked.teachers:
        out = selected(entropy=asked.entropy, support=kept)
        return list(out) if isinstance(out, tuple) else [out]
    all_ids = listed(entropy=asked.entropy)
    entropy = [] if all_ids.entropy is None else [all_ids.entropy]
    own = [] if kept is None else [selected(support=kept)]
    return [all_ids.targets, *all_ids.lists.values(), *entropy, *own]


def _chunks(batch: Batch, kept: Any) -> Iterator[tuple[Tensor, Tensor, dict[str, Any], Any]]:
    """Rows, targets, teachers' lists and kept ids of `CHUNK` loss tokens each."""
    rows, targets = batch.loss_rows.split(CHUNK), batch.loss_targets.split(CHUNK)
    counts = [len(part) for part in rows]
    lists = {name: own.split(counts) for name, own in batch.teachers.items()}
    own_kept = [None] * len(rows) if kept is None else kept.split(counts)
    for k, own in enumerate(zip(rows, targets, strict=True)):
        yield *own, {name: parts[k] for name, parts in lists.items()}, own_kept[k]


def _check_kept(support: Any, count: int) -> None:
    """Raise ArgumentError for kept ids, put into a batch by hand, that are no `count` lists: they are cut in chunks."""
    if support is None or (isinstance(support, Support) and len(support) == count):
        return
    what = f"{len(support)} lists" if isinstance(support, Support) else kind_of(support)
    raise ArgumentError(
        f"packed_logprobs: kept_ids is {what}, expected a Support of {count} lists, one per loss token. "
        "Fix: pass batch.kept_ids, as mp.pack made it"
    )


def listed_of(values: Tensor, batch: Batch, entropy: bool) -> tuple[Tensor, ListedLogprobs]:
    """Logprobs [N] for the loss, and those of all lists, of what was read with `teachers`."""
    count = len(batch.loss_targets)
    more = bool(entropy) + (batch.kept_ids is not None)
    sizes = [count, *(len(own.ids) for own in batch.teachers.values()), *[count] * more]
    targets, *rest = values.split(sizes)
    kept = targets if batch.kept_ids is None else rest.pop()
    entropies = rest.pop() if entropy else None
    return kept, ListedLogprobs(targets, dict(zip(batch.teachers, rest, strict=True)), entropies)


def is_linear(head: Any) -> bool:
    """Whether the head is a Linear; `fully_shard` makes a class of its own."""
    kinds = [k for k in type(head).__mro__ if not k.__module__.startswith("torch.distributed.")]
    return kinds[0] is torch.nn.Linear
