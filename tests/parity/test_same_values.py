"""One number written in two ways is one number; two numbers stay two."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planting.episodes import episode, finish, other, settings
from support.samples import make_sample

import mmpack as mp
from mmpack import compare
from mmpack.parity.values import same_value

WRITTEN = {
    "float32": lambda x: float(np.float32(x)),
    **{f"{n} digits": (lambda x, n=n: float(f"{x:.{n}g}")) for n in range(6, 11)},
    **{f"{n} decimals": (lambda x, n=n: round(x, n)) for n in range(6, 11)},
}


@given(st.floats(1e-3, 1e4), st.sampled_from(sorted(WRITTEN)))
def test_a_number_through_float32_or_few_digits(value, way):
    assert same_value(value, WRITTEN[way](value)) and same_value(WRITTEN[way](value), value)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1003520, 1003521),  # pixels
        (1003520.0, 1003521),
        (30, 29.97),
        (24, 24000 / 1001),
        (1.0, 1.0859375),  # of a bf16 cast
        (0.4004, 0.400390625),  # 0.4004 in bf16
        (1 / 255, 1 / 256),
        (0.48145466, 0.48),
        ("1", 1),
        (None, 0),
        ([1.0], [1.0, 1.0]),
        ({"a": 1}, {"a": 1, "b": None}),
        (float("nan"), float("nan")),
        (float("inf"), 1.0),
    ],
)
def test_other_numbers(a, b):
    assert not same_value(a, b) and not same_value(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (29.97, 30000 / 1001),
        (59.94, 60000 / 1001),
        (23.976, 24000 / 1001),
        ((0.5, 1), np.array([0.5, 1.0])),
        ([1, [2, {"x": 0.1}]], [1, [2, {"x": float(np.float32(0.1))}]]),
        (True, 1),
        (np.int32(3), 3),
    ],
)
def test_one_value(a, b):
    assert same_value(a, b) and same_value(b, a)


@pytest.fixture
def video():
    sample = episode(video=(4, 4, 4))
    clip = sample.media[0]
    clip.fps, clip.second_per_grid_ts = 30000 / 1001, 2 * 1001 / 30000
    clip.frame_timestamps = tuple((clip.frame_indices / clip.fps + 3600.0).tolist())
    means = [0.48145466, 0.4578275, 0.40821073]
    image = {"image_mean": means, "rescale_factor": 1 / 255}
    return finish(other(sample, processor=settings(image=image, video=image)))


def through(sample, write):
    """The sample, every float of its media and settings written another way."""
    out = other(sample)
    for medium in out.media:
        for name in ("fps", "second_per_grid_ts"):
            value = getattr(medium, name)
            setattr(medium, name, value and write(value))
        stamps = medium.frame_timestamps
        medium.frame_timestamps = stamps and tuple(map(write, stamps))
    text = json.dumps(out.processor)
    out.processor = json.loads(text, parse_float=lambda number: write(float(number)))
    return out


@pytest.mark.parametrize("way", sorted(WRITTEN))
def test_floats_of_a_trace_written_in_another_way(tmp_path, video, way):
    right = through(video, WRITTEN[way])
    for pair in ((video, right), (right, video)):
        report = compare([pair[0]], [pair[1]])
        assert report.ok, report.lines()
    for name, sample in (("a", video), ("b", right)):
        mp.write_trace(tmp_path / f"{name}.parquet", [sample])
    assert compare(tmp_path / "a.parquet", tmp_path / "b.parquet").ok


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fps", 30.0),
        ("fps", 29.9),
        ("second_per_grid_ts", 0.0667),
        ("second_per_grid_ts", 0.06689453125),  # in bf16
    ],
)
def test_real_differences_stay(video, name, value):
    right = other(video)
    setattr(right.media[0], name, value)
    assert not compare([video], [right]).ok


def test_one_other_frame_time_stays(video):
    right = other(video)
    stamps = list(right.media[0].frame_timestamps)
    stamps[3] += 1 / 30
    right.media[0].frame_timestamps = tuple(stamps)
    assert not compare([video], [right]).ok
    settings_of = other(video)
    settings_of.processor["image"]["image_mean"] = [0.5, 0.5, 0.5]
    assert not compare([video], [settings_of]).ok


# ---- in memory -------------------------------------------------------------------------------------

DTYPES = {
    "input_ids": ("int32", "uint32", "int16", "float32", "float64"),
    "position_ids": ("int32", "float32"),
    "attention_mask": ("bool", "int64", "uint8", "float32"),
    "rollout_logprobs": ("float64", "float16"),
}


def typed(name, dtype, sample_id="s0"):
    sample = make_sample([("text", (1, 2, 3)), ("response", (5, 6))], sample_id=sample_id)
    sample.position_ids = np.tile(np.arange(5), (3, 1))
    sample.attention_mask = np.ones(5, np.int8)
    sample.rollout_logprobs = np.array([-0.5, -0.25], np.float32)
    setattr(sample, name, getattr(sample, name).astype(dtype))
    return sample


@pytest.mark.parametrize(
    ("name", "dtype"), [(n, d) for n, all_of in DTYPES.items() for d in all_of]
)
def test_other_dtypes_in_memory(name, dtype):
    left, right = typed(name, dtype), typed("input_ids", "int64")
    for pair in ((left, right), (right, left), (left, left)):
        assert compare([pair[0]], [pair[1]]).findings == []
    right.input_ids[0] += 1
    for pair in ((left, right), (right, left)):
        assert [f.field for f in compare([pair[0]], [pair[1]]).findings] == ["input_ids"]
    assert getattr(left, name).dtype == dtype  # the caller's sample stays as it is


def test_other_dtypes_that_wait_on_disk():
    left = [typed("attention_mask", "bool", f"s{i}") for i in range(200)]
    right = [typed("input_ids", "int32", f"s{i}") for i in range(200)]
    assert compare(left, right[::-1]).ok


def test_a_dtype_that_changes_values_is_named():
    left = typed("attention_mask", "int64")
    left.attention_mask[0] = 256
    assert "MM003" in compare([left], [typed("input_ids", "int64")]).first.evidence
    left = typed("input_ids", "float32")
    left.input_ids[1] = 2.5
    first = compare([left], [typed("input_ids", "int64")]).first
    assert "MM003 in rollout: input_ids is float32" in first.evidence


# ---- samplers that are off ---------------------------------------------------------------------------


def scored(**sampling):
    sample = typed("input_ids", "int64")
    return other(sample, sampling={"logprobs": "processed", **sampling})


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("top_k", (0, -1, None), 20),
        ("top_p", (1, 1.0, None), 0.9),
        ("min_p", (0, 0.0, None), 0.1),
        ("repetition_penalty", (1, 1.0, None), 1.1),
        ("presence_penalty", (0, 0.0, None), 0.5),
        ("logit_bias", ({}, None), {"5": 1.0}),
        ("allowed_token_ids", (None,), [5]),
    ],
)
def test_off_is_off(name, off, on):
    for a in off:
        for b in off:
            report = compare([scored(**{name: a})], [scored(**{name: b})], require=("sampling",))
            assert report.ok, (a, b, report.lines())
        for pair in (
            (scored(**{name: a}), scored(**{name: on})),
            (scored(**{name: on}), scored(**{name: a})),
        ):
            report = compare([pair[0]], [pair[1]], require=("sampling",))
            assert not report.ok and report.causes == {"sampling": 1}


def test_a_temperature_of_null_was_not_recorded():
    report = compare([scored(temperature=None)], [scored(temperature=1.0)])
    assert report.ok and "sampling.temperature" in report.not_compared
    assert not compare([scored(temperature=None)], [scored(temperature=0.7)]).ok
    near = compare([scored(temperature=0.7)], [scored(temperature=float(np.float32(0.7)))])
    assert near.ok and "sampling.temperature" not in near.not_compared


def test_a_bias_by_number_or_by_text():
    pair = scored(logit_bias={5: -1.0}), scored(logit_bias={"5": -1.0})
    assert compare([pair[0]], [pair[1]], require=("sampling",)).ok
