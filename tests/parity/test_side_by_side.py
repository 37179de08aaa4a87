"""Two Parquet traces, read side by side, give the report that their samples give one by one."""

import copy
import json
import random
from itertools import product

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
        sample.policy_versions = [mp.PolicyVersion(0, len(sample), "w1")]
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
            mp.ModalitySpan(len(ids) - tokens, len(ids), "video", 0, frame)
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


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_thousands_of_changed_samples(tmp_path, seed):
    left, right = cases(500, seed)
    fast, slow = both_ways(tmp_path, left, right, max_findings=10**6)
    assert fast.compared == 500 and len(fast.causes) > 5
    assert_same(fast, slow)
    assert_same(*both_ways(tmp_path, left, right, max_findings=10))


@pytest.mark.slow
def test_any_order_and_missing_samples(tmp_path):
    rng = random.Random(0)
    left, right = cases(250, 9)
    shuffled = rng.sample(right, len(right))
    assert_same(*both_ways(tmp_path, left, shuffled))
    assert_same(*both_ways(tmp_path, left, right[::-1]))
    assert_same(*both_ways(tmp_path, left[3:], right))
    assert_same(*both_ways(tmp_path, left, [s for s in right if rng.random() < 0.9]))
    assert_same(*both_ways(tmp_path, left[:100], right[50:]))
    assert_same(*both_ways(tmp_path, left, []))
    assert_same(*both_ways(tmp_path, [], []))


@pytest.mark.slow
def test_unlike_row_groups(tmp_path):
    left, right = cases(200, 4)
    fast, _ = both_ways(tmp_path, left, right)
    for size in (1, 7, 64):
        path = tmp_path / f"{size}.parquet"
        pq.write_table(pq.read_table(tmp_path / "right.parquet"), path, row_group_size=size)
        assert_same(compare(tmp_path / "left.parquet", path), fast)


@settings(max_examples=25, deadline=None)
@given(traces(6), st.randoms(use_true_random=False))
def test_random_traces(tmp_path_factory, trace, rng):
    folder = tmp_path_factory.mktemp("random")
    other = [nudged(s, rng) if rng.random() < 0.3 else copy.deepcopy(s) for s in trace]
    rng.shuffle(other)
    for right in (trace, other):
        assert_same(*both_ways(folder, trace, right))


def test_what_lacks_or_differs_in_settings_and_turns(tmp_path):
    sampling = [None, {"logprobs": "raw", "top_p": 0.5}, {"logprobs": "processed"}]
    sampling += [{"logprobs": "processed", "presence_penalty": v} for v in (0.0, 1.0)]
    kinds = list(product(sampling, (False, True)))
    left, right = [], []
    for i, ((mine, has), (theirs, have)) in enumerate(product(kinds, kinds)):
        for trace, what, scores in ((left, mine, has), (right, theirs, have)):
            sample = make_sample([("text", [1, 2]), ("response", [3, 4], 0)], sample_id=f"s{i}")
            sample.sampling = what
            sample.rollout_logprobs = np.full(2, -0.5, np.float32) if scores else None
            trace.append(sample)
    left[0].loss_spans = [mp.LossSpan(2, 3, turn=0), mp.LossSpan(3, 4, turn=1)]
    for sample, mark in ((left[1], "0"), (right[1], "1")):
        sample.processor = dict(PROCESSOR)
        sample.processor_fingerprint = "sha256:" + mark * 64
    fast, slow = both_ways(tmp_path, left, right)
    assert {f.field for f in fast.findings} == {"loss_spans", "processor_fingerprint", "sampling"}
    assert {"sampling", "sampling.presence_penalty"} <= fast.not_compared.keys()
    assert fast.not_compared["sampling"].count(";") == 3
    assert_same(fast, slow)


def test_a_video_of_a_family_without_videos(tmp_path):
    sample = make_sample(
        [("text", [1, 2, 9, 9, 9, 9, 5]), ("response", [3, 4], 0)], "s", family="internvl"
    )
    sample.media = [mp.Medium("m", "video", "k", (1, 4, 4), 4, content_hash="c", size=(56, 56))]
    sample.modality_spans = [mp.ModalitySpan(2, 6, "video", 0)]
    fast, slow = both_ways(tmp_path, [sample], [sample])
    assert not fast.ok
    assert_same(fast, slow)


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


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.binary()])
@pytest.mark.parametrize("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"])
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


