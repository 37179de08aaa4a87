"""Two Parquet traces read side by side: pairs that are surely equal are counted, only the others become samples.

Rows come in windows, the next n of both files. A window yields `Alike`, pairs that are equal and break no rule, and
steps, the samples of all other rows, in the order in which both files would be read one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from mmpack.families import FAMILIES
from mmpack.parity.columnar.lacking import Lacks
from mmpack.parity.columnar.same import lacks_of_equal
from mmpack.schema.columns.table import Table, parsed_lists, take
from mmpack.schema.parquet import Block
from mmpack.schema.sample import Sample
from mmpack.schema.trace import Ids, TraceReader, repeated_id

Numbered = tuple[int, Sample]  # with its number in the trace, from 0
Step = tuple[Numbered | None, Numbered | None]
BLOCKS_AHEAD = 2


@dataclass(frozen=True)
class Alike:
    """`count` pairs, one after the other, that lack the same."""

    count: int
    lacks: Lacks


def steps(rollout: TraceReader, train: TraceReader, scored: int) -> Iterator[Alike | Step]:
    """All that two Parquet traces hold; the first `scored` pairs with logprobs are always yielded as samples.

    Raises TraceError.
    """
    # While rows are compared, the next ones are parsed, and more are decoded.
    with ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(count)) for count in (1, 1, 2)]
        left_file = ReadAhead(rollout.blocks(), rollout.max_record_bytes, threads[0], threads[2])
        right_blocks = train.blocks(rollout)
        right_file = ReadAhead(right_blocks, train.max_record_bytes, threads[1], threads[2])
        files = left_file, right_file
        while rows := [file.rows_left() for file in files if file.rows_left()]:
            left = files[0].next(min(rows))
            right = files[1].next(min(rows), left.block)
            alike = _alike(left, right)
            with_logprobs = {lacks for lacks in set(alike.values()) if _has_logprobs(lacks)}
            if scored and with_logprobs:
                kept = [pair for pair, lacks in alike.items() if lacks in with_logprobs]
                kept = sorted(kept, key=_arrival)[:scored]
                scored -= len(kept)
                alike = {pair: lacks for pair, lacks in alike.items() if pair not in kept}
            yield from _merged(_events(left, right, alike))


class ReadAhead:
    """One file, read some blocks ahead."""

    def __init__(
        self, blocks: Iterator[Block], max_record_bytes: int, reading: Executor, parsing: Executor
    ) -> None:
        self.blocks, self.max_record_bytes = blocks, max_record_bytes
        self.reading, self.parsing = reading, parsing  # `reading`: one thread, blocks come in order
        self.coming: deque[Future[Block | None]] = deque()
        for _ in range(BLOCKS_AHEAD):
            self._read_on()
        self.block: Block | None = None
        self.at = 0
        self.seen = Ids()

    def _read_on(self) -> None:
        read = self.reading.submit(next, self.blocks, None)
        self.coming.append(self.parsing.submit(_parsed, read))

    def rows_left(self) -> int:
        """Rows left of the block that is being read; 0 at the end of the file."""
        if self.block is None or self.at == self.block.rows:
            self._read_on()
            self.block, self.at = self.coming.popleft().result(), 0
        return 0 if self.block is None else self.block.rows - self.at

    def next(self, rows: int, other: Block | None = None) -> Part:
        """The next rows; none at the end of the file. `other`: those of the other file."""
        if self.block is None:
            return Part(None, [], set(), self.max_record_bytes)
        block = self.block.slice(self.at, self.at + rows).filled(other)
        self.at += rows
        ids = block.values("sample_id")
        named = [(k, name) for k, name in enumerate(ids) if type(name) is str]
        repeated = {k for k, name in named if not self.seen.is_new(name)}
        return Part(block, ids, repeated, self.max_record_bytes)


def _parsed(read: Future[Block | None]) -> Block | None:
    """A block, its columns of records parsed as far as Arrow can."""
    block = read.result()
    return block and replace(block, lists=parsed_lists(block.columns))


@dataclass
class Part:
    """Rows of one file, and which of them have an id that came before."""

    block: Block | None
    ids: list[Any]
    repeated: set[int]
    max_record_bytes: int

    def places(self) -> dict[str, int]:
        """The row of each id."""
        ids = enumerate(self.ids)
        return {name: k for k, name in ids if type(name) is str and k not in self.repeated}

    def take(self, rows: list[int], family: str) -> Table:
        assert self.block is not None
        columns, lists = self.block.columns, self.block.lists
        if rows != [*range(len(self.ids))]:
            columns, lists = take(columns, rows), take(lists, rows)
        return Table(columns, lists, len(rows), FAMILIES[family])

    def samples(self, but: set[int]) -> Iterator[Numbered]:
        """The samples of all rows except `but`."""
        rows = [k for k in range(len(self.ids)) if k not in but]
        for _, together in groupby(enumerate(rows), lambda item: item[1] - item[0]):
            run = [k for _, k in together]
            assert self.block is not None
            block = self.block.slice(run[0], run[-1] + 1)
            for k, (number, record) in zip(run, block.records(), strict=True):
                where = f"{block.path}: record {number}"
                sample = Sample.from_dict(record, where)
                if k in self.repeated:
                    raise repeated_id(sample.sample_id, where)
                yield number - 1, sample


def _arrival(pair: tuple[int, int]) -> tuple[int, bool]:
    """When the second row of a pair comes: at a row, the left one first."""
    return max(pair), pair[0] < pair[1]


def _has_logprobs(lacks: Lacks) -> bool:
    return not any(name == "rollout_logprobs" and who in ("rollout", "both") for name, who in lacks)


def _merged(events: Iterator[Lacks | Step]) -> Iterator[Alike | Step]:
    """Equal pairs that lack the same, one after the other, as one."""
    for lacks, together in groupby(events, lambda e: e if isinstance(e, frozenset) else None):
        if isinstance(lacks, frozenset):
            yield Alike(sum(1 for _ in together), lacks)
        else:
            yield from (event for event in together if isinstance(event, tuple))


def _events(left: Part, right: Part, alike: dict[tuple[int, int], Lacks]) -> Iterator[Lacks | Step]:
    """What row k yields, in order of k: its samples, and each equal pair at the second of its rows."""
    if len(alike) == len(left.ids) == len(right.ids) and all(i == j for i, j in alike):
        yield from (alike[k, k] for k in range(len(alike)))
        return
    equal = [{i for i, _ in alike}, {j for _, j in alike}]
    came = {_arrival(pair): lacks for pair, lacks in alike.items()}
    lefts, rights = left.samples(equal[0]), right.samples(equal[1])
    for k in range(max(len(left.ids), len(right.ids))):
        if (k, False) in came:
            yield came[k, False]
        a = next(lefts) if k < len(left.ids) and k not in equal[0] else None
        b = next(rights) if k < len(right.ids) and k not in equal[1] else None
        if a is not None or b is not None:
            yield a, b
        if (k, True) in came:
            yield came[k, True]


def _alike(left: Part, right: Part) -> dict[tuple[int, int], Lacks]:
    """The pairs (left row, right row) of one id that are equal and break no rule, with what they lack."""
    there = right.places()
    pairs = [(i, there[name]) for name, i in left.places().items() if name in there]
    if not pairs:
        return {}
    assert left.block is not None and right.block is not None
    families = left.block.values("family"), right.block.values("family")
    out: dict[tuple[int, int], Lacks] = {}
    for family in FAMILIES:
        of = [(i, j) for i, j in pairs if families[0][i] == family == families[1][j]]
        if of:
            rows = left.take([i for i, _ in of], family), right.take([j for _, j in of], family)
            found = lacks_of_equal(*rows, left.max_record_bytes, right.max_record_bytes)
            out |= {pair: lacks for pair, lacks in zip(of, found, strict=True) if lacks is not None}
    return out
