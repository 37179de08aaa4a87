"""Attention plans against the rule itself: every query's keys, its blocks, padding; on random forests."""

import copy
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import draw, forest, packed
from support.lines import lay, lines, plan_of, windows

from mmpack.errors import ArgumentError
from mmpack.ops.attention import flex as flex_module
from mmpack.ops.attention import plan_attention, plan_of_rule, plan_sequences, tree_attention
from mmpack.ops.attention.attention_plan import PADDING_PIECE
from mmpack.ops.attention.flex import block_mask, block_mask_of_sequences
from mmpack.ops.attention.rule import FLEX_BLOCK, path_of, path_on_device
from mmpack.ops.attention.tree_attention import rule_of


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
    plan, sees = plan_attention(line.until, line.padding), line.sees()
    keys = keys_of_rows(plan)
    assert sorted(keys) == list(range(len(line.until)))
    for q in np.flatnonzero(~line.padding):
        assert keys[q] == np.flatnonzero(sees[q]).tolist()
    for q in np.flatnonzero(line.padding):
        assert keys[q][-1] == q and line.padding[keys[q]].all()
    assert plan.pairs == sum(map(len, keys.values()))
    lengths = plan.cu_seqlens_q.diff(), plan.cu_seqlens_k.diff()
    assert (plan.max_seqlen_q, plan.max_seqlen_k) == tuple(int(x.max()) for x in lengths)
    starts = plan.cu_seqlens_q[:-1].numpy()
    shared = any((line.until[:start] > start).any() for start in starts)
    assert (plan.key_rows is not None) == shared == (plan.key_inverse is not None)
    if shared:
        order, offsets = plan.key_inverse
        for row in range(plan.rows):
            found = order[offsets[row] : offsets[row + 1]].tolist()
            assert found == np.flatnonzero(plan.key_rows.numpy() == row).tolist()


def rectangle(some, left=False):
    """Lines of one batch, padded to one width on either side: until, start, padding [B, S], where each begins."""
    width = max(len(line.until) for line in some)
    until = np.tile(np.arange(1, width + 1, dtype=np.int32), (len(some), 1))
    start = np.tile(np.arange(width, dtype=np.int32), (len(some), 1))
    padding, begin = np.ones(until.shape, dtype=bool), []
    for b, line in enumerate(some):
        at = width - len(line.until) if left else 0
        here = slice(at, at + len(line.until))
        until[b, here], start[b, here], padding[b, here] = (
            line.until + at,
            line.start + at,
            line.padding,
        )
        begin.append(b * width + at)
    return until, start, padding, begin


@given(st.lists(lines(), min_size=1, max_size=3), st.booleans())
def test_lines_of_one_batch_see_nothing_of_each_other(some, left):
    until, _, padding, begin = rectangle(some, left)
    keys = keys_of_rows(plan_attention(until, padding))
    assert len(keys) == padding.size
    for line, at in zip(some, begin, strict=True):
        for q in np.flatnonzero(~line.padding):
            assert keys[at + q] == (at + np.flatnonzero(line.sees()[q])).tolist()


@settings(max_examples=40)
@given(lines(), windows, st.booleans())
def test_a_plan_counts_what_kernels_compute(line, window, two_way):
    plan = plan_of(line, window, two_way)
    seen, tokens = line.sees(window, two_way), np.flatnonzero(~line.padding)
    below = range(int(line.padding.sum()))  # padding sees padding, within the window
    own = plan.pairs - sum(min(i + 1, window or i + 1) for i in below)
    of_blocks = 0
    for b in np.unique(line.block[line.block >= 0]):
        rows = np.flatnonzero(line.block == b)
        of_blocks += seen[rows].sum() if len(rows) > 1 else 0
    assert own == line.sees(window)[tokens].sum() + (of_blocks if two_way else 0)
    assert np.array_equal(path_of(line.until)[tokens], [len(line.above[t]) - 1 for t in tokens])
    found = path_on_device(torch.from_numpy(line.until)[None])[0]
    assert found.tolist() == path_of(line.until).tolist()


