"""Two Parquet traces, read side by side, give the report that their samples give one by one."""

import copy
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.samples import PROCESSOR, full_sample, make_sample, traces

import mmpack as mp
from mmpack import compare
from mmpack.errors import TraceError
from mmpack.families import FAMILIES
from mmpack.schema.jsonl import dump_json
from mmpack.schema.parquet import Block
from mmpack.schema.sample import Sample
from mmpack.schema.trace import read_trace, write_trace

LIMIT = 2**25


def both_ways(folder, left, right, **options):
    """The reports of two traces: read side by side, and sample by sample."""
    paths = [folder / "left.parquet", folder / "right.parquet"]
    for path, trace in zip(paths, (left, right), strict=True):
        write_trace(path, trace)
    fast = compare(*paths, **options)
    slow = compare(*(list(read_trace(path)) for path in paths), **options)
    return fast, slow


def assert_same(fast, slow):
    assert fast.to_json() == slow.to_json()
    drawn = [
        [[s.to_dict(numpy=True) for s in pair] for pair in report.pairs] for report in (fast, slow)
    ]
    np.testing.assert_equal(*drawn)


@pytest.fixture
def parsed(monkeypatch):
    """What was parsed: record and names of columns, None for all of them."""
    seen = []
    of_block = Block.parsed

    def watched(block, number, record, names=None):
        seen.append((block.path.rpartition("/")[2], number, names))
        return of_block(block, number, record, names)

    monkeypatch.setattr(Block, "parsed", watched)
    return seen


# ---- random samples, changed a little ------------------------------------------------------------


def text_sample(rng, name):
    """A sample with images and, often, any of the optional fields that do not need one another."""
    ids = [rng.randrange(1000) for _ in range(12)]
    grids = [(1, rng.choice((2, 4)), rng.choice((2, 4, 6))) for _ in range(3)]
    parts = [("text", ids[:2])]
    parts += [("image", grid, f"{name}-{i}") for i, grid in enumerate(grids[: rng.randrange(4)])]
    parts += [("text", ids[2:4]), ("response", ids[4:8], 0), ("observation", ids[8:10], 0)]
    parts += [("response", ids[10:], 1)]
    sample = make_sample(parts, sample_id=name, family=rng.choice(("qwen2_vl", "qwen2_5_vl")))
    if rng.random() < 0.5:
        sample.position_ids = np.arange(3 * len(sample)).reshape(3, -1)
        sample.attention_mask = np.ones(len(sample), np.int8)
    if rng.random() < 0.5:
        sample.rollout_logprobs = np.full(sample.num_loss_tokens, -0.5, np.float32)
        sample.sampling = {"temperature": 1.0, "logprobs": rng.choice(("raw", "processed"))}
        sample.prefix_cached_tokens = rng.randrange(3)
    if rng.random() < 0.5:
        sample.processor, sample.processor_fingerprint = dict(PROCESSOR), "sha256:" + "0" * 64
        sample.policy_versions = [mp.schema.PolicyVersion(0, len(sample), "w1")]
    if rng.random() < 0.5:
        sample.rewards, sample.finish_reason = [mp.Score("exact", 1.0)], "stop"
        sample.metadata = {"dataset": "geo", "turns": [1, 2]}
    return sample


def frames_sample(rng, name):
    """A sample with a video of one span per temporal patch, of a family that has such."""
    family = next(f for f in FAMILIES.values() if f.video_layout == "frames")
    patches, tokens = rng.choice((1, 2, 3)), 2
    sample = make_sample([("text", [1, 2])], sample_id=name, family=family.name)
    grid = (patches, family.spatial_merge_size, tokens * family.spatial_merge_size)
    medium = mp.Medium(
        media_id=name, modality="video", cache_key=name, grid_thw=grid, num_tokens=patches * tokens
    )
    frames = patches * family.temporal_patch_size
    medium.fps, medium.second_per_grid_ts = 25.0, 1.0
    medium.frame_indices = np.arange(frames)
    medium.frame_timestamps = tuple(float(i) for i in range(frames))
    medium.total_frames = frames
    ids = [1, 2]
    for frame in range(patches):
        ids += [7] + [family.video_token_id] * tokens
        sample.modality_spans.append(
            mp.schema.ModalitySpan(len(ids) - tokens, len(ids), "video", 0, frame)
        )
    sample.loss_spans = [mp.LossSpan(len(ids), len(ids) + 3)]
    sample.input_ids = np.array([*ids, 3, 4, 5])
    sample.media = [medium]
    return sample


