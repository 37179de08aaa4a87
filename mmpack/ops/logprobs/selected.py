"""Logprobs of N loss tokens from logits that exist: [T, V] in, [N] out.

The public function makes a Call, which goes through a custom op (forward, backward, fakes, autograd) to one of two
paths of the same contract: torch.py or triton.py. Statistics of a row are stored per loss token, [N], whichever runs.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_name
from mmpack.ops.backend import module_of
from mmpack.ops.logprobs import SELECTED_LOGPROBS
from mmpack.ops.logprobs.arguments import Tokens, check_support
from mmpack.ops.logprobs.autograd import Incoming, define, gradient_to_logits, sparse_rows
from mmpack.ops.logprobs.call import Call, Statistics
from mmpack.ops.logprobs.lists.logits import from_logits
from mmpack.ops.logprobs.row_groups import RowGroups
from mmpack.ops.logprobs.support import Support

NAME = "selected_logprobs"
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
    support: Support | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) of each target, natural log.

    Args:
        logits: [T, V], any float dtype. Rows that are not read may hold anything, NaN included.
        targets: [N] int64 token ids.
        rows: [N] row that predicts each target, in any order, with repeats; None: row n predicts target n.
        entropy: also return the entropy of each row's distribution, in nats.
        rows_unique, row_inverse: [R], [N], `rows` as its distinct values and their index
            (`PackedBatch.loss_rows_unique`, `.loss_row_inverse`; each value is used at least once). Repeated rows are
            then read once, and if R is N nothing is sorted.
        gradient: the form of the gradient to the logits. "dense": [T, V]. "compact": a sparse COO tensor [T, V] with
            one sparse dimension and values [R, V], of the rows that are read, as `Embedding(sparse=True)` has;
            for leaves and `torch.autograd.grad`, not under torch.compile. "inplace": dense, written over the logits,
            which the backward destroys; no second backward. The last two need rows that are known not to repeat:
            `rows_unique` and `row_inverse`, or no `rows`.
        support: the ids that the sampler left for each target, `PackedBatch.kept_ids`. The softmax and the entropy are
            over these alone: log p(target) - log Σ p(id), and no other logit is read or has a gradient.

    Returns [N] float32 (float64 for float64 logits), or (logprobs, entropy). The gradient to the logits is exactly 0
    in rows that are not read or whose incoming gradients are all 0; gradients of one row are summed in the order of
    n. Values and gradients of a row are the same bits in any batch and order, if the logits have the same alignment.

    Raises ArgumentError for wrong shapes, different devices, DTensors and forward-mode tangents, and on the CPU for
    indices out of range and for a list of `support` that is empty, does not rise or lacks its target. On a GPU that
    check would wait for the device: there such a target or list gives NaN.

    Example: two tokens, predicted by rows 0 and 2.
        >>> import torch
        >>> from mmpack import selected_logprobs
        >>> logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [9.0, 9.0, 9.0, 9.0], [0.0, 2.0, 0.0, 0.0]])
        >>> selected_logprobs(logits, torch.tensor([0, 1]), rows=torch.tensor([0, 2]))
        tensor([-1.3863, -0.3408])
    """
    tokens = Tokens(targets, rows, rows_unique, row_inverse, temperature, entropy)
    check_logits(NAME, logits, tokens, gradient)
    if support is not None:
        check_support(NAME, support, targets, logits.shape[1])
        logprobs, entropies = from_logits(logits, support, tokens, gradient)
    else:
        groups = tokens.groups(logits.shape[0])
        logprobs, entropies = from_groups(logits, targets, groups, tokens.scale, entropy, gradient)
    return (logprobs, entropies) if entropy else logprobs


def check_logits(what: str, logits: Tensor, tokens: Tokens, gradient: str) -> None:
    """Raise ArgumentError unless `logits` is a float [T, V] that the tokens and the form of the gradient fit."""
    tokens.check(what, logits=logits)
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ArgumentError(
            f"{what}: logits has shape {list(logits.shape)} and dtype {logits.dtype}, expected a float "
            f"[T, V]. Fix: drop the batch dimension, e.g. logits[0]"
        )
    tokens.check_values(what, *logits.shape)
    check_name(what, "gradient", gradient, GRADIENTS)
    if gradient != "dense" and tokens.rows is not None and tokens.rows_unique is None:
        raise ArgumentError(
            f"{what}: gradient is {gradient!r}, but rows may repeat. "
            "Fix: pass rows_unique and row_inverse, or gradient='dense'"
        )


def from_groups(
    logits: Tensor,
    targets: Tensor,
    groups: RowGroups,
    temperature: Tensor,
    entropy: bool,
    gradient: str,
) -> tuple[Tensor, Tensor]:
    """Logprobs [N], and entropies [N], or [0] unless asked for, of checked arguments."""
    call = Call(logits, targets, *groups, temperature, bool(entropy), gradient)
    logprobs, entropies, *_ = selected_op(*call)
    return logprobs, entropies


def _fake(call: Call) -> Statistics:
    logits, count = call.logits, call.targets.shape[0]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logprobs, maximum, log_total = (logits.new_empty(count, dtype=dtype) for _ in range(3))
    entropies = logits.new_empty(count if call.entropy else 0, dtype=dtype)
    return Statistics(logprobs, entropies, maximum, log_total)


def _fake_backward(given: Incoming, call: Call, statistics: Statistics) -> Tensor:
    """Shape of the gradient to the logits: [T, V], in place of them, or compact [S, V] by group."""
    rows = call.rows if call.gradient == "compact" else None
    return call.logits.new_empty(call.num_rows if rows is None else rows.shape[0], call.vocab)


def _path(call: Call) -> Any:
    return module_of(SELECTED_LOGPROBS, call.logits)


def _sparse(values: Tensor, call: Call) -> Tensor:
    """Rows [S, V] of the groups as a sparse COO tensor [T, V]."""
    rows = call.rows
    index = torch.arange(call.num_rows, device=values.device) if rows is None else rows.long()
    return sparse_rows(index, values, call.logits)


selected_gradient = gradient_to_logits(
    f"{NAME}_backward",
    lambda given, call, statistics: _path(call).backward(given, call, statistics),
    _fake_backward,
    _sparse,
)
selected_op = define(NAME, lambda call: _path(call).forward(call), _fake, selected_gradient)