def test_a_missing_file_is_named(tmp_path):
    for name in ("l.parquet", "r.parquet"):
        write_trace(tmp_path / name, numbered(2))
    readers = [read_trace(tmp_path / name) for name in ("l.parquet", "r.parquet")]
    readers[0].path.unlink()
    for pair in (readers, readers[::-1]):
        with pytest.raises(TraceError, match=r"l\.parquet: can't be read"):
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
        ("input_ids", pa.array([[1], [-1]])),
        ("input_ids", pa.array([[1.0], [2.0]])),
        ("input_ids", pa.array(["1", "2"])),
        ("input_ids", pa.array([[1], None])),
        ("input_ids", pa.array([[1], [2**60]])),
        ("position_ids", pa.array([None, [[1, 1], [1], [1, 1]]])),
        ("position_ids", pa.array([None, [[1, 1], [1, 1]]])),
        ("position_ids", pa.array([None, [[1, 1], None, [1, 1]]])),
        ("attention_mask", pa.array([[1, 1], [1, 2]])),
        ("attention_mask", pa.array([[1, 1], [1]])),
        ("rollout_logprobs", pa.array([[], [float("nan")]])),
        ("rollout_logprobs", pa.array([[], [-1e300]])),
        ("media", pa.array(["[]", "["])),
        ("media", pa.array(["[]", "[] []"])),
        ("media", pa.array(["[]", "[1]"])),
        ("media", pa.array(["[]", "{}"])),
        ("media", pa.array(["[]", "[" * 5000])),
        ("loss_spans", pa.array(["[]", '[{"start":1,"stop":1,"start":1}]'])),
        ("loss_spans", pa.array(["[]", '[{"start":1,"start" :2}]'])),
        ("loss_spans", pa.array(["[]", '[{"start":1,"stop":1e400}]'])),
        ("loss_spans", pa.array(["[]", '[{"start":true,"stop":1}]'])),
        ("loss_spans", pa.array(["[]", f'[{{"start":1,"stop":{"9" * 5000}}}]'])),
        ("metadata", pa.array([None, '{"a": NaN}'])),
        ("metadata", pa.array([None, '{"a":{"b":1,"b":2}}'])),
        ("processor", pa.array([None, "[]"])),
        ("processor_fingerprint", pa.array([None, "sha256:0"])),
        ("sample_id", pa.array(["a", "a"])),
        ("sample_id", pa.array(["a", None])),
        ("schema_version", pa.array(["1", "3"])),
        ("family", pa.array(["qwen2_vl", "gpt"])),
        ("finish_reason", pa.array(["stop", "done"])),
        ("screen_size", pa.array([[1, 2], [1]])),
        ("turn", pa.array([1.5, 2.0])),
        ("turn", pa.array([1, -2])),
        ("when", pa.array([0, 1], pa.timestamp("s"))),
        ("raw", pa.array([b"\x80\x04", b""])),
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


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("input_ids", pa.list_(pa.int64())),
        ("position_ids", pa.list_(pa.list_(pa.int64()))),
        ("attention_mask", pa.list_(pa.int8())),
        ("turn", pa.int64()),
        ("screen_size", pa.list_(pa.int64())),
    ],
)
def test_whole_numbers_written_as_floats(tmp_path, name, whole):
    sample = make_sample([("text", [1, 2])], "s0")
    sample.position_ids, sample.attention_mask = np.ones((3, 2), np.int64), np.ones(2, np.int8)
    sample.turn, sample.screen_size = 1, (640, 480)
    write_trace(tmp_path / "fine.parquet", [sample])
    table = pq.read_table(tmp_path / "fine.parquet")
    at = table.column_names.index(name)
    values = table[name].to_pylist()
    for kind, folder in ((whole, "whole"), (as_floats(whole), "floats")):
        pq.write_table(table.set_column(at, name, pa.array(values, kind)), tmp_path / folder)
        (tmp_path / folder).rename(tmp_path / f"{folder}.parquet")
    assert compare(tmp_path / "fine.parquet", tmp_path / "whole.parquet").ok
    for pair in (("fine", "floats"), ("floats", "fine"), ("floats", "floats")):
        with pytest.raises(TraceError, match=f"floats.parquet: record 1.{name}.*MM003"):
            compare(*(tmp_path / f"{side}.parquet" for side in pair))


def as_floats(kind):
    return pa.list_(as_floats(kind.value_type)) if pa.types.is_list(kind) else pa.float64()


def test_a_required_column_of_nulls(tmp_path):
    path = altered(tmp_path, "input_ids", pa.array([None, None], pa.list_(pa.int64())))
    table = pq.read_table(path)
    names = ["s0", "s1"]
    assert table["sample_id"].to_pylist() == names
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


def test_values_of_no_rows(tmp_path):
    write_trace(tmp_path / "t.parquet", [make_sample([("text", [1, 2])], "s0")])
    data = bytearray((tmp_path / "t.parquet").read_bytes())
    data[data.rindex(b"\x16\x02\x26") + 1] = 0  # field 3 of the row group, before field 5: its rows
    path = tmp_path / "lies.parquet"
    path.write_bytes(data)
    assert pq.read_metadata(path).row_group(0).num_rows == 0
    with pytest.raises(TraceError, match=r"row group 0: has values, but 0 rows .MM001"):
        compare(path, tmp_path / "t.parquet")


def test_rows_that_the_footer_makes_up(tmp_path):
    """A group whose footer counts more rows than its pages hold."""
    path = tmp_path / "t.parquet"
    write_trace(path, numbered(4))
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


def altered_none(folder):
    write_trace(folder / "fine.parquet", [make_sample([("text", [1, 2])], f"s{i}") for i in (0, 1)])
    return folder / "fine.parquet"


def test_large_records_and_extra_columns(tmp_path):
    path = altered(tmp_path, "note", pa.array(["x", "y" * 10**5]))
    assert compare(path, path).ok
    reader = read_trace(path, max_record_bytes=5 * 10**4)
    with pytest.raises(TraceError, match=r"record 2: .*MM010"):
        compare(reader, reader)
