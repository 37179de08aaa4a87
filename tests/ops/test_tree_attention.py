"""Attention by visible_until against explicit softmax in float64; which backend is chosen, and what is refused."""

import pickle
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention import (
    by_weights,
    draw,
    gradients,
    gradients_in_turn,
    one_sequence_after_the_other,
    packed,
    stand_in,
)
from support.samples import make_sample
from torch.utils.checkpoint import checkpoint

import mmpack as mp
from mmpack.errors import ArgumentError, BackendError
from mmpack.ops.attention import (
    TREE,
    choose,
    plan_attention,
    resolve,
    tree_attention,
    varlen,
)
from mmpack.ops.attention.rule import Rule
from mmpack.ops.attention.sdpa import sdpa

SHARED = [(5, [3, (2, [4, 1, 1]), 6]), 7, (1, [1, 1]), (4, [2])]
PACKS = {"plain": [5, 1, 9], "shared": SHARED, "one sample": [8]}
trees = st.recursive(
    st.integers(1, 5), lambda t: st.tuples(st.integers(1, 5), st.lists(t, max_size=3)), max_leaves=6
)


def in_turn(q, k, v, plan, scale):
    cu = plan.cu_seqlens_q.tolist(), plan.cu_seqlens_k.tolist()
    return one_sequence_after_the_other(q, k, v, *cu, scale)[0]


def assert_near(found, expected, rows=slice(None), off=1e-12):
    """Outputs and gradients; `rows` hold tokens."""
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
    assert (found[0][:, rows] - expected[0][:, rows]).abs().max() <= off
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert (a - b)[:, :, rows].abs().max() <= off


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("name", PACKS)
def test_sdpa(name, scale, monkeypatch):
    monkeypatch.setattr("mmpack.ops.attention.sdpa.QUERY_ROWS", 6)
    until, plan, rows = packed(PACKS[name], padding=3)
    q, k, v, grad = draw(1, 4, 2, len(rows), 8, torch.float64)
    expected = gradients(lambda *x: by_weights(*x, until, scale), q, k, v, grad)
    for given_plan in (plan, None):
        found = gradients(
            lambda *x, p=given_plan: tree_attention(*x, until, p, scale=scale), q, k, v, grad
        )
        assert_near(found, expected)


@given(st.lists(trees, min_size=1, max_size=3), st.integers(0, 3))
def test_paths_of_random_forests(forest, padding):
    """Branches as sequences over their gathered paths: values and gradients of the dense rule."""
    until, plan, rows = packed(forest, padding)
    q, k, v, grad = draw(1, 4, 2, len(rows), 4, torch.float64)
    grad = grad * rows[:, None, None]  # nobody reads padding
    expected = gradients(lambda *x: by_weights(*x, until), q, k, v, grad)
    found = gradients(lambda *x: varlen.by_sequences(in_turn, *x, plan, None)[0], q, k, v, grad)
    assert_near(found, expected, rows)
    assert_near(gradients(lambda *x: sdpa(*x, Rule(until[None])), q, k, v, grad), expected)


def test_rectangles_as_sequences():
    (a, _, _), (b, _, _) = packed([4, 3]), packed([5], padding=2)
    until = torch.stack([a, b])
    padding = torch.tensor([[0] * 7, [0] * 5 + [1] * 2]).bool()
    plan = plan_attention(until.numpy(), padding.numpy())
    q, k, v, grad = draw(2, 2, 2, 7, 4, torch.float64)
    grad = grad * ~padding[:, :, None, None]
    expected = gradients(lambda *x: by_weights(*x, until), q, k, v, grad)
    found = gradients(lambda *x: varlen.by_sequences(in_turn, *x, plan, None)[0], q, k, v, grad)
    for found_, expected_ in zip(found[1:], expected[1:], strict=True):
        assert (found_ - expected_).abs().max() <= 1e-12
    assert (found[0] - expected[0])[~padding].abs().max() <= 1e-12


def offered():
    """Those that `auto` may take."""
    return [name for name, backend in TREE.backends.items() if not backend.only_named]


