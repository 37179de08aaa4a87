"""Logprobs of whole lists of ids and of the sampled one, all from one pass over the vocabulary.

An entry is one id that a loss token is scored on: its target first, then those of its lists. K entries of N loss
tokens go through the op of selected logprobs, or that of linear ones, as K targets of N rows. Of linear logprobs the
one pass over V makes the softmax of each row, and the rows of the weight that entries name are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, kind_of
from mmpack.ops.inputs import check_index, check_tensors
from mmpack.ops.logprobs import selected
from mmpack.ops.logprobs.arguments import Tokens, check_list
from mmpack.ops.logprobs.linear import selected as linear
from mmpack.ops.logprobs.linear.call import Head
from mmpack.ops.logprobs.linear.selected import check_head
from mmpack.ops.logprobs.row_groups import RowGroups, slots_of
from mmpack.ops.logprobs.selected import check_logits
from mmpack.ops.logprobs.support import Support
from mmpack.ops.segments import entry_segments

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME, LINEAR = "listed_logprobs", "linear_listed_logprobs"


@dataclass(frozen=True, eq=False)
class ListedLogprobs:
    """Logprobs under the softmax over the whole vocabulary, natural log; float32, or float64 for float64 inputs."""

    targets: Tensor  # [N]
    lists: dict[str, Tensor]  # by the lists' name [M], one for each of its ids
    entropy: Tensor | None  # [N] in nats, where asked for


def listed_logprobs(
    logits: Tensor,
    targets: Tensor,
    lists: Mapping[str, Support],
    rows: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    *,
    rows_unique: Tensor | None = None,
    row_inverse: Tensor | None = None,
    gradient: Literal["dense", "compact", "inplace"] = "dense",
) -> ListedLogprobs:
    """log softmax(logits / temperature) of each target and of each id of its lists, natural log.

    Args:
        logits, targets, rows, temperature, entropy, rows_unique, row_inverse, gradient: see `selected_logprobs`.
        lists: by name, N lists of any length each (offsets [N+1] and ids [M], int64 or int32), as in
            `PackedBatch.teachers`. A list may be empty. An id may be in several lists, and several times in one.

    A row of the logits is read once forward and once backward, however many ids are scored on it. Values are those of
    `selected_logprobs`, bit by bit. The backward on a GPU compares the ids of a row with each other: for lists of
    thousands take `linear_listed_logprobs`.

    Raises ArgumentError as `selected_logprobs` does, and for lists that are not one per target. Values of offsets and
    ids are checked on the CPU only.

    Example: a teacher names ids 0 and 1 for the first token, and says nothing of the second.
        >>> import torch
        >>> import mmpack as mp
        >>> logits = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
        >>> teacher = mp.ops.Support(torch.tensor([0, 2, 2]), torch.tensor([0, 1]))
        >>> out = mp.ops.listed_logprobs(logits, torch.tensor([1, 2]), {"32B": teacher})
        >>> out.targets, out.lists["32B"]
        (tensor([-0.2395, -1.0986]), tensor([-2.2395, -0.2395]))
    """
    tokens = Tokens(targets, rows, rows_unique, row_inverse, temperature, entropy)
    check_logits(NAME, logits, tokens, gradient)
    ids, groups = entries_of(NAME, tokens, lists, logits.shape[0], logits.shape[1])
    found = selected.from_groups(logits, ids, groups, tokens.scale, entropy, gradient)
    return split_entries(*found, tokens, lists)


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
        lists: see `listed_logprobs`.

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
        >>> teacher = mp.ops.Support(torch.tensor([0, 2, 2]), torch.tensor([0, 1]))
        >>> out = mp.ops.linear_listed_logprobs(hidden, weight, torch.tensor([1, 2]), {"32B": teacher})
        >>> out.targets, out.lists["32B"]
        (tensor([-0.2395, -1.0986]), tensor([-2.2395, -0.2395]))
    """
    tokens = Tokens(targets, rows, rows_unique, row_inverse, temperature, entropy)
    head = check_head(
        LINEAR, Head(hidden, weight, bias, softcap, 0, 0, ""), tokens, memory_budget, group
    )
    ids, groups = entries_of(LINEAR, tokens, lists, hidden.shape[0], head.vocab)
    found = linear.from_groups(head, ids, groups, temperature, entropy, memory_budget)
    return split_entries(*found, tokens, lists)


def check_lists(what: str, lists: Any, targets: Tensor, vocab: int) -> None:
    """Raise ArgumentError unless `lists` maps names to Supports of one list per target, with ids in [0, V).

    Values are checked on the CPU only.
    """
    if not isinstance(lists, Mapping) or not all(isinstance(name, str) for name in lists):
        raise ArgumentError(
            f"{what}: lists is {kind_of(lists)}, expected a mapping of names to Supports. "
            f"Fix: pass batch.teachers, or {{'teacher': Support(offsets, ids)}}"
        )
    for name, support in lists.items():
        where = f"lists[{name!r:.40}]"
        check_list(what, where, support)
        check_tensors(what, (), targets=targets, **{f"{where}.ids": support.ids})
        if len(support) != len(targets):
            raise ArgumentError(
                f"{what}: {where} has {len(support)} lists for {len(targets)} targets. "
                f"Fix: pass one list per loss token, an empty one where the teacher scored nothing"
            )
        check_index(what, f"{where}.ids", support.ids, vocab)


def tokens_of(support: Support) -> Tensor:
    """The loss token of each id of the lists, [M] int64."""
    return entry_segments(support.offsets.long(), len(support.ids))


def entries_of(
    what: str, tokens: Tokens, lists: Mapping[str, Support], num_rows: int, vocab: int
) -> tuple[Tensor, RowGroups]:
    """Ids [K] of all entries, targets first, and which of them read one row. Raises ArgumentError as `check_lists`."""
    targets, groups = tokens.targets, tokens.groups(num_rows)
    check_lists(what, lists, targets, vocab)
    count, device = len(targets), targets.device
    ids = torch.cat([targets.long(), *(support.ids.long() for support in lists.values())])
    if len(ids) == count:
        return ids, groups
    own = torch.arange(count, device=device)
    of_each = torch.cat([own, *(tokens_of(support) for support in lists.values())])
    rows, size = groups.rows, count if groups.rows is None else len(groups.rows)
    of = own if groups.order is None else slots_of(groups, num_rows, count, device, 1).of
    slots, order = torch.sort(of[of_each], stable=True)
    bounds = torch.arange(size + 1, device=device)
    rows = own if rows is None else rows
    return ids, RowGroups(rows, order, torch.searchsorted(slots, bounds))


def split_entries(
    logprobs: Tensor, entropies: Tensor, tokens: Tokens, lists: Mapping[str, Support]
) -> ListedLogprobs:
    """Values [K] of all entries, by what they are of."""
    count = len(tokens.targets)
    sizes = [count, *(len(support.ids) for support in lists.values())]
    own, *others = logprobs.split(sizes)
    named = dict(zip(lists, others, strict=True))
    return ListedLogprobs(own, named, entropies[:count] if tokens.entropy else None)
