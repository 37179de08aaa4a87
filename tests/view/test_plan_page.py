"""A plan as a page: every micro-batch is a box as wide as its cost, in its rank's lane; it fits, and nothing runs."""

import itertools
import re

import pytest
from support import drawn
from support.groups import answered

import mmpack as mp
from mmpack.planning import CostModel


def a_plan(ranks=3, error=None):
    cost = CostModel(row=1e-4, patch=1e-5, error=error)
    return mp.plan(drawn.answers(6, 3), max_tokens=400, ranks=ranks, share_prefix=True, cost=cost)


def boxes(html):
    """(x, width, words) of each box."""
    found = re.findall(
        r'<rect class="mm-box" rx="3" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="\d+">'
        r"<title>(.*?)</title>",
        html,
    )
    return [(float(x), float(y), float(w), words) for x, y, w, words in found]


def test_boxes_are_as_wide_as_their_cost_and_lie_side_by_side():
    plan = a_plan()
    found = boxes(mp.view.html(plan))
    assert len(found) == len(plan.bins)
    ordered = [b for rank in plan.ranks for b in rank]
    lanes = {}
    for (x, y, width, words), b in zip(found, ordered, strict=True):
        # a pixel of space, and a decimal
        assert width + 1 == pytest.approx(
            (found[0][2] + 1) * plan.bin_costs[b] / plan.bin_costs[ordered[0]], abs=0.2
        )
        assert words.startswith(
            f"micro-batch {b}: {len(plan.bins[b])} samples, {plan.bin_rows[b]:,} rows"
        )
        assert f"{plan.bin_patches[b]:,} patches, {plan.bin_loss_tokens[b]:,} loss tokens" in words
        lanes.setdefault(y, []).append((x, width))
    assert len(lanes) == len(plan.ranks)
    for places in lanes.values():
        for (x, width), (following, _) in itertools.pairwise(places):
            assert x + width + 1 == pytest.approx(following, abs=0.3)


def test_figures_and_titles():
    html = mp.view.html(a_plan(error=0.1), title="<b>step 7</b>")
    assert "&lt;b&gt;step 7&lt;/b&gt;" in html and "<b>step" not in html
    for name in ("makespan_whole", "rows_repeated", "lockstep", "max_tokens", "seconds_error"):
        assert name in html
    assert re.search(r">[\d.]+ s</text>", html)
    assert not re.search(r">[\d.]+ s</text>", mp.view.html(a_plan()))


def test_many_ranks_and_none():
    samples = [answered(f"s{k}", f"g{k}", [5], [7] * (k + 1)) for k in range(130)]
    html = mp.view.html(mp.plan(samples, max_tokens=200, ranks=65))
    assert "The first 64 ranks are drawn; 1 more are not." in html
    assert "0 samples" in mp.view.html(mp.plan([], max_tokens=8))
