"""Which rank encodes which medium of a step, so that all ranks encode about as many patches."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mmpack.planning.balance import balance


def media_to_ranks(
    patches: Sequence[int], tokens: Sequence[int], users: Sequence[Collection[int]], ranks: int
) -> list[int]:
    """The rank that encodes each medium: patches are balanced, then features stay at home where they can.

    All ranks wait for the features of all others: patches are balanced by themselves, whatever text a rank has.

    Args: of each medium its `patches`, its `tokens`, and `users`: the ranks whose batches have it.
    Returns: the same on every rank, for the same arguments.
    """
    parts = balance([float(n) for n in patches], ranks)
    of_part = {i: p for p, part in enumerate(parts) for i in part}
    at_home = [[0] * ranks for _ in parts]
    for i, own in enumerate(users):
        for rank in own:
            at_home[of_part[i]][rank] += tokens[i]
    pairs = sorted((-at_home[p][r], p, r) for p in range(ranks) for r in range(ranks))
    home: dict[int, int] = {}
    for _, p, r in pairs:
        if p not in home and r not in home.values():
            home[p] = r
    return [home[of_part[i]] for i in range(len(patches))]
