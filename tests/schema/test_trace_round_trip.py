"""What is written is read back, field by field, in each format; equal samples give equal bytes."""

import base64
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from support.samples import full_sample, make_sample, traces

from mmpack.errors import ArgumentError, TraceError
from mmpack.schema.rules import validate
from mmpack.schema.sample import Sample
from mmpack.schema.trace import FORMATS, read_trace, write_trace


def assert_same(left: object, right: object, where: str = "sample") -> None:
    """Equality without mmpack's own `==`: types, dtypes, shapes and values, down to the leaves."""
    assert type(left) is type(right), f"{where}: {left!r} {right!r}"
    if dataclasses.is_dataclass(left):
        for f in dataclasses.fields(left):
            assert_same(getattr(left, f.name), getattr(right, f.name), f"{where}.{f.name}")
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and left.shape == right.shape, where
        assert left.tobytes() == right.tobytes(), where
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    else:
        assert left == right, where


@pytest.mark.parametrize("suffix", FORMATS)
@settings(max_examples=15)
@given(trace=traces())
def test_round_trip(tmp_path_factory, suffix, trace):
    path = tmp_path_factory.mktemp("t") / f"trace{suffix}"
    assert write_trace(path, iter(trace)) == len(trace)
    back = list(read_trace(path))
    assert_same(trace, back)
    assert trace == back and validate(trace) == []
    first = path.read_bytes()
    write_trace(path, read_trace(path))  # reads the file that it replaces
    assert path.read_bytes() == first


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_field_survives(tmp_path, suffix):
    sample = full_sample()
    unset = [f.name for f in dataclasses.fields(Sample) if getattr(sample, f.name) is None]
    assert unset == ["codec_ids"] and validate(sample) == []  # see test_codec_ids.py: never packed
    path = tmp_path / f"trace{suffix}"
    write_trace(path, [sample, full_sample("s1", seed=1)])
    back = list(read_trace(path))
    assert_same([sample, full_sample("s1", seed=1)], back)
    for array in (back[0].input_ids, back[0].position_ids, back[0].rollout_logprobs):
        assert array.flags.writeable and array.flags.c_contiguous  # the reader's own
        assert array.base is None or array.base.nbytes <= array.nbytes
    assert write_trace(path, []) == 0 and list(read_trace(path)) == []


@pytest.mark.parametrize("suffix", [".jsonl.zst", ".parquet"])
def test_many_samples_keep_their_order(tmp_path, suffix):
    path = tmp_path / f"trace{suffix}"
    rng = np.random.default_rng(0)

    def stream():
        for i in range(2500):  # more than two row groups
            ids = rng.integers(0, 1000, i % 7)
            yield make_sample([("text", [i]), ("response", ids)], sample_id=f"s{i}")

    assert write_trace(path, stream()) == 2500
    reader = read_trace(path)
    for _ in range(2):  # a reader can be asked again
        back = list(reader)
        assert [s.sample_id for s in back] == [f"s{i}" for i in range(2500)]
        assert [int(s.input_ids[0]) for s in back] == list(range(2500))
        assert [s.num_loss_tokens for s in back] == [i % 7 for i in range(2500)]


def test_lines_are_canonical_and_media_come_from_the_store(tmp_path):
    sample = full_sample()
    path = tmp_path / "t.jsonl"
    sample.media[0].pixel_values = np.ones((24, 1176), np.float32)
    write_trace(path, [sample])
    (line,) = path.read_text("ascii").splitlines()
    record = json.loads(line)
    declared = [f.name for f in dataclasses.fields(Sample)]
    assert list(record) == [name for name in declared if name in record]
    assert json.dumps(record, separators=(",", ":")) == line and "pixel_values" not in line
    key = sample.media[0].cache_key
    (back,) = read_trace(path, media={key: sample.media[0].pixel_values})
    assert back.media[0].pixel_values is sample.media[0].pixel_values
    assert back.media[1].pixel_values is None


@pytest.mark.parametrize("suffix", FORMATS)
def test_unknown_fields_survive_in_metadata(tmp_path, suffix):
    record = json.loads(json.dumps(full_sample().to_dict(numpy=True), default=lambda a: a.tolist()))
    record |= {"engine": {"name": "x"}, "latency": 2.5, "dataset": "other"}
    record["media"][0]["camera"] = "B"
    record["loss_spans"][0]["tool_calls"] = [1, {"a": None}]
    (tmp_path / "in.jsonl").write_text(json.dumps(record))
    samples = list(read_trace(tmp_path / "in.jsonl"))
    path = tmp_path / f"out{suffix}"
    write_trace(path, samples)
    (back,) = read_trace(path)
    assert back.metadata["engine"] == {"name": "x"} and back.metadata["latency"] == 2.5
    assert back.metadata["dataset"] == "geo" and back.metadata["dataset_"] == "other"
    assert back.media[0].metadata == {"camera": "A", "camera_": "B"}
    assert back.loss_spans[0].metadata == {"tool_calls": [1, {"a": None}]}
    assert_same(samples[0], back)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_cut_off(tmp_path, side):
    plain = full_sample()
    record = plain.to_dict(numpy=True)
    before, after = (5, 0) if side == "left" else (0, 5)
    record["input_ids"] = np.pad(plain.input_ids, (before, after), constant_values=151643)
    record["position_ids"] = np.pad(plain.position_ids, ((0, 0), (before, after)))
    record["attention_mask"] = np.pad(plain.attention_mask, (before, after))
    routes = np.pad(plain.routed_experts, ((before, after), (0, 0), (0, 0)))
    record["routed_experts"] = {
        "dtype": "uint8",
        "shape": list(routes.shape),
        "base64": base64.b64encode(routes.tobytes()).decode(),
    }
    (tmp_path / "in.jsonl").write_text(json.dumps(record, default=lambda a: a.tolist()))
    (sample,) = read_trace(tmp_path / "in.jsonl")
    assert sample.metadata.pop("padding") == [before, after]
    assert_same(plain, sample)


