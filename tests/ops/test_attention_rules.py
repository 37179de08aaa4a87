"""Windows along the path and two-way blocks against the dense rule by ancestors: plans, blocks, kernels' rows."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import (
    draw,
    gradients,
    in_sequence,
    one_sequence_after_the_other,
    run_varlen_on_the_cpu,
)
from torch.nn.attention.flex_attention import flex_attention

from mmpack.errors import ArgumentError, BackendError
from mmpack.ops.attention import TREE, plan_attention, plan_of_rule, tree_attention, varlen
from mmpack.ops.attention.attention_plan import FLEX_BLOCK
from mmpack.ops.attention.flex import block_mask
from mmpack.ops.attention.rule import Rule, path_of, path_on_device
from mmpack.ops.attention.tree_attention import rule_of


class Line(NamedTuple):
    until: np.ndarray  # int32 [T]
    start: np.ndarray
    padding: np.ndarray
    above: list  # of each row, its path from the root, itself last
    block: np.ndarray  # number of the row's block, -1: text

    def sees(self, window=None, two_way=False):
        """bool [T, T], pair by pair."""
        size = len(self.until)
        seen = np.zeros((size, size), dtype=bool)
        for q in range(size):
            for k in self.above[q]:
                seen[q, k] = True
            if two_way and self.block[q] >= 0:
                seen[q, self.block == self.block[q]] = True
            for k in np.flatnonzero(seen[q]):
                if window is not None and len(self.above[q]) - len(self.above[k]) >= window:
                    seen[q, k] = False
        return seen


def lay(segments, padding=0):
    """Segments in depth-first order: (depth, pieces); a piece is a count of text rows, or a block's, negative."""
    above, block, until = [], [], []
    ends, stack = {}, []
    for number, (depth, pieces) in enumerate(segments):
        stack = stack[:depth]
        path = list(above[stack[-1][1]]) if stack else []
        begin = len(above)
        for piece in pieces:
            own = len(above) if piece < 0 else -1
            for _ in range(abs(piece)):
                path = [*path, len(above)]
                above.append(path)
                block.append(own)
        stack.append((number, len(above) - 1))
        for n, _ in stack:
            ends[n] = len(above)
        until += [number] * (len(above) - begin)
    until = [ends[n] for n in until]
    total = len(until)
    for i in range(padding):
        above.append([total + i])
        block.append(-1)
        until.append(total + i + 1)
    start = np.array([b if b >= 0 else i for i, b in enumerate(block)])
    return Line(
        np.array(until, dtype=np.int32),
        start.astype(np.int32),
        np.arange(len(until)) >= total,
        above,
        np.array(block),
    )


@st.composite
def lines(draw_, longest=6):
    segments, depth = [], 0
    for number in range(draw_(st.integers(1, 6))):
        depth = draw_(st.integers(0, depth)) if number else 0
        size = st.integers(1, longest)
        pieces = draw_(st.lists(size | size.map(lambda n: -n), min_size=1, max_size=4))
        segments.append((depth, pieces))
        depth += 1
    return lay(segments, draw_(st.integers(0, 3)))


windows = st.none() | st.integers(1, 12)
TREES = lay(
    [(0, [3, -4, 2]), (1, [2, -3, -2, 5]), (2, [1]), (2, [-5, 1]), (1, [9]), (0, [-2, 4])], 3
)


def by_dense_rule(q, k, v, seen):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~torch.from_numpy(seen), -torch.inf)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


def in_turn(q, k, v, lengths, scale, return_lse=False):
    cu = lengths.cu_seqlens_q.tolist(), lengths.cu_seqlens_k.tolist()
    assert lengths.max_seqlen_k == int(lengths.cu_seqlens_k.diff().max())
    found = one_sequence_after_the_other(
        q, k, v, *cu, scale, causal=lengths.causal, window=lengths.window
    )
    return found if return_lse else found[0]


def plan_of(line, window, two_way):
    return plan_of_rule(plan_attention(line.until, line.padding, line.start), window, two_way)


