"""Which rows of a step a rank has, and which of them are a micro-batch: rows of one prompt together, ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmpack.planning.plan import plan
from mmpack.schema.sample import Sample


def bins(
    samples: Sequence[Sample], max_tokens: int, most: Callable[[int], int], share: bool = True
) -> list[list[int]]:
    """Samples of each micro-batch of at most `max_tokens` rows, shared ones counted once (unless not `share`).

    Args: `most`: the number of micro-batches here -> that of the rank which has most. Every rank gets as many, or
    FSDP would hang.
    """
    own = plan(samples, max_tokens=max_tokens, share_prefix=share).bins
    count = most(len(own))
    if count > len(own):
        own = plan(samples, max_tokens=max_tokens, share_prefix=share, ranks=count).bins
    return own


def together(groups: Sequence[str], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows of each rank, equally many: a group is cut only where no rank has room for it. Longest groups first, each to
    the rank with the fewest tokens.

    Args: `groups`, `lengths`: the group and the tokens of each row, whose number `ranks` divides.
    """
    members: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    room, load = [len(groups) // ranks] * ranks, [0] * ranks
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for rows in sorted(
        members.values(), key=lambda own: (-len(own), -sum(lengths[i] for i in own))
    ):
        while rows:
            fitting = [r for r in range(ranks) if room[r] >= len(rows)]
            rank = (
                min(fitting, key=lambda r: load[r])
                if fitting
                else max(range(ranks), key=lambda r: room[r])
            )
            taken, rows = rows[: room[rank]], rows[room[rank] :]
            parts[rank] += taken
            room[rank] -= len(taken)
            load[rank] += sum(lengths[i] for i in taken)
    return parts