def test_null_is_absent_and_a_last_line_needs_no_newline(tmp_path):
    record = make_sample([("text", [1, 2])]).to_dict(numpy=True) | {"turn": None, "metadata": None}
    path = tmp_path / "t.jsonl"
    path.write_text("\n\n" + json.dumps(record, default=lambda a: a.tolist()))
    (sample,) = read_trace(path)
    assert sample.turn is None and sample.metadata == {}


def test_parquet_of_another_writer(tmp_path):
    """Large and fixed-size lists, other widths of integers, dictionaries of strings."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sample = full_sample()
    write_trace(tmp_path / "t.parquet", [sample])
    table = pq.read_table(tmp_path / "t.parquet")
    length = len(sample)
    others = {
        "input_ids": pa.large_list(pa.int32()),
        "position_ids": pa.list_(pa.list_(pa.int16(), length)),
        "attention_mask": pa.list_(pa.int8(), length),
        "rollout_logprobs": pa.list_(pa.float64()),
        "group_id": pa.dictionary(pa.int32(), pa.string()),
        "media": pa.large_string(),
    }
    for name, kind in others.items():
        i = table.schema.get_field_index(name)
        column = table.column(name)
        column = column.dictionary_encode() if name == "group_id" else column.cast(kind)
        table = table.set_column(i, name, column)
    table = table.append_column("engine", pa.array(["vllm"])).append_column(
        "cost_per_token", pa.array([[0.5, 2.0]])
    )
    pq.write_table(table, tmp_path / "other.parquet", use_dictionary=False)
    (back,) = read_trace(tmp_path / "other.parquet")
    assert back.metadata.pop("engine") == "vllm"
    assert back.metadata.pop("cost_per_token") == [0.5, 2.0]
    assert_same(sample, back)


# ---- writing is atomic ---------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", FORMATS)
def test_failed_write_leaves_the_old_file(tmp_path, suffix):
    path = tmp_path / f"trace{suffix}"

    def broken():
        yield full_sample()
        raise KeyError("rollout died")

    with pytest.raises(KeyError):
        write_trace(path, broken())
    assert list(tmp_path.iterdir()) == []
    write_trace(path, [full_sample()])
    before = path.read_bytes()
    with pytest.raises(KeyError):
        write_trace(path, broken())
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
from support.samples import full_sample
from mmpack.schema.trace import write_trace
def stream():
    for i in range(300):
        if i == 200:
            os.kill(os.getpid(), signal.SIGKILL)
        yield full_sample(f"new{{i}}")
write_trace({path!r}, stream())
"""


def test_killed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, [full_sample("old")])
    tests = Path(__file__).resolve().parent.parent
    code = KILLED.format(paths=[str(tests), str(tests.parent)], path=str(path))
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=120)
    assert done.returncode == -9
    assert [s.sample_id for s in read_trace(path)] == ["old"]


def test_write_refuses(tmp_path):
    path = tmp_path / "t.jsonl"
    cases = {
        r"samples\[1\].sample_id: s0 occurs more than once \(MM007\)": [
            full_sample(),
            full_sample(),
        ],
        r"samples\[0\].rollout_logprobs\[0\]: nan .*MM009": [
            make_sample([("text", [1]), ("response", [2])], rollout_logprobs=np.float32([np.nan]))
        ],
        r"samples\[0\].metadata: holds a value of type int64.*MM003": [
            make_sample([("text", [1])], metadata={"x": np.int64(3)})
        ],
        r"samples\[0\].metadata: holds an object with a key.*MM003": [
            make_sample([("text", [1])], metadata={"x": {1: 2}})
        ],
    }
    for message, trace in cases.items():
        with pytest.raises(TraceError, match=message):
            write_trace(path, trace)
    with pytest.raises(ArgumentError, match=r"samples\[0\] is a dict"):
        write_trace(path, [{}])
    assert list(tmp_path.iterdir()) == []
    for target in (tmp_path / "no" / "t.jsonl", tmp_path / "t.json", tmp_path):
        with pytest.raises(TraceError):
            write_trace(target, [full_sample()])


def test_half_a_surrogate_pair(tmp_path):
    sample = make_sample([("text", [1])], sample_id="bad \ud800")
    write_trace(tmp_path / "t.jsonl", [sample])
    (back,) = read_trace(tmp_path / "t.jsonl")
    assert back.sample_id == "bad \ud800"
    with pytest.raises(TraceError, match="surrogate"):
        write_trace(tmp_path / "t.parquet", [sample])
    assert not (tmp_path / "t.parquet").exists()
