"""Log-sum-exp of attention against scores written out in float64, its gradient by autograd of those, and merging."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention import (
    draw,
    gradients_in_turn,
    one_sequence_after_the_other,
    packed,
    run_varlen_on_the_cpu,
    stand_in,
)
from support.tiny_models import tiny_model

from mmpack.errors import ArgumentError, BackendError
from mmpack.ops.attention import (
    TREE,
    choose,
    merge_attention,
    plan_sequences,
    sequence_attention,
    tree_attention,
    varlen,
)
from mmpack.ops.attention.lse import with_gradient

SHARED = [(5, [3, (2, [4, 1, 1]), 6]), 7, (1, [1, 1]), (4, [2])]
LENGTHS = [16, 16, 8, 40, 4, 4, 2]


def of_scores(q, k, seen, scale=None):
    """seen [B or 1, T, T] bool -> [B, heads, T]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return torch.logsumexp(scores.masked_fill(~seen[:, None], -torch.inf), -1)


def by_rule(until):
    at = torch.arange(until.shape[-1])
    until = until.view(-1, 1, until.shape[-1])
    return (at[None] <= at[:, None]) & (at[:, None] < until)


def within(lengths):
    own = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return (own[:, None] == own)[None]


def lse_and_gradients(function, q, k, weight):
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    lse = function(*leaves)
    return [lse.detach(), *torch.autograd.grad(lse, leaves, weight)]


