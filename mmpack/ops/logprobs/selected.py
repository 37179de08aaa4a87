"""Logprobs of N loss tokens from logits that exist: [T, V] in, [N] out.

Public function -> custom op (forward, backward, fakes, autograd) -> Triton kernel, or torch in chunks of a fixed row
count. Statistics of a row travel by loss token, [N], whatever runs.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_name
from mmpack.ops.backend import choose
from mmpack.ops.inputs import check_tensors
from mmpack.ops.logprobs import SELECTED_LOGPROBS
from mmpack.ops.logprobs.row_groups import (
    RowGroups,
    by_slot,
    check_arguments,
    gather_gradients,
    make_row_groups,
    slots_of,
)
from mmpack.ops.logprobs.scalars import runtime_scalar
from mmpack.ops.logprobs.softmax import pad_columns, row_gradient, row_statistics, target_gradient

CHUNK_ROWS = 64  # of the torch path
OPTIONAL = ("rows", "rows_unique", "row_inverse")
GRADIENTS = ("dense", "compact", "inplace")


def selected_logprobs(
    logits: Tensor,
    targets: Tensor,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    *,
    rows_unique: Tensor | None = None,
    row_inverse: Tensor | None = None,
    gradient: Literal["dense", "compact", "inplace"] = "dense",
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) of each target, natural log.

    Args:
        logits: [T, V], any float dtype. Rows that are not read may hold anything, NaN included.
        targets: [N] int64 token ids.
        rows: [N] row that predicts each target, in any order, with repeats; None: row n predicts target n.
        entropy: also return the entropy of each row's distribution, in nats.
        rows_unique, row_inverse: [R], [N], `rows` as its distinct values (`PackedBatch.loss_rows_unique`,
            `.loss_row_inverse`; each is named at least once): then what repeats is read once, and where R is N
            nothing is sorted.
        gradient: the form of the gradient to the logits. "dense": [T, V]. "compact": a sparse COO tensor [T, V] with
            one sparse dimension, whose values [R, V] are of the rows that are read, as `Embedding(sparse=True)` has;
            for leaves and `torch.autograd.grad`, not under torch.compile. "inplace": dense, written over the logits,
            which the backward destroys; no second backward. The last two need rows that are known not to repeat:
            `rows_unique` and `row_inverse`, or no `rows`.

    Returns [N] float32 (float64 for float64 logits), or (logprobs, entropy). The gradient to the logits is exactly 0
    in rows that are not read or whose incoming gradients are all 0; gradients of one row are summed in the order of
    n. Values and gradients of a row are the same bits in any batch and order, where the logits are aligned alike.

    Raises ArgumentError for wrong shapes, unlike devices, DTensors and forward-mode tangents, and on the CPU for
    indices out of range. On a GPU looking would wait for it: there kernels give NaN for a target that is out of range.
    """
    check_tensors(
        "selected_logprobs", OPTIONAL, logits=logits, targets=targets, rows=rows,
        rows_unique=rows_unique, row_inverse=row_inverse,
    )  # fmt: skip
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ArgumentError(
            f"selected_logprobs: logits has shape {list(logits.shape)} and dtype {logits.dtype}, expected a float "
            f"[T, V]. Fix: drop the batch dimension, e.g. logits[0]"
        )
    num_rows, vocab = logits.shape
    check_arguments(
        "selected_logprobs", (num_rows, vocab), targets, rows, rows_unique, row_inverse, temperature
    )
    check_name("selected_logprobs", "gradient", gradient, GRADIENTS)
    if gradient != "dense" and rows is not None and rows_unique is None:
        raise ArgumentError(
            f"selected_logprobs: gradient is {gradient!r}, and rows may repeat. "
            f"Fix: pass rows_unique and row_inverse, or gradient='dense'"
        )
    runs = make_row_groups(num_rows, rows, rows_unique, row_inverse)
    scale = runtime_scalar(temperature, logits.device)
    logprobs, entropies, _, _ = _forward(logits, targets, *runs, scale, entropy, gradient)
    return (logprobs, entropies) if entropy else logprobs


