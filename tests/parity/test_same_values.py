"""One number written in two ways is one number; two numbers stay two."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planting.episodes import episode, finish, other, settings
from support.planting.said import check
from support.samples import make_sample

from mmpack import compare
from mmpack.parity.values import same_value

WRITTEN = {
    "float32": lambda x: float(np.float32(x)),
    **{f"{n} digits": (lambda x, n=n: float(f"{x:.{n}g}")) for n in (6, 8, 10)},
    **{f"{n} decimals": (lambda x, n=n: round(x, n)) for n in (6, 8, 10)},
}


@given(st.floats(1e-3, 1e4), st.sampled_from(sorted(WRITTEN)))
def test_a_number_through_float32_or_few_digits(value, way):
    assert same_value(value, WRITTEN[way](value)) and same_value(WRITTEN[way](value), value)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1003520, 1003521, False),  # pixels
        (1003520.0, 1003521, False),
        (30, 29.97, False),
        (24, 24000 / 1001, False),
        (0.4004, 0.400390625, False),  # 0.4004 in bf16
        (1 / 255, 1 / 256, False),
        ("1", 1, False),
        (None, 0, False),
        ([1.0], [1.0, 1.0], False),
        ({"a": 1}, {"a": 1, "b": None}, False),
        (float("nan"), float("nan"), False),
        (float("inf"), 1.0, False),
        (29.97, 30000 / 1001, True),
        (23.976, 24000 / 1001, True),
        ((0.5, 1), np.array([0.5, 1.0]), True),
        ([1, [2, {"x": 0.1}]], [1, [2, {"x": float(np.float32(0.1))}]], True),
        (True, 1, True),
        (np.int32(3), 3, True),
    ],
)
def test_values(a, b, same):
    assert same_value(a, b) == same_value(b, a) == same


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


def test_floats_of_a_trace():
    video = episode(video=(4, 4, 4))
    clip = video.media[0]
    clip.fps, clip.second_per_grid_ts = 30000 / 1001, 2 * 1001 / 30000
    clip.frame_timestamps = tuple((clip.frame_indices / clip.fps + 3600.0).tolist())
    means = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "rescale_factor": 1 / 255}
    video = finish(other(video, processor=settings(image=means, video=means)))
    for way in WRITTEN.values():
        check(video, through(video, way))
    stamps = list(clip.frame_timestamps)
    stamps[3] += 1 / 30
    for name, value in (
        ("fps", 30.0),
        ("fps", 29.9),
        ("second_per_grid_ts", 0.0667),
        ("second_per_grid_ts", 0.06689453125),  # in bf16
        ("frame_timestamps", tuple(stamps)),
    ):
        right = other(video)
        setattr(right.media[0], name, value)
        assert not compare([video], [right]).ok
    right = other(video)
    right.processor["image"]["image_mean"] = [0.5, 0.5, 0.5]
    assert not compare([video], [right]).ok


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


@pytest.mark.parametrize(("name", "dtype"), [(n, d) for n, some in DTYPES.items() for d in some])
def test_other_dtypes_in_memory(name, dtype):
    left, right = typed(name, dtype), typed("input_ids", "int64")
    check(left, right)
    right.input_ids[0] += 1
    assert [f.field for f in check(left, right, "unknown").findings] == ["input_ids"]
    assert getattr(left, name).dtype == dtype  # the caller's sample stays as it is


def test_dtypes_on_disk_and_those_that_change_values():
    left = [typed("attention_mask", "bool", f"s{i}") for i in range(200)]
    right = [typed("input_ids", "int32", f"s{i}") for i in range(200)]
    assert compare(left, right[::-1]).ok
    odd = typed("attention_mask", "int64")
    odd.attention_mask[0] = 256
    check(odd, typed("input_ids", "int64"), "unknown", "MM003")
    odd = typed("input_ids", "float32")
    odd.input_ids[1] = 2.5
    said = "MM003 in rollout: input_ids is float32"
    check(odd, typed("input_ids", "int64"), "unknown", said)
