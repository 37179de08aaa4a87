"""`mmpack convert`: versions and kinds of traces, whole or not at all."""

import json

import pyarrow.parquet as pq
import pytest
from support.process import call_mmpack
from support.samples import full_sample, make_sample

import mmpack as mp

KINDS = (".jsonl", ".jsonl.zst", ".parquet")
PARTS = [("text", [1]), ("response", [2, 3])]


@pytest.fixture
def old(tmp_path):
    """A trace of version 1, as its writer left it: a field that version 1 does not know is another tool's."""
    record = make_sample(PARTS, sample_id="a").to_dict() | {"schema_version": "1"}
    record["kept_ids"] = {"of": "another tool"}
    path = tmp_path / "old.jsonl"
    path.write_text(json.dumps(record) + "\n")
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_version_1_becomes_version_2(tmp_path, old, kind):
    new = tmp_path / f"new{kind}"
    document = json.loads(call_mmpack("convert", old, new, "--json").stdout)
    versions = {"from": {"1": 1}, "schema_version": "2"}
    assert document == versions | {"samples": 1, "file": str(new)}
    (before,), (after,) = mp.read_trace(old), mp.read_trace(new)
    assert (before.schema_version, after.schema_version) == ("1", "2")
    assert after.kept_ids is None and after.metadata["kept_ids"] == {"of": "another tool"}
    after.schema_version = "1"
    assert after == before


def test_back_to_version_1_where_nothing_is_lost(tmp_path):
    plain, full, to = tmp_path / "a.parquet", tmp_path / "b.jsonl", tmp_path / "c.parquet"
    mp.write_trace(plain, [make_sample(PARTS)])
    mp.write_trace(full, [full_sample()])
    assert call_mmpack("convert", plain, to, "--schema-version", "1").returncode == 0
    assert pq.read_table(to)["schema_version"].to_pylist() == ["1"]
    before = to.read_bytes()
    refused = call_mmpack("convert", full, to, "--schema-version", "1")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "MM012" in refused.stderr and to.read_bytes() == before
