"""Small files that would decode to much are refused or stream in little memory; page walks are right."""

import io
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from support.samples import full_sample, make_sample

from mmpack.errors import ArgumentError, TraceError
from mmpack.schema import parquet_pages
from mmpack.schema.parquet_bounds import row_lengths
from mmpack.schema.parquet_pages import read_row_groups
from mmpack.schema.plain_json import json_fault
from mmpack.schema.rules import validate
from mmpack.schema.trace import read_trace, write_trace

TESTS = Path(__file__).resolve().parents[1]


def refuse(path, code, **options) -> str:
    with pytest.raises(TraceError, match=rf"\({code}\)") as caught:
        list(read_trace(path, **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("filler", [b"\n", b"[" * 100])
def test_zst_bomb(tmp_path, filler):
    path = tmp_path / "t.jsonl.zst"
    compressor = zstandard.ZstdCompressor()
    block = filler * (2**20 // len(filler))
    with path.open("wb") as file, compressor.stream_writer(file) as out:
        for _ in range(512):
            out.write(block)
    assert path.stat().st_size < 2**20
    refuse(path, "MM010")
    count, peak = peak_of_reading(path)
    assert count == 0 and peak < 250


def test_zst_window_of_a_gigabyte(tmp_path):
    path = tmp_path / "t.jsonl.zst"
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=30)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    with path.open("wb") as file, compressor.stream_writer(file) as out:
        out.write(b"{}\n")
    assert "memory" in refuse(path, "MM001")


@pytest.mark.parametrize("at", [3, 100, -1])
def test_cut_zst(tmp_path, at):
    path = tmp_path / "t.jsonl.zst"
    write_trace(path, [full_sample(f"s{i}") for i in range(200)])
    path.write_bytes(path.read_bytes()[:at])
    refuse(path, "MM002")
    path.write_bytes(b"")
    refuse(path, "MM002")


def test_parquet_that_is_none(tmp_path):
    path = tmp_path / "t.parquet"
    path.write_bytes(b"")
    refuse(path, "MM001")
    path.write_bytes(b"PAR1" + b"\0" * 50 + b"\xff\xff\xff\x7fPAR1")
    refuse(path, "MM001")
    pq.write_table(pa.table({"problem": ["x"], "answer": ["y"]}), path)
    assert "no column of a trace" in refuse(path, "MM001")
    write_trace(path, [full_sample()])
    pq.write_table(pq.read_table(path).drop_columns(["media"]), path)
    refuse(path, "MM004")
    write_trace(path, [full_sample()])
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    refuse(path, "MM001")
    flipped, column = (
        bytearray(whole),
        pq.ParquetFile(io.BytesIO(whole)).metadata.row_group(0).column(3),
    )
    flipped[column.data_page_offset + column.total_compressed_size // 2] ^= 1  # of input_ids
    path.write_bytes(flipped)
    refuse(path, "MM001")


def altered(tmp_path, name: str, column: pa.Array) -> str:
    path = tmp_path / "t.parquet"
    write_trace(path, [make_sample([("text", [1, 2])], f"s{i}") for i in range(len(column))])
    table = pq.read_table(path)
    table = table.drop_columns([name]) if name in table.column_names else table
    pq.write_table(table.append_column(name, column), path)
    return path


def test_parquet_values(tmp_path):
    for name, column, code, place in [
        ("input_ids", pa.array([[1], [1, None]]), "MM003", "record 2.input_ids"),
        ("input_ids", pa.array([[1], [-1]]), "MM003", "record 2.input_ids"),
        ("input_ids", pa.array([[1.0], [2.0]]), "MM003", "record 1.input_ids"),
        ("input_ids", pa.array(["1", "2"]), "MM003", "input_ids"),
        ("input_ids", pa.array([[1], None]), "MM004", "record 2.input_ids"),
        (
            "position_ids",
            pa.array([None, [[1, 1], None, [1, 1]]]),
            "MM003",
            "record 2.position_ids",
        ),
        ("position_ids", pa.array([None, [[1, 1], [1], [1, 1]]]), "MM008", "record 2.position_ids"),
        ("position_ids", pa.array([None, [[1], [1], [None]]]), "MM003", "record 2.position_ids"),
        (
            "rollout_logprobs",
            pa.array([[], [float("nan")]]),
            "MM009",
            "record 2.rollout_logprobs[0]",
        ),
        ("media", pa.array(["[]", "["]), "MM003", "record 2.media"),
        ("metadata", pa.array([None, '{"a": NaN}']), "MM009", "record 2.metadata"),
        ("sample_id", pa.array(["a", "a"]), "MM007", "record 2.sample_id"),
        ("when", pa.array([0, 1], pa.timestamp("s")), "MM003", "record 1.when"),
        ("raw", pa.array([b"\x80\x04", b""]), "MM003", "record 1.raw"),
    ]:
        assert f": {place}" in refuse(altered(tmp_path, name, column), code), name


def test_parquet_bomb_of_one_long_list(tmp_path):
    values = pa.array(np.zeros(2**22, np.int64))
    offsets = pa.array([0, 0, 2**22], pa.int32())
    path = altered(tmp_path, "input_ids", pa.ListArray.from_arrays(offsets, values))
    assert path.stat().st_size < 2**15
    assert "row group 0: decodes to" in refuse(path, "MM010", max_record_bytes=2**20)
    assert "record 2" in refuse(path, "MM010", max_record_bytes=2**24)
    assert len(list(read_trace(path, max_record_bytes=2**26))[1]) == 2**22


STREAMED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30,) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
from support.trace_fuzz import peak_mib
from mmpack.errors import ArgumentError, TraceError
from mmpack.schema.rules import validate
from mmpack.schema.trace import read_trace
import pyarrow.parquet, zstandard
before, count = peak_mib(), 0
try:
    for _ in read_trace(sys.argv[1]):
        count += 1
except TraceError as error:
    print(error, file=sys.stderr)
print(count, peak_mib() - before)
"""


def peak_of_reading(path) -> tuple[int, float]:
    """How many samples were read, and by how many MiB the process grew."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    done = subprocess.run(
        [sys.executable, "-c", STREAMED, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    )
    count, peak = done.stdout.split()
    return int(count), float(peak)


@pytest.mark.slow
def test_parquet_bomb_of_one_long_string(tmp_path):
    column = pa.DictionaryArray.from_arrays(np.zeros(1000, np.int32), ["x" * 2**20])
    path = altered(tmp_path, "group_id", column)
    delta = {"store_schema": False, "use_dictionary": False, "data_page_size": 2**30}
    delta |= {"column_encoding": {"group_id": "DELTA_BYTE_ARRAY"}}
    pq.write_table(pq.read_table(path), path, **delta)
    assert path.stat().st_size < 2**20  # decodes to a gigabyte
    count, peak = peak_of_reading(path)
    assert count == 1000 and peak < 200


def test_parquet_bomb_of_one_text_that_all_rows_share(tmp_path):
    text = json.dumps({"a": "x" * 20_000_000})
    column = pa.DictionaryArray.from_arrays(np.zeros(10_000, np.int32), [text])
    path = altered(tmp_path, "metadata", column)
    assert path.stat().st_size < 2**21
    count, peak = peak_of_reading(path)
    assert count == 0 and peak < 400
    assert "row group 0: decodes to more than" in refuse(path, "MM010")


def test_parquet_bomb_of_a_row_of_many_ids(tmp_path):
    path = tmp_path / "t.parquet"
    write_trace(path, [make_sample([("text", [1])], f"s{i}") for i in range(1001)])
    ids = pa.array(np.broadcast_to(np.int64(1), 1000 + 10**7))
    column = pa.ListArray.from_arrays(pa.array([*range(1001), 1000 + 10**7], pa.int32()), ids)
    table = pq.read_table(path).drop_columns(["input_ids"])
    pq.write_table(table.append_column("input_ids", column), path)
    assert path.stat().st_size < 2**20
    count, peak = peak_of_reading(path)
    assert count == 0 and peak < 100
    assert "record 1001: is larger" in refuse(path, "MM010")


def test_columns_that_share_pages_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    write_trace(path, [full_sample()])
    plain = parquet_pages.read_footer

    def repeated(file, where):
        size, footer = plain(file, where)
        return size, footer | {4: footer[4] * 1000}

    monkeypatch.setattr(parquet_pages, "read_footer", repeated)
    assert "share pages" in refuse(path, "MM001")


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".parquet"])
def test_a_file_may_decode_to_so_much_in_all(tmp_path, suffix):
    """1,000 records of 50 KB, each small enough, out of some kilobytes."""
    path = tmp_path / f"t{suffix}"
    sample = make_sample([("text", [1, 2])])
    sample.metadata = {"a": "x" * 50_000}

    def stream():
        for i in range(1000):
            sample.sample_id = f"s{i}"
            yield sample

    write_trace(path, stream())
    assert path.stat().st_size < 40_000
    assert len(list(read_trace(path))) == 1000
    assert "decodes to more than" in refuse(path, "MM010", max_record_bytes=2**16)