def assert_near(found, expected, rows, off=1e-12):
    assert (found[0] - expected[0])[:, rows].abs().max() <= off
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert (a - b)[:, :, rows].abs().max() <= off


@settings(max_examples=20)
@given(lines(), windows, st.booleans())
def test_values_and_gradients_are_those_of_the_dense_rule(line, window, two_way):
    size = len(line.until)
    q, k, v, grad = draw(1, 2, 1, size, 4, torch.float64)
    rows = torch.from_numpy(~line.padding)
    grad = grad * rows[:, None, None]
    seen = line.sees(window, two_way)
    expected = gradients(lambda *x: by_dense_rule(*x, seen), q, k, v, grad)
    plan = plan_of(line, window, two_way)
    until, start = torch.from_numpy(line.until), torch.from_numpy(line.start)
    rule = {"visible_from": start if two_way else None, "window": window}
    for own in (plan, None):
        found = gradients(lambda *x, p=own: tree_attention(*x, until, p, **rule), q, k, v, grad)
        assert_near(found, expected, rows)
    found = gradients(lambda *x: varlen.by_sequences(in_turn, *x, plan, None)[0], q, k, v, grad)
    assert_near(found, expected, rows)


@settings(max_examples=40)
@given(lines(), windows, st.booleans())
def test_a_plan_counts_what_kernels_compute(line, window, two_way):
    plan = plan_of(line, window, two_way)
    seen = line.sees(window, two_way)
    tokens = np.flatnonzero(~line.padding)
    own = plan.pairs - sum(n * (n + 1) // 2 for n in [line.padding.sum()])
    if window is None:
        expected = line.sees().sum() - line.padding.sum()
    else:
        own, expected = 0, 0  # padding sees padding within the window: counted below
        expected = line.sees(window)[tokens].sum()
        own = plan.pairs - sum(min(i + 1, window) for i in range(line.padding.sum()))
    of_blocks = 0
    for b in np.unique(line.block[line.block >= 0]):
        rows = np.flatnonzero(line.block == b)
        of_blocks += seen[rows].sum() if len(rows) > 1 else 0
    assert own == expected + (of_blocks if two_way else 0)
    assert np.array_equal(path_of(line.until)[tokens], [len(line.above[t]) - 1 for t in tokens])
    found = path_on_device(torch.from_numpy(line.until)[None])[0]
    assert found.tolist() == path_of(line.until).tolist()


@settings(max_examples=15)
@given(
    st.lists(lines(longest=90), min_size=1, max_size=2),
    windows | st.integers(60, 300),
    st.booleans(),
)
def test_blocks_of_flex(some, window, two_way):
    width = max(len(line.until) for line in some)
    until = np.tile(np.arange(1, width + 1, dtype=np.int32), (len(some), 1))
    start = np.tile(np.arange(width, dtype=np.int32), (len(some), 1))
    dense = np.tile(np.eye(width, dtype=bool), (len(some), 1, 1))
    for b, line in enumerate(some):
        size = len(line.until)
        until[b, :size], start[b, :size] = line.until, line.start
        dense[b, :size, :size] = line.sees(window, two_way)
    plan = plan_of_rule(plan_attention(until, np.zeros(until.shape, bool), start), window, two_way)
    first = torch.from_numpy(start) if two_way else None
    rule = rule_of(torch.from_numpy(until), first, window, plan)
    mask = block_mask(rule)
    row = torch.arange(width)
    line = torch.arange(len(some))[:, None, None]
    found = mask.mask_mod(line, None, row[:, None], row[None])
    assert np.array_equal(found.expand(len(some), width, width).numpy(), dense)
    assert np.array_equal(rule.mask(0, width).expand(len(some), -1, -1).numpy(), dense)
    count = -(-width // FLEX_BLOCK)
    whole = np.zeros((len(some), count * FLEX_BLOCK, count * FLEX_BLOCK), dtype=bool)
    whole[:, :width, :width] = dense
    blocks = whole.reshape(len(some), count, FLEX_BLOCK, count, FLEX_BLOCK)
    any_, all_ = blocks.any((2, 4)), blocks.all((2, 4))
    numbers = mask.kv_num_blocks[:, 0], mask.full_kv_num_blocks[:, 0]
    lists = mask.kv_indices[:, 0], mask.full_kv_indices[:, 0]
    for b in range(len(some)):
        for i in range(count):
            mixed, full = (
                set(x[b, i, : n[b, i]].tolist()) for n, x in zip(numbers, lists, strict=True)
            )
            assert not mixed & full and all(all_[b, i, j] for j in full)
            assert set(np.flatnonzero(any_[b, i])) <= mixed | full
    assert (plan.full_blocks, plan.mixed_blocks) == (int(numbers[1].sum()), int(numbers[0].sum()))


def test_windows_of_any_length_share_a_graph_of_flex():
    """A window as a number would be an input of the second graph, and FlashAttention-4 takes none."""
    line, graphs = lay([(0, [150])]), []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    until, path = (torch.from_numpy(x)[None] for x in (line.until, path_of(line.until)))
    q, _, _, _ = draw(1, 1, 1, 150, 16, torch.float32)
    torch._dynamo.reset()
    run = torch.compile(flex_attention, backend=count)
    for window in (100, 20, 7):
        found = run(q, q, q, block_mask=block_mask(Rule(until, None, path, window)))
        seen = in_sequence(150, 150, window=window).numpy()
        assert torch.allclose(found.transpose(1, 2), by_dense_rule(q, q, q, seen), atol=1e-5)
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["varlen", "flash_attn", "flash_attn_4"])
def test_what_kernels_of_sequences_are_told(name, monkeypatch):
    """Their arguments as the packages name them, computed here by explicit softmax; log-sum-exp too."""
    import sys

    from support.attention import gradients_in_turn, of_window, stand_in

    def of_two(q, k, v, cu_q, cu_k, *sizes, softmax_scale, causal, window_size, **rest):
        window = of_window((window_size[0], 0 if causal else window_size[1]))
        out = one_sequence_after_the_other(
            q, k, v, cu_q.tolist(), cu_k.tolist(), softmax_scale, **window
        )
        return (*out, None) if rest.get("return_attn_probs") else out[0]

    def numbers(rest):
        return {
            "causal": rest["causal"],
            "window": rest.get("window_size_left", -2) + 1 if "window_size_left" in rest else None,
        }

    def forward(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, **rest):
        cu = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        return one_sequence_after_the_other(q, k, v, *cu, softmax_scale, **numbers(rest))

    def backward(q, k, v, out, dout, lse, *, cu_seqlens_q, cu_seqlens_k, **rest):
        return gradients_in_turn(
            q, k, v, dout, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), **numbers(rest)
        )

    interface = stand_in("interface", _flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setitem(
        sys.modules, "flash_attn", stand_in("flash_attn", flash_attn_varlen_func=of_two)
    )
    monkeypatch.setitem(sys.modules, "flash_attn.cute", stand_in("flash_attn.cute"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    line, window = TREES, 4
    rows = torch.from_numpy(~line.padding)
    q, k, v, grad = draw(1, 2, 1, len(line.until), 8, torch.float64)
    grad = grad * rows[:, None, None]
    for window, two_way in ((4, True), (4, False), (None, True)):
        seen = line.sees(window, two_way)
        expected = gradients(lambda *x, s=seen: by_dense_rule(*x, s), q, k, v, grad)
        plan = plan_of(line, window, two_way)
        library = torch.library.Library("torch_attn", "IMPL")
        try:
            if name == "varlen":
                run_varlen_on_the_cpu(library)
            kernel = varlen.KERNELS[name]
            found = gradients(
                lambda *x, f=kernel, p=plan: varlen.by_sequences(f, *x, p, None)[0], q, k, v, grad
            )
            assert_near(found, expected, rows)
            out, lse = varlen.by_sequences(kernel, q, k, v, plan, None, return_lse=True)
        finally:
            library._destroy()
        scores = (q @ k.repeat_interleave(2, 1).mT * 8**-0.5).masked_fill(
            ~torch.from_numpy(seen), -torch.inf
        )
        assert (out - expected[0])[:, rows].abs().max() <= 1e-12
        assert (lse - scores.logsumexp(-1))[:, :, rows].abs().max() <= 1e-5


def test_log_sum_exp_and_its_gradient():
    line = TREES
    until, start = torch.from_numpy(line.until), torch.from_numpy(line.start)
    q, k, v, _ = draw(1, 2, 1, len(until), 8, torch.float64)
    weight = torch.randn(1, 2, len(until), dtype=torch.float64)
    seen = torch.from_numpy(line.sees(4, True))
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    scores = leaves[0] @ leaves[1].repeat_interleave(2, 1).mT * 8**-0.5
    expected = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    for plan in (plan_of(line, 4, True), None):
        own = [x.detach().requires_grad_() for x in (q, k)]
        _, lse = tree_attention(*own, v, until, plan, visible_from=start, window=4, return_lse=True)
        found = torch.autograd.grad((lse * weight).sum(), own)
        assert (lse - expected).abs().max() <= 1e-12
        for a, b in zip(found, wanted, strict=True):
            assert (a - b).abs().max() <= 1e-12


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
    assert plan_of_rule(plan, 8).cu_seqlens_k.tolist() == [0, 105, 105 + 53 + 7]
    assert plan_of_rule(plan, 8).gathered < plan.gathered


def test_wrong_use_is_an_error():
    line = TREES
    until, start = torch.from_numpy(line.until), torch.from_numpy(line.start)
    q, k, v, _ = draw(1, 2, 1, len(until), 8, torch.float32)
    plan = plan_attention(line.until, line.padding, line.start)
    with pytest.raises(
        ArgumentError,
        match="plan is for no window and no two-way blocks, but the call for a window of 4",
    ):
        tree_attention(q, k, v, until, plan, window=4)
    made = plan_of_rule(plan, 4, True)
    with pytest.raises(
        ArgumentError,
        match="a window of 4 and two-way blocks, but the call for a window of 4 and no",
    ):
        tree_attention(q, k, v, until, made, window=4)
    with pytest.raises(ArgumentError, match="the plan was made of another visible_from"):
        tree_attention(q, k, v, until, made, window=4, visible_from=torch.zeros_like(start))
    with pytest.raises(ArgumentError, match="the plan was made for a rule already"):
        plan_of_rule(made, 4)
    with pytest.raises(ArgumentError, match="the plan has no two-way blocks"):
        plan_of_rule(plan_attention(line.until, line.padding), None, True)
    with pytest.raises(ArgumentError, match="window is 0, expected a whole number of 1 or more"):
        plan_of_rule(plan, 0)
    with pytest.raises(ArgumentError, match="visible_from has shape"):
        tree_attention(q, k, v, until, visible_from=start[1:])


def test_backends_that_keep_to_no_window_are_refused(monkeypatch):
    plan = plan_of(TREES, 4, False)
    cpu = torch.device("cpu")
    assert "fixed_blocks keeps to no sliding window" in TREE.why_not(
        "fixed_blocks", cpu, torch.float32, 8, 0.0, plan
    )
    monkeypatch.setenv("MMPACK_ATTENTION", "fixed_blocks")
    with pytest.raises(
        BackendError, match=r"fixed_blocks keeps to no sliding window, which the model has.*Fix"
    ):
        TREE.choices(plan, cpu, 8)
    assert set(TREE.choices(plan_of(TREES, None, True), cpu, 8).values()) == {"fixed_blocks"}
    q, k, v, grad = draw(1, 2, 1, len(TREES.until), 8, torch.float64)
    rows = torch.from_numpy(~TREES.padding)
    grad = grad * rows[:, None, None]
    until, start = torch.from_numpy(TREES.until), torch.from_numpy(TREES.start)
    own = plan_of(TREES, None, True)
    found = gradients(lambda *x: tree_attention(*x, until, own, visible_from=start), q, k, v, grad)
    seen = TREES.sees(None, True)
    assert_near(found, gradients(lambda *x: by_dense_rule(*x, seen), q, k, v, grad), rows)
