"""Logprobs of N loss tokens from hidden states [T, H] and the output weight [V, H]; [T, V] logits never exist.

Public function -> custom op (forward, backward, fakes, autograd) -> Triton kernels, or torch in chunks. Statistics of
a row travel by loss token, [N], in the units of what runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_number
from mmpack.ops.backend import choose
from mmpack.ops.inputs import check_tensors
from mmpack.ops.linear_logprobs import LINEAR_SELECTED_LOGPROBS
from mmpack.ops.linear_logprobs import torch as linear_torch
from mmpack.ops.linear_logprobs import triton as linear_triton
from mmpack.ops.linear_logprobs.call import Call, Statistics
from mmpack.ops.logprobs.row_groups import RowGroups, check_arguments, make_row_groups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "linear_selected_logprobs"
OPTIONAL = ("bias", "rows", "rows_unique", "row_inverse")


def linear_selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    *,
    rows_unique: Tensor | None = None,
    row_inverse: Tensor | None = None,
    softcap: float | None = None,
    memory_budget: int | None = None,
    group: ProcessGroup | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(z / temperature) of each target, natural log, z = hidden · weightᵀ + bias, without the logits.

    Args:
        hidden: [T, H], any float dtype. Rows that are not read may hold anything, NaN included.
        weight, bias: [V, H], [V]: the output embedding.
        targets, rows, rows_unique, row_inverse, entropy: see `selected_logprobs`.
        softcap: logits are softcap · tanh(z / softcap), before the temperature (Gemma 2, section 2).
        memory_budget: bytes that may be held beyond the gradients. If the probabilities fit, two bytes each, they are
            kept for the backward, which takes up to a fifth more for a while. Otherwise it computes them again, in
            chunks as wide as fit; by default, and with a smaller budget, in a twentieth of what the probabilities
            would take (more where N is below 6,144, or the vocabulary less than ten times H). A budget changes the
            last bits of gradients with the size of the batch; the default does not. The torch path goes by chunks of
            its own.
        group: ranks that the vocabulary is split over, in order: `weight` and `bias` are this rank's [V / ranks, H]
            and [V / ranks], all else is the same on each. Every rank gets all values and the whole gradient to
            `hidden`, summed in the order of the ranks. Values are the same bits for any number of ranks if a shard is
            a whole number of tiles (256 columns with Triton on CUDA, 128 on ROCm; 16,384 with torch).

    Returns [N] float32 (float64 for float64 inputs), or (logprobs, entropy in nats). The gradient to `hidden` is
    exactly 0 in rows that are not read or whose incoming gradients are all 0, which costs their products too; it
    and the values are the same bits in any batch and order. Gradients to weight and bias are summed in fp32; that to
    a bf16 or fp16 weight is rounded once a block of rows, of which there are up to four.

    Kernels take bf16 and fp16; other dtypes run on torch, where fp32 products obey
    `torch.set_float32_matmul_precision`, and the numerical contract needs its default, "highest". Logits of some
    hundreds are rounded by 1e-5 and more, and errors of values and gradients grow with them, as those of any fp32
    product do (`linear_logprob_bound`, `linear_gradient_fp32_bound`).

    Raises ArgumentError for wrong shapes, unlike devices, DTensors and forward-mode tangents, and on the CPU for
    indices out of range.
    """
    check_tensors(
        NAME, OPTIONAL, hidden=hidden, weight=weight, bias=bias, targets=targets, rows=rows,
        rows_unique=rows_unique, row_inverse=row_inverse,
    )  # fmt: skip
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ArgumentError(
            f"{NAME}: hidden has shape {list(hidden.shape)} and weight {list(weight.shape)}, expected [T, H] and "
            f"[V, H]. Fix: drop the batch dimension; weight is lm_head.weight"
        )
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise ArgumentError(
            f"{NAME}: hidden is {hidden.dtype} and weight {weight.dtype}, expected float dtypes. "
            f"Fix: pass hidden states, not ids or quantised weights"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(
            f"{NAME}: bias has shape {list(bias.shape)}, expected [{weight.shape[0]}]. Fix: one a vocabulary entry"
        )
    if softcap is not None:
        check_number(NAME, "softcap", softcap, above=0, fix="pass None for no softcap")
    if memory_budget is not None:
        check_number(NAME, "memory_budget", memory_budget, least=0, fix="pass bytes, or None")
    ranks, rank, group_name = 1, 0, ""
    if group is not None:
        ranks, rank, group_name = group.size(), group.rank(), group.group_name
    num_rows, shard = hidden.shape[0], weight.shape[0]
    vocab = ranks * shard
    check_arguments(NAME, (num_rows, vocab), targets, rows, rows_unique, row_inverse, temperature)
    runs = make_row_groups(num_rows, rows, rows_unique, row_inverse)
    inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    count = num_rows if runs.rows is None else runs.rows.shape[0]
    budget = int(memory_budget or 0)
    store = differentiable and count * shard * 2 <= budget
    logprobs, entropies, *_ = _forward(
        hidden, weight, bias, targets, *runs, float(temperature), softcap, entropy, store, budget,
        rank * shard, vocab, group_name,
    )  # fmt: skip
    return (logprobs, entropies) if entropy else logprobs


@torch.library.custom_op("mmpack::linear_selected_logprobs", mutates_args=())
def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rows: Tensor | None,
    order: Tensor | None,
    offsets: Tensor | None,
    temperature: float,
    softcap: float | None,
    entropy: bool,
    store: bool,
    budget: int,
    first_column: int,
    vocab: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Logprobs, entropies (none unless asked for), maxima, logs of the sums above them, targets' logits; [N] each.

    Then what `store` keeps, or [0, 0] twice.
    """
    call = Call(
        hidden, weight, bias, targets.long(), RowGroups(rows, order, offsets), temperature, softcap,
        first_column, vocab, group,
    )  # fmt: skip
    if _backend(hidden, weight) == "triton":
        with torch.cuda.device_of(hidden):
            found, stored, tile_maximum = linear_triton.forward(call, entropy, store)
    else:
        found = linear_torch.forward(call, entropy)
        stored, tile_maximum = hidden.new_empty(0, 0), hidden.new_empty(0, 0, dtype=torch.float32)
    return *found, stored, tile_maximum


@_forward.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rows: Tensor | None,
    order: Tensor | None,
    offsets: Tensor | None,
    temperature: float,
    softcap: float | None,
    entropy: bool,
    store: bool,
    budget: int,
    first_column: int,
    vocab: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    count = targets.shape[0]
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    kept: tuple[list[int], list[int]] = [0, 0], [0, 0]
    if store and _backend(hidden, weight) == "triton":
        slots = hidden.shape[0] if rows is None else rows.shape[0]
        kept = linear_triton.stored_shapes(slots, weight.shape[0], hidden.device)
    logprobs, maximum, log_total, chosen = (hidden.new_empty(count, dtype=dtype) for _ in range(4))
    entropies = hidden.new_empty(count if entropy else 0, dtype=dtype)
    stored, tile_maximum = hidden.new_empty(kept[0]), hidden.new_empty(kept[1], dtype=torch.float32)
    return logprobs, entropies, maximum, log_total, chosen, stored, tile_maximum


@torch.library.custom_op("mmpack::linear_selected_logprobs_backward", mutates_args=())
def _backward(
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rows: Tensor | None,
    order: Tensor | None,
    offsets: Tensor | None,
    logprobs: Tensor,
    entropies: Tensor,
    maximum: Tensor,
    log_total: Tensor,
    chosen: Tensor,
    stored: Tensor,
    tile_maximum: Tensor,
    temperature: float,
    softcap: float | None,
    budget: int,
    first_column: int,
    vocab: int,
    group: str,
    to_hidden: bool,
    to_weight: bool,
    to_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to hidden, weight and bias; [0] for those not asked for."""
    call = Call(
        hidden, weight, bias, targets.long(), RowGroups(rows, order, offsets), temperature, softcap,
        first_column, vocab, group,
    )  # fmt: skip
    statistics = Statistics(logprobs, entropies, maximum, log_total, chosen)
    gradients, needs = (grad_logprobs, grad_entropies), (to_hidden, to_weight, to_bias)
    if _backend(hidden, weight) == "triton":
        kept = stored, tile_maximum
        with torch.cuda.device_of(hidden):
            found = linear_triton.backward(call, statistics, *kept, *gradients, needs, budget)
    else:
        found = linear_torch.backward(call, statistics, *gradients, needs)
    like = hidden, weight, hidden if bias is None else bias
    a, b, c = (x.new_empty(0) if g is None else g for g, x in zip(found, like, strict=True))
    return a, b, c


@_backward.register_fake
def _(
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rows: Tensor | None,
    order: Tensor | None,
    offsets: Tensor | None,
    logprobs: Tensor,
    entropies: Tensor,
    maximum: Tensor,
    log_total: Tensor,
    chosen: Tensor,
    stored: Tensor,
    tile_maximum: Tensor,
    temperature: float,
    softcap: float | None,
    budget: int,
    first_column: int,
    vocab: int,
    group: str,
    to_hidden: bool,
    to_weight: bool,
    to_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if to_hidden else 0),
        weight.new_empty(weight.shape if to_weight else 0),
        hidden.new_empty(0) if bias is None else bias.new_empty(bias.shape if to_bias else 0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, (ctx.temperature, ctx.softcap, ctx.entropy, _, *ctx.rest) = inputs[:7], inputs[7:]
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[2:] if ctx.entropy else output[1:])
    ctx.set_materialize_grads(False)


def _autograd(
    ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(tensors[7])  # only the entropy was used
    needs = ctx.needs_input_grad[:3]
    found = _backward(
        grad_logprobs, grad_entropies if ctx.entropy else None, *tensors, ctx.temperature,
        ctx.softcap, *ctx.rest, *needs,
    )  # fmt: skip
    return *(g if need else None for g, need in zip(found, needs, strict=True)), *[None] * 12


_forward.register_autograd(_autograd, setup_context=_setup_context)


def _backend(hidden: Tensor, weight: Tensor) -> str:
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    return choose(LINEAR_SELECTED_LOGPROBS, hidden.device, dtype)