def heard_sample(rng, name):
    """An audio, or a video with its sound."""
    audio = (rng.randrange(20, 60), 1, 1)
    medium = ("audio", audio, "a") if rng.random() < 0.7 else ("film", ((2, 2, 4), audio), "f")
    parts = [("text", [5, 6]), medium, ("text", [7]), ("response", [8, 9])]
    return make_sample(parts, name, family=rng.choice(["qwen2_5_omni", "qwen3_omni_moe"]))


def any_sample(rng, name):
    kind = rng.randrange(5)
    if kind == 4:
        return heard_sample(rng, name)
    if kind == 0:
        return full_sample(name, rng.randrange(100))
    return frames_sample(rng, name) if kind == 1 else text_sample(rng, name)


def nudged(sample, rng):
    """A sample with one value changed, such as the schema's types allow; the same one if they don't."""
    record = json.loads(dump_json(sample.to_dict(numpy=True)))
    holder = record
    while True:
        keys = [k for k in holder if k != "sample_id"] if isinstance(holder, dict) else None
        key = rng.choice(keys if keys is not None else range(len(holder)))
        value = holder[key]
        if not (isinstance(value, dict | list) and value and rng.random() < 0.85):
            break
        holder = value
    optional = [None, {}, [], "", "video", "image", "qwen2_vl", "action", "normalized_1"]
    new = {
        bool: lambda: not value,
        int: lambda: rng.choice((value + 1, value - 1, 0, 2**31 - 1, 151655, 151656, value + 2)),
        float: lambda: rng.choice((-value, 0.0, value + 1, 1e300)),
        str: lambda: rng.choice((*optional[3:], value + "x")),
        list: lambda: rng.choice((value[1:], value + value[-1:], value[::-1], [], None)),
        dict: lambda: rng.choice(({}, None, value | {"added": 1}, value | {"logprobs": "raw"})),
        type(None): lambda: 1,
    }[type(value)]()
    holder[key] = new
    try:
        return Sample.from_dict(record, "nudged")
    except TraceError:
        return sample


def cases(count, seed):
    """Pairs of traces: each sample is equal on both sides, changed on one, or changed alike on both."""
    rng = random.Random(seed)
    left, right = [], []
    for i in range(count):
        sample = any_sample(rng, f"s{i}")
        changed = nudged(sample, rng)
        if rng.random() < 0.3:
            changed = nudged(changed, rng)
        pair = rng.choice([(sample, sample), (sample, changed), (changed, sample), (changed,) * 2])
        left.append(pair[0])
        right.append(pair[1])
    return left, right


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 200), *(pytest.param(s, 500, marks=pytest.mark.slow) for s in (1, 2))]
)
def test_changed_samples(tmp_path, seed, count):
    left, right = cases(count, seed)
    fast, slow = both_ways(tmp_path, left, right, max_findings=10**6)
    assert fast.compared == count and len(fast.causes) > 5
    assert_same(fast, slow)


def test_any_order_missing_samples_and_unlike_row_groups(tmp_path):
    left, right = cases(60, 9)
    shuffled = random.Random(0).sample(right, len(right))
    for pair in ((left, shuffled), (left[3:], right), (left, right[::2]), (left, []), ([], [])):
        assert_same(*both_ways(tmp_path, *pair))
    fast, _ = both_ways(tmp_path, left, right, max_findings=10)
    for size in (1, 7):
        path = tmp_path / f"{size}.parquet"
        pq.write_table(pq.read_table(tmp_path / "right.parquet"), path, row_group_size=size)
        assert_same(compare(tmp_path / "left.parquet", path, max_findings=10), fast)


@settings(max_examples=15, deadline=None)
@given(traces(6), st.randoms(use_true_random=False))
def test_random_traces(tmp_path_factory, trace, rng):
    folder = tmp_path_factory.mktemp("random")
    other = [nudged(s, rng) if rng.random() < 0.3 else copy.deepcopy(s) for s in trace]
    rng.shuffle(other)
    for right in (trace, other):
        assert_same(*both_ways(folder, trace, right))


# ---- what is equal is parsed once ------------------------------------------------------------------


def numbered(count):
    rng = random.Random(1)
    return [text_sample(rng, f"s{i}") for i in range(count)]


