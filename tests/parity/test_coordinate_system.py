"""Conventions of boxes planted against each other: named where a conversion explains the numbers, and nowhere else."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planting.said import check
from support.samples import make_sample

import mmpack as mp
from mmpack.grounding import convert, sizes_of
from mmpack.grounding.coordinates import as_floats
from mmpack.schema.sample import COORDINATE_SYSTEMS

ORIGINAL, GRID = (1920, 1080), (1, 52, 92)  # as the model sees it: 1288 × 728
BOXES = [(96.0, 108.0, 960.0, 810.0), (1200.0, 30.0, 1800.0, 500.0)]  # in pixels of the file
SYSTEMS = ("absolute_pixels", "normalized_1000", "normalized_1")


def written(values, system):
    """Integers, as models write them; `normalized_1` as floats."""
    return values if system == "normalized_1" else [round(v) for v in values]


def made(system, recorded="its own", boxes=BOXES, field="bbox_targets", rounded=True, pictures=1):
    """Boxes of as many pictures, in pixels of the first one's file; the last ones' are in `system`."""
    shown = [("image", GRID, f"screen{k}") for k in range(pictures)]
    sample = make_sample([("text", [5]), *shown, ("response", [6, 7, 8])])
    for medium in sample.media:
        medium.size = medium.decoded_size = ORIGINAL
    numbers = [convert(box, "original_pixels", system, sizes_of(sample, 0)) for box in boxes]
    numbers = [as_floats(written(n, system) if rounded else n) for n in numbers]
    if field == "bbox_targets":
        sample.bbox_targets = [mp.schema.BboxTarget(n, 0) for n in numbers]
    elif field == "point_targets":
        sample.point_targets = [mp.schema.PointTarget(n[:2], 0) for n in numbers]
    else:
        start = sample.loss_spans[0].start
        spans = [(start + k, start + k + 1) for k in range(len(numbers))]
        sample.region_spans = [
            mp.schema.RegionSpan(*s, 0, n) for s, n in zip(spans, numbers, strict=True)
        ]
    sample.coordinate_system = system if recorded == "its own" else recorded
    return sample


@pytest.mark.parametrize("field", ["bbox_targets", "point_targets", "region_spans"])
@pytest.mark.parametrize(("one", "two"), list(combinations(SYSTEMS, 2)))
@pytest.mark.parametrize("recorded", ["its own", "one", "none"])
def test_one_side_in_another_system(one, two, recorded, field):
    names = {"its own": ("its own", "its own"), "one": (one, one), "none": (None, None)}[recorded]
    for rounded in (True, False):
        left = made(one, names[0], field=field, rounded=rounded)
        right = made(two, names[1], field=field, rounded=rounded)
        for a, b in ((left, right), (right, left)):
            report = mp.compare([a], [b])
            # MM308, of a side that recorded no system, is a finding of its own
            found = {f.cause for f in report.findings if not f.evidence.startswith("MM308")}
            assert found == {"coordinate_system"}
            way = f"from {one} to {two}" if a is left else f"from {two} to {one}"
            assert any(way in f.evidence for f in report.findings)


def test_what_the_names_say():
    left, right = made("absolute_pixels"), made("original_pixels", "absolute_pixels")
    check(left, right, "coordinate_system", "from absolute_pixels to original_pixels")
    check(left, made("normalized_1000"), "coordinate_system", "the same places in both")
    left = made("normalized_1000", boxes=BOXES[:1])
    right = replace(left, coordinate_system="absolute_pixels")
    (finding,) = check(left, right, "coordinate_system", "numbers are equal").findings
    assert finding.field == "coordinate_system"
    left = made("normalized_1000", boxes=[])
    check(left, replace(left, coordinate_system="normalized_1"), "coordinate_system")
    check(left, replace(left, coordinate_system=None))
    elsewhere = made("normalized_1000", boxes=[(5.0, 500.0, 90.0, 900.0), BOXES[0]])
    report = mp.compare([made("absolute_pixels")], [elsewhere])
    assert "not the same places" in str(report.findings)


def scaled(x, y=None):
    y = x if y is None else y
    return lambda box: tuple(v * (y if k % 2 else x) for k, v in enumerate(box))


@pytest.mark.parametrize("system", COORDINATE_SYSTEMS)
def test_other_boxes_are_unknown(system):
    left = made(system, rounded=False)
    check(left, made(system, rounded=False))
    for change in (
        scaled(0.5),
        scaled(0.9, 0.8),
        lambda box: (box[0] * 0.5, *box[1:]),
        lambda box: (box[0] / 3, box[1] / 2, box[2] - 30, box[3] - 50),
        lambda box: (box[1], box[0], box[3], box[2]),
    ):
        right = made(system, rounded=False)
        for target in right.bbox_targets:
            target.bbox = change(target.bbox)
        named = mp.compare([left], [right]).causes
        assert "coordinate_system" not in named and "unknown" in named
    check(left, replace(left, bbox_targets=left.bbox_targets[::-1]), "unknown")
    if system != "normalized_1000":
        fewer = made(system, "normalized_1000", BOXES[:1])
        assert set(mp.compare([made("normalized_1000")], [fewer]).causes) == {"unknown"}


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(COORDINATE_SYSTEMS), st.integers(1, 3))
def test_random_boxes_are_never_taken_for_converted_ones(seed, system, count):
    rng = np.random.default_rng(seed)
    sides = []
    for _ in range(2):
        corner = rng.uniform(0, 900, (count, 2))
        boxes = np.concatenate([corner, corner + rng.uniform(40, 170, (count, 2))], 1)
        sides.append(made(system, boxes=[tuple(b) for b in boxes.tolist()], rounded=False))
    assert "coordinate_system" not in mp.compare(*([side] for side in sides)).causes


def test_one_picture_of_three_in_another_system():
    """The first two are handed on as they were."""

    def of_three(last):
        sample = made("absolute_pixels", pictures=3)
        systems = ("absolute_pixels", "absolute_pixels", last)
        boxes = [
            convert(BOXES[k % 2], "original_pixels", system, sizes_of(sample, k))
            for k, system in enumerate(systems)
        ]
        boxes = [as_floats(written(b, s)) for b, s in zip(boxes, systems, strict=True)]
        return replace(
            sample, bbox_targets=[mp.schema.BboxTarget(b, k) for k, b in enumerate(boxes)]
        )

    left, right = of_three("absolute_pixels"), of_three("normalized_1000")
    said = "bbox_targets (1 of 3) of train are"
    (finding,) = check(left, right, "coordinate_system", said).findings
    assert finding.index == 2
    right.bbox_targets[1].bbox = (1.0, 2.0, 3.0, 4.0)  # which no conversion explains
    check(left, right, "unknown")
