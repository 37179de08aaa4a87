"""The attention plan against the rule itself: every query's keys, its blocks, padding; on random forests."""

import copy
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention import forest, packed

from mmpack.errors import ArgumentError
from mmpack.ops.attention import plan_attention
from mmpack.ops.attention.attention_plan import FLEX_BLOCK, PADDING_PIECE
from mmpack.ops.attention.rule import Rule


@st.composite
def lines(draw, longest=6):
    """visible_until of one line, and what each row sees, from ancestors only; then padding."""
    lengths, parents, on_path = [], [], [-1]
    for g in range(draw(st.integers(1, 7))):
        # of the branch that was left last, or a new root
        parents.append(draw(st.sampled_from(on_path)))
        on_path = [*on_path[: on_path.index(parents[-1]) + 1], g]
        lengths.append(draw(st.integers(1, longest)))
    owner = np.repeat(np.arange(len(lengths)), lengths)
    ancestors = [{g} for g in range(len(lengths))]
    for g, parent in enumerate(parents):
        ancestors[g] |= ancestors[parent] if parent >= 0 else set()
    padding = draw(st.integers(0, 3))
    total = len(owner) + padding
    sees = np.eye(total, dtype=bool)
    for q in range(len(owner)):
        for k in range(q + 1):
            sees[q, k] = owner[k] in ancestors[owner[q]]
    until = total - np.argmax(sees[::-1], axis=0)
    return until, sees, np.arange(total) >= len(owner)


def keys_of_rows(plan):
    """For each row the keys that a bottom-right causal kernel gives it."""
    out = {}
    cu_q, cu_k = plan.cu_seqlens_q.tolist(), plan.cu_seqlens_k.tolist()
    keys = list(range(plan.rows)) if plan.key_rows is None else plan.key_rows.tolist()
    for s in range(len(cu_q) - 1):
        own = keys[cu_k[s] : cu_k[s + 1]]
        count = cu_q[s + 1] - cu_q[s]
        for i in range(count):
            out[cu_q[s] + i] = own[: len(own) - count + i + 1]
    return out


@given(lines())
def test_every_query_has_exactly_its_keys_in_order(line):
    until, sees, padding = line
    plan = plan_attention(until.astype(np.int32), padding)
    keys = keys_of_rows(plan)
    assert sorted(keys) == list(range(len(until)))
    for q in np.flatnonzero(~padding):
        assert keys[q] == np.flatnonzero(sees[q]).tolist()
    for q in np.flatnonzero(padding):
        assert keys[q][-1] == q and padding[keys[q]].all()
    assert plan.pairs == sum(map(len, keys.values()))
    lengths = plan.cu_seqlens_q.diff(), plan.cu_seqlens_k.diff()
    assert (plan.max_seqlen_q, plan.max_seqlen_k) == tuple(int(x.max()) for x in lengths)
    rule = np.arange(len(until))
    assert np.array_equal(sees, (rule[None] <= rule[:, None]) & (rule[:, None] < until[None]))


@given(lines())
def test_keys_are_gathered_only_where_rows_are_shared_and_the_inverse_finds_them(line):
    until, _, padding = line
    plan = plan_attention(until, padding)
    starts = plan.cu_seqlens_q[:-1].numpy()
    shared = any((until[:start] > start).any() for start in starts)
    assert (plan.key_rows is not None) == shared == (plan.key_inverse is not None)
    if shared:
        order, offsets = plan.key_inverse
        rows = plan.key_rows.numpy()
        for row in range(plan.rows):
            found = order[offsets[row] : offsets[row + 1]].tolist()
            assert found == np.flatnonzero(rows == row).tolist()


@given(st.lists(lines(), min_size=1, max_size=3), st.booleans())
def test_rectangles(some, left):
    """Lines of one batch see nothing of each other, padded on either side."""
    width = max(len(u) for u, _, _ in some)
    until = np.tile(np.arange(1, width + 1), (len(some), 1))
    padding = np.ones((len(some), width), dtype=bool)
    expected = {}
    for b, (u, sees, pad) in enumerate(some):
        at = width - len(u) if left else 0
        until[b, at : at + len(u)] = u + at
        padding[b, at : at + len(u)] = pad
        for q in np.flatnonzero(~pad):
            expected[b * width + at + q] = (b * width + at + np.flatnonzero(sees[q])).tolist()
    keys = keys_of_rows(plan_attention(until, padding))
    assert len(keys) == padding.size
    assert {q: keys[q] for q in expected} == expected


def test_long_padding_is_cut():
    count = 3 * PADDING_PIECE + 7
    until = np.append(np.full(5, 5), np.arange(6, 6 + count))
    plan = plan_attention(until, np.arange(5 + count) >= 5)
    assert plan.cu_seqlens_q.diff().tolist() == [5, *[PADDING_PIECE] * 3, 7]


