"""Columns with the same bytes in two traces are read once, and nothing else is."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.samples import make_sample

from mmpack.errors import TraceError
from mmpack.parity.compare import compare
from mmpack.schema import parquet
from mmpack.schema.parquet_twins import Twins
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
    with Twins(right, left) as twins:
        return [twins.same(group) for group in range(groups)]


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
    wanted = [sample.write() for sample in read_trace(right)]
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
