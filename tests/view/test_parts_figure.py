"""Figures of plans, packs and reports: PNGs whose pixels are where the numbers say, in the page's light colours."""

import io

import numpy as np
import pytest
from PIL import Image
from support import drawn

import mmpack as mp
from mmpack.parity.drift_traces import trace_drift
from mmpack.view.bars import histogram
from mmpack.view.batch import batch_parts
from mmpack.view.figures import COLOURS, MARGIN, figure
from mmpack.view.parity.parts import report_parts
from mmpack.view.parts import Box, Drawing, Grid
from mmpack.view.plan import plan_parts
from mmpack.view.sheet import written


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def colour(name):
    return np.array([int(COLOURS[name][k : k + 2], 16) for k in (1, 3, 5)])


def widest(image, name):
    """Of the lines of an image, the most pixels of a colour, and how many lines have as many."""
    found = (image == colour(name)).all(axis=2).sum(axis=1)
    return int(found.max()), int((found == found.max()).sum())


def test_boxes_are_where_they_are_said_to_be():
    boxes = [Box(0, 0, 250, 20, "mm-image"), Box(500, 0, 100, 20, "mm-loss mm-pale")]
    image = pixels(figure([Drawing(boxes, 20, "two boxes")]))
    wide = 2160 - 4 * MARGIN
    left = 2 * MARGIN
    row = image[2 * (MARGIN - 8) + 10]
    blue = np.flatnonzero((row == colour("image")).all(axis=1))
    assert (blue[0], blue[-1] + 1) == pytest.approx((left, left + wide / 4), abs=2)
    pale = np.round(0.4 * colour("loss") + 0.6 * 255)
    found = np.flatnonzero((np.abs(row - pale) <= 1).all(axis=1))
    ends = (left + wide / 2, left + wide * 0.6)
    assert (found[0], found[-1] + 1) == pytest.approx(ends, abs=2)


def test_the_bars_of_a_histogram_are_as_high_as_they_count():
    values = [1] * 8 + [2] * 4 + [4] * 2
    image = pixels(figure([Grid([histogram(values, "of these")])]))
    blue = (image == colour("image")).all(axis=2)
    heights = blue.sum(axis=0)
    quarter = blue.any(axis=0).nonzero()[0]
    low, high = quarter[0], quarter[-1] + 1
    at = [int(low + (high - low) * (k + 0.5) / 4) for k in range(4)]
    tall = heights[at] / heights.max()
    assert tall == pytest.approx([1, 0.5, 0, 0.25], abs=0.02)


def test_a_figure_of_each_kind_shows_its_numbers():
    batch, plan, report = drawn.packed(), drawn.planned(), drawn.reported()
    kinds = {"pack": batch, "plan": plan, "report": report}
    found = {name: pixels(mp.view.png(x)) for name, x in kinds.items()}
    assert all(image.shape[1] == 2160 and image.shape[0] > 1000 for image in found.values())
    # the longest sample's answer is the widest green line among its strips
    longest = max(batch.loss_counts) / max(batch.token_counts)
    green, _ = widest(found["pack"], "loss")
    forest = batch.num_loss_tokens / batch.num_tokens  # all answers lie in one line
    room = 2160 - 4 * MARGIN
    names = 12 + 7 * max(map(len, batch.sample_ids))
    expected = max(longest * (1 - names / 1000), forest) * room
    assert green == pytest.approx(expected, rel=0.03)
    # a report says its verdict in the colour of what is bad
    assert (found["report"] == colour("bad")).all(axis=2).any()
    assert not (found["plan"] == colour("good")).all(axis=2).any()


def test_a_plans_boxes_are_as_wide_as_their_cost():
    plan = drawn.planned()
    image = pixels(mp.view.png(plan))
    frame = (image == colour("soft")).all(axis=2).sum(axis=1)
    loads = [sum(plan.bin_costs[b] for b in rank) for rank in plan.ranks]
    lines = np.flatnonzero(frame > frame.max() * 0.5)  # upper and lower edges
    edges = np.split(lines, np.flatnonzero(np.diff(lines) > 4) + 1)
    ranks = len(plan.ranks)
    widths = [int(frame[edge].max()) for edge in edges[: 2 * ranks]]
    assert widths[::2] == pytest.approx(widths[1::2], abs=4)  # the mean crosses some
    shares = np.array(widths[::2]) / max(widths)
    assert shares == pytest.approx(np.array(loads) / max(loads), abs=0.02)


def test_the_font_has_every_letter_of_what_pages_say():
    samples = drawn.answers()
    same = [s.rollout_logprobs for s in samples]
    batch = mp.pack(samples, share_prefix=True, loss_columns={"old_logprobs": same})
    drift, _ = trace_drift(*drawn.sides())
    parts = batch_parts(batch, "pack") + plan_parts(drawn.planned())
    parts += report_parts(drawn.reported(), drift=drift)
    said = [repr(part) for part in parts]
    assert any("exp(old − rollout)" in text for text in said)
    escaped = {text[:80] for text in said if "\\u" in written(text) and "\\u" not in text}
    assert escaped == set()