@torch.library.custom_op("mmpack::selected_logprobs", mutates_args=())
def _forward(
    logits: Tensor,
    targets: Tensor,
    rows: Tensor | None,
    order: Tensor | None,
    offsets: Tensor | None,
    temperature: Tensor,
    entropy: bool,
    gradient: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs, entropies (none unless asked for), maxima of the rows, logs of the sums above them; [N] each."""
    runs = RowGroups(rows, order, offsets)
    if choose(SELECTED_LOGPROBS, logits.device, logits.dtype) == "triton":
        from mmpack.ops.logprobs.triton import forward

        with torch.cuda.device_of(logits):
            return forward(logits, targets, *runs, temperature, entropy)
    return _forward_torch(logits, targets, runs, temperature, entropy)


@_forward.register_fake
def _(
    logits: Tensor,
    targets: Tensor,
    rows: Tensor | None,
    order: Tensor | None,
    offsets: Tensor | None,
    temperature: Tensor,
    entropy: bool,
    gradient: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, dtype = targets.shape[0], torch.promote_types(logits.dtype, torch.float32)
    logprobs, maximum, log_total = (logits.new_empty(count, dtype=dtype) for _ in range(3))
    return logprobs, logits.new_empty(count if entropy else 0, dtype=dtype), maximum, log_total


@torch.library.custom_op("mmpack::selected_logprobs_backward", mutates_args=())
def _backward(
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    rows: Tensor | None,
    order: Tensor | None,
    offsets: Tensor | None,
    logprobs: Tensor,
    entropies: Tensor,
    maximum: Tensor,
    log_total: Tensor,
    temperature: Tensor,
    compact: bool,
) -> Tensor:
    """Gradient to the logits: [T, V], or compact [S, V] by slot."""
    runs, statistics = RowGroups(rows, order, offsets), (logprobs, entropies, maximum, log_total)
    gradients = grad_logprobs, grad_entropies
    num_rows, vocab = logits.shape
    if choose(SELECTED_LOGPROBS, logits.device, logits.dtype) == "triton":
        from mmpack.ops.logprobs.triton import backward

        slots = num_rows if rows is None else len(rows)
        out = logits.new_empty(slots if compact else num_rows, vocab)
        with torch.cuda.device_of(logits):
            backward(out, *gradients, logits, targets, *runs, *statistics, temperature, compact)
        return out
    if compact:
        out = logits.new_zeros(num_rows if rows is None else len(rows), vocab)
        _backward_torch(out, *gradients, logits, targets, runs, *statistics, temperature, True)
        return out
    out = logits.new_zeros(num_rows + 1, vocab)
    _backward_torch(out, *gradients, logits, targets, runs, *statistics, temperature, False)
    return out[:num_rows]


@_backward.register_fake
def _(
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    rows: Tensor | None,
    order: Tensor | None,
    offsets: Tensor | None,
    logprobs: Tensor,
    entropies: Tensor,
    maximum: Tensor,
    log_total: Tensor,
    temperature: Tensor,
    compact: bool,
) -> Tensor:
    slots = rows.shape[0] if compact and rows is not None else logits.shape[0]
    return logits.new_empty(slots, logits.shape[1])


@torch.library.custom_op("mmpack::selected_logprobs_backward_", mutates_args={"logits"})
def _backward_inplace(
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    rows: Tensor | None,
    order: Tensor | None,
    offsets: Tensor | None,
    logprobs: Tensor,
    entropies: Tensor,
    maximum: Tensor,
    log_total: Tensor,
    temperature: Tensor,
) -> None:
    """The gradient [T, V] written over the logits."""
    runs, statistics = RowGroups(rows, order, offsets), (logprobs, entropies, maximum, log_total)
    gradients = grad_logprobs, grad_entropies
    if choose(SELECTED_LOGPROBS, logits.device, logits.dtype) == "triton":
        from mmpack.ops.logprobs.triton import backward

        with torch.cuda.device_of(logits):
            backward(logits, *gradients, logits, targets, *runs, *statistics, temperature, False)
        return
    if rows is not None:
        unread = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        logits.masked_fill_(unread.index_fill_(0, rows.long(), False)[:, None], 0.0)
    _backward_torch(logits, *gradients, logits, targets, runs, *statistics, temperature, False)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.entropy, ctx.gradient = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[2:] if ctx.entropy else output[1:])
    ctx.set_materialize_grads(False)


def _autograd(
    ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    logits, targets, rows, order, offsets, temperature, *statistics = ctx.saved_tensors
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(statistics[0])  # only the entropy was used
    if not ctx.entropy:
        grad_entropies = None
    gradients, runs, none = (grad_logprobs, grad_entropies), (rows, order, offsets), (None,) * 7
    if ctx.gradient == "inplace":
        logits = logits.detach()
        _backward_inplace(*gradients, logits, targets, *runs, *statistics, temperature)
        return logits, *none
    compact = ctx.gradient == "compact"
    grad = _backward(*gradients, logits, targets, *runs, *statistics, temperature, compact)
    if compact:
        index = torch.arange(len(logits), device=logits.device) if rows is None else rows.long()
        with torch.sparse.check_sparse_tensor_invariants(False):  # it would wait for the GPU
            grad = torch.sparse_coo_tensor(index[None], grad, logits.shape)
    return grad, *none


_forward.register_autograd(_autograd, setup_context=_setup_context)


def _forward_torch(
    logits: Tensor, targets: Tensor, runs: RowGroups, temperature: Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots = slots_of(runs, len(logits), len(targets), logits.device, CHUNK_ROWS)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    maximum, log_total, row_entropy = (
        torch.empty(len(slots.rows), dtype=dtype, device=logits.device) for _ in range(3)
    )
    for start in range(0, len(slots.rows), CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        x = _read(logits, slots.rows[chunk], dtype)
        maximum[chunk], log_total[chunk], h = row_statistics(x, temperature, entropy)
        if h is not None:
            row_entropy[chunk] = h
    maximum, log_total = maximum[slots.of], log_total[slots.of]
    # [N] values alone: float64 costs nothing and leaves one rounding.
    chosen = logits[slots.rows[slots.of], targets.long()].double() - maximum.double()
    logprobs = (chosen / temperature - log_total.double()).to(dtype)
    return logprobs, row_entropy[slots.of] if entropy else row_entropy[:0], maximum, log_total


def _backward_torch(
    out: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    runs: RowGroups,
    logprobs: Tensor,
    entropies: Tensor,
    maximum: Tensor,
    log_total: Tensor,
    temperature: Tensor,
    compact: bool,
) -> None:
    """Write the rows that are read: row r to out[r] (unused slots to out[T]), or compact slot s to out[s]."""
    targets = targets.long()
    slots = slots_of(runs, len(logits), len(targets), logits.device, CHUNK_ROWS)
    gradients = gather_gradients(
        grad_logprobs, grad_entropies, slots, targets, logits.shape[1], runs.order is None
    )
    entropy = None if grad_entropies is None else by_slot(entropies, slots)
    row_maximum, row_log_total = by_slot(maximum, slots), by_slot(log_total, slots)

    num_slots = len(logits) if runs.rows is None else len(runs.rows)
    places = torch.arange(len(slots.rows), device=logits.device) if compact else slots.writes
    for start in range(0, num_slots, CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        h = None if entropy is None else entropy[chunk]
        x = _read(logits, slots.rows[chunk], maximum.dtype)
        x = row_gradient(
            x, row_maximum[chunk], row_log_total[chunk], h, gradients, chunk, temperature
        )
        here = places[start : min(start + CHUNK_ROWS, num_slots)]
        out[here] = x[: len(here), : out.shape[1]].to(out.dtype)
    at_targets = target_gradient(logprobs, entropy, gradients, slots, temperature)
    out[places[slots.of], targets] = at_targets.to(out.dtype)


def _read(logits: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as a fresh [C, V padded] tensor; padding columns hold -inf."""
    x = logits.index_select(0, rows).to(dtype)
    padding = pad_columns(x.shape[1])
    return torch.nn.functional.pad(x, (0, padding), value=-torch.inf) if padding else x