@pytest.mark.few(1)
@pytest.mark.parametrize(("suffix", "item"), [(".jsonl", "[]"), (".parquet", '{"a":0}')])
def test_a_record_of_very_many_items_is_not_parsed(tmp_path, suffix, item, monkeypatch):
    """Some kilobytes, and seconds of Python's JSON in each record."""
    path = tmp_path / f"t{suffix}"
    record = make_sample([("text", [1, 2])]).to_dict()
    many = f'{{"a":[{",".join([item] * 2**20)}]}}'
    if suffix == ".parquet":
        write_trace(path, [make_sample([("text", [1, 2])])])
        table = pq.read_table(path)
        at = table.schema.get_field_index("metadata")
        pq.write_table(table.set_column(at, "metadata", pa.array([many])), path, compression="zstd")
    else:
        path.write_text(json.dumps(record)[:-1] + f', "metadata": {many}}}')
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text, **kw: loads(text[: 2**20], **kw))
    assert "objects, lists and keys" in refuse(path, "MM010")
    assert [p.code for p in validate(read_trace(path))] == ["MM010"]
    monkeypatch.undo()
    assert len(list(read_trace(path, max_record_bytes=2**28))) == 1


def test_many_small_values_in_a_record_take_little_beside_themselves():
    value = {"a": [[]] * 10**5}
    for _ in range(20):
        value = {"a": value}
    tracemalloc.start()
    assert json_fault(value) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**16


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("suffix", "number", "bound"),
    [(".jsonl", 400, 30), (".jsonl.zst", 400, 30), (".parquet", 1500, 120)],
)
def test_memory_of_many_samples(tmp_path, suffix, number, bound):
    path = tmp_path / f"trace{suffix}"
    rng = np.random.default_rng(0)
    sample = make_sample([("text", rng.integers(0, 1000, 3000)), ("response", [1] * 1000)])
    sample.position_ids = np.zeros((3, 4000), np.int64)

    def stream():
        for i in range(number):  # 51 and 192 MB of arrays
            sample.sample_id = f"s{i}"
            yield sample

    write_trace(path, stream())
    count, peak = peak_of_reading(path)
    assert count == number and peak < bound


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "brotli", "lz4"])
@pytest.mark.parametrize(("version", "dictionary"), [("1.0", True), ("2.0", False)])
def test_page_walk_and_row_lengths_are_pyarrows(tmp_path, compression, version, dictionary):
    rng, path = np.random.default_rng(0), tmp_path / "t.parquet"
    lengths = rng.choice([0, 1, 3, 8, 9, 64, 500], 300)
    lists = [None if n == 1 and i % 2 else [int(n)] * n for i, n in enumerate(lengths)]
    nested = [None if row is None else [row, [], row[:2]] for row in lists]
    deep = pa.array(nested, pa.list_(pa.list_(pa.int64())))
    texts = [["a", None]] * 299 + [None]
    options = {"compression": compression, "data_page_version": version, "row_group_size": 120}
    options |= {"use_dictionary": dictionary, "write_page_checksum": dictionary}
    table = pa.table({"flat": lists, "deep": deep, "tags": texts, "id": list(map(str, range(300)))})
    pq.write_table(table, path, data_page_size=500, write_batch_size=10, **options)
    theirs = pq.ParquetFile(path)
    with path.open("rb") as file:
        ours = read_row_groups(file, "t")
        assert [rows for rows, _ in ours] == [120, 120, 60]
        for i, (rows, chunks) in enumerate(ours):
            for j, chunk in enumerate(chunks):
                column = theirs.metadata.row_group(i).column(j)
                assert chunk.values == column.num_values
                assert chunk.is_nested == ("." in column.path_in_schema)
                assert chunk.is_text == (column.physical_type == "BYTE_ARRAY")
                assert (chunk.repeated_bytes > 0) == column.has_dictionary_page
                assert (
                    0 < chunk.page_bytes < column.total_uncompressed_size
                )  # theirs counts headers
            part = slice(120 * i, 120 * i + rows)
            wanted = [
                max(len(row or ()), 1) for row in lists[part]
            ]  # an empty list has one entry, too
            inner = [sum(max(len(r), 1) for r in row or ([],)) for row in nested[part]]
            for chunk, entries in zip(chunks, (wanted, inner), strict=False):
                depth = theirs.schema.column(chunks.index(chunk)).max_repetition_level
                assert row_lengths(file, chunk, rows, depth, "t").tolist() == entries