def assert_near(found, expected, off=1e-12):
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert (a - b).abs().max() <= off


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("with_plan", [True, False])
def test_tree(scale, with_plan, monkeypatch):
    monkeypatch.setattr("mmpack.ops.attention.lse.ROWS", 6)
    until, plan, rows = packed(SHARED, padding=3)
    q, k, v, _ = draw(1, 4, 2, len(rows), 8, torch.float64)
    weight = torch.randn(1, 4, len(rows), dtype=torch.float64)
    plan = plan if with_plan else None

    def attend(q, k):
        return tree_attention(q, k, v, until, plan, scale=scale, return_lse=True)[1]

    expected = lse_and_gradients(lambda *x: of_scores(*x, by_rule(until), scale), q, k, weight)
    assert_near(lse_and_gradients(attend, q, k, weight), expected)
    out, _ = tree_attention(q, k, v, until, plan, scale=scale, return_lse=True)
    assert torch.equal(out, tree_attention(q, k, v, until, plan, scale=scale))


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("lines", [1, 2])
def test_sequences(scale, lines, monkeypatch):
    monkeypatch.setattr("mmpack.ops.attention.lse.ROWS", 20)
    lengths = LENGTHS * lines
    plan = plan_sequences(lengths)
    q, k, v, _ = draw(lines, 4, 2, sum(LENGTHS), 8, torch.float64)
    weight = torch.randn(lines, 4, sum(LENGTHS), dtype=torch.float64)

    def attend(q, k):
        return sequence_attention(q, k, v, plan, scale=scale, return_lse=True)[1]

    seen = within(LENGTHS)
    expected = lse_and_gradients(lambda *x: of_scores(*x, seen, scale), q, k, weight)
    assert_near(lse_and_gradients(attend, q, k, weight), expected)
    out, _ = sequence_attention(q, k, v, plan, scale=scale, return_lse=True)
    assert torch.equal(out, sequence_attention(q, k, v, plan, scale=scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_float32(dtype):
    """Of scores that are not rounded to the dtype of the queries; large ones too."""
    until, plan, rows = packed(SHARED)
    q, k, v, _ = draw(1, 4, 2, len(rows), 64, dtype)
    for factor in (1, 30):
        _, lse = tree_attention(factor * q, k, v, until, plan, return_lse=True)
        expected = of_scores((factor * q).double(), k.double(), by_rule(until))
        assert lse.dtype == torch.float32 and lse.shape == (1, 4, len(rows))
        assert (lse - expected).abs().max() <= 1e-6 * max(1, float(expected.abs().max()))


def test_the_gradient_of_both_at_once():
    """out and lse of one call, beside autograd of the written-out softmax."""
    until, plan, rows = packed(SHARED)
    q, k, v, grad = draw(1, 4, 2, len(rows), 8, torch.float64)
    weight = torch.randn(1, 4, len(rows), dtype=torch.float64)
    seen = by_rule(until)

    def written_out(q, k, v):
        wide_k, wide_v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = (q @ wide_k.mT * 8**-0.5).masked_fill(~seen[:, None], -torch.inf)
        return (scores.softmax(-1) @ wide_v).transpose(1, 2), torch.logsumexp(scores, -1)

    results = []
    for f in (lambda *x: tree_attention(*x, until, plan, return_lse=True), written_out):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        results.append(torch.autograd.grad(f(*leaves), leaves, (grad, weight)))
    assert_near(*results)


def test_rows_that_see_nothing():
    """Not even themselves: 0 and -inf, and gradients of 0."""
    until = torch.tensor([5, 1, 5, 0, 5]).int()
    q, k, v, _ = draw(1, 2, 2, 5, 4, torch.float64)
    until[0], until[2] = 2, 3  # rows 3 sees nothing, 4 itself
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = tree_attention(*leaves, until, return_lse=True)
    assert not out[:, 3].any() and (lse[:, :, 3] == -torch.inf).all()
    assert lse[:, :, [0, 1, 2, 4]].isfinite().all()
    merged, together = merge_attention([out, out], [lse, lse])
    assert not merged[:, 3].any() and (together[:, :, 3] == -torch.inf).all()
    seen = [0, 1, 2, 4]
    assert (merged - out)[:, seen].abs().max() <= 1e-15
    (merged.sum() + together[:, :, seen].sum()).backward()
    assert all(x.grad.isfinite().all() for x in leaves)
    assert not leaves[0].grad[:, :, 3].any()


def test_autocast_and_checkpointing():
    until, plan, rows = packed(SHARED)
    q, k, v, _ = draw(1, 4, 2, len(rows), 8, torch.float32)
    weight = torch.randn(1, 4, len(rows))
    expected = lse_and_gradients(
        lambda *x: tree_attention(*x, v.bfloat16(), until, plan, return_lse=True)[1],
        q.bfloat16(), k.bfloat16(), weight,
    )  # fmt: skip

    def attend(q, k):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.utils.checkpoint.checkpoint(
                lambda *x: tree_attention(*x, v, until, plan, return_lse=True)[1],
                q, k, use_reentrant=False,
            )  # fmt: skip

    found = lse_and_gradients(attend, q, k, weight)
    assert torch.equal(found[0], expected[0])
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b.float())


def test_compiled():
    until, plan, rows = packed(SHARED)
    q, k, v, _ = draw(1, 4, 2, len(rows), 8, torch.float32)

    def attend(q, k, v):
        out, lse = tree_attention(q, k, v, until, plan, return_lse=True)
        return 2 * out, 3 * lse

    with torch.no_grad():
        found = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v)
        for a, b in zip(found, attend(q, k, v), strict=True):
            assert (a - b).abs().max() <= 1e-5
    results = []
    for f in (attend, torch.compile(attend, backend="aot_eager")):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = f(*leaves)
        results.append(torch.autograd.grad(out.sum() + (lse**2).sum(), leaves))
    assert_near(*results, off=1e-4)