def test_equal_rows_are_parsed_once(tmp_path, parsed):
    left, right = numbered(60), numbered(60)
    right[50].input_ids[0] += 1
    right[51].sampling = {"temperature": 0.5, "logprobs": "raw"}
    right[52].sampling, right[52].rewards = None, [mp.Score("exact", 2.0)]
    fast, slow = both_ways(tmp_path, left, right)
    assert_same(fast, slow)
    rights = [(number, names) for name, number, names in parsed[:-120] if name == "right.parquet"]
    changed = [[*names] for _, names in rights[1:]]
    assert rights[0] == (51, None) and {n for n, _ in rights[1:]} <= {52, 53}
    assert all(set(names) <= {"sampling", "rewards"} for names in changed) and changed


def test_a_record_that_is_too_large_for_one_side(tmp_path):
    write_trace(tmp_path / "t.parquet", [make_sample([("text", [1])], metadata={"a": "x" * 2000})])
    readers = [read_trace(tmp_path / "t.parquet", max_record_bytes=n) for n in (LIMIT, 1000)]
    for pair in (readers, readers[::-1]):
        with pytest.raises(TraceError, match="record 1: is larger than 1000 bytes"):
            compare(*pair)
    assert compare(readers[0], readers[0]).ok


def test_a_sample_twice_in_one_trace(tmp_path):
    once, twice = tmp_path / "once.parquet", tmp_path / "twice.parquet"
    write_trace(once, [make_sample([("text", [1])], "s0")])
    pq.write_table(pa.concat_tables([pq.read_table(once)] * 2), twice)
    for pair in ((once, twice), (twice, once), (twice, twice)):
        with pytest.raises(TraceError, match=r"twice.parquet: record 2.sample_id.*MM007"):
            compare(*pair)


@pytest.mark.parametrize(
    ("kind", "encoding"),
    [
        (pa.large_string(), "DELTA_LENGTH_BYTE_ARRAY"),
        (pa.string_view(), "DELTA_BYTE_ARRAY"),
        (pa.binary(), "DELTA_BYTE_ARRAY"),
    ],
)
def test_other_types_of_text_are_read_as_sample_by_sample(tmp_path, kind, encoding):
    left, right = tmp_path / "l.parquet", tmp_path / "r.parquet"
    write_trace(left, numbered(20))
    table = pq.read_table(left)
    place = table.schema.get_field_index("media")
    table = table.set_column(place, "media", table["media"].cast(kind))
    pq.write_table(table, right, use_dictionary=False, column_encoding={"media": encoding})
    for pair in ((left, right), (right, left)):
        outcomes = []
        for sides in (pair, [iter(read_trace(p)) for p in pair]):
            try:
                outcomes.append(compare(*sides).to_json())
            except TraceError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def test_a_damaged_page(tmp_path):
    left, right = tmp_path / "l.parquet", tmp_path / "r.parquet"
    write_trace(left, numbered(20))
    data = bytearray(left.read_bytes())
    chunk = pq.read_metadata(left).row_group(0).column(0)
    assert chunk.path_in_schema == "sample_id"
    data[chunk.dictionary_page_offset + chunk.total_compressed_size - 1] ^= 1
    right.write_bytes(data)
    for pair in ((left, right), (right, left)):
        with pytest.raises(TraceError, match=r"r\.parquet.*\(MM001\)"):
            compare(*pair)


# ---- files that are broken -------------------------------------------------------------------------