def test_a_lying_page_is_refused(tmp_path):
    path = tmp_path / "t.parquet"
    write_trace(path, [full_sample()])
    data = bytearray(path.read_bytes())
    count = len(full_sample().input_ids)
    column = pq.ParquetFile(path).metadata.row_group(0).column(3)
    at = data.index(bytes([0x15, 2 * count]), column.data_page_offset)  # field 1 of the header
    data[at + 1] += 2
    path.write_bytes(data)
    assert f"has {count + 1} values, its footer says {count}" in refuse(path, "MM001")


@pytest.mark.parametrize("path", [3, b"t.jsonl", "a\0.jsonl"])
def test_what_is_no_path(path):
    with pytest.raises(ArgumentError, match=r"read_trace: .* is not a path. Fix: "):
        read_trace(path)
    with pytest.raises(ArgumentError, match=r"write_trace: .* is not a path. Fix: "):
        write_trace(path, [])


@pytest.mark.parametrize("samples", [3, full_sample()], ids=["3", "one"])
def test_what_are_no_samples(tmp_path, samples):
    with pytest.raises(ArgumentError, match=r"samples is .*, expected Samples\. Fix: pass"):
        write_trace(tmp_path / "t.jsonl", samples)
    assert not list(tmp_path.iterdir())


def test_folders_that_may_not_be_read_and_files_that_are_gone(tmp_path, monkeypatch):
    for wrong in (tmp_path, tmp_path / "trace.json"):
        with pytest.raises(TraceError, match=r"\(MM001\)"):
            read_trace(wrong)
    path = tmp_path / "t.jsonl"
    write_trace(path, [full_sample()])
    reader = read_trace(path)
    path.unlink()
    with pytest.raises(TraceError, match=r"can't be read: No such file.*\(MM001\)"):
        list(reader)

    def denied(path, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", denied)  # whoever is root may read all
    monkeypatch.setattr(os.path, "isfile", denied)  # which newer versions of Python ask
    with pytest.raises(TraceError, match=r"can't be read: this user lacks the right \(MM001\)"):
        read_trace(path)
