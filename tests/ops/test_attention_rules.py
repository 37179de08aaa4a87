"""Attention of packed rows and within sequences against explicit softmax in float64: all outputs, and gradients."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import (
    dense,
    draw,
    gradients,
    packages_on_the_cpu,
    packed,
    run_varlen_on_the_cpu,
    sees,
    with_lse,
    within,
)
from support.lines import TREES, lines, plan_of, windows
from support.samples import make_sample
from support.tiny_models import tiny_model
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.ops.attention import (
    SEQUENCES,
    flex,
    merge_attention,
    plan_attention,
    plan_sequences,
    plan_tiles,
    resolve,
    resolve_sequences,
    sequence_attention,
    tree_attention,
    varlen,
)
from mmpack.ops.attention.rule import Rule, path_of
from mmpack.ops.attention.sequence_attention import brought_together, by_length

SHARED = [(5, [3, (2, [4, 1, 1]), 6]), 7, (1, [1, 1]), (4, [2])]
LENGTHS = {
    "one": [9],
    "sorted": [6, 6, 3, 3, 1],
    "windows at the edges": [16, 16, 8, 16, 16, 8, 4, 4, 2],
    "a tiny one and a large one": [1, 40, 4],
}
KERNELS = ("varlen", "flash_attn", "flash_attn_4")


@pytest.fixture(autouse=True)
def a_few_rows_at_a_time(monkeypatch):
    monkeypatch.setattr("mmpack.ops.attention.sdpa.QUERY_ROWS", 6)
    monkeypatch.setattr("mmpack.ops.attention.lse.ROWS", 20)


@pytest.fixture
def calls(monkeypatch):
    """Kernels of sequences on the CPU; what the packages were told."""
    told = []
    packages_on_the_cpu(monkeypatch, told)
    with torch.library._scoped_library("torch_attn", "FRAGMENT") as library:
        run_varlen_on_the_cpu(library)
        yield told


def assert_near(found, expected, off=1e-12, rows=slice(None)):
    """`rows` hold tokens."""
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        at = (slice(None), rows) if a is found[0] else (slice(None), slice(None), rows)
        assert (a - b)[at].abs().max() <= off


def inputs(plan, heads=(4, 2), dim=8, dtype=torch.float64, lines=1):
    """query, key, value, and gradients of output and log-sum-exp, of a plan's rows."""
    width = plan.rows // lines
    q, k, v, grad = draw(lines, *heads, width, dim, dtype)
    return q, k, v, grad, torch.randn(lines, heads[0], width, dtype=torch.float64)


@settings(max_examples=25)
@given(lines(), windows, st.booleans(), st.sampled_from([None, 0.3]))
def test_rows_of_a_forest(line, window, two_way, scale):
    """With a plan, without, and as sequences over gathered paths; with windows and two-way blocks."""
    plan, rows = plan_of(line, window, two_way), torch.from_numpy(~line.padding)
    q, k, v, grad, weight = inputs(plan, (2, 1), 4)
    grad, weight = grad * rows[:, None, None], weight * rows  # nobody reads padding
    seen = torch.from_numpy(line.sees(window, two_way))[None]
    expected = with_lse(lambda *x: dense(*x, seen, scale), q, k, v, grad, weight)
    until, start = torch.from_numpy(line.until), torch.from_numpy(line.start)
    rule = {"visible_from": start if two_way else None, "window": window, "scale": scale}
    for own in (plan, None):
        found = with_lse(
            lambda *x, p=own: tree_attention(*x, until, p, return_lse=True, **rule),
            q, k, v, grad, weight,
        )  # fmt: skip
        assert_near(found, expected, rows=rows)
        assert torch.equal(found[0], tree_attention(q, k, v, until, own, **rule))
    expected = gradients(lambda *x: dense(*x, seen, scale)[0], q, k, v, grad)
    found = gradients(lambda *x: varlen.by_sequences(in_turn, *x, plan, scale)[0], q, k, v, grad)
    assert_near(found, expected, rows=rows)


def in_turn(q, k, v, lengths, scale):
    from support.attention import one_sequence_after_the_other

    cu = lengths.cu_seqlens_q.tolist(), lengths.cu_seqlens_k.tolist()
    seen = {"causal": lengths.causal, "window": lengths.window}
    return one_sequence_after_the_other(q, k, v, *cu, scale, **seen)[0]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("lines_", [1, 2])
