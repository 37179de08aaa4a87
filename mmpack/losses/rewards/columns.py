"""Scores by name: one column [B] for each, as GDPO and `group_advantages` take them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_number, kind_of
from mmpack.schema.spans import Cost, Score


def score_columns(
    scores: Sequence[Sequence[Score]],
    names: Iterable[str] | None = None,
    missing: float | None = None,
) -> dict[str, Tensor]:
    """Name to [B] float64: the sum of each sample's scores of that name, whatever they score.

    Args: scores: B lists, as `batch.rewards`. names: those to take, in this order; None: all, as they first appear.
    missing: the value of a sample without such a score; None: that is an error. Raises ArgumentError for that, for
    values that are not finite, and for what is no Score.

    Example:
        >>> import mmpack as mp
        >>> exact, form = mp.Score("exact", 1.0), mp.Score("form", 0.5)
        >>> mp.losses.score_columns([[exact, form], [form]], missing=0.0)["exact"]
        tensor([1., 0.], dtype=torch.float64)
    """
    what = "score_columns"
    if isinstance(scores, (str, bytes)) or not isinstance(scores, Sequence):
        raise ArgumentError(f"{what}: scores is {kind_of(scores)}. Fix: pass B lists of Score")
    return columns_by_name(what, scores, Score, names, missing, range(len(scores)))


def columns_by_name(
    what: str,
    scores: Sequence[Any],
    of: type[Score | Cost],
    names: Iterable[str] | None,
    missing: float | None,
    samples: Sequence[Any],
) -> dict[str, Tensor]:
    """`score_columns` of lists of `of`. `samples`: how errors name them."""
    if missing is not None:
        check_number(what, "missing", missing)
    found: dict[str, dict[int, float]] = (
        {} if names is None else {n: {} for n in names_of(what, names)}
    )
    for b, of_sample in enumerate(scores):
        for k, score in enumerate(of_sample if isinstance(of_sample, Sequence) else [of_sample]):
            if not isinstance(score, of):
                raise ArgumentError(
                    f"{what}: scores[{b}][{k}] is {kind_of(score)}, expected a {of.__name__}. "
                    f"Fix: pass B lists of {of.__name__}"
                )
            if names is not None and score.name not in found:
                continue
            where = f"{score.name!r} of sample {samples[b]!r}"
            check_number(what, where, score.value, fix="leave it out")
            column = found.setdefault(score.name, {})
            column[b] = column.get(b, 0.0) + float(score.value)
    for name, column in found.items():
        absent = next((b for b in range(len(scores)) if b not in column), None)
        if missing is None and absent is not None:
            raise ArgumentError(
                f"{what}: sample {samples[absent]!r} has no {of.__name__.lower()} {name!r}. "
                "Fix: score it, or pass missing=, the value to use in its place"
            )
    return {
        name: torch.tensor(
            [column.get(b, missing) for b in range(len(scores))], dtype=torch.float64
        )
        for name, column in found.items()
    }


def names_of(what: str, names: Any) -> list[str]:
    """`names` as a list. Raises ArgumentError unless they are strings."""
    many = isinstance(names, Iterable) and not isinstance(names, (str, bytes, torch.Tensor))
    found: list[Any] = list(names) if many else [None]
    if not all(isinstance(name, str) for name in found):
        raise ArgumentError(
            f"{what}: names is {kind_of(names)}, expected names of scores. Fix: pass a list of str"
        )
    return found
