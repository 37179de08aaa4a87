"""Columns with the same bytes in two traces are read once, and nothing else is."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.samples import make_sample

from mmpack.errors import TraceError
from mmpack.parity.compare import compare
from mmpack.schema import parquet
from mmpack.schema.parquet_same import same_columns
from mmpack.schema.sample import Sample
from mmpack.schema.trace import read_trace, write_trace


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(parquet, "GROUP_ROWS", 8)


def trace(count=20, logprobs=False):
    out = []
    for i in range(count):
        sample = make_sample([("text", [1, 2]), ("response", [i, 4], 0)], f"s{i}")
        if logprobs:
            sample.rollout_logprobs = np.full(2, -0.5, np.float32)
        out.append(sample)
    return out


def written(folder, name, samples):
    write_trace(folder / name, samples)
    return folder / name


def same(left, right, groups):
    schema = pq.read_metadata(right).schema
    leaves = [schema.column(i).path for i in range(len(schema))]
    with same_columns(right, left, leaves) as (columns, _):
        return [columns(group) for group in range(groups)]


def test_equal_columns_whatever_else_a_side_records(tmp_path):
    left = written(tmp_path, "l.parquet", trace(logprobs=True))
    right = written(tmp_path, "r.parquet", trace())
    every = frozenset(Sample.columns())
    assert same(left, right, 4) == [every - {"rollout_logprobs"}] * 3 + [frozenset()]
    assert same(left, left, 3) == [every] * 3


def test_only_the_group_that_differs_is_read(tmp_path):
    samples = trace()
    left = written(tmp_path, "l.parquet", samples)
    samples[10].input_ids = samples[10].input_ids + 1
    right = written(tmp_path, "r.parquet", samples)
    assert ["input_ids" in names for names in same(left, right, 3)] == [True, False, True]
    report = compare(left, right)
    assert report.compared == 20 and {f.sample_id for f in report.findings} == {"s10"}


def test_groups_of_other_rows_share_nothing_from_there_on(tmp_path, monkeypatch):
    left = written(tmp_path, "l.parquet", trace())
    shorter = written(tmp_path, "s.parquet", trace(12))
    assert [bool(names) for names in same(left, shorter, 3)] == [True, False, False]
    report = compare(left, shorter)
    assert report.compared == 12 and report.missing == {"rollout": 0, "train": 8}
    monkeypatch.setattr(parquet, "GROUP_ROWS", 5)
    assert not any(same(left, written(tmp_path, "r.parquet", trace()), 4))


def test_blocks_are_filled_from_the_other_file(tmp_path):
    samples = trace()
    left = written(tmp_path, "l.parquet", samples)
    samples[10].input_ids = samples[10].input_ids + 1
    right = written(tmp_path, "r.parquet", samples)
    lefts = read_trace(left).blocks()
    rights = [*read_trace(right).blocks(read_trace(left))]
    assert ["input_ids" in block.columns for block in rights] == [False, True, False]
    filled = [b.filled(a) for a, b in zip(lefts, rights, strict=True)]
    records = [record for block in filled for _, record in block.records()]
    wanted = [sample.to_dict(numpy=True) for sample in read_trace(right)]
    assert len(records) == len(wanted)
    for record, sample in zip(records, wanted, strict=True):
        np.testing.assert_equal(record["input_ids"], sample["input_ids"])
        assert record["sample_id"] == sample["sample_id"]


def test_a_damaged_page_is_not_equal_and_not_read(tmp_path):
    left = written(tmp_path, "l.parquet", trace())
    data = bytearray(left.read_bytes())
    chunk = pq.read_metadata(left).row_group(1).column(0)
    assert chunk.path_in_schema == "sample_id"
    data[chunk.dictionary_page_offset + chunk.total_compressed_size - 1] ^= 1
    right = tmp_path / "r.parquet"
    right.write_bytes(data)
    assert "sample_id" not in same(left, right, 3)[1]
    with pytest.raises(TraceError, match=r"r\.parquet.*\(MM001\)"):
        compare(left, right)
    with pytest.raises(TraceError, match=r"r\.parquet.*\(MM001\)"):
        compare(right, left)


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.binary()])
@pytest.mark.parametrize("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"])
def test_other_types_of_text_are_read_as_sample_by_sample(tmp_path, kind, encoding):
    left = written(tmp_path, "l.parquet", trace())
    table = pq.read_table(left)
    place = table.schema.get_field_index("media")
    table = table.set_column(place, "media", table["media"].cast(kind))
    right = tmp_path / "r.parquet"
    pq.write_table(table, right, use_dictionary=False, column_encoding={"media": encoding})
    for pair in ((left, right), (right, left)):
        outcomes = []
        for sides in (pair, [read_trace(p) for p in pair]):
            try:
                outcomes.append(
                    compare(*map(iter, sides) if sides is not pair else sides).to_json()
                )
            except TraceError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def test_columns_of_another_meaning_are_not_shared(tmp_path):
    """The same pages, signed on one side and unsigned on the other."""
    paths = []
    for kind in (pa.int64(), pa.uint64()):
        table = pq.read_table(written(tmp_path, "t.parquet", trace()))
        ids = table["input_ids"].cast(pa.list_(kind))
        place = table.schema.get_field_index("input_ids")
        paths.append(tmp_path / f"{kind}.parquet")
        pq.write_table(table.set_column(place, "input_ids", ids), paths[-1])
    assert same(*paths, 1) == [frozenset()]
    assert same(paths[0], paths[0], 1) == [frozenset(Sample.columns())]


def test_a_file_that_is_replaced_meanwhile(tmp_path):
    left = written(tmp_path, "l.parquet", trace())
    right = written(tmp_path, "r.parquet", trace())
    block = next(read_trace(left).blocks())
    later = trace()
    later[0].input_ids = later[0].input_ids + 1
    write_trace(left, later)
    other = next(read_trace(right).blocks(read_trace(left)))
    with pytest.raises(TraceError, match=r"l\.parquet.*was replaced.*\(MM001\)"):
        other.filled(block)


def test_a_missing_file_is_named(tmp_path):
    right = written(tmp_path, "r.parquet", trace())
    gone = read_trace(written(tmp_path, "l.parquet", trace()))
    gone.path.unlink()
    with pytest.raises(TraceError, match=r"l\.parquet: can't be read"):
        next(read_trace(right).blocks(gone))


def test_rows_that_the_footer_makes_up(tmp_path):
    """A group whose footer counts more rows than its pages hold."""
    path = written(tmp_path, "t.parquet", trace(4))
    data = path.read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - size : -8]
    lying = footer.replace(b"\x16\x08", b"\x16\x0c")  # i64 4 -> 6, zigzag
    assert lying != footer
    path.write_bytes(data[: -8 - size] + lying + data[-8:])
    with pytest.raises(TraceError, match="MM001"):
        compare(path, path)
    with pytest.raises(TraceError, match="MM001"):
        list(read_trace(path))