def altered(folder, name, column):
    path = folder / "altered.parquet"
    write_trace(path, [make_sample([("text", [1, 2])], f"s{i}") for i in range(len(column))])
    table = pq.read_table(path)
    table = table.drop_columns([name]) if name in table.column_names else table
    pq.write_table(table.append_column(name, column), path)
    return path


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("input_ids", pa.array([[1], [1, None]])),
        ("input_ids", pa.array([[1.0], [2.0]])),
        ("input_ids", pa.array(["1", "2"])),
        ("input_ids", pa.array([[1], None])),
        ("position_ids", pa.array([None, [[1, 1], [1], [1, 1]]])),
        ("position_ids", pa.array([None, [[1, 1], None, [1, 1]]])),
        ("attention_mask", pa.array([[1, 1], [1]])),
        ("rollout_logprobs", pa.array([[], [float("nan")]])),
        ("media", pa.array(["[]", "["])),
        ("media", pa.array(["[]", "[" * 5000])),
        ("loss_spans", pa.array(["[]", '[{"start":1,"stop":1,"start":1}]'])),
        ("loss_spans", pa.array(["[]", '[{"start":1,"stop":1e400}]'])),
        ("metadata", pa.array([None, '{"a": NaN}'])),
        ("sample_id", pa.array(["a", "a"])),
        ("schema_version", pa.array(["1", "3"])),
        ("screen_size", pa.array([[1, 2], [1]])),
        ("turn", pa.array([1.5, 2.0])),
        ("when", pa.array([0, 1], pa.timestamp("s"))),
        ("group_id", pa.array([b"a", b"\xff"]).cast(pa.string(), safe=False)),
    ],
)
def test_the_error_is_that_of_reading(tmp_path, name, values):
    path = altered(tmp_path, name, values)
    with pytest.raises(TraceError) as read:
        list(read_trace(path))
    for pair in ((path, path), (altered_none(tmp_path), path)):
        with pytest.raises(TraceError) as compared:
            compare(*pair)
        assert str(compared.value) == str(read.value)


def test_whole_numbers_written_as_floats_and_columns_of_nulls(tmp_path):
    sample = make_sample([("text", [1, 2])], "s0")
    sample.position_ids = np.ones((3, 2), np.int64)
    fine, path = tmp_path / "fine.parquet", tmp_path / "odd.parquet"
    write_trace(fine, [sample])
    table = pq.read_table(fine)
    at, values = table.column_names.index("position_ids"), table["position_ids"].to_pylist()
    whole = pa.list_(pa.list_(pa.int64()))
    for kind, error in ((whole, None), (pa.list_(pa.list_(pa.float64())), "position_ids.*MM003")):
        pq.write_table(table.set_column(at, "position_ids", pa.array(values, kind)), path)
        for pair in ((fine, path), (path, fine), (path, path)):
            if error is None:
                assert compare(*pair).ok
                continue
            with pytest.raises(TraceError, match=f"odd.parquet: record 1.{error}"):
                compare(*pair)
    path = altered(tmp_path, "input_ids", pa.array([None, None], pa.list_(pa.int64())))
    for pair in ((altered_none(tmp_path), path), (path, altered_none(tmp_path)), (path, path)):
        with pytest.raises(TraceError, match=r"record 1.input_ids: is missing .MM004"):
            compare(*pair)


def test_row_groups_of_no_rows(tmp_path):
    fine, path = altered_none(tmp_path), tmp_path / "empty.parquet"
    table = pq.read_table(fine)
    pq.write_table(table.slice(0, 0), path)
    assert pq.read_metadata(path).num_row_groups == 1
    assert list(read_trace(path)) == []
    report = compare(path, fine)
    assert report.compared == 0 and report.missing == {"rollout": 2, "train": 0}
    with pq.ParquetWriter(path, table.schema) as writer:
        for rows in (table.slice(0, 0), table.slice(0, 1), table.slice(0, 0), table.slice(1, 1)):
            writer.write_table(rows)
    assert pq.read_metadata(path).num_row_groups == 4
    assert compare(path, fine).ok and compare(fine, path).compared == 2


def test_footers_that_lie_of_their_rows(tmp_path):
    """Of a group that has more rows than it says, or fewer."""
    path = tmp_path / "t.parquet"
    for count, true, lie in ((1, b"\x16\x02\x26", b"\x16\x00\x26"), (4, b"\x16\x08", b"\x16\x0c")):
        write_trace(path, numbered(count))
        data = path.read_bytes()
        start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        lying = data[start:].replace(true, lie)  # i64, zigzag
        assert lying != data[start:]
        path.write_bytes(data[:start] + lying)
        for read in (lambda: compare(path, path), lambda: list(read_trace(path))):
            with pytest.raises(TraceError, match="MM001"):
                read()


def altered_none(folder):
    write_trace(folder / "fine.parquet", [make_sample([("text", [1, 2])], f"s{i}") for i in (0, 1)])
    return folder / "fine.parquet"


def test_large_records_and_extra_columns(tmp_path):
    path = altered(tmp_path, "note", pa.array(["x", "y" * 10**5]))
    assert compare(path, path).ok
    reader = read_trace(path, max_record_bytes=5 * 10**4)
    with pytest.raises(TraceError, match=r"record 2: .*MM010"):
        compare(reader, reader)
