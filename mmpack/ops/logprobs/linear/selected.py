"""Logprobs of N loss tokens from hidden states [T, H] and the output weight [V, H]; [T, V] logits never exist.

The public function makes a Call, which goes through a custom op (forward, backward, fakes, autograd) to one of two
paths of the same contract: torch.py or triton.py. Statistics of a row are stored per loss token, [N].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_number, kind_of
from mmpack.ops import invariance
from mmpack.ops.backend import module_of
from mmpack.ops.inputs import check_floats, check_shapes
from mmpack.ops.logprobs.arguments import Tokens, check_support
from mmpack.ops.logprobs.autograd import Incoming, Needs, define, gradients_to_head
from mmpack.ops.logprobs.linear import LINEAR_SELECTED_LOGPROBS
from mmpack.ops.logprobs.linear.call import Call, Gradients, Head, Statistics
from mmpack.ops.logprobs.lists.hidden import from_hidden
from mmpack.ops.logprobs.row_groups import RowGroups
from mmpack.ops.logprobs.support import Support

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "linear_selected_logprobs"


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
    support: Support | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(z / temperature) of each target, natural log, z = hidden · weightᵀ + bias, without the logits.

    Args:
        hidden: [T, H], any float dtype. Rows that are not read may hold anything, NaN included.
        weight, bias: [V, H], [V]: the output embedding.
        targets, rows, rows_unique, row_inverse, entropy: see `selected_logprobs`.
        softcap: logits are softcap · tanh(z / softcap), before the temperature (Gemma 2, section 2).
        memory_budget: bytes that may be held beyond the gradients. If the probabilities fit, two bytes each, they are
            kept for the backward, which takes up to a fifth more for a while. Otherwise it computes them again, in
            chunks as wide as fit. By default, and with a smaller budget, chunks take a twentieth of what the
            probabilities would take (more if N is below 6,144, or the vocabulary less than ten times H). With a budget
            the last bits of gradients depend on the size of the batch; by default they don't. The torch path has
            chunks of its own.
        group: ranks that the vocabulary is split over, in order: `weight` and `bias` are this rank's [V / ranks, H]
            and [V / ranks], all else is the same on each. Every rank gets all values and the whole gradient to
            `hidden`, summed in the order of the ranks. Values are the same bits for any number of ranks if a shard is
            a whole number of tiles (256 columns with Triton on CUDA, 128 on ROCm; 16,384 with torch).
        support: the ids that the sampler left for each target, `PackedBatch.kept_ids`. The softmax and the entropy are
            over these alone. Only their rows of `weight` are read, and have a gradient other than 0; `memory_budget`
            does nothing, and values are the same bits for any number of ranks. Where the lists are so long that
            products with the whole weight cost less (`ops/logprobs/lists/products.py`: on an H200 in bf16 from a mean
            of V / 123 ids), these are made, and with them a float32 sum of the size of `weight`.

    Returns [N] float32 (float64 for float64 inputs), or (logprobs, entropy in nats). The gradient to `hidden` is
    exactly 0 in rows that are not read or whose incoming gradients are all 0, which costs their products too; it
    and the values are the same bits in any batch and order. Gradients to weight and bias are summed in fp32; that to
    a bf16 or fp16 weight is rounded once per block of rows, of which there are up to four.

    Kernels take bf16 and fp16 (with `support` float32 too); other dtypes run on torch, where fp32 products obey
    `torch.set_float32_matmul_precision`, and the numerical contract needs its default, "highest". Logits of some
    hundreds are rounded by 1e-5 and more, and errors of values and gradients grow with them, as those of any fp32
    product do (`linear_logprob_bound`, `linear_gradient_fp32_bound`).

    Raises ArgumentError for wrong shapes, different devices, DTensors and forward-mode tangents, and on the CPU for
    indices out of range and for a list of `support` that is empty, does not rise or lacks its target: on a GPU, where
    nothing is looked at, such a list gives NaN.

    Example: logits of the one row that is read are 0, 2 and 0.
        >>> import torch
        >>> from mmpack import linear_selected_logprobs
        >>> hidden, weight = torch.eye(2), torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
        >>> linear_selected_logprobs(hidden, weight, torch.tensor([1, 2]), rows=torch.tensor([0, 0]))
        tensor([-0.2395, -2.2395])
    """
    tokens = Tokens(targets, rows, rows_unique, row_inverse, temperature, entropy)
    head = check_head(
        NAME, Head(hidden, weight, bias, softcap, 0, 0, ""), tokens, memory_budget, group
    )
    if support is not None:
        check_support(NAME, support, targets, head.vocab)
        logprobs, entropies = from_hidden(head, support, tokens)
    else:
        logprobs, entropies = from_groups(
            head, targets, tokens.groups(hidden.shape[0]), temperature, entropy, memory_budget
        )
    return (logprobs, entropies) if entropy else logprobs