@pytest.fixture
def hopper(monkeypatch):
    """As if a Hopper GPU were here with every package."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(choose, "INSTALLED", dict.fromkeys(choose.INSTALLED, True))
    monkeypatch.delenv("MMPACK_ATTENTION", raising=False)
    return torch.device("cuda")


def test_the_cheapest_that_can_run_is_chosen(hopper, monkeypatch):
    _, plan, _ = packed([(200, [50, 60])])
    chosen = TREE.choices(plan, hopper, 128)
    by_cost = min(offered(), key=lambda b: TREE.backends[b].cost(plan))
    assert chosen[torch.bfloat16] == chosen[torch.float16] == by_cost
    assert chosen[torch.float32] == chosen[torch.float64] == "sdpa"
    monkeypatch.setattr(choose, "INSTALLED", {p: p == "torch" for p in choose.INSTALLED})
    assert TREE.choices(plan, hopper, 128)[torch.bfloat16] == "varlen"
    assert TREE.choices(plan, hopper, 12)[torch.bfloat16] == "sdpa"
    assert TREE.choices(plan, hopper, 128, dropout=0.1)[torch.bfloat16] == "sdpa"
    assert TREE.choices(plan, torch.device("cpu"), 128)[torch.bfloat16] == "sdpa"


def test_why_a_backend_cannot_run(hopper, monkeypatch):
    assert set(TREE.explain(hopper).values()) == {None}
    assert TREE.why_not("varlen", hopper, torch.float32, 128) == "varlen can't take torch.float32"
    assert "heads of 12" in TREE.why_not("flash_attn_4", hopper, torch.bfloat16, 12)
    assert "dropout" in TREE.why_not("flex", hopper, torch.bfloat16, 64, 0.1)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "deterministic" in TREE.why_not("flex_flash", hopper, torch.bfloat16, 64)
    assert TREE.why_not("flash_attn_4", hopper, torch.bfloat16, 64) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    assert "9.0, the device has 8.6" in TREE.why_not("flash_attn_4", hopper, torch.bfloat16, 64)
    assert "CUDA device, not cpu" in TREE.explain(torch.device("cpu"))["varlen"]
    monkeypatch.setattr(choose, "INSTALLED", dict.fromkeys(choose.INSTALLED, False))
    assert TREE.explain(hopper)["flash_attn"] == "flash-attn is not installed"
    assert TREE.explain(hopper)["sdpa"] is None


def test_report(hopper, monkeypatch):
    assert TREE.report(hopper) == (
        "attention",
        ", ".join(["sdpa", *offered()]),
        "the cheapest for each batch",
    )
    monkeypatch.setenv("MMPACK_ATTENTION", "varlen")
    assert TREE.report(hopper) == ("attention", "varlen", "MMPACK_ATTENTION=varlen")
    _, backend, why = TREE.report(torch.device("cpu"))
    assert backend is None and "varlen needs a CUDA device, not cpu. Fix: " in why
    monkeypatch.setenv("MMPACK_ATTENTION", "fast")
    assert TREE.report(hopper)[1] is None and "'fast' is not a backend" in TREE.report(hopper)[2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("varlen", "varlen was requested, but varlen needs a CUDA device, not cpu"),
        ("flash_attn", "flash-attn is not installed"),
        ("triton", "'triton' is not a backend. Fix: set MMPACK_ATTENTION=auto, or one of sdpa, "),
    ],
)
def test_a_forced_backend_that_cannot_run_is_an_error(name, message, monkeypatch):
    monkeypatch.setattr(choose, "INSTALLED", {p: p == "torch" for p in choose.INSTALLED})
    until, plan, rows = packed([3, 4])
    q, k, v, _ = draw(1, 2, 2, len(rows), 8, torch.float32)
    monkeypatch.setenv("MMPACK_ATTENTION", name)
    with pytest.raises(BackendError, match=message):
        resolve(plan, until, 8)
    with pytest.raises(BackendError, match=message):
        tree_attention(q, k, v, until, plan)
    with pytest.raises(BackendError):  # also without a plan
        tree_attention(q, k, v, until)
    monkeypatch.delenv("MMPACK_ATTENTION")
    with pytest.raises(BackendError, match=message):
        tree_attention(q, k, v, until, plan, backend=name)


def test_a_dtype_that_the_forced_backend_cannot_take_is_an_error(hopper, monkeypatch):
    monkeypatch.setenv("MMPACK_ATTENTION", "varlen")
    until, plan, rows = packed([3, 4])
    plan.choice = TREE.choices(plan, hopper, 8)
    assert plan.choice == dict.fromkeys(choose.HALF, "varlen")
    q, k, v, _ = draw(1, 2, 2, len(rows), 8, torch.float32)
    with pytest.raises(BackendError, match=r"varlen needs a CUDA device"):
        tree_attention(q, k, v, until, plan)
    with pytest.raises(BackendError, match=r"varlen can't take torch.float32"):
        TREE.demand("varlen", hopper, torch.float32, 8)


def test_a_plan_of_another_batch_is_an_error():
    until, _, rows = packed([3, 4])
    _, other, _ = packed([3, 5])
    q, k, v, _ = draw(1, 2, 2, len(rows), 8, torch.float32)
    with pytest.raises(ArgumentError, match="the plan is for 8 rows, but there are 1 × 7"):
        tree_attention(q, k, v, until, other)
    _, other, _ = packed([4, 3])
    with pytest.raises(ArgumentError, match="the plan was made of another visible_until"):
        tree_attention(q, k, v, until, other)


@pytest.mark.parametrize("lines", [1, 0])
@pytest.mark.parametrize("forced", [None, "sdpa"])
def test_no_rows(lines, forced, monkeypatch):
    monkeypatch.setenv("MMPACK_ATTENTION", forced or "auto")
    width = 0 if lines else 5
    until = np.zeros((lines, width), dtype=np.int32)
    plan = plan_attention(until, until == 1)
    q, k, v, grad = draw(lines, 4, 2, width, 8, torch.float32)
    seen = torch.from_numpy(until)
    for rule in (seen, seen[0]) if lines else (seen,):
        found = gradients(lambda *x, r=rule: tree_attention(*x, r, plan), q, k, v, grad)
        assert [x.shape for x in found] == [grad.shape, q.shape, k.shape, v.shape]


@pytest.fixture
def ran(hopper, monkeypatch):
    """The kernels that run, of torch and FlashAttention-2, as if the CPU were the GPU; they compute on the CPU."""
    names = []

    def kernel(name):
        def attend(*operands):
            names.append(name)
            return in_turn(*operands)

        return attend

    able = TREE.why_not
    monkeypatch.setattr(
        choose.Chooser, "why_not", lambda self, name, device, *rest: able(name, hopper, *rest)
    )
    installed = {p: p in ("torch", "flash-attn") for p in choose.INSTALLED}
    monkeypatch.setattr(choose, "INSTALLED", installed)
    monkeypatch.setattr(
        varlen, "KERNELS", {name: kernel(name) for name in ("varlen", "flash_attn")}
    )
    monkeypatch.setattr(
        sys.modules[tree_attention.__module__],
        "sdpa",
        lambda *operands: names.append("sdpa") or sdpa(*operands),
    )
    return names


def test_a_plan_follows_the_present_settings(ran, monkeypatch):
    until, plan, rows = packed([(3, [2, 4])])

    def attend(dim=8, **options):
        q, k, v, _ = draw(1, 4, 2, len(rows), dim, torch.bfloat16)
        tree_attention(q, k, v, until, plan, **options)
        return ran[-1]

    assert attend() == "flash_attn"
    assert attend(dim=12) == "sdpa"
    assert attend() == "flash_attn"
    assert attend(dropout=0.5) == "sdpa"
    assert attend(backend="varlen") == "varlen"
    monkeypatch.setenv("MMPACK_ATTENTION", "varlen")
    assert attend() == "varlen"
    with pytest.raises(BackendError, match="varlen can't take heads of 12"):
        attend(dim=12)
    with pytest.raises(BackendError, match="varlen has no dropout"):
        attend(dropout=0.5)
    monkeypatch.setenv("MMPACK_ATTENTION", "flash_attn_4")
    with pytest.raises(BackendError, match="flash-attn-4 is not installed"):
        attend()
    monkeypatch.setenv("MMPACK_ATTENTION", "sdpa")
    assert attend() == "sdpa"
    monkeypatch.delenv("MMPACK_ATTENTION")
    assert attend() == "flash_attn"


def test_a_plan_follows_determinism(hopper, monkeypatch):
    until, plan, _ = packed([3, 4])
    able = TREE.why_not
    monkeypatch.setattr(
        choose.Chooser, "why_not", lambda self, name, device, *rest: able(name, hopper, *rest)
    )
    monkeypatch.setenv("MMPACK_ATTENTION", "flex_flash")
    resolve(plan, until, 64)
    assert plan.choice[torch.bfloat16] == "flex_flash"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(BackendError, match="flex_flash has no deterministic backward"):
        resolve(plan, until, 64)
    monkeypatch.delenv("MMPACK_ATTENTION")
    resolve(plan, until, 64)
    assert "flex_flash" not in plan.choice.values()


def test_autocast_chooses_for_the_dtype_that_is_computed_in(ran):
    until, plan, rows = packed(SHARED)
    q, k, v, grad = draw(1, 4, 2, len(rows), 8, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(lambda *x: tree_attention(*x, until, plan), q, k, v, grad.bfloat16())
    assert ran == ["flash_attn"] and found[0].dtype == torch.bfloat16
    assert [x.dtype for x in found[1:]] == [torch.float32] * 3
    low = [x.bfloat16().double() for x in (q, k, v, grad)]
    for a, b in zip(found, gradients(lambda *x: by_weights(*x, until), *low), strict=True):
        assert (a.double() - b).norm() <= 2e-2 * b.norm()
    tree_attention(q, k, v, until, plan)
    assert ran[-1] == "sdpa"


def test_shapes_alone():
    """`meta` has no autocast, which is no reason to raise."""
    until, plan, rows = packed(SHARED)
    q, k, v, _ = (x.to("meta") for x in draw(1, 4, 2, len(rows), 8, torch.float32))
    for own in (None, plan):
        assert tree_attention(q, k, v, until, own).shape == (1, len(rows), 4, 8)


def test_checkpointed(ran):
    until, plan, rows = packed(SHARED)
    q, k, v, grad = draw(1, 4, 2, len(rows), 8, torch.bfloat16)

    def attend(*x):
        return tree_attention(*x, until, plan)

    expected = gradients(attend, q, k, v, grad)
    for reentrant in (False, True):
        found = gradients_by_backward(
            lambda *x, r=reentrant: checkpoint(attend, *x, use_reentrant=r), q, k, v, grad
        )
        assert all(map(torch.equal, found, expected))
    assert ran == ["flash_attn"] * 5


def gradients_by_backward(function, q, k, v, grad):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def test_dropout_drops_weights_and_scales_the_rest():
    """Uniform weights on rows of the identity: the output is the weights themselves."""
    until, plan, rows = packed([(40, [30, 50])], padding=3)
    count, rate = len(rows), 0.25
    q = torch.zeros(1, 2, count, count)
    v = torch.eye(count).expand(1, 2, count, count)
    torch.manual_seed(0)
    found = tree_attention(q, q, v, until, plan, dropout=rate).transpose(1, 2)
    whole = by_weights(q, q, v, until).transpose(1, 2)
    kept = found != 0
    torch.testing.assert_close(found[kept], whole[kept] / (1 - rate))
    dropped = 1 - kept.sum() / (whole != 0).sum()
    assert abs(float(dropped) - rate) < 0.02  # of some 16,000 weights
    assert not torch.equal(found[0, 0], found[0, 1])


def test_flash_attn_is_called_by_its_signature(monkeypatch):
    """The package's own signature, computed by explicit softmax."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        assert causal and (max_seqlen_q, max_seqlen_k) == (10, 15) and not deterministic
        cu = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        return one_sequence_after_the_other(q, k, v, *cu, softmax_scale)[0]

    stub = stand_in("flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", stub)
    until, plan, rows = packed([(5, [4, 10])])
    q, k, v, grad = draw(1, 4, 2, len(rows), 8, torch.float64)
    kernel = varlen.KERNELS["flash_attn"]
    found = gradients(lambda *x: varlen.by_sequences(kernel, *x, plan, 0.2)[0], q, k, v, grad)
    assert_near(found, gradients(lambda *x: by_weights(*x, until, 0.2), q, k, v, grad))


