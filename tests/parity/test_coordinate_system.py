"""Conventions of boxes planted against each other: named where a conversion explains the numbers, and nowhere else."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.samples import make_sample

import mmpack as mp
from mmpack.grounding import convert, sizes_of
from mmpack.grounding.coordinates import as_floats
from mmpack.schema.sample import COORDINATE_SYSTEMS

ORIGINAL, GRID = (1920, 1080), (1, 52, 92)  # as the model sees it: 1288 × 728
BOXES = [(96.0, 108.0, 960.0, 810.0), (1200.0, 30.0, 1800.0, 500.0)]  # in pixels of the file


def written(values, system):
    """Integers, as models write them; `normalized_1` as floats."""
    return values if system == "normalized_1" else [round(v) for v in values]


def made(system, recorded="its own", boxes=BOXES, field="bbox_targets", grid=GRID, rounded=True):
    sample = make_sample([("text", [5]), ("image", grid, "screen"), ("response", [6, 7, 8])])
    sample.media[0].size = sample.media[0].decoded_size = ORIGINAL
    sizes = sizes_of(sample)
    numbers = [convert(box, "original_pixels", system, sizes) for box in boxes]
    numbers = [as_floats(written(n, system) if rounded else n) for n in numbers]
    if field == "bbox_targets":
        sample.bbox_targets = [mp.BboxTarget(n, 0) for n in numbers]
    elif field == "point_targets":
        sample.point_targets = [mp.PointTarget(n[:2], 0) for n in numbers]
    else:
        start = sample.loss_spans[0].start
        sample.region_spans = [
            mp.RegionSpan(start + k, start + k + 1, 0, n) for k, n in enumerate(numbers)
        ]
    sample.coordinate_system = system if recorded == "its own" else recorded
    return sample


def causes(left, right):
    """In both directions, with the MM308 of a side that recorded no system left out: it is a finding of its own."""
    found = [mp.compare([a], [b]) for a, b in ((left, right), (right, left))]
    named = [
        {f.cause for f in report.findings if not f.evidence.startswith("MM308")} for report in found
    ]
    assert named[0] == named[1]
    return named[0]


@pytest.mark.parametrize("field", ["bbox_targets", "point_targets", "region_spans"])
@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize(
    "one, two",
    [
        ("absolute_pixels", "normalized_1000"),
        ("absolute_pixels", "normalized_1"),
        ("normalized_1000", "normalized_1"),
    ],
)
@pytest.mark.parametrize("recorded", ["its own", "one", "none"])
def test_one_side_in_another_system(one, two, recorded, rounded, field):
    names = {"its own": ("its own", "its own"), "one": (one, one), "none": (None, None)}[recorded]
    left = made(one, names[0], field=field, rounded=rounded)
    right = made(two, names[1], field=field, rounded=rounded)
    assert causes(left, right) == {"coordinate_system"}
    evidence = " ".join(f.evidence for f in mp.compare([left], [right]).findings)
    assert f"from {one} to {two}" in evidence


def test_pixels_of_the_file_are_no_pixels_of_the_model():
    left, right = made("absolute_pixels"), made("original_pixels", "absolute_pixels")
    assert causes(left, right) == {"coordinate_system"}
    evidence = mp.compare([left], [right]).first.evidence
    assert "from absolute_pixels to original_pixels" in evidence


def test_equal_numbers_under_two_names():
    left = made("normalized_1000", boxes=[(96.0, 108.0, 960.0, 810.0)])
    right = replace(left, coordinate_system="absolute_pixels")
    assert causes(left, right) == {"coordinate_system"}
    (finding,) = mp.compare([left], [right]).findings
    assert "numbers are equal" in finding.evidence and finding.field == "coordinate_system"


def test_two_names_without_a_number():
    left = made("normalized_1000", boxes=[])
    assert causes(left, replace(left, coordinate_system="normalized_1")) == {"coordinate_system"}


def test_a_name_that_only_one_side_recorded_is_no_difference():
    left = made("normalized_1000", boxes=[])
    right = replace(left, coordinate_system=None)
    assert mp.compare([left], [right]).ok and causes(left, right) == set()


@pytest.mark.parametrize("system", COORDINATE_SYSTEMS)
def test_equal_sides_have_no_finding(system):
    assert causes(made(system), made(system)) == set()


def scaled(x, y=None):
    y = x if y is None else y
    return lambda box: tuple(v * (y if k % 2 else x) for k, v in enumerate(box))


@pytest.mark.parametrize("system", COORDINATE_SYSTEMS)
@pytest.mark.parametrize(
    "change",
    [
        scaled(0.5),
        scaled(0.9, 0.8),
        lambda box: (box[0] * 0.5, *box[1:]),
        lambda box: (box[0] / 3, box[1] / 2, box[2] - 30, box[3] - 50),
        lambda box: (box[1], box[0], box[3], box[2]),
    ],
)
def test_other_boxes_are_unknown(system, change):
    left = made(system, rounded=False)
    right = made(system, rounded=False)
    for target in right.bbox_targets:
        target.bbox = change(target.bbox)
    named = mp.compare([left], [right]).causes
    assert "coordinate_system" not in named and "unknown" in named


def test_another_order_of_boxes_is_unknown():
    left = made("normalized_1000")
    right = replace(left, bbox_targets=left.bbox_targets[::-1])
    assert causes(left, right) == {"unknown"}


def test_boxes_of_a_picture_of_another_size_follow_from_its_grid():
    """Each side in pixels as its model saw the picture, which `max_pixels` made smaller on one."""
    left, right = made("absolute_pixels"), made("absolute_pixels", grid=(1, 26, 46))
    assert "coordinate_system" not in causes(left, right)


def test_one_box_more_is_unknown():
    left, right = made("normalized_1000"), made("absolute_pixels", "normalized_1000", BOXES[:1])
    assert causes(left, right) == {"unknown"}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(COORDINATE_SYSTEMS), st.integers(1, 3))
def test_random_boxes_are_never_taken_for_converted_ones(seed, system, count):
    rng = np.random.default_rng(seed)
    sides = []
    for _ in range(2):
        corner = rng.uniform(0, 900, (count, 2))
        boxes = np.concatenate([corner, corner + rng.uniform(40, 170, (count, 2))], 1)
        sides.append(made(system, boxes=[tuple(b) for b in boxes.tolist()], rounded=False))
    assert "coordinate_system" not in mp.compare(*([side] for side in sides)).causes


def test_names_of_the_two_sides_are_told():
    left, right = made("absolute_pixels"), made("normalized_1000")
    assert "the same places in both" in str(mp.compare([left], [right]).findings)
    other = made("normalized_1000", boxes=[(5.0, 500.0, 90.0, 900.0), BOXES[0]])
    assert "not the same places" in str(mp.compare([left], [other]).findings)


def test_one_picture_of_three_in_another_system():
    """The first two are handed on as they were."""

    def of_three(last):
        sample = make_sample(
            [
                ("text", [5]),
                *(("image", GRID, f"screen{k}") for k in range(3)),
                ("response", [6, 7]),
            ]
        )
        for medium in sample.media:
            medium.size = medium.decoded_size = ORIGINAL
        systems = ("absolute_pixels", "absolute_pixels", last)
        for k, system in enumerate(systems):
            box = convert(BOXES[k % 2], "original_pixels", system, sizes_of(sample, k))
            sample.bbox_targets = [
                *(sample.bbox_targets or []), mp.BboxTarget(as_floats(written(box, system)), k)
            ]  # fmt: skip
        sample.coordinate_system = "absolute_pixels"
        return sample

    left, right = of_three("absolute_pixels"), of_three("normalized_1000")
    assert causes(left, right) == {"coordinate_system"}
    (finding,) = mp.compare([left], [right]).findings
    assert finding.index == 2 and "bbox_targets (1 of 3) of train are" in finding.evidence
    # and one that no conversion explains is no cause
    right.bbox_targets[1].bbox = (1.0, 2.0, 3.0, 4.0)
    assert causes(left, right) == {"unknown"}