def test_rows_of_sequences(name, scale, lines_):
    lengths = LENGTHS[name]
    plan = plan_sequences(lengths * lines_)
    given_ = inputs(plan, lines=lines_)
    seen = within(lengths)
    expected = with_lse(lambda *x: dense(*x, seen, scale), *given_)
    attend = lambda *x: sequence_attention(*x, plan, scale=scale, return_lse=True)  # noqa: E731
    found = with_lse(attend, *given_)
    assert_near(found, expected)
    assert torch.equal(found[0], sequence_attention(*given_[:3], plan, scale=scale))


@given(st.lists(st.integers(1, 7), min_size=1, max_size=12))
def test_sequences_of_one_length_are_brought_together_and_back(lengths):
    """What runs on a GPU under sdpa: one call for each length."""
    plan = plan_sequences(lengths)
    assert len(plan.groups) == len(set(lengths))
    assert sum(length * count for length, count in plan.runs) == sum(lengths) == plan.rows
    *x, grad, _ = inputs(plan, (2, 2), 4)
    expected = gradients(lambda *x: dense(*x, within(lengths))[0], *x, grad)
    for way in (by_length, brought_together):
        run = lambda *x, w=way: w(*(y[0].transpose(0, 1) for y in x), plan)[None]  # noqa: E731
        assert_near(gradients(run, *x, grad), expected)


@pytest.mark.parametrize("lines_", [1, 3])
def test_tiles(lines_):
    for plan in (plan_tiles(lines_, 5, "cpu"), plan_sequences([5] * lines_)):
        assert plan.cu_seqlens.tolist() == list(range(0, 5 * lines_ + 1, 5))
        assert (plan.pairs, plan.max_seqlen, plan.sequences) == (25 * lines_, 5, lines_)
        *x, grad, _ = inputs(plan, (2, 2), lines=lines_)
        expected = gradients(lambda *x: dense(*x, within([5]))[0], *x, grad)
        assert_near(gradients(lambda *x, p=plan: sequence_attention(*x, p), *x, grad), expected)


def test_rectangles_as_sequences():
    (a, _, _), (b, _, _) = packed([4, 3]), packed([5], padding=2)
    until = torch.stack([a, b])
    padding = torch.tensor([[0] * 7, [0] * 5 + [1] * 2]).bool()
    plan = plan_attention(until.numpy(), padding.numpy())
    q, k, v, grad = draw(2, 2, 2, 7, 4, torch.float64)
    grad = grad * ~padding[:, :, None, None]
    expected = gradients(lambda *x: dense(*x, sees(until))[0], q, k, v, grad)
    found = gradients(lambda *x: varlen.by_sequences(in_turn, *x, plan, None)[0], q, k, v, grad)
    assert_near(found[1:], expected[1:])
    assert (found[0] - expected[0])[~padding].abs().max() <= 1e-12


def test_others_are_not_seen_and_a_sequence_has_its_own_bits():
    """The comparisons can see a wrong rule; and what is beyond a window may be NaN."""
    plan = plan_sequences([16, 16, 8, 16])
    q, k, v, grad, _ = inputs(plan, dtype=torch.float32)
    right, *to_each = gradients(lambda *x: sequence_attention(*x, plan), q, k, v, grad)
    assert (sequence_attention(q, k, v, plan_sequences([56])) - right).abs().max() > 1e-2
    own = slice(32, 40)
    part = (x[:, :, own] for x in (q, k, v))
    run = lambda *x: sequence_attention(*x, plan_sequences([8]))  # noqa: E731
    alone, *to_own = gradients(run, *part, grad[:, own])
    assert torch.equal(right[:, own], alone)
    assert all(torch.equal(a[:, :, own], b) for a, b in zip(to_each, to_own, strict=True))
    k[:, :, 40:], v[:, :, 40:] = torch.nan, torch.nan
    assert torch.equal(sequence_attention(q, k, v, plan)[:, :40], right[:, :40])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_log_sum_exp_is_float32(dtype):
    """Of scores that are not rounded to the dtype of the queries; large ones too."""
    until, plan, rows = packed(SHARED)
    q, k, v, _ = draw(1, 4, 2, len(rows), 64, dtype)
    for factor in (1, 30):
        _, lse = tree_attention(factor * q, k, v, until, plan, return_lse=True)
        _, expected = dense((factor * q).double(), k.double(), v.double(), sees(until))
        assert lse.dtype == torch.float32 and lse.shape == (1, 4, len(rows))
        assert (lse - expected).abs().max() <= 1e-6 * max(1, float(expected.abs().max()))