def test_flash_attn_4_differentiates_and_is_traced(monkeypatch):
    """Our op around the package's two functions, here computed by explicit softmax."""

    def forward(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, return_lse, **sizes):
        assert causal and return_lse
        cu = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        return *one_sequence_after_the_other(q, k, v, *cu, softmax_scale), None, None, None

    def backward(q, k, v, out, dout, lse, *, softmax_scale, cu_seqlens_q, cu_seqlens_k, **rest):
        cu = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        assert torch.equal(one_sequence_after_the_other(q, k, v, *cu, softmax_scale)[0], out)
        return gradients_in_turn(q, k, v, dout, *cu)

    stub = stand_in("interface", _flash_attn_fwd=forward, _flash_attn_bwd=backward)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, stand_in(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", stub)
    until, plan, rows = packed(SHARED)
    q, k, v, grad = draw(1, 4, 2, len(rows), 8, torch.float64)
    kernel = varlen.KERNELS["flash_attn_4"]

    def attend(q, k, v):
        return varlen.by_sequences(kernel, q, k, v, plan, None)[0]

    expected = gradients(lambda *x: by_weights(*x, until), q, k, v, grad)
    assert_near(gradients(attend, q, k, v, grad), expected)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert_near(gradients(compiled, q, k, v, grad), expected)
    flat = [x.transpose(1, 2)[0].detach().requires_grad_() for x in (q, k, v)]
    numbers = (plan.max_seqlen_q, plan.max_seqlen_k, True, None, None, False)
    cu = torch.tensor([0, *plan.cu_seqlens_q.tolist()[1:]], dtype=torch.int32)
    torch.library.opcheck(torch.ops.mmpack.flash_attn_4.default, (*flat, cu, cu, *numbers))


def test_it_is_traced_whole():
    until, plan, rows = packed(SHARED)
    q, k, v, grad = draw(1, 4, 2, len(rows), 8, torch.float32)
    resolve(plan, until, 8)
    compiled = torch.compile(
        lambda *x: tree_attention(*x, until, plan), backend="aot_eager", fullgraph=True
    )
    expected = gradients(lambda *x: tree_attention(*x, until, plan), q, k, v, grad)
    assert_near(gradients(compiled, q, k, v, grad), expected, off=1e-6)


def test_a_plan_as_packed_compiles_and_pickles():
    """What a collator hands to a compiled model: nobody resolved it before."""
    batch = mp.pack(
        [make_sample([("text", [1, 2, 3]), ("response", [4, 5], 0)], f"s{i}") for i in range(2)]
    )
    q = torch.randn(1, 4, batch.num_tokens, 8)
    compiled = torch.compile(tree_attention, backend="aot_eager", fullgraph=True)
    got = compiled(q, q, q, batch.visible_until, batch.attention_plan)
    wanted = tree_attention(q, q, q, batch.visible_until)
    torch.testing.assert_close(got, wanted)
    again = pickle.loads(pickle.dumps(batch.attention_plan))
    assert again.choice is None and again.rows == batch.attention_plan.rows
    assert batch.attention_plan.to("cpu") is batch.attention_plan


def test_auto_leaves_a_backend_out(monkeypatch):
    """Of all backends, as on a device that can run them: the cheapest one, and the cheapest of the others."""
    monkeypatch.delenv("MMPACK_ATTENTION", raising=False)
    monkeypatch.setattr(choose.Chooser, "why_not", lambda *args: None)
    _, plan, _ = packed(SHARED)
    ranked = sorted(offered(), key=lambda name: TREE.backends[name].cost(plan))
    device = torch.device("cpu")
    assert TREE.choices(plan, device, 64)[torch.bfloat16] == ranked[0]
    without = TREE.choices(plan, device, 64, 0.0, ranked[:2])
    assert without[torch.bfloat16] == ranked[2] and without[torch.float32] == "sdpa"
