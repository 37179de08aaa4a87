"""What only several samples show: samples, responses or media under each other's ids, and turns merged on one side."""

import copy

import numpy as np
import pytest
from support.samples import make_sample

import mmpack as mp
from mmpack.parity.fixes import UNKNOWN
from mmpack.trajectory import Trajectory, Turn, to_samples


def rollout(count=12, length=20):
    """Groups of four with one prompt and picture."""
    out = []
    for k in range(count):
        response = np.random.default_rng(k).integers(100, 900, length)
        parts = [("text", [1, 2, k // 4 + 5]), ("image", (1, 4, 4), f"i{k // 4}"), ("text", [3])]
        sample = make_sample([*parts, ("response", response, 0)], sample_id=f"s{k}")
        sample.group_id, sample.finish_reason = f"g{k // 4}", "stop"
        out.append(sample)
    return out


def placed(samples, order):
    """The samples in another order, under the ids that stood there."""
    out = [copy.deepcopy(samples[k]) for k in order]
    for sample, name in zip(out, samples, strict=True):
        sample.sample_id = name.sample_id
    return out


def both(left, right):
    """The report; the other direction has the same causes."""
    report = mp.compare(left, right)
    assert mp.compare(right, left).causes == report.causes
    assert report.total_findings == sum(report.causes.values()) == len(report.findings)
    return report


@pytest.mark.parametrize(
    "order",
    [[11, *range(11)], [1, 0, *range(2, 12)], [5, 3, 8, 1, 0, 2, 4, 11, 7, 6, 9, 10]],
)
def test_samples_shifted_or_permuted(tmp_path, order):
    left = rollout()
    right = placed(left, order)
    report = both(left, right)
    moved = [k for k, place in enumerate(order) if k != place]
    assert report.causes == {"sample_order": len(moved)}
    assert [f.sample_id for f in report.findings] == [f"s{k}" for k in moved]
    assert f"the ids of rollout's 's{order[moved[0]]}'" in report.first.evidence
    for suffix in ("jsonl", "parquet"):
        paths = [tmp_path / f"{name}.{suffix}" for name in ("rollout", "train")]
        for path, samples in zip(paths, (left, right), strict=True):
            mp.write_trace(path, samples)
        assert mp.compare(*paths).to_json() == report.to_json()
    few = mp.compare(left, right, max_findings=3)
    assert (few.causes, few.total_findings) == (report.causes, len(moved))
    assert 1 <= len(few.findings) <= 3 and few.first.cause == "sample_order"


def test_short_answers_exchanged_with_their_pictures():
    """One text, answers too short to tell: the pictures' contents do."""
    left = []
    for k in range(4):
        parts = [("text", [1, 2]), ("image", (1, 4, 4), f"i{k}"), ("response", [100 + k, 9], 0)]
        left.append(make_sample(parts, sample_id=f"s{k}"))
    assert mp.compare(left, placed(left, [1, 2, 3, 0])).causes == {"sample_order": 4}
    answers = copy.deepcopy(left)
    for one, other in zip(answers, left[1:] + left[:1], strict=True):
        one.input_ids = np.append(one.input_ids[:-2], other.input_ids[-2:])
    assert mp.compare(left, answers).causes == {UNKNOWN: 4}  # chance can't be ruled out
    left = rollout(4, 1)  # as of one prompt
    assert mp.compare(left, placed(left, [2, 3, 1, 0])).causes == {UNKNOWN: 4}


def test_shifted_with_an_end():
    """Row k has the ids of row k - 1, the first those of nobody."""
    left = rollout()
    right = placed(left, [0, *range(11)])
    right[0].input_ids = right[0].input_ids + np.array([0] * 9 + [1] * (len(right[0]) - 9))
    assert both(left, right).causes == {"sample_order": 12}
    right = copy.deepcopy(left)
    right[3].input_ids = left[2].input_ids.copy()  # once more: nothing was exchanged
    assert mp.compare(left, right).causes == {UNKNOWN: 1}


@pytest.mark.parametrize("what", ["input_ids", "response", "media"])
def test_two_of_two_hundred_exchanged(what):
    left = rollout(200)
    right = copy.deepcopy(left)
    one, other = right[17], right[101]
    if what == "response":
        a, b = one.input_ids, other.input_ids
        one.input_ids, other.input_ids = (np.append(x[:-20], y[-20:]) for x, y in ((a, b), (b, a)))
    else:
        first, second = getattr(one, what), getattr(other, what)
        setattr(one, what, second)
        setattr(other, what, first)
    report = mp.compare(left, right)
    assert report.causes == {"media_order" if what == "media" else "sample_order": 2}
    assert [f.sample_id for f in report.findings] == ["s17", "s101"]


def test_settings_are_found_beside_the_order():
    left = rollout()
    right = placed(left, [1, 0, *range(2, 12)])
    for samples, limit in ((left, 1000), (right, 500)):
        for sample in samples:
            sample.processor = {"image": {"max_pixels": limit}}
    assert mp.compare(left, right).causes == {"max_pixels": 12, "sample_order": 2}


@pytest.mark.parametrize("name", ["e/0", "e"])
def test_merged_turns(name):
    turns = [Turn([1, 2], [3]), Turn([1, 2, 3, 4], [5]), Turn([1, 2, 3, 4, 5, 6], [7])]
    episode = Trajectory("e", "task", "qwen2_5_vl", turns)
    (merged,), single = to_samples(episode), to_samples(episode, merge=False)
    merged.sample_id = name
    others = rollout(4)
    report = both([merged, *others], [*single, *copy.deepcopy(others)])
    assert set(report.causes) == {"merged_turns"}
    assert {f.sample_id for f in report.findings} == {name, "e/0", "e/1", "e/2"}
    # a turn that is missing is missing
    assert UNKNOWN in mp.compare([merged, *others], [single[0], *copy.deepcopy(others)]).causes
