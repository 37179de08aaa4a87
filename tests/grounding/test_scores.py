"""Scores of regions and of sets: matching, labels, media, and every way in which one side is missing or broken."""

import math

import numpy as np
import pytest
from support.samples import make_medium, make_sample

import mmpack as mp
from mmpack.grounding import annotate, scores, set_score
from mmpack.grounding.scores import KINDS

BOX = "<|box_start|>({},{}),({},{})<|box_end|>"
WORST = {"iou": 0.0, "giou": -1.0, "point_in_box": 0.0, "centre_distance": 0.0}


def a_sample(boxes, targets, system="absolute_pixels", labels=(), wanted=(), **fields):
    """A sample of one picture of 644 × 476; of each box a region of one loss token."""
    sample = make_sample(
        [("image", (1, 34, 46), "a"), ("response", list(range(5, 6 + len(boxes))))], **fields
    )
    first = sample.loss_spans[0].start
    sample.region_spans = [
        mp.schema.RegionSpan(first + k, first + k + 1, 0, box, label=labels[k] if labels else None)
        if box is None or len(box) == 4
        else mp.schema.RegionSpan(first + k, first + k + 1, 0, None, box)
        for k, box in enumerate(boxes)
    ]
    sample.bbox_targets = [
        mp.schema.BboxTarget(t, label=wanted[k] if wanted else None) for k, t in enumerate(targets)
    ]
    sample.coordinate_system = system
    return sample


def values(sample, kind="iou", **options):
    return [s.value for s in scores(sample, kind, **options)]


def test_scores_are_of_regions_and_bear_their_name():
    box = (0.0, 0.0, 10.0, 10.0)
    sample = a_sample([box, box], [(0.0, 0.0, 10.0, 20.0)])
    sample.region_spans[0].start, sample.region_spans[0].stop = 0, 1  # without a loss token
    (score,) = scores(sample)
    assert (score.name, score.value, score.scope) == ("iou", 0.5, {"region": 1})
    assert scores(sample, "giou", name="box")[0].name == "box"
    sample.rewards = scores(sample)
    assert mp.validate(sample) == []
    sample.media.append(make_medium("b", (1, 34, 46)))
    sample.bbox_targets[0].media_index = 1  # a target in another picture is not hit
    assert values(sample) == [0.0]


