"""Two Parquet traces read side by side: what is equal on both sides is parsed once.

Arrow compares columns, some rows of both files at a time. A row that is equal in all of them is one sample for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mmpack.schema.fields import same
from mmpack.schema.parquet import Block
from mmpack.schema.sample import Sample
from mmpack.schema.trace import Ids, TraceReader

Numbered = tuple[int, Sample]  # with its number in the trace, from 0
Step = tuple[Numbered | None, Numbered | None]
# optional fields that `Sample.from_dict` reads without a look at others
_ALONE = {name for name, column in Sample.columns().items() if not column.required} - {
    *("schema_version", "position_ids", "attention_mask", "metadata"),
    *("kept_ids", "teachers", "routed_experts"),
}


def side_by_side(rollout: TraceReader, train: TraceReader) -> Iterator[Step]:
    """Yield the next sample of each trace; None after the end of one. Raises TraceError."""
    ids = Ids(), Ids()
    for left, right in _windows(rollout.blocks(), train.blocks()):
        if left is not None and right is not None:
            yield from _both(left, right, ids)
        elif left is not None:
            yield from ((own, None) for own in _samples(left, ids[0]))
        elif right is not None:
            yield from ((None, own) for own in _samples(right, ids[1]))


def _windows(*files: Iterator[Block]) -> Iterator[list[Block | None]]:
    """The next rows of two files, as many of each; of one file once the other has ended."""
    blocks = [next(file, None) for file in files]
    while any(blocks):
        rows = min(block.rows for block in blocks if block is not None)
        yield [block and block.slice(0, rows) for block in blocks]
        for k, block in enumerate(blocks):
            if block is not None:
                rest = block.slice(rows, block.rows)
                blocks[k] = rest if rest.rows else next(files[k], None)


def _samples(block: Block, ids: Ids) -> Iterator[Numbered]:
    for number, record in block.records():
        yield _new(ids, block, number, Sample.from_dict(record, block.where(number)))


def _both(left: Block, right: Block, ids: tuple[Ids, Ids]) -> Iterator[Step]:
    """The samples of as many rows of both; a right one takes over what it has in common with the left one."""
    unlike = _unlike(left, right)
    one_limit = left.max_record_bytes == right.max_record_bytes
    shown = {n: c for n, c in right.columns.items() if n in unlike or n == "schema_version"}
    rights = replace(right, columns=shown).unparsed()
    for (number, mine), (other, theirs) in zip(left.unparsed(), rights, strict=True):
        sample = Sample.from_dict(left.parsed(number, mine), left.where(number))
        one = _new(ids[0], left, number, sample)
        changed = [n for n in unlike if not (one_limit and _same(mine.get(n), theirs.get(n)))]
        theirs = {name: value for name, value in mine.items() if name not in unlike} | theirs
        yield one, _new(ids[1], right, other, _changed(sample, changed, right, other, theirs))


def _unlike(left: Block, right: Block) -> list[str]:
    """The columns that differ in any row; all of them where the two traces' records may be of different size."""
    names = dict.fromkeys([*left.columns, *right.columns])
    if left.max_record_bytes != right.max_record_bytes:
        return list(names)
    pairs = ((name, left.columns.get(name), right.columns.get(name)) for name in names)
    return [name for name, a, b in pairs if a is None or b is None or not a.equals(b)]


def _same(a: Any, b: Any) -> bool:
    """Whether values are surely equal: in Python, 1 in a list equals 1.0, which `Sample.from_dict` refuses."""
    return not isinstance(a, dict | list) and same(a, b)


def _changed(
    sample: Sample, names: Sequence[str], block: Block, number: int, record: dict[str, Any]
) -> Sample:
    """The sample of a record that differs from `sample`, if at all, in the fields `names`. Raises TraceError."""
    where = block.where(number)
    if not _ALONE.issuperset(names):
        return Sample.from_dict(block.parsed(number, record), where)
    if not names:
        return sample
    read = block.parsed(number, record, names)
    columns = Sample.columns()
    fields: dict[str, Any] = dict.fromkeys(names)
    for name in filter(read.__contains__, names):
        fields[name] = columns[name].spec.read(read[name], f"{where}.{name}")
    return replace(sample, **fields)


def _new(ids: Ids, block: Block, number: int, sample: Sample) -> Numbered:
    """Raises: TraceError (MM007) for an id that came before."""
    ids.add(sample.sample_id, block.where(number))
    return number - 1, sample
