"""The drift by axis as it is drawn: bars of the page and of the figure are as long as the numbers say."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from support.drifts import planted, rollouts
from support.html_page import Page

import mmpack as mp
from mmpack.parity.drift import logprob_drift
from mmpack.parity.drift_traces import trace_drift
from mmpack.view.figures import COLOURS
from mmpack.view.parity.drift import WIDTH, Scale
from mmpack.view.sheet import SCALE


@pytest.fixture(scope="module")
def sides():
    rng = np.random.default_rng(0)
    left = rollouts(rng, 40)
    for sample in left:
        sample.modality_spans = []
    train = planted(rng, left, "turns", 30, 1e-4)
    right = [
        replace(s, rollout_logprobs=np.minimum(x, 0).astype(np.float32))
        for s, x in zip(left, train, strict=True)
    ]
    return left, right


def bars_of(page):
    """Widths of the bars of all tables."""
    return [float(a["width"]) for a in page.all("rect", height="10") if a.get("x") == "0"]


def drawn(drift):
    return [g for axis in drift.axes.values() if len(axis.groups) > 1 for g in axis.groups]


def test_the_page_draws_all_samples_where_it_is_handed_their_drift(sides):
    drift, _ = trace_drift(*sides)
    page = Page(mp.compare(*sides).to_html(drift=drift))
    text = "\n".join(page.text)
    assert "Drift of logprobs, told apart" in text and "from turn 1 on" in text
    assert "all samples whose logprobs can be compared" in text
    bars = bars_of(page)
    groups = drawn(drift)
    assert len(bars) == len(groups)
    top = math.ceil(math.log10(max(g.mean_abs for g in groups)))
    low = math.floor(math.log10(min(g.mean_abs for g in groups)))
    for bar, group in zip(bars, groups, strict=True):
        share = (math.log10(group.mean_abs) - low) / (top - low)
        assert bar == pytest.approx(WIDTH * share, abs=0.02)
    titles = [t for t in page.text if t.startswith("by ")]
    assert titles == ["by position", "by response", "by length", "by turn", "by version"]


def test_without_it_that_of_the_samples_drawn(sides):
    report = mp.compare(*sides)
    text = "\n".join(Page(report.to_html()).text)
    drift, _ = trace_drift(*zip(*report.pairs[:20], strict=True))
    assert drift.figures in text and "the samples drawn below" in text


def test_the_figure_is_to_scale(sides):
    drift, _ = trace_drift(*sides)
    data = mp.view.drift_png(drift, title="Drift of a run")
    picture = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    assert picture.shape[1] == 2160
    scale, widths, colours = Scale(drift), [], []
    before = 0
    for row in picture:
        for name in ("image", "observation"):
            rgb = [int(COLOURS[name][k : k + 2], 16) for k in (1, 3, 5)]
            width = int((row == rgb).all(axis=1).sum())
            if width:
                break
        if width and not before:
            widths.append(width)
            colours.append(name)
        before = width
    groups = drawn(drift)
    assert len(widths) == len(groups)
    for width, group in zip(widths, groups, strict=True):
        assert width == pytest.approx(scale.length(group.mean_abs) * WIDTH * SCALE, abs=3)
    turns = len(drift.axes["turn"].groups)
    assert colours.count("observation") == turns  # the axis that stands out


def test_what_is_not_drawn(sides):
    left, right = sides
    report = mp.compare(left[:2], [replace(s, rollout_logprobs=None) for s in right[:2]])
    assert "told apart" not in report.to_html()
    drift = logprob_drift(left[:1], [np.full(left[0].num_loss_tokens, np.nan)])
    assert "told apart" not in report.to_html(drift=drift)
    assert mp.view.drift_png(drift)[1:4] == b"PNG"
