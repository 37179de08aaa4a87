"""A topic of rules: its check of one sample, which names what is broken, beside its check of many rows by columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from mmpack.families import Family
from mmpack.schema.columns.table import Table
from mmpack.schema.sample import Sample

# code, field, message, [start, stop) of tokens
Found = Iterator[tuple[str, str, str, tuple[int, int] | None]]


@dataclass(frozen=True)
class Topic:
    """Some rules: `problems` and `valid` check the same, one sample or many rows at a time."""

    codes: tuple[str, ...]
    fields: tuple[str, ...]  # of a sample, that `valid` reads
    problems: Callable[[Sample, Family], Found]  # the broken rules of a sample
    # bool [n]: rows that surely break no rule, of a table whose rows are readable
    valid: Callable[[Table], np.ndarray]

    def valid_rows(self, table: Table) -> np.ndarray:
        """bool [n], see `valid`; found once for two tables that share the fields."""
        return table.once(self.valid, self.valid, *self.fields)


def before(row: np.ndarray, values: np.ndarray, first: int = 0) -> np.ndarray:
    """int64 [m]: of each item, the value of the item before it in its row; of a row's first item, `first`."""
    out = np.full(len(row), first, np.int64)
    follows = np.flatnonzero(row[1:] == row[:-1]) + 1
    out[follows] = values[follows - 1]
    return out


def overlaps(
    start: np.ndarray, stop: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> np.ndarray:
    """bool: which of [start, stop) share a token with the sorted, disjoint [starts, stops)."""
    ended = np.searchsorted(stops, start, "right")  # those that end there or earlier
    return (start < stop) & (np.searchsorted(starts, stop, "left") > ended)
