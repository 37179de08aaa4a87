"""Length penalties as scores: B lengths in loss tokens become B lists of Score, for `mp.scatter_rewards`.

A response without a token has nothing to bear a penalty: its list is empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mmpack.errors import ArgumentError, check_number, check_whole, kind_of
from mmpack.losses.listed import listed
from mmpack.schema.spans import Score


def linear_length_scores(
    lengths: Any, target: int, alpha: float = 0.0003, name: str = "length"
) -> list[list[Score]]:
    """−alpha · |target − length| (L1's exact form, arXiv 2503.04697): B lists of one Score.

    Args: lengths: [B] loss tokens of each sample, as `batch.loss_counts`. target: the length that is asked for, in
    tokens. alpha: 0 or more. name: of the scores. Raises ArgumentError.

    Example:
        >>> import mmpack as mp
        >>> [s.value for (s,) in mp.losses.linear_length_scores([90, 120], target=100, alpha=0.01)]
        [-0.1, -0.2]
    """
    what = "linear_length_scores"
    counts = _lengths(what, lengths)
    check_whole(what, "target", target, least=0)
    check_number(what, "alpha", alpha, least=0)
    return _scores(what, counts, [-alpha * abs(target - n) for n in counts], name)


def group_length_scores(
    lengths: Any, group_index: Any, correct: Any, name: str = "length"
) -> list[list[Score]]:
    """Linear within a group: λ = 0.5 − (length − shortest) / (longest − shortest) where correct, else min(0, λ).

    Kimi k1.5's length reward (arXiv 2501.12599); 0 where all of a group are equally long.

    Args: lengths: [B] loss tokens. group_index: [B] int, as `batch.group_index`. correct: [B] bool. Raises
    ArgumentError.

    Example: a right answer that is long, and two wrong ones.
        >>> import mmpack as mp
        >>> scores = mp.losses.group_length_scores([30, 10, 20], [0, 0, 0], [True, False, False])
        >>> [s.value for (s,) in scores]
        [-0.5, 0.0, 0.0]
    """
    what = "group_length_scores"
    counts = _lengths(what, lengths)
    right = _flags(what, correct, len(counts))
    fix = "pass the number of each sample's group"
    groups = listed(what, "group_index", group_index, "iu", "integers", fix, len(counts))
    members: dict[int, list[int]] = {}
    for n, group in zip(counts, groups, strict=True):
        members.setdefault(group, []).append(n)
    values = []
    for n, group, good in zip(counts, groups, right, strict=True):
        shortest, longest = min(members[group]), max(members[group])
        span = longest - shortest
        value = 0.5 - (n - shortest) / span if span else 0.0
        values.append(value if good else min(0.0, value))
    return _scores(what, counts, values, name)


def cosine_length_scores(
    lengths: Any,
    correct: Any,
    max_length: int,
    *,
    correct_from: float = 2.0,
    correct_to: float = 1.0,
    wrong_from: float = -10.0,
    wrong_to: float = 0.0,
    exceeded: float = -10.0,
    name: str = "length",
) -> list[list[Score]]:
    """Along half a cosine from `…_from` at length 0 to `…_to` at `max_length` (arXiv 2502.03373).

    to + (from − to) · (1 + cos(π · length / max_length)) / 2; `exceeded` from max_length on. Defaults as in the runs
    published with it: a correct answer is worth more when short, a wrong one costs less when long.

    Args: lengths: [B] loss tokens. correct: [B] bool. max_length: 1 or more. Raises ArgumentError.

    Example: two of half the length, right and wrong, and one that was cut off.
        >>> import mmpack as mp
        >>> scores = mp.losses.cosine_length_scores([50, 50, 100], [True, False, False], max_length=100)
        >>> [s.value for (s,) in scores]
        [1.5, -5.0, -10.0]
    """
    what = "cosine_length_scores"
    counts = _lengths(what, lengths)
    right = _flags(what, correct, len(counts))
    check_whole(what, "max_length", max_length)
    bounds = {"correct_from": correct_from, "correct_to": correct_to, "exceeded": exceeded}
    for option, number in (bounds | {"wrong_from": wrong_from, "wrong_to": wrong_to}).items():
        check_number(what, option, number)
    values = []
    for n, good in zip(counts, right, strict=True):
        begin, end = (correct_from, correct_to) if good else (wrong_from, wrong_to)
        along = end + (begin - end) * (1 + math.cos(math.pi * n / max_length)) / 2
        values.append(along if n < max_length else exceeded)
    return _scores(what, counts, values, name)


def soft_overlong_scores(
    lengths: Any, max_length: int, buffer: int, penalty: float = 1.0, name: str = "length"
) -> list[list[Score]]:
    """DAPO's soft overlong punishment (arXiv 2503.14476 eq. 13): B lists of one Score.

    0 up to max_length − buffer, then falling linearly to −penalty at max_length, and −penalty behind it.

    Args: lengths: [B] loss tokens. max_length, buffer: in tokens, 0 < buffer ≤ max_length. penalty: 0 or more.
    Raises ArgumentError.

    Example:
        >>> import mmpack as mp
        >>> [s.value for (s,) in mp.losses.soft_overlong_scores([70, 90, 100, 130], max_length=100, buffer=20)]
        [0.0, -0.5, -1.0, -1.0]
    """
    what = "soft_overlong_scores"
    counts = _lengths(what, lengths)
    check_whole(what, "max_length", max_length)
    check_whole(what, "buffer", buffer)
    check_number(what, "penalty", penalty, least=0)
    if buffer > max_length:
        raise ArgumentError(
            f"{what}: buffer is {buffer}, max_length is {max_length}. Fix: pass a buffer that is at most max_length"
        )
    begin = max_length - buffer
    return _scores(
        what, counts, [-penalty * min(max(n - begin, 0) / buffer, 1) for n in counts], name
    )


def _scores(what: str, counts: list[int], values: Sequence[float], name: str) -> list[list[Score]]:
    if not isinstance(name, str):
        raise ArgumentError(f"{what}: name is {kind_of(name)}, expected a str. Fix: pass its name")
    return [
        [Score(name=name, value=float(v) + 0.0)] if n else []  # + 0.0: no -0.0
        for n, v in zip(counts, values, strict=True)
    ]


def _lengths(what: str, lengths: Any) -> list[int]:
    """[B] whole numbers, 0 or more, as a list."""
    fix = "pass the loss tokens of each sample"
    counts: list[int] = listed(what, "lengths", lengths, "iu", "integers", fix)
    if min(counts, default=0) < 0:
        raise ArgumentError(f"{what}: lengths holds {min(counts)}. Fix: pass lengths of 0 or more")
    return counts


def _flags(what: str, correct: Any, count: int) -> list[bool]:
    fix = "pass whether each answer is right"
    flags: list[bool] = listed(what, "correct", correct, "b", "bools", fix, count)
    return flags
