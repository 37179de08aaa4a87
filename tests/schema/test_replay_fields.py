"""Kept ids, teachers and routes: made, read, written in both versions, and refused where they are none."""

import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.samples import kept_of, make_sample, routes_of, samples, teacher_of

import mmpack as mp
from mmpack.errors import ArgumentError, TraceError
from mmpack.schema.ragged import Ragged
from mmpack.schema.routes import compact_routes
from mmpack.schema.sample import REPLAY
from mmpack.schema.trace import FORMATS, read_trace, write_trace

LISTS = st.lists(st.lists(st.integers(0, 2**31 - 1), unique=True, max_size=5), max_size=6)


def small(**fields):
    return make_sample([("text", [1, 2, 3]), ("response", [5, 6, 7], 0)], **fields)


def replayed(seed=0, **fields):
    sample, rng = small(**fields), np.random.default_rng(seed)
    sample.kept_ids, sample.teachers = kept_of(sample, rng), {"t": teacher_of(sample, rng)}
    sample.routed_experts = routes_of(sample, rng)
    return sample


@given(lists=LISTS, more=LISTS, data=st.data())
def test_lists_are_those_given(lists, more, data):
    made = Ragged.of(lists)
    assert [row.tolist() for row in made.lists()] == [sorted(row) for row in lists]
    assert len(made) == len(lists) and made.lengths.tolist() == [len(row) for row in lists]
    assert Ragged.cat([made, Ragged.of(more)]) == Ragged.of([*lists, *more])
    assert made[:] == made and pickle.loads(pickle.dumps(made)) == made
    start, stop = (data.draw(st.integers(-7, 7)) for _ in range(2))
    assert made[start:stop] == Ragged.of(lists[start:stop])
    if lists:
        picked = data.draw(st.lists(st.integers(0, len(lists) - 1)))
        assert made[np.array(picked, np.int64)] == Ragged.of([lists[k] for k in picked])
        mask = np.isin(np.arange(len(lists)), picked)
        assert made[mask] == Ragged.of([row for row, m in zip(lists, mask, strict=True) if m])


def test_logprobs_go_with_their_ids():
    made = Ragged.of([[7, 3], [], [5]], [[-0.5, -1.5], [], [-2.0]])
    assert made.ids.tolist() == [3, 7, 5] and made.logprobs.tolist() == [-1.5, -0.5, -2.0]
    assert made[::2].logprobs.tolist() == [-1.5, -0.5, -2.0] and made[1:].ids.tolist() == [5]
    assert Ragged.cat([made, made]).logprobs.tolist() == [-1.5, -0.5, -2.0] * 2
    assert made != Ragged(made.offsets, made.ids) and made != Ragged.of([[7, 3], [], [5]])
    assert Ragged.empty(2, scored=True) == Ragged.of([[], []], [[], []])
    whole = made.spread(np.array([1, 2, 4]), 6)
    assert [x.tolist() for x in whole.lists()] == [[], [3, 7], [], [], [5], []]
    assert whole[[1, 2, 4]] == made


ONE, TWO = np.array([0, 2]), np.array([1, 2], np.int32)


@pytest.mark.parametrize(
    "given",
    [
        ([0, 2], TWO),
        (ONE.astype(np.int32), TWO),
        (ONE, TWO[None]),
        (ONE, TWO, [-1.0, -2.0]),
        (ONE, TWO, np.array([-1.0], np.float32)),
        (ONE, TWO, np.array([-1.0, np.nan], np.float32)),
        (np.array([1, 2]), TWO),
        (np.array([0, 2, 1, 2]), TWO),
        (np.array([0, 3]), TWO),
        (ONE, -TWO),
    ],
)
def test_what_is_no_ragged(given):
    with pytest.raises(ArgumentError, match=r"^Ragged: .+\. Fix: ") as caught:
        Ragged(*given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        (3,),
        ([[1.5]],),
        ([[[1]]],),
        ([[-1]],),
        ([[1, 1]],),
        ([[1, 2]], [[-1.0]]),
        ([[1]], [[float("nan")]]),
    ],
)
def test_what_no_ragged_is_made_of(given):
    with pytest.raises(ArgumentError, match=r"^Ragged.+\. Fix: "):
        Ragged.of(*given)


def test_parts_of_two_kinds_are_not_joined():
    with pytest.raises(ArgumentError, match="only some parts have logprobs"):
        Ragged.cat([Ragged.of([[1]]), Ragged.of([[1]], [[-1.0]])])
    with pytest.raises(ArgumentError, match="an integer would select one list"):
        Ragged.of([[1]])[0]
    for which in ([5], [True], [0.5], None):
        with pytest.raises(ArgumentError, match="Fix: index it by a slice, indices or a mask"):
            Ragged.of([[3, 7], [5]])[which]


@pytest.mark.parametrize(("experts", "dtype"), [(2, "uint8"), (256, "uint8"), (257, "uint16")])
def test_the_number_of_experts_decides_the_bytes(experts, dtype):
    made = compact_routes(np.full((3, 2, 1), experts - 1), experts)
    assert made.dtype == dtype and (made == experts - 1).all()


@pytest.mark.parametrize(
    ("values", "experts"),
    [
        ([[1, 2]], 8),
        ([[[1.0]]], 8),
        ([[[8]]], 8),
        ([[[1], [1, 2]]], 8),
        (np.zeros((2, 0, 1), int), 8),
        ([[[1]]], 2**16 + 1),
    ],
)
def test_what_are_no_routes(values, experts):
    with pytest.raises(ArgumentError, match=r"^compact_routes: .+\. Fix: "):
        compact_routes(values, experts)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("version", ["1", "2"])