def test_rows_that_see_nothing():
    """Not even themselves: 0 and -inf, and gradients of 0."""
    until = torch.tensor([2, 1, 3, 0, 5]).int()  # row 3 sees nothing, row 4 itself
    leaves = [x.requires_grad_() for x in draw(1, 2, 2, 5, 4, torch.float64)[:3]]
    out, lse = tree_attention(*leaves, until, return_lse=True)
    seen = [0, 1, 2, 4]
    merged, together = merge_attention([out, out], [lse, lse])
    for a, b in ((out, lse), (merged, together)):
        assert not a[:, 3].any() and (b[:, :, 3] == -torch.inf).all()
        assert b[:, :, seen].isfinite().all()
    assert (merged - out)[:, seen].abs().max() <= 1e-15
    (merged.sum() + together[:, :, seen].sum()).backward()
    assert all(x.grad.isfinite().all() for x in leaves) and not leaves[0].grad[:, :, 3].any()


def test_autocast_casts_as_for_sdpa():
    until, plan, rows = packed(SHARED)
    q, k, v, _, weight = inputs(plan, dtype=torch.float32)
    grad = torch.zeros(1, len(rows), 4, 8)
    low = [x.bfloat16() for x in (q, k, v)]
    for attend in (
        lambda *x: tree_attention(*x, until, plan, return_lse=True),
        lambda *x: sequence_attention(*x, plan_sequences([len(rows)]), return_lse=True),
    ):
        expected = with_lse(attend, *low, grad, weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = with_lse(attend, q, k, v, grad, weight)
        assert found[0].dtype == torch.bfloat16
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b.to(a.dtype))


@pytest.mark.parametrize("tower", [False, True])
def test_dropout_drops_weights_and_scales_the_rest(tower):
    """Uniform weights on rows of the identity: the output is the weights themselves."""
    until, plan, rows = packed([(40, [30, 50])], padding=3)
    count, rate = len(rows), 0.25
    q, v = torch.zeros(1, 2, count, count), torch.eye(count).expand(1, 2, count, count)
    torch.manual_seed(0)
    if tower:
        lengths = [60, count - 60]
        found = sequence_attention(q, q, v, plan_sequences(lengths), dropout=rate)
        whole, _ = dense(q, q, v, within(lengths))
    else:
        found = tree_attention(q, q, v, until, plan, dropout=rate)
        whole, _ = dense(q, q, v, sees(until))
    kept = found != 0
    torch.testing.assert_close(found[kept], whole[kept] / (1 - rate))
    assert abs(float(1 - kept.sum() / (whole != 0).sum()) - rate) < 0.03
    assert not torch.equal(found[0, :, 0], found[0, :, 1])


@pytest.mark.parametrize("forced", ["auto", "sdpa"])
@pytest.mark.parametrize("lines_", [1, 0])
def test_no_rows(forced, lines_, monkeypatch):
    monkeypatch.setenv("MMPACK_ATTENTION", forced)
    monkeypatch.setenv("MMPACK_TOWER_ATTENTION", forced)
    width = 0 if lines_ else 5
    until = np.zeros((lines_, width), dtype=np.int32)
    q, k, v, grad = draw(lines_, 4, 2, width, 8, torch.float32)
    plan, seen, none = (
        plan_attention(until, until == 1),
        torch.from_numpy(until),
        plan_sequences([]),
    )
    for attend in (
        lambda *x: tree_attention(*x, seen, plan),
        lambda *x: sequence_attention(*x, none),
    ):
        found = gradients(attend, q, k, v, grad)
        assert [x.shape for x in found] == [grad.shape, q.shape, k.shape, v.shape]