def blocks_of(dense, size=FLEX_BLOCK):
    """Which blocks of dense [B, T, T] hold something, and which hold all."""
    count = -(-dense.shape[1] // size)
    whole = np.zeros((len(dense), count * size, count * size), dtype=bool)
    whole[:, : dense.shape[1], : dense.shape[1]] = dense
    blocks = whole.reshape(len(dense), count, size, count, size)
    return blocks.any((2, 4)), blocks.all((2, 4))


def listed(mask):
    """Which blocks are visited with a mask, and without."""
    found = []
    for numbers, columns in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        taken = torch.arange(columns.shape[-1]) < numbers[..., None]
        found.append(torch.zeros_like(taken).scatter_(-1, columns.long(), taken)[:, 0].numpy())
    return found


@settings(max_examples=25)
@given(
    st.lists(lines(longest=90), min_size=1, max_size=2),
    windows | st.integers(60, 300),
    st.booleans(),
)
def test_blocks_of_flex_attention(some, window, two_way):
    """Which blocks it visits and which it takes for full, and its rule of one pair, against the dense rule."""
    until, start, _, _ = rectangle(some)
    width = until.shape[1]
    dense = np.tile(np.eye(width, dtype=bool), (len(some), 1, 1))
    for b, line in enumerate(some):
        dense[b, : len(line.until), : len(line.until)] = line.sees(window, two_way)
    plan = plan_attention(until, np.zeros(until.shape, bool), start)
    plan = plan if window is None and not two_way else plan_of_rule(plan, window, two_way)
    first = torch.from_numpy(start) if two_way else None
    rule = rule_of(torch.from_numpy(until), first, window, plan)
    mask, row = block_mask(rule), torch.arange(width)
    found = mask.mask_mod(torch.arange(len(some))[:, None, None], None, row[:, None], row[None])
    assert np.array_equal(found.expand(dense.shape).numpy(), dense)
    assert np.array_equal(rule.mask(0, width).expand(dense.shape).numpy(), dense)
    (some_seen, all_seen), (mixed, full) = blocks_of(dense), listed(mask)
    assert not (mixed & full).any() and not (full & ~all_seen).any()
    assert not (some_seen & ~mixed & ~full).any()
    if window is None and not two_way:
        assert np.array_equal(full, all_seen) and np.array_equal(mixed | full, some_seen)
    assert (plan.full_blocks, plan.mixed_blocks) == (full.sum(), mixed.sum())


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9))
def test_blocks_of_sequences(lengths):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_module, "FLEX_BLOCK", 4)
        mask = block_mask_of_sequences(plan_sequences(lengths))
    own = np.repeat(np.arange(len(lengths)), lengths)
    seen, row = own[:, None] == own, torch.arange(len(own))
    assert np.array_equal(mask.mask_mod(None, None, row[:, None], row[None]).numpy(), seen)
    (some_seen, all_seen), (mixed, full) = blocks_of(seen[None], 4), listed(mask)
    assert np.array_equal(full, all_seen) and np.array_equal(mixed | full, some_seen)


def test_long_padding_is_cut():
    count = 3 * PADDING_PIECE + 7
    until = np.append(np.full(5, 5), np.arange(6, 6 + count))
    plan = plan_attention(until, np.arange(5 + count) >= 5)
    assert plan.cu_seqlens_q.diff().tolist() == [5, *[PADDING_PIECE] * 3, 7]


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


def test_a_rule_that_says_nothing_is_the_plan_itself():
    """A window longer than all paths and blocks of one row: the same arrays, and the same bits."""
    line = lay([(0, [3, -1, 2]), (1, [2]), (1, [4])])
    plan = plan_attention(line.until, line.padding, line.start)
    longest = max(map(len, line.above))
    made = plan_of_rule(plan, longest, True)
    assert made.key_rows is plan.key_rows and made.cu_seqlens_k is plan.cu_seqlens_k
    assert made.path is None and made.blocks is None and not made.windowed
    assert plan_of_rule(plan, longest - 1).windowed
    until, start = torch.from_numpy(line.until), torch.from_numpy(line.start)
    q, k, v, _ = draw(1, 2, 1, len(until), 8, torch.float32)
    found = tree_attention(q, k, v, until, made, visible_from=start, window=longest)
    assert torch.equal(found, tree_attention(q, k, v, until, plan))


def test_a_window_leaves_out_the_keys_before_it():
    """Of a branch far below its root, whose window begins on the root or behind it."""
    line = lay([(0, [100]), (1, [5]), (1, [50, 3])])
    plan = plan_attention(line.until, line.padding)
    made = plan_of_rule(plan, 8)
    assert made.cu_seqlens_k.tolist() == [0, 105, 105 + 53 + 7] and made.gathered < plan.gathered
    for arguments, message in (
        ((made, 4), "the plan was made for a rule already"),
        ((plan, None, True), "the plan has no two-way blocks"),
        ((plan, 0), "window is 0, expected a whole number of 1 or more"),
    ):
        with pytest.raises(ArgumentError, match=message):
            plan_of_rule(*arguments)


def test_a_plan_is_of_one_visible_until():
    until, own, _ = packed([(2, [1, 3]), 4])
    own.check(until)
    own.check(until.long())
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
    own.choice = {torch.float32: "sdpa"}
    until, own = until.to("meta"), own.to("meta")
    assert own.choice is None  # what was chosen for another device
    for _ in range(2):
        own.check(until)
    until += 1
    with pytest.raises(ArgumentError, match="was changed since"):
        own.check(until)