@settings(max_examples=8)
@given(sample=samples(sample_id="s", replay=True))
def test_either_version_is_written_and_read(tmp_path_factory, suffix, version, sample):
    path = tmp_path_factory.mktemp("t") / f"t{suffix}"
    if version == "1" and any(getattr(sample, name) is not None for name in REPLAY):
        with pytest.raises(
            TraceError, match=r"samples\[0\]\.\w+: is a field of version 2 \(MM012\)"
        ):
            write_trace(path, [sample], schema_version="1")
        assert not path.exists()
        return
    before = sample.schema_version
    write_trace(path, [sample], schema_version=version)
    assert sample.schema_version == before
    (back,) = read_trace(path)
    assert back.schema_version == version
    back.schema_version = before
    assert back == sample


@pytest.mark.parametrize("version", [2, "3"])
def test_another_version_is_refused(tmp_path, version):
    with pytest.raises(ArgumentError, match=r"^write_trace: schema_version is .+ Fix: "):
        write_trace(tmp_path / "t.jsonl", [small()], schema_version=version)


def test_what_version_1_does_not_know_is_kept_there():
    record = small().to_dict() | {"schema_version": "1"}
    unknown = {"kept_ids": {"of": "another tool"}, "routed_experts": [[[1]]]}
    sample = mp.Sample.from_dict(record | unknown | {"engine": 1, "metadata": {"a": 2}})
    assert sample.kept_ids is None and sample.routed_experts is None
    assert sample.metadata == {"a": 2, **unknown, "engine": 1}
    with pytest.raises(TraceError, match="MM009"):
        mp.Sample.from_dict(record | {"teachers": {"a": float("nan")}})


def test_a_parquet_trace_of_both_versions(tmp_path):
    new, old = replayed(sample_id="new"), small(sample_id="old", schema_version="1")
    write_trace(tmp_path / "t.parquet", [new, old, replayed(1, sample_id="newer")])
    assert list(read_trace(tmp_path / "t.parquet"))[:2] == [new, old]
    table = pq.read_table(tmp_path / "t.parquet")
    # by another tool: what version 1 has under these names is its own
    versions = pa.array(["2", "1", "1"])
    table = table.set_column(table.schema.names.index("schema_version"), "schema_version", versions)
    pq.write_table(table, tmp_path / "o.parquet")
    samples = list(read_trace(tmp_path / "o.parquet"))
    assert samples[0] == new and samples[2].kept_ids is None
    assert samples[2].metadata["kept_ids"] == [row.tolist() for row in replayed(1).kept_ids.lists()]
    assert json.loads(samples[2].metadata["routed_experts"])["shape"] == [6, 2, 2]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("kept_ids", pa.array([[1, 2]])),
        ("kept_ids", pa.array([[[1], None]])),
        ("kept_ids", pa.array([[[1, None]]])),
        ("kept_ids", pa.array(["a"])),
        ("kept_ids", pa.array([[[-1]]])),
        ("teachers", pa.array([[{"name": "t", "ids": [[1]]}]])),
        ("teachers", pa.array([[{"name": "t", "ids": [[1]], "logprobs": [None]}]])),
        ("teachers", pa.array([[{"name": "t", "ids": [[1]], "logprobs": [-1.0, -2.0]}]])),
        ("teachers", pa.array([[{"name": "t", "ids": [[1]], "logprobs": [-1.0]}] * 2])),
        ("teachers", pa.array([[None]], pa.list_(pa.struct([("name", pa.string())])))),
        ("routed_experts", pa.array([b"\x01"])),
    ],
)
def test_a_column_of_another_kind_is_one_line(tmp_path, name, column):
    write_trace(tmp_path / "t.parquet", [replayed()])
    table = pq.read_table(tmp_path / "t.parquet")
    table = table.set_column(table.schema.names.index(name), name, column)
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(TraceError, match=r"\(MM0\d\d\)\. Fix: ") as caught:
        list(read_trace(tmp_path / "t.parquet"))
    assert "\n" not in str(caught.value)


def test_a_large_column_is_refused_before_it_is_decoded(tmp_path):
    sample = small()
    sample.kept_ids = Ragged.of([[5], [6], np.arange(2**18)])
    for suffix in FORMATS:
        write_trace(tmp_path / f"t{suffix}", [sample])
        with pytest.raises(TraceError, match="MM010"):
            list(read_trace(tmp_path / f"t{suffix}", max_record_bytes=2**18))


def test_bytes_a_token(tmp_path):
    """What docs/trace.md says of 48 layers with 8 of 128 experts."""
    sample = make_sample([("text", range(1000)), ("response", range(1000), 0)])
    sample.routed_experts = routes_of(sample, np.random.default_rng(0), 48, 8, 128)
    assert sample.routed_experts.nbytes / len(sample) == 384
    assert len(sample.to_dict()["routed_experts"]["base64"]) / len(sample) == 512
    for suffix in FORMATS[1:]:
        write_trace(tmp_path / f"t{suffix}", [sample])
        assert (tmp_path / f"t{suffix}").stat().st_size / len(sample) < 410


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kept_ids", [[1]]),
        ("kept_ids", Ragged.of([[1]] * 3, [[-1.0]] * 3)),
        ("teachers", {"t": Ragged.of([[1]] * 3)}),
        ("teachers", {3: Ragged.of([[1]] * 3, [[-1.0]] * 3)}),
        ("routed_experts", np.zeros((6, 2, 2), np.int64)),
        ("routed_experts", np.zeros((6, 4), np.uint8)),
        ("routed_experts", np.zeros((5, 2, 2), np.uint8)),
    ],
)
def test_a_field_of_another_type_is_a_problem(name, value):
    problems = mp.validate(small(**{name: value}))
    assert problems and all(p.code.startswith("MM0") and p.field.startswith(name) for p in problems)
