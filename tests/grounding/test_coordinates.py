"""Conversions by rational numbers: there and back is exact; sizes of a picture; a sample moved as a whole."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.samples import make_medium, make_sample

import mmpack as mp
from mmpack.families import FAMILIES
from mmpack.grounding import Sizes, convert, sizes_of, system_of, to_system
from mmpack.grounding.coordinates import SYSTEMS

sides = st.integers(1, 20_000)
sizes = st.builds(Sizes, st.tuples(sides, sides), st.tuples(sides, sides))
numbers = st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | st.fractions()
systems = st.sampled_from(SYSTEMS)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), max_size=4), systems, systems, sizes)
def test_there_and_back_is_exact(pairs, source, target, sizes):
    values = [v for pair in pairs for v in pair]
    there = convert(values, source, target, sizes)
    assert list(convert(there, target, source, sizes)) == values


def test_what_each_family_writes():
    """And both conventions of a box of a 1920 × 1080 screenshot that Qwen2.5-VL saw at 1288 × 728."""
    systems = {
        "qwen2_vl": "normalized_1000",
        "qwen2_5_vl": "absolute_pixels",
        "qwen3_vl": "normalized_1000",
    }
    assert {family: system_of(family) for family in systems} == systems
    assert all(f.coordinates in (None, *SYSTEMS[:3]) for f in FAMILIES.values())
    sizes, box = Sizes(model=(1288, 728), original=(1920, 1080)), (480, 270, 960, 540)
    assert convert(box, "original_pixels", "absolute_pixels", sizes) == (322, 182, 644, 364)
    assert convert(box, "original_pixels", "normalized_1000", sizes) == (250, 250, 500, 500)


def shown(family="qwen2_5_vl", grid=(1, 34, 46), **fields):
    sample = make_sample([("image", grid, "a"), ("response", [5, 6])], family=family)
    for name, value in fields.items():
        setattr(sample.media[0] if hasattr(sample.media[0], name) else sample, name, value)
    return sample


def test_sizes_follow_from_the_medium():
    sample = shown(size=(640, 480), decoded_size=(1280, 960))
    assert sizes_of(sample) == sizes_of(sample, 0) == Sizes((644, 476), (1280, 960))
    seen = sizes_of(shown("qwen3_vl", (1, 30, 40), size=(640, 480)))
    assert seen == Sizes((640, 480), (640, 480))
    bare = shown(size=None, decoded_size=None, screen_size=(800, 600))
    assert sizes_of(bare).original == (800, 600)
    assert sizes_of(shown("internvl", (3, 32, 32))).model is None  # tiles
    two = shown(screen_size=(800, 600))
    two.media.append(make_medium("b", (1, 4, 4)))
    assert sizes_of(two) == Sizes(None, (800, 600))
    assert sizes_of(two, 1).model == (56, 56)


@pytest.mark.parametrize(
    "orientation, size, original",
    [
        (6, (480, 640), (480, 640)),  # turned upright before the processor
        (6, (640, 480), (640, 480)),  # handed on as it lies
        (6, (240, 320), (480, 640)),  # and made smaller
        (6, (448, 448), None),  # nothing tells whether it was turned
    ],
)
def test_a_turned_picture_is_measured_upright(orientation, size, original):
    sample = shown(size=size, decoded_size=(640, 480), exif_orientation=orientation)
    assert sizes_of(sample).original == original


def test_a_sample_is_moved_as_a_whole():
    sample = shown(coordinate_system="absolute_pixels", size=(1288, 952))
    sample.bbox_targets = [mp.schema.BboxTarget((322.0, 119.0, 644.0, 476.0), 0, "cat")]
    sample.point_targets = [mp.schema.PointTarget((161.0, 238.0))]
    start = sample.loss_spans[0].start
    sample.region_spans = [
        mp.schema.RegionSpan(start, start + 1, 0, (0.0, 0.0, 161.0, 119.0)),
        mp.schema.RegionSpan(start, start + 2, 0),
    ]
    swipe = {"kind": "swipe", "point": [161.0, 119.0], "to": [644.0, 0.0], "why": "x"}
    own, wait = {"tap": [161.0, 119.0]}, {"kind": "wait", "seconds": 1.0}
    sample.action_spans = [mp.schema.ActionSpan(start, start + 1, a, 0) for a in (swipe, own, wait)]
    moved = to_system(sample, "normalized_1000")
    there = {**swipe, "point": [250.0, 250.0], "to": [1000.0, 0.0]}
    assert [span.action for span in moved.action_spans] == [there, own, wait]
    assert moved.bbox_targets[0].bbox == (500.0, 250.0, 1000.0, 1000.0)
    assert moved.bbox_targets[0].label == "cat"
    assert moved.point_targets[0].point == (250.0, 500.0)
    assert moved.region_spans[0].bbox == (0.0, 0.0, 250.0, 250.0)
    assert moved.region_spans[1].bbox is None
    assert moved.coordinate_system == "normalized_1000"
    assert sample.coordinate_system == "absolute_pixels"  # a copy
    assert mp.validate(moved) == []
    assert to_system(moved, "absolute_pixels") == sample


@pytest.mark.parametrize(
    "call",
    [
        lambda: convert((1, 2, 3), "normalized_1", "normalized_1000"),
        lambda: convert((1, float("nan")), "normalized_1", "normalized_1000"),
        lambda: convert("12", "normalized_1", "normalized_1000"),
        lambda: convert((1, 2), "pixels", "normalized_1000"),
        lambda: convert((1, 2), "normalized_1", "absolute_pixels"),
        lambda: convert((1, 2), "original_pixels", "normalized_1", Sizes(model=(1, 1))),
        lambda: convert((1, 2), "absolute_pixels", "normalized_1", (640, 480)),
        lambda: Sizes(model=(0, 5)),
        lambda: Sizes(original=5),
        lambda: sizes_of("sample"),
        lambda: sizes_of(shown(), 1),
        lambda: to_system(shown(), "original_pixels"),
        lambda: to_system(
            replace(shown(), bbox_targets=[mp.schema.BboxTarget((0.0, 0.0, 1.0, 1.0))]),
            "normalized_1",
        ),
    ],
)
def test_wrong_arguments(call):
    with pytest.raises(mp.ArgumentError, match=r": .* Fix: "):
        call()