def test_sets_are_matched_for_the_largest_sum():
    """Greedy would give the first region the first target, which the second region needs more."""
    boxes = [(100.0, 0.0, 110.0, 10.0), (104.0, 0.0, 114.0, 10.0)]
    sample = a_sample(boxes, [(102.0, 0.0, 112.0, 10.0), (97.0, 0.0, 107.0, 10.0)])
    assert values(sample) == pytest.approx([7 / 13, 8 / 12])
    assert set_score(sample).value == pytest.approx((7 / 13 + 8 / 12) / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_more_of_one_side_than_of_the_other(kind):
    box, far = (0.0, 0.0, 10.0, 10.0), (600.0, 400.0, 640.0, 470.0)
    extra = a_sample([far, box], [box])
    assert values(extra, kind) == [WORST[kind], 1.0]
    assert set_score(extra, kind).value == (1 + WORST[kind]) / 2
    missed = a_sample([box], [far, box])
    assert values(missed, kind) == [1.0]
    assert set_score(missed, kind).value == (1 + WORST[kind]) / 2
    assert values(a_sample([], [box]), kind) == []
    assert values(a_sample([box], []), kind) == [WORST[kind]]
    assert set_score(a_sample([], [box]), kind).value == WORST[kind]
    assert set_score(a_sample([], []), kind).value == 1.0


def test_points_and_centres():
    target = (100.0, 100.0, 200.0, 200.0)
    sample = a_sample([(150.0, 130.0)], [target])
    assert values(sample, "point_in_box") == [1.0]
    assert values(sample, "centre_distance") == pytest.approx([1 - 20 / math.hypot(644, 476)])
    assert values(sample, "iou") == [0.0]  # a box was asked for
    assert values(a_sample([(90.0, 130.0)], [target]), "point_in_box") == [0.0]
    assert values(a_sample([(100.0, 100.0, 300.0, 300.0)], [target]), "point_in_box") == [1.0]
    points = a_sample([(150.0, 130.0)], [])
    points.point_targets = [mp.schema.PointTarget((153.0, 134.0))]
    assert values(points, "centre_distance") == pytest.approx([1 - 5 / math.hypot(644, 476)])


def test_a_distance_is_one_of_pixels_in_every_system():
    pixels = a_sample([(161.0, 119.0)], [(322.0, 119.0, 322.5, 119.5)])
    for system in ("normalized_1000", "normalized_1"):
        moved = mp.grounding.to_system(pixels, system)
        assert values(moved, "centre_distance") == pytest.approx(values(pixels, "centre_distance"))


def test_labels_are_respected_where_both_sides_have_one():
    box, other = (0.0, 0.0, 10.0, 10.0), (0.0, 0.0, 10.0, 20.0)
    named = {"labels": ["Dog", " a  cat"], "wanted": ["A cat", "dog"]}
    sample = a_sample([box, other], [box, other], **named)
    assert values(sample) == [0.5, 0.5]
    assert values(sample, labels=False) == [1.0, 1.0]
    unnamed = a_sample([box, other], [box, other], wanted=["cat", "dog"])
    assert values(unnamed) == [1.0, 1.0]
    none = a_sample([box], [box], labels=["cat"], wanted=["dog"])
    assert values(none) == [0.0] and values(none, "giou") == [-1.0]


@pytest.mark.parametrize(
    "box",
    [
        (10.0, 0.0, 0.0, 10.0),
        (0.0, 0.0, 10.0, 477.0),
        (0.0, 0.0, math.nan, 10.0),
        (0.0, 0.0, 1e308, 1e308),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_region_gets_the_worst(box, kind):
    sample = a_sample([box], [(0.0, 0.0, 10.0, 10.0)])
    assert values(sample, kind) == [WORST[kind]]


@pytest.mark.parametrize(
    "bad", [(10.0, 0.0, 0.0, 10.0), (0.0, 0.0, math.nan, 1.0), (0.0, 1.0), None, "x"]
)
def test_a_broken_target_is_an_error(bad):
    sample = a_sample([(0.0, 0.0, 10.0, 10.0)], [(0.0, 0.0, 1.0, 1.0)])
    sample.bbox_targets[0].bbox = bad
    with pytest.raises(mp.ArgumentError, match=r"bbox_targets\[0\] of sample 's0' .* Fix: "):
        scores(sample)


def test_from_text_to_rewards(answered, qwen):
    """Malformed answers are scored too: their tokens are paid the worst."""
    text = BOX.format(0, 0, 100, 100) + BOX.format(9, 9, 5, 5) + '{"bbox_2d": [1, 2'
    sample = answered(text, bbox_targets=[mp.schema.BboxTarget((0.0, 0.0, 100.0, 50.0))])
    sample.coordinate_system = "absolute_pixels"
    sample = annotate(sample, qwen)
    sample.rewards = scores(sample, "giou")
    assert [s.value for s in sample.rewards] == [0.5, -1.0, -1.0]
    assert mp.validate(sample) == []
    pytest.importorskip("torch")
    sample.media[0].pixel_values = np.zeros((34 * 46, 1176), np.float32)
    paid = mp.scatter_rewards(mp.pack([sample])).numpy()
    start = sample.loss_spans[0].start
    for region, score in zip(sample.region_spans, sample.rewards, strict=True):
        own = paid[region.start - start : region.stop - start]
        assert np.sign(own.sum()) == np.sign(score.value)


def test_tiles_have_overlap_and_no_distance():
    sample = make_sample([("image", (3, 32, 32), "a"), ("response", [5, 6])], family="internvl")
    first = sample.loss_spans[0].start
    sample.coordinate_system = "normalized_1000"
    sample.region_spans = [mp.schema.RegionSpan(first, first + 1, 0, (0.0, 0.0, 10.0, 10.0))]
    sample.bbox_targets = [mp.schema.BboxTarget((0.0, 0.0, 10.0, 20.0))]
    assert values(sample) == [0.5]
    with pytest.raises(mp.ArgumentError, match=r"centre_distance needs .* Fix: "):
        scores(sample, "centre_distance")


@pytest.mark.parametrize("call", [scores, set_score])
def test_wrong_arguments(call):
    with pytest.raises(mp.ArgumentError, match=r"kind is 'dice'. Fix: "):
        call(a_sample([], []), "dice")
    with pytest.raises(mp.ArgumentError, match=r"sample is .* Fix: "):
        call([a_sample([], [])])
    assert np.isfinite(set_score(a_sample([], [])).value)


def test_a_box_in_numpy_is_a_box_and_other_types_are_refused():
    sample = a_sample([(0.0, 0.0, 10.0, 10.0)], [(0.0, 0.0, 10.0, 10.0)])
    sample.region_spans[0].bbox = np.array([0.0, 0.0, 10.0, 10.0])
    assert values(sample) == [1.0]
    for bad in ("x", 5, [10**400] * 4):
        sample.region_spans[0].bbox = bad
        with pytest.raises(mp.ArgumentError, match=r"region_spans\[0\] of .* bbox.* Fix: "):
            scores(sample)