def test_shapes_alone():
    """`meta` has no autocast, which is no reason to raise."""
    until, plan, rows = packed(SHARED)
    q, k, v, _ = (x.to("meta") for x in draw(1, 4, 2, len(rows), 8, torch.float32))
    for own in (None, plan):
        assert tree_attention(q, k, v, until, own).shape == (1, len(rows), 4, 8)


def test_a_probe_reads_it_in_a_model():
    """transformers' eager attention gives the scores' softmax: exp(score - lse), for a row that sees itself alone."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import eager_attention_forward

    layer = tiny_model("qwen2_5_vl").model.language_model.layers[0].self_attn
    width = layer.q_proj.out_features // layer.head_dim, layer.k_proj.out_features // layer.head_dim
    until, plan, _ = packed([9])
    q, k, v, _ = draw(1, *width, 9, layer.head_dim, torch.float32)
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    _, weights = eager_attention_forward(layer, q, k, v, mask, layer.scaling)
    _, lse = tree_attention(q, k, v, until, plan, scale=layer.scaling, return_lse=True)
    own = (q * k.repeat_interleave(width[0] // width[1], 1)).sum(-1) * layer.scaling
    assert (own - lse - weights.diagonal(dim1=2, dim2=3).log()).abs().max() <= 1e-5


# Kernels that take sequences.


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("window", "two_way", "scale"),
    [(4, True, None), (4, False, 0.2), (None, True, None), (None, False, 0.3)],
)
def test_what_kernels_of_sequences_are_told(name, window, two_way, scale, calls):
    """Their arguments as the packages name them; output, log-sum-exp and gradients."""
    line, kernel = TREES, varlen.KERNELS[name]
    plan, rows = plan_of(line, window, two_way), torch.from_numpy(~line.padding)
    q, k, v, grad, weight = inputs(plan)
    grad, weight = grad * rows[:, None, None], weight * rows
    seen = torch.from_numpy(line.sees(window, two_way))[None]

    def attend(*x, lse=False):
        return varlen.by_sequences(kernel, *x, plan, scale, lse)

    expected = gradients(lambda *x: dense(*x, seen, scale)[0], q, k, v, grad)
    assert_near(gradients(lambda *x: attend(*x)[0], q, k, v, grad), expected, rows=rows)
    _, lse = attend(q, k, v, lse=True)
    assert lse.dtype == torch.float32
    assert (lse - dense(q, k, v, seen, scale)[1])[:, :, rows].abs().max() <= 1e-6
    if name == "flash_attn_4" and window is None:
        compiled = torch.compile(lambda *x: attend(*x)[0], backend="aot_eager", fullgraph=True)
        assert_near(gradients(compiled, q, k, v, grad), expected, rows=rows)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("dim", "wide"), [(72, 96), (80, 96), (64, 64)])
def test_towers_by_kernels_of_sequences(name, scale, dim, wide, calls, monkeypatch):
    """Without a mask; heads that FlashAttention-4 gets wrong are padded, all results are those of the true size."""
    monkeypatch.setattr(varlen, "right_size", lambda *_: wide)
    lengths = [5, 1, 10]
    plan = plan_sequences(lengths)
    plan.choice, plan.chosen_under = {torch.float64: name}, SEQUENCES.settings(dim, 0.0)
    given_ = inputs(plan, dim=dim)
    attend = lambda *x: sequence_attention(*x, plan, scale=scale)  # noqa: E731
    expected = gradients(lambda *x: dense(*x, within(lengths), scale)[0], *given_[:4])
    assert_near(gradients(attend, *given_[:4]), expected)
    _, lse = sequence_attention(*given_[:3], plan, scale=scale, return_lse=True)
    assert (lse - dense(*given_[:3], within(lengths), scale)[1]).abs().max() <= 1e-6
    if name == "flash_attn_4":
        assert set(calls) == {(name, wide)}
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        assert_near(gradients(compiled, *given_[:4]), expected)
        flat = [x[0].transpose(0, 1) for x in given_[:3]]
        cu = plan.cu_seqlens
        numbers = (10, 10, False, None, None, False)
        torch.library.opcheck(torch.ops.mmpack.flash_attn_4.default, (*flat, cu, cu, *numbers))


# torch.compile, and FlexAttention.


def test_it_is_traced_whole():
    until, plan, rows = packed(SHARED)
    q, k, v, grad, weight = inputs(plan, dtype=torch.float32)
    resolve(plan, until, 8)
    tower = plan_sequences([len(rows) - 8, 8])
    resolve_sequences(tower, torch.device("cpu"), 8)
    for attend in (
        lambda *x: tree_attention(*x, until, plan),
        lambda *x: sequence_attention(*x, tower),
    ):
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        expected = gradients(attend, q, k, v, grad)
        assert_near(gradients(compiled, q, k, v, grad), expected, 1e-6)
    both = lambda *x: tree_attention(*x, until, plan, return_lse=True)  # noqa: E731
    with torch.no_grad():
        found = torch.compile(both, backend="aot_eager", fullgraph=True)(q, k, v)
    assert_near(found, both(q, k, v), 1e-5)
    compiled = torch.compile(both, backend="aot_eager")
    assert_near(
        with_lse(compiled, q, k, v, grad, weight), with_lse(both, q, k, v, grad, weight), 1e-4
    )


def test_a_plan_as_packed_compiles_and_pickles():
    """What a collator hands to a compiled model: nobody resolved it before."""
    turns = [("text", [1, 2, 3]), ("response", [4, 5], 0)]
    batch = mp.pack([make_sample(turns, f"s{i}") for i in range(2)])
    q = torch.randn(1, 4, batch.num_tokens, 8)
    compiled = torch.compile(tree_attention, backend="aot_eager", fullgraph=True)
    got = compiled(q, q, q, batch.visible_until, batch.attention_plan)
    torch.testing.assert_close(got, tree_attention(q, q, q, batch.visible_until))
    tower = plan_sequences([4, 2, 4])
    resolve_sequences(tower, torch.device("cpu"), 8)
    for plan in (batch.attention_plan, tower):
        again = pickle.loads(pickle.dumps(plan))
        assert again.choice is None and again.rows == plan.rows and plan.to("cpu") is plan
        moved = plan.to("meta")
        assert moved.device.type == "meta" and moved.choice is None
    assert moved.from_groups.order.is_meta and again.groups == tower.groups


def test_windows_of_any_length_share_a_graph_of_flex():
    """A window as a number would be an input of the second graph, and FlashAttention-4 takes none."""
    until, _, _ = packed([150])
    path, counter = (
        torch.from_numpy(path_of(until.numpy()))[None],
        CompileCounterWithBackend("eager"),
    )
    q, _, _, _ = draw(1, 1, 1, 150, 16, torch.float32)
    torch._dynamo.reset()
    run = torch.compile(flex_attention, backend=counter)
    at = torch.arange(150)
    for window in (100, 20, 7):
        found = run(q, q, q, block_mask=flex.block_mask(Rule(until[None], None, path, window)))
        seen = sees(until) & (at[:, None] - at < window)
        assert torch.allclose(found.transpose(1, 2), dense(q, q, q, seen)[0], atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("error")  # of an attention that holds all scores
@pytest.mark.slow
def test_more_graphs_of_flex_than_torch_s_limit(monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(flex, "_compiled", torch.compile(flex_attention, backend=counter))
    lengths = [64] * 3
    mask = flex.block_mask_of_sequences(plan_sequences(lengths))
    kinds = [(heads, dim) for dim in (16, 32) for heads in range(2, 8)]
    for heads, dim in kinds:
        q = torch.randn(1, heads, 192, dim)
        found, _ = flex.flex(q, q, q, mask, None, flash=False)
    assert (found - dense(q, q, q, within(lengths))[0]).abs().max() <= 1e-5
    assert counter.frame_count == len(kinds)
    torch._dynamo.reset()


# Merging.


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 2**31))
def test_parts_are_merged_exactly(parts, seed):
    """Attentions over parts of the keys, as softmax over all of them; values and gradients."""
    torch.manual_seed(seed)
    q, grad = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in "qg")
    k, v = (torch.randn(2, 3, sum(parts), 4, dtype=torch.float64) for _ in "kv")
    weight, grad = torch.randn(2, 3, 5, dtype=torch.float64), grad.transpose(1, 2)
    every = lambda k: torch.ones(1, 5, k.shape[2], dtype=torch.bool)  # noqa: E731

    def in_parts(q, k, v):
        made = [
            dense(q, *kv, every(kv[0]))
            for kv in zip(k.split(parts, 2), v.split(parts, 2), strict=True)
        ]
        return merge_attention(*zip(*made, strict=True))

    whole = with_lse(lambda q, k, v: dense(q, k, v, every(k)), q, k, v, grad, weight)
    assert_near(with_lse(in_parts, q, k, v, grad, weight), whole)


def test_merging_keeps_nan_out_and_sums_halves_in_float32():
    out, lse = torch.ones(1, 2, 1, 3), torch.zeros(1, 1, 2)
    other, none = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    merged, together = merge_attention([out, other], [lse, none])
    assert torch.equal(merged, out) and torch.equal(together, lse)
    outs = [torch.ones(1, 1, 1, 1).bfloat16()] * 3
    merged, lse = merge_attention(outs, [torch.full((1, 1, 1), x) for x in (0.0, -3.0, 100.0)])
    assert merged.dtype == torch.bfloat16 and float(merged) == 1.0
    assert lse.dtype == torch.float32 and float(lse) == 100.0


OUT, LSE = torch.zeros(1, 2, 3, 4), torch.zeros(1, 3, 2)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], "there are 0 outs and 0 lses"),
        (OUT, LSE, "outs is of type Tensor. Fix: pass a list of tensors"),
        ([OUT], [[1.0]], r"lses\[0\] is of type list, expected a tensor"),
        ([OUT[0]], [LSE], r"outs\[0\] has shape \[2, 3, 4\], expected \[B, T, heads, d\]"),
        ([OUT], [LSE.mT], r"lses\[0\] has shape \[1, 2, 3\], expected \[1, 3, 2\]"),
        ([OUT], [LSE.double()], r"lses\[0\] has dtype torch.float64, expected torch.float32"),
        ([OUT, OUT[:, :1]], [LSE] * 2, r"outs\[1\] has shape \[1, 1, 3, 4\]"),
        ([OUT.long()], [LSE], r"outs\[0\] is torch.int64, expected a floating"),
    ],
)
def test_what_merging_refuses(outs, lses, message):
    with pytest.raises(ArgumentError, match=message):
        merge_attention(outs, lses)


def test_what_does_not_fit_is_an_error():
    q, k, v, _ = draw(1, 2, 2, 7, 8, torch.float32)
    plan, until = plan_sequences([3, 4]), packed([3, 4])[0]
    for arguments, options, message in (
        ((q, k, v, plan_sequences([8])), {}, "the plan is for 8 rows, but there are 1 × 7"),
        ((q, k[:, :, :5], v, plan), {}, "key has shape"),
        ((q, k, v, plan), {"scale": "1"}, "scale"),
        ((q, k, v, plan), {"dropout": 1.5}, "dropout"),
    ):
        with pytest.raises(ArgumentError, match=message):
            sequence_attention(*arguments, **options)
    with pytest.raises(ArgumentError, match="leave out empty sequences"):
        plan_sequences([3, 0, 4])
    for other, message in (([3, 5], "the plan is for 8 rows"), ([4, 3], "another visible_until")):
        with pytest.raises(ArgumentError, match=message):
            tree_attention(q, k, v, until, packed(other)[1])
    line = TREES
    until, start = torch.from_numpy(line.until), torch.from_numpy(line.start)
    q, k, v, _ = draw(1, 2, 2, len(until), 8, torch.float32)
    plan, made = plan_of(line, None, False), plan_of(line, 4, True)
    for arguments, options, message in (
        (
            (plan,),
            {"window": 4},
            "is for no window and no two-way blocks, but the call for a window of 4",
        ),
        (
            (made,),
            {"window": 4},
            "a window of 4 and two-way blocks, but the call for a window of 4 and no",
        ),
        ((made,), {"window": 4, "visible_from": start * 0}, "was made of another visible_from"),
        ((), {"visible_from": start[1:]}, "visible_from has shape"),
    ):
        with pytest.raises(ArgumentError, match=message):
            tree_attention(q, k, v, until, *arguments, **options)