def check_head(
    what: str, head: Head, tokens: Tokens, memory_budget: int | None, group: ProcessGroup | None
) -> Head:
    """The head with the place of its shard in `group`. Raises ArgumentError for what makes no logits of the tokens."""
    hidden, weight, bias, softcap = head[:4]
    tokens.check(what, hidden=hidden, weight=weight, bias=bias)
    fix = (
        "drop the batch dimension; weight is lm_head.weight, and bias has one per vocabulary entry"
    )
    check_shapes(what, fix, hidden=(hidden, "T H"), weight=(weight, "V H"), bias=(bias, "V"))
    fix = "pass hidden states, not ids or quantised weights"
    check_floats(what, fix, hidden=hidden, weight=weight)
    if softcap is not None:
        check_number(what, "softcap", softcap, above=0, fix="pass None for no softcap")
    if memory_budget is not None:
        check_number(what, "memory_budget", memory_budget, least=0, fix="pass bytes, or None")
    shard = weight.shape[0]
    head = head._replace(vocab=shard)
    if group is not None:
        _check_group(what, group)
        first, vocab = group.rank() * shard, group.size() * shard
        head = Head(hidden, weight, bias, softcap, first, vocab, group.group_name)
    tokens.check_values(what, hidden.shape[0], head.vocab)
    return head


def from_groups(
    head: Head,
    targets: Tensor,
    groups: RowGroups,
    temperature: float,
    entropy: bool,
    memory_budget: int | None,
) -> tuple[Tensor, Tensor]:
    """Logprobs [N], and entropies [N], or [0] unless asked for, of checked arguments."""
    hidden, weight, bias, softcap = head[:4]
    inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    count = hidden.shape[0] if groups.rows is None else groups.rows.shape[0]
    # with one, chunks follow from how many tokens there are
    budget = 0 if invariance.is_on() else int(memory_budget or 0)
    store = differentiable and count * weight.shape[0] * 2 <= budget
    call = Call(
        hidden, weight, bias, targets.long(), *groups, float(temperature), softcap, bool(entropy),
        store, budget, *head.shard,
    )  # fmt: skip
    logprobs, entropies, *_ = _op(*call)
    invariance.hold(logprobs)
    invariance.hold(entropies)
    return logprobs, entropies


def _check_group(what: str, group: Any) -> None:
    if not (torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup)):
        raise ArgumentError(
            f"{what}: group is {kind_of(group)}, expected a ProcessGroup. "
            f"Fix: pass torch.distributed.new_group(…), or None"
        )


def _fake(call: Call) -> Statistics:
    hidden, count = call.hidden, call.targets.shape[0]
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, call.weight.dtype), torch.float32)
    stored, tiles = [0, 0], [0, 0]
    if call.store:
        groups = hidden.shape[0] if call.rows is None else call.rows.shape[0]
        stored, tiles = _path(call).stored_shapes(groups, call.weight.shape[0], hidden.device)
    logprobs, maximum, log_total, chosen = (hidden.new_empty(count, dtype=dtype) for _ in range(4))
    return Statistics(
        logprobs,
        hidden.new_empty(count if call.entropy else 0, dtype=dtype),
        maximum,
        log_total,
        chosen,
        hidden.new_empty(stored),
        hidden.new_empty(tiles, dtype=torch.float32),
    )


def _backward(given: Incoming, call: Call, statistics: Statistics, needs: Needs) -> Gradients:
    return _path(call).backward(given, call, statistics, needs)


def _path(call: Call) -> Any:
    return module_of(LINEAR_SELECTED_LOGPROBS, call.hidden, call.weight)


_gradients = gradients_to_head("linear_selected_logprobs_backward", _backward)
_op = define(NAME, lambda call: _path(call).forward(call), _fake, _gradients)
