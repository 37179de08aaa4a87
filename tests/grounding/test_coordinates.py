"""Conversions by rational numbers: there and back is exact; integers as written stay within the stated error."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.samples import make_medium, make_sample

import mmpack as mp
from mmpack.families import FAMILIES
from mmpack.grounding import (
    SYSTEMS,
    Sizes,
    as_floats,
    as_written,
    convert,
    convert_array,
    rounding_error,
    sizes_of,
    system_of,
    to_system,
)

sides = st.integers(1, 20_000)
sizes = st.builds(Sizes, st.tuples(sides, sides), st.tuples(sides, sides))
numbers = st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | st.fractions()
systems = st.sampled_from(SYSTEMS)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), max_size=4), systems, systems, sizes)
def test_there_and_back_is_exact(pairs, source, target, sizes):
    values = [v for pair in pairs for v in pair]
    there = convert(values, source, target, sizes)
    assert list(convert(there, target, source, sizes)) == values


@settings(max_examples=200, deadline=None)
@given(st.lists(numbers, min_size=2, max_size=2), systems, systems, systems, sizes)
def test_a_detour_changes_nothing(point, a, b, c, sizes):
    by_way_of = convert(convert(point, a, b, sizes), b, c, sizes)
    assert by_way_of == convert(point, a, c, sizes)


@settings(max_examples=300, deadline=None)
@given(st.tuples(st.fractions(0, 1), st.fractions(0, 1)), systems, systems, sizes)
def test_integers_as_written_stay_within_the_error(point, written, measured, sizes):
    """The bound holds, and half an integer reaches it."""
    exact = convert(point, "normalized_1", written, sizes)
    back = convert(as_written(exact, written), written, measured, sizes)
    true = convert(point, "normalized_1", measured, sizes)
    bound = rounding_error(written, measured, sizes)
    if written != "normalized_1":  # a float is rounded by the float's own error
        assert all(abs(b - t) <= e for b, t, e in zip(back, true, bound, strict=True))
        worst = (Fraction(1, 2), Fraction(1, 2))
        off = convert(as_written(worst, written), written, measured, sizes)
        start = convert(worst, written, measured, sizes)
        assert tuple(abs(a - b) for a, b in zip(off, start, strict=True)) == bound
    else:
        assert bound == (0, 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=4), systems, systems, sizes)
def test_arrays_are_off_by_two_roundings(box, source, target, sizes):
    exact = convert(box, source, target, sizes)
    found = convert_array(np.array([box]), source, target, sizes)[0]
    for a, b in zip(found.tolist(), exact, strict=True):
        assert abs(Fraction(a) - b) <= abs(b) * Fraction(2) ** -52 + Fraction(2) ** -1070


def test_both_conventions_of_one_box():
    """A box of a 1920 × 1080 screenshot that Qwen2.5-VL saw at 1288 × 728, and Qwen3-VL at any size."""
    sizes = Sizes(model=(1288, 728), original=(1920, 1080))
    box = (480, 270, 960, 540)
    seen = convert(box, "original_pixels", "absolute_pixels", sizes)
    assert seen == (322, 182, 644, 364)
    assert convert(box, "original_pixels", "normalized_1000", sizes) == (250, 250, 500, 500)
    assert as_floats(convert(box, "original_pixels", "normalized_1", sizes)) == (
        0.25,
        0.25,
        0.5,
        0.5,
    )
    assert as_written(
        convert((1, 1), "original_pixels", "normalized_1000", sizes), "normalized_1000"
    ) == (1, 1)


@pytest.mark.parametrize(
    "family, system",
    [
        ("qwen2_vl", "normalized_1000"),
        ("qwen2_5_vl", "absolute_pixels"),
        ("qwen3_vl", "normalized_1000"),
        ("qwen3_vl_moe", "normalized_1000"),
        ("qwen3_5", "normalized_1000"),
        ("qwen3_5_moe", "normalized_1000"),
        ("internvl", "normalized_1000"),
    ],
)
def test_what_each_family_writes(family, system):
    assert system_of(family) == system
    assert all(f.coordinates in (None, *SYSTEMS[:3]) for f in FAMILIES.values())


def shown(family="qwen2_5_vl", grid=(1, 34, 46), **fields):
    sample = make_sample([("image", grid, "a"), ("response", [5, 6])], family=family)
    for name, value in fields.items():
        setattr(sample.media[0] if hasattr(sample.media[0], name) else sample, name, value)
    return sample


def test_sizes_follow_from_the_medium():
    sample = shown(size=(640, 480), decoded_size=(1280, 960))
    assert sizes_of(sample) == sizes_of(sample, 0) == Sizes((644, 476), (1280, 960))
    assert sizes_of(shown("qwen3_vl", (1, 30, 40), size=(640, 480))) == Sizes(
        (640, 480), (640, 480)
    )
    assert sizes_of(shown(size=None, decoded_size=None, screen_size=(800, 600))).original == (
        800,
        600,
    )
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
        (3, (640, 480), (640, 480)),
        (6, (240, 320), (480, 640)),  # and made smaller
        (6, (448, 448), None),  # nothing tells whether it was turned
        (6, None, None),
    ],
)
def test_a_turned_picture_is_measured_upright(orientation, size, original):
    sample = shown(size=size, decoded_size=(640, 480), exif_orientation=orientation)
    assert sizes_of(sample).original == original


def test_a_sample_is_moved_as_a_whole():
    sample = shown(coordinate_system="absolute_pixels", size=(1288, 952))
    sample.bbox_targets = [mp.BboxTarget((322.0, 119.0, 644.0, 476.0), 0, "cat")]
    sample.point_targets = [mp.PointTarget((161.0, 238.0))]
    start = sample.loss_spans[0].start
    sample.region_spans = [
        mp.RegionSpan(start, start + 1, 0, (0.0, 0.0, 161.0, 119.0)),
        mp.RegionSpan(start, start + 2, 0),
    ]
    swipe = {"kind": "swipe", "point": [161.0, 119.0], "to": [644.0, 0.0], "why": "x"}
    own, wait = {"tap": [161.0, 119.0]}, {"kind": "wait", "seconds": 1.0}
    sample.action_spans = [mp.ActionSpan(start, start + 1, a, 0) for a in (swipe, own, wait)]
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
        lambda: convert((1, float("inf")), "normalized_1", "normalized_1000"),
        lambda: convert("12", "normalized_1", "normalized_1000"),
        lambda: convert(5, "normalized_1", "normalized_1000"),
        lambda: convert((1, None), "normalized_1", "normalized_1000"),
        lambda: convert((1, 2), "pixels", "normalized_1000"),
        lambda: convert((1, 2), "normalized_1", ["normalized_1000"]),
        lambda: convert((1, 2), "normalized_1", "absolute_pixels"),
        lambda: convert((1, 2), "original_pixels", "normalized_1", Sizes(model=(1, 1))),
        lambda: convert((1, 2), "absolute_pixels", "normalized_1", (640, 480)),
        lambda: Sizes(model=(0, 5)),
        lambda: Sizes(model=(5.5, 5)),
        lambda: Sizes(original=5),
        lambda: convert_array([1, 2], "normalized_1", "normalized_1000"),
        lambda: convert_array(np.array([1.0]), "normalized_1", "normalized_1000"),
        lambda: convert_array(np.array([1.0, np.nan]), "normalized_1", "normalized_1000"),
        lambda: convert_array(np.array(["a", "b"]), "normalized_1", "normalized_1000"),
        lambda: as_floats([10**400]),
        lambda: as_written((1, 2), "pixels"),
        lambda: rounding_error("pixels", "normalized_1"),
        lambda: sizes_of("sample"),
        lambda: sizes_of(shown(), 1),
        lambda: sizes_of(shown(), "0"),
        lambda: to_system(shown(), "original_pixels"),
        lambda: to_system(None, "normalized_1"),
        lambda: to_system(
            replace(shown(), bbox_targets=[mp.BboxTarget((0.0, 0.0, 1.0, 1.0))]), "normalized_1"
        ),
    ],
)
def test_wrong_arguments(call):
    with pytest.raises(mp.ArgumentError, match=r": .* Fix: "):
        call()