def test_a_probe_reads_it_in_a_model():
    """transformers' eager attention gives the scores' softmax: exp(score - lse), for a row that sees itself alone."""
    model = tiny_model("qwen2_5_vl")
    layer = model.model.language_model.layers[0].self_attn
    width = layer.q_proj.out_features // layer.head_dim, layer.k_proj.out_features // layer.head_dim
    until, plan, rows = packed([9])
    q, k, v, _ = draw(1, *width, len(rows), layer.head_dim, torch.float32)
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import eager_attention_forward

    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    _, weights = eager_attention_forward(layer, q, k, v, mask, layer.scaling)
    _, lse = tree_attention(q, k, v, until, plan, scale=layer.scaling, return_lse=True)
    own = (q * k.repeat_interleave(width[0] // width[1], 1)).sum(-1) * layer.scaling
    assert (own - lse - weights.diagonal(dim1=2, dim2=3).log()).abs().max() <= 1e-5


# Kernels that take sequences, on the CPU.


@pytest.fixture
def varlen_on_the_cpu():
    with torch.library._scoped_library("torch_attn", "FRAGMENT") as library:
        run_varlen_on_the_cpu(library)
        yield


@pytest.fixture
def packages(monkeypatch, varlen_on_the_cpu):
    """flash-attn and flash-attn-4 by their own signatures, computed by explicit softmax."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        cu = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        out, lse = one_sequence_after_the_other(q, k, v, *cu, softmax_scale, causal)
        return (out, lse, None) if return_attn_probs else out

    def forward(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, return_lse, **sizes):
        cu = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        found = one_sequence_after_the_other(q, k, v, *cu, softmax_scale, causal)
        return *found, None, None, None

    def backward(q, k, v, out, dout, lse, *, cu_seqlens_q, cu_seqlens_k, causal, **rest):
        return gradients_in_turn(
            q, k, v, dout, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), causal
        )

    first = stand_in("flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", first)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", stand_in("flash_attn.cute"))
    interface = stand_in("interface", _flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)


@pytest.mark.parametrize("name", ["varlen", "flash_attn", "flash_attn_4"])
def test_kernels_of_sequences(name, packages):
    until, plan, rows = packed(SHARED)
    q, k, v, _ = draw(1, 4, 2, len(rows), 8, torch.float64)
    weight = torch.randn(1, 4, len(rows))
    kernel = varlen.KERNELS[name]

    def attend(q, k):
        _, lse = varlen.by_sequences(kernel, q, k, v, plan, None, return_lse=True)
        own = lambda *x: varlen.by_sequences(kernel, *x, plan, None)[0]  # noqa: E731
        return with_gradient(lse, q, k, own, None)

    expected = lse_and_gradients(lambda *x: of_scores(*x, by_rule(until)), q, k, weight.double())
    found = lse_and_gradients(attend, q, k, weight)
    assert found[0].dtype == torch.float32
    assert (found[0] - expected[0]).abs().max() <= 1e-6
    assert_near(found[1:], expected[1:], off=1e-6)  # weighted in float32


def on_a_hopper(monkeypatch):
    """As if a Hopper GPU were here with every package; tensors stay on the CPU."""
    monkeypatch.setattr(choose, "INSTALLED", dict.fromkeys(choose.INSTALLED, True))
    why_not = choose.Chooser.why_not
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(
        choose.Chooser,
        "why_not",
        lambda self, name, device, *rest: why_not(self, name, torch.device("cuda"), *rest),
    )


def test_a_backend_without_is_refused_by_name(monkeypatch, packages):
    on_a_hopper(monkeypatch)
    monkeypatch.delenv("MMPACK_ATTENTION", raising=False)
    until, plan, rows = packed([64, 64])
    q, k, v, _ = draw(1, 4, 4, len(rows), 64, torch.bfloat16)
    message = (
        "flex_flash was requested, but returns no log-sum-exp. Fix: use one of sdpa, flash_attn_4"
    )
    with pytest.raises(BackendError, match=message):
        tree_attention(q, k, v, until, plan, backend="flex_flash", return_lse=True)
    monkeypatch.setenv("MMPACK_ATTENTION", "flex_flash")
    with pytest.raises(BackendError, match=message):
        tree_attention(q, k, v, until, plan, return_lse=True)


def test_auto_leaves_out_a_backend_without(monkeypatch, packages):
    on_a_hopper(monkeypatch)
    monkeypatch.delenv("MMPACK_ATTENTION", raising=False)
    until, plan, _ = packed([64, 64])
    q, k, v, _ = draw(1, 4, 4, 128, 64, torch.float16)
    plan.choice = dict.fromkeys(choose.DTYPES, "flex_flash")
    plan.chosen_under = TREE.settings(64, 0.0)
    called = []
    for name, kernel in varlen.KERNELS.items():
        monkeypatch.setitem(
            varlen.KERNELS,
            name,
            lambda *x, n=name, f=kernel, **o: (called.append(n), f(*x, **o))[1],
        )
    _, lse = tree_attention(q, k, v, until, plan, return_lse=True)
    assert called == ["flash_attn_4"]
    expected = of_scores(q.double(), k.double(), by_rule(until))
    assert (lse - expected).abs().max() <= 1e-2  # the stand-in computes in fp16


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 2**31))
def test_parts_are_merged_exactly(parts, seed):
    """Attentions over parts of the keys, as softmax over all of them in float64; values and gradients."""
    torch.manual_seed(seed)
    q, grad = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 3, sum(parts), 4, dtype=torch.float64) for _ in "kv")
    weight = torch.randn(2, 3, 5, dtype=torch.float64)

    def whole(q, k, v):
        scores = q @ k.mT
        return (scores.softmax(-1) @ v).transpose(1, 2), torch.logsumexp(scores, -1)

    def in_parts(q, k, v):
        made = [whole(q, *kv) for kv in zip(k.split(parts, 2), v.split(parts, 2), strict=True)]
        return merge_attention(*zip(*made, strict=True))

    results = []
    for f in (in_parts, whole):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = f(*leaves)
        results.append([*out, *torch.autograd.grad(out, leaves, (grad.transpose(1, 2), weight))])
    assert_near(*results)


def test_merging_a_prefix_and_what_follows():
    """What an index of prefixes computes: rows over their cached prefix, and among themselves."""
    until, plan, _ = packed([12])
    q, k, v, _ = draw(1, 4, 2, 12, 8, torch.float64)
    whole = tree_attention(q, k, v, until, plan, return_lse=True)
    after = [x[:, :, 7:] for x in (q, k, v)]
    own = tree_attention(*after, torch.full((5,), 5), return_lse=True)
    scores = after[0] @ k[:, :, :7].repeat_interleave(2, 1).mT * 8**-0.5
    prefix = (scores.softmax(-1) @ v[:, :, :7].repeat_interleave(2, 1)).transpose(1, 2)
    merged = merge_attention([prefix, own[0]], [torch.logsumexp(scores, -1), own[1]])
    assert_near(merged, (whole[0][:, 7:], whole[1][:, :, 7:]))


def test_nan_of_rows_that_see_nothing_stays_out():
    out, lse = torch.ones(1, 2, 1, 3), torch.zeros(1, 1, 2)
    other, none = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    merged, together = merge_attention([out, other], [lse, none])
    assert torch.equal(merged, out) and torch.equal(together, lse)


def test_halves_are_merged_in_float32():
    outs = [torch.full((1, 1, 1, 1), x).bfloat16() for x in (1.0, 1.0, 1.0)]
    merged, lse = merge_attention(outs, [torch.full((1, 1, 1), x) for x in (0.0, -3.0, 100.0)])
    assert merged.dtype == torch.bfloat16 and float(merged) == 1.0
    assert lse.dtype == torch.float32 and float(lse) == 100.0


ONE = torch.zeros(1, 2, 3, 4), torch.zeros(1, 3, 2)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        ([], [], "there are 0 outs and 0 lses"),
        ([ONE[0]], [], "there are 1 outs and 0 lses"),
        (ONE[0], ONE[1], "outs is of type Tensor. Fix: pass a list of tensors"),
        ([ONE[0]], [[1.0]], r"lses\[0\] is of type list, expected a tensor"),
        ([ONE[0][0]], [ONE[1]], r"outs\[0\] has shape \[2, 3, 4\], expected \[B, T, heads, d\]"),
        ([ONE[0]], [ONE[1].mT], r"lses\[0\] has shape \[1, 2, 3\] .*expected \[1, 3, 2\]"),
        (
            [ONE[0]],
            [ONE[1].double()],
            r"dtype torch.float64, expected \[1, 3, 2\] and torch.float32",
        ),
        ([ONE[0], ONE[0][:, :1]], [ONE[1]] * 2, r"outs\[1\] has shape \[1, 1, 3, 4\]"),
        ([ONE[0], ONE[0].double()], [ONE[1]] * 2, r"outs\[1\] .* dtype torch.float64"),
        ([ONE[0].long()], [ONE[1]], r"outs\[0\] .* dtype torch.int64"),
    ],
)
def test_what_merging_refuses(outs, lses, message):
    with pytest.raises(ArgumentError, match=message):
        merge_attention(outs, lses)
