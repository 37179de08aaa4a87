"""Plans of linear attention: waves and rows before a row, beside a walk over the paths, token by token."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.linear_attention import forests, rows_of

from mmpack.errors import ArgumentError
from mmpack.ops.linear_attention import plan_segments


@settings(max_examples=60)
@given(forests(9, st.sampled_from([0, 1, 2, 3, 64, 65, 130])), st.integers(0, 130))
def test_any_forest(forest, loose):
    offsets, parents = forest
    total = offsets[-1] + loose
    padding = np.arange(total) >= offsets[-1]
    plan = plan_segments(np.array(offsets), np.array(parents), padding)
    before = {}
    for g, rows in enumerate(rows_of(offsets, parents)):
        for at in range(len(rows) - (offsets[g + 1] - offsets[g]), len(rows)):
            taps = [rows[at - j] if at >= j else -1 for j in (1, 2, 3)]
            before[rows[at]] = taps
    assert plan.previous[: offsets[-1]].tolist() == [before[r] for r in range(offsets[-1])]
    readers = {row: [(row, 0)] for row in range(total)}
    for reader, taps in enumerate(plan.previous.tolist()):
        for distance, row in enumerate(taps, 1):
            if row >= 0:
                readers[row].append((reader, distance))
    far = {r: own for r, own in readers.items() if any(q != r + d for q, d in own)}
    assert plan.far.rows.tolist() == list(far)
    bounds = itertools.pairwise(plan.far.offsets.tolist())
    for own, (start, stop) in zip(far.values(), bounds, strict=True):
        assert plan.far.entries[start:stop].tolist() == [q * 4 + d for q, d in own]
    assert plan.far.offsets[-1] == len(plan.far.entries)

    assert plan.rows == total and (np.diff(plan.offsets) > 0).all()
    order = torch.arange(total) if plan.order is None else plan.order.long()
    if plan.place is not None:
        assert torch.equal(order[plan.place.long()], torch.arange(total))
    at, segments = 0, []
    for depth, wave in enumerate(plan.waves):
        here = np.flatnonzero(plan.depths == depth)
        wanted = [np.arange(plan.offsets[g], plan.offsets[g + 1]) for g in here]
        assert order[at : at + wave.rows].tolist() == np.concatenate(wanted).tolist()
        assert wave.cu_seqlens.diff().tolist() == [len(w) for w in wanted]
        pairs = [[s, c] for s, w in enumerate(wanted) for c in range(-(-len(w) // 64))]
        assert wave.chunk_indices.tolist() == pairs
        if depth:
            assert [segments[p] for p in wave.parents] == plan.parents[here].tolist()
        segments, at = here.tolist(), at + wave.rows
    assert at == total


def test_to_another_device_and_through_a_pipe():
    plan = plan_segments(np.array([0, 2, 4, 5]), np.array([-1, 0, 0]))
    moved = plan.to("meta")
    assert plan.to("cpu") is plan and moved.device.type == "meta"
    assert moved.waves[1].parents.device.type == "meta" and moved.far.entries.is_meta
    plan.chunk_plan()
    again = pickle.loads(pickle.dumps(plan))
    assert torch.equal(again.previous, plan.previous) and again.segments == 3


@pytest.mark.parametrize(
    ("offsets", "parents", "padding", "message"),
    [
        ([0, 2], [-1, -1], None, "expected .G.1. and .G."),
        ([1, 2], [-1], None, "must rise from 0"),
        ([0, 2, 1], [-1, -1], None, "must rise from 0"),
        ([0, 2, 3], [-1, 1], None, "segment 1 has parent 1"),
        ([0, 2], [-2], None, "segment 0 has parent -2"),
        ([0, 2.5], [-1], None, "offsets are float64, expected integers"),
        ([0, 2], [-1.0], None, "parents are float64, expected integers"),
        ([0, 3], [-1], [False, True, False], "segment 0, rows 0 to 3, has padding between tokens"),
        ([0, 3], [-1], [False, False], "padding is bool of 2 rows"),
        ([0, 2], [-1], [False, False, False], "padding is bool of 3 rows"),
    ],
)
def test_refusals(offsets, parents, padding, message):
    padding = None if padding is None else np.array(padding)
    with pytest.raises(ArgumentError, match=message):
        plan_segments(np.array(offsets), np.array(parents), padding)


@pytest.mark.parametrize("width", [0, 2.5])
def test_refused_widths(width):
    with pytest.raises(ArgumentError, match=f"conv_width is {width}, expected a whole number"):
        plan_segments(np.array([0, 2]), np.array([-1]), conv_width=width)
