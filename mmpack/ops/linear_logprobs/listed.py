"""Logprobs of whole lists of ids beside the sampled one from hidden states [T, H] and the output weight [V, H].

The fused op's one pass over V makes the softmax of each row; rows of the weight that entries name are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from mmpack.errors import check_flag
from mmpack.ops.inputs import check_tensors
from mmpack.ops.linear_logprobs.linear import OPTIONAL, check_head, from_groups
from mmpack.ops.logprobs.arguments import check_arguments
from mmpack.ops.logprobs.listed import ListedLogprobs, check_lists, entries_of, split_entries
from mmpack.ops.logprobs.row_groups import make_row_groups
from mmpack.ops.logprobs.support import Support

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "linear_listed_logprobs"


def linear_listed_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lists: Mapping[str, Support],
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
) -> ListedLogprobs:
    """log softmax(z / temperature) of each target and of each id of its lists, z = hidden · weightᵀ + bias.

    Args:
        hidden, weight, targets, rows, bias, temperature, entropy, rows_unique, row_inverse, softcap, memory_budget,
            group: see `linear_selected_logprobs`.
        lists: by name, N lists of any length each (offsets [N+1] and ids [M], int64 or int32), as in
            `PackedBatch.teachers`. A list may be empty. An id may be in several lists, and several times in one.

    The softmax is over the whole vocabulary, and costs one pass over it for the target and all lists together; so does
    the backward, whose gradient to the logits is made for all of them at once, a chunk at a time. To that come M
    gathered rows of `weight` forward, and one number per id backward. Values are those of
    `linear_selected_logprobs`, bit by bit, and so are determinism, dtypes and bounds.

    Raises ArgumentError as `linear_selected_logprobs` does, and for lists that are not one per target. Values of
    offsets and ids are checked on the CPU only.

    Example: a teacher names ids 0 and 1 for the first token, and says nothing of the second.
        >>> import torch
        >>> import mmpack as mp
        >>> hidden, weight = torch.eye(2), torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 0.0]])
        >>> teacher = mp.Support(torch.tensor([0, 2, 2]), torch.tensor([0, 1]))
        >>> out = mp.linear_listed_logprobs(hidden, weight, torch.tensor([1, 2]), {"32B": teacher})
        >>> out.targets, out.lists["32B"]
        (tensor([-0.2395, -1.0986]), tensor([-2.2395, -0.2395]))
    """
    check_tensors(
        NAME, OPTIONAL, hidden=hidden, weight=weight, bias=bias, targets=targets, rows=rows,
        rows_unique=rows_unique, row_inverse=row_inverse,
    )  # fmt: skip
    check_flag(NAME, "entropy", entropy)
    head = check_head(NAME, hidden, weight, bias, softcap, memory_budget, group)
    num_rows, vocab = hidden.shape[0], head.vocab
    check_arguments(NAME, (num_rows, vocab), targets, rows, rows_unique, row_inverse, temperature)
    check_lists(NAME, lists, targets, vocab)
    groups = make_row_groups(num_rows, rows, rows_unique, row_inverse)
    ids, groups = entries_of(targets, lists, groups, num_rows)
    found = from_groups(head, ids, groups, temperature, entropy, memory_budget)
    return split_entries(*found, targets, lists, bool(entropy))