@given(st.lists(lines(longest=200), min_size=1, max_size=2))
def test_blocks(some):
    """Which blocks FlexAttention visits and which it takes for full, against the dense rule."""
    from mmpack.ops.attention.flex import block_mask

    width = max(len(u) for u, _, _ in some)
    until = np.tile(np.arange(1, width + 1), (len(some), 1))
    for b, (u, _, _) in enumerate(some):
        until[b, : len(u)] = u
    count = -(-width // FLEX_BLOCK)
    at = np.arange(width)
    sees = np.zeros((len(some), count * FLEX_BLOCK, count * FLEX_BLOCK), dtype=bool)
    sees[:, :width, :width] = (at[None] <= at[:, None]) & (at[:, None] < until[:, None])
    blocks = sees.reshape(len(some), count, FLEX_BLOCK, count, FLEX_BLOCK)
    some_seen, all_seen = blocks.any(axis=(2, 4)), blocks.all(axis=(2, 4))
    plan = plan_attention(until, np.zeros_like(until, dtype=bool))
    assert plan.full_blocks == all_seen.sum()
    assert plan.mixed_blocks == some_seen.sum() - all_seen.sum()

    mask = block_mask(Rule(torch.from_numpy(until.astype(np.int32))))
    assert np.array_equal(mask.to_dense()[:, 0].bool().numpy(), some_seen)
    for b in range(len(some)):
        for i in range(count):
            full = mask.full_kv_indices[b, 0, i, : mask.full_kv_num_blocks[b, 0, i]]
            assert full.tolist() == np.flatnonzero(all_seen[b, i]).tolist()
    heads = torch.zeros(1, dtype=torch.int64)
    pairs = [torch.from_numpy(x) for x in np.nonzero(np.ones((len(some), width, width)))]
    seen = mask.mask_mod(pairs[0], heads, pairs[1], pairs[2])
    assert np.array_equal(seen.view(len(some), width, width).numpy(), sees[:, :width, :width])


def lines_run(turns):
    """How many lines of the plan's file run for a chain whose every turn has a branch beside what follows."""
    tree = 3
    for _ in range(turns):
        tree = (3, [2, tree])
    ran = 0

    def trace(frame, event, arg):
        nonlocal ran
        if frame.f_code.co_filename != plan_attention.__code__.co_filename:
            return None
        ran += event == "line"
        return trace

    until, padding = forest([tree])
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = plan_attention(until, padding)
    finally:
        sys.settrace(before)
    assert len(found.cu_seqlens_q) == turns + 2
    return ran


def test_long_chains_run_no_loop():
    assert 0 < lines_run(10) == lines_run(150)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_no_rows(shape):
    found = plan_attention(np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=bool))
    assert (found.rows, found.pairs, found.key_rows, found.full_blocks) == (0, 0, None, 0)
    assert (found.max_seqlen_q, found.max_seqlen_k) == (0, 0)
    assert found.cu_seqlens_q.tolist() == found.cu_seqlens_k.tolist() == [0]


def test_a_plan_is_of_one_visible_until():
    until, own, _ = packed([(2, [1, 3]), 4])
    own.check(until)
    own.check(until.clone())
    own.check(until.long())
    with torch.inference_mode():
        own.check(until.clone())
    _, other, _ = packed([(2, [3, 1]), 4])
    with pytest.raises(ArgumentError, match="the plan was made of another visible_until"):
        other.check(until)
    own.check(until)
    until[0] = 1
    for plan in (own, copy.deepcopy(own)):
        with pytest.raises(ArgumentError, match="was changed since"):
            plan.check(until)


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("by_numpy", [True, False])
def test_on_the_cpu_a_change_is_seen_whoever_made_it(inference, by_numpy):
    """torch counts neither numpy's changes nor those of tensors of inference mode."""
    with torch.inference_mode(inference):
        until, own, _ = packed([2, 3])
        until = until.clone()
        own.check(until)
        (until.numpy() if by_numpy else until)[0] = 1
        with pytest.raises(ArgumentError, match="was changed since"):
            own.check(until)


def test_a_change_in_place_is_seen_where_values_are_not_read():
    """As on a GPU: `meta` has no values at all."""
    until, own, _ = packed([2, 3])
    until, own = until.to("meta"), own.to("meta")
    own.check(until)
    own.check(until)
    until += 1
    with pytest.raises(ArgumentError, match="was changed since"):
        own.check(until)


def test_a_plan_that_moves_forgets_what_was_chosen_for_another_device():
    plan = plan_attention(np.array([3, 2, 3]), np.zeros(3, dtype=bool))
    plan.choice = {torch.float32: "sdpa"}
    moved = plan.to("meta")
    assert moved.choice is None and moved.key_inverse.order.device.type == "meta"
    assert moved.cu_seqlens_q.device.type == "meta" and plan.cu_seqlens_q.device.type == "cpu"
