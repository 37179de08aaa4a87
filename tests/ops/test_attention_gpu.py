"""Every attention backend on a GPU, of packs and of towers: outputs, log-sum-exp, gradients, bits, graphs, waits."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.attention import dense, draw, gradients, packed, sees, with_lse, within
from support.waits import never_waits
from torch.utils.checkpoint import checkpoint

from mmpack.contracts import TOLERANCES
from mmpack.errors import ArgumentError, BackendError
from mmpack.ops.attention import (
    SEQUENCES,
    TREE,
    merge_attention,
    plan_attention,
    plan_of_rule,
    plan_sequences,
    plan_tiles,
    resolve,
    resolve_sequences,
    sequence_attention,
    tree_attention,
    varlen,
    without_cudnn,
)
from mmpack.ops.attention.choose import Chooser
from mmpack.ops.attention.rule import path_of

pytestmark = pytest.mark.gpu
CUDA, HALF = torch.device("cuda"), torch.bfloat16
BOUND = TOLERANCES["gradient_bf16"].value


@dataclass
class Case:
    """Rows that attend to each other: by the public function, and densely."""

    chooser: Chooser
    plan: object
    attend: Callable  # q, k, v, backend, options
    seen: torch.Tensor  # bool [B or 1, T, T]
    rows: torch.Tensor  # bool [B, T]: hold a token
    heads: tuple[int, int]
    resolve: Callable  # plan, head size

    def inputs(self, dim=None, dtype=HALF, heads=None):
        dim = dim or self.chooser.head_dim
        q, k, v, grad = draw(
            len(self.rows), *(heads or self.heads), self.rows.shape[1], dim, dtype, CUDA
        )
        return q, k, v, grad * self.rows[:, :, None, None]

    def by(self, backend, **options):
        return lambda *x: self.attend(*x, backend=backend, **options)


def of_pack(trees, padding=0):
    until, plan, rows = packed(trees, padding, CUDA)
    return of_plan(until, plan, rows[None])


def of_plan(until, plan, rows, **rule):
    def attend(q, k, v, **options):
        return tree_attention(q, k, v, until, plan, **rule, **options)

    def resolved(plan, dim):
        resolve(plan, until, dim, visible_from=rule.get("visible_from"))

    return Case(TREE, plan, attend, sees(until), rows, (28, 4), resolved)


def of_rectangles():
    width, lengths = 512, [300, 1, 512]
    until, padding = np.tile(np.arange(1, width + 1), (3, 1)), np.ones((3, width), dtype=bool)
    for b, length in enumerate(lengths):
        until[b, width - length :], padding[b, width - length :] = width, False
    plan = plan_attention(until, padding).to(CUDA)
    seen = torch.from_numpy(until.astype(np.int32)).cuda()
    return of_plan(seen, plan, torch.from_numpy(~padding).cuda())


def rows_of_rule():
    """A prompt with a block of 256, three branches (one with two blocks), a plain sample, padding."""
    until = np.concatenate(
        [np.full(700, 1650), np.full(300, 1000), np.full(500, 1500), np.full(150, 1650)]
        + [np.full(400, 2050), np.arange(2051, 2101)]
    ).astype(np.int32)
    start, padding = np.arange(2100, dtype=np.int32), np.arange(2100) >= 2050
    for first, stop in ((200, 456), (1100, 1356), (1400, 1464), (1700, 1956)):
        start[first:stop] = first
    return until, start, padding


def of_rule(window, two_way):
    until, start, padding = rows_of_rule()
    plan = plan_of_rule(plan_attention(until, padding, start).to(CUDA), window, two_way)
    first = torch.from_numpy(start).cuda() if two_way else None
    rule, rows = {"visible_from": first, "window": window}, torch.from_numpy(~padding).cuda()[None]
    return of_plan(torch.from_numpy(until).cuda(), plan, rows, **rule)


def of_tower(lengths):
    plan = plan_sequences(lengths).pin_memory().to(CUDA, non_blocking=True)

    def attend(q, k, v, **options):
        return sequence_attention(q, k, v, plan, **options)

    def resolved(plan, dim):
        resolve_sequences(plan, CUDA, dim)

    rows = torch.ones(1, plan.rows, dtype=torch.bool, device=CUDA)
    return Case(SEQUENCES, plan, attend, within(lengths).cuda(), rows, (16, 16), resolved)


SHARED = [(300, [200, 1, 137]), (1, [1, 1]), (64, [(100, [30, 40]), 128]), 5]
PACKS = {
    "plain": lambda: of_pack([700, 1, 129, 300]),
    "plain, padded": lambda: of_pack([257, 64], 190),
    "shared": lambda: of_pack(SHARED),
    "shared, padded": lambda: of_pack([(600, [513, 90, 255]), (20, [300, 300])], 59),
    "rectangles": of_rectangles,
}
RULES = {
    f"window {window}, two-way {two_way}": lambda w=window, t=two_way: of_rule(w, t)
    for window, two_way in ((100, True), (512, True), (512, False), (None, True))
}
TOWERS = {
    "windows": lambda: of_tower([64] * 48),
    "windows at the edges": lambda: of_tower(([64] * 5 + [48]) * 5 + [32] * 5 + [24]),
    "pictures": lambda: of_tower([1024, 16, 784, 2048]),
    "one": lambda: of_tower([700]),
}
USUAL = {
    "pack": PACKS["shared"],
    "rule": lambda: of_rule(100, True),
    "tower": TOWERS["windows at the edges"],
}
BACKENDS = dict.fromkeys((*SEQUENCES.names, *TREE.backends))
each_backend = pytest.mark.parametrize("backend", BACKENDS)
usually = pytest.mark.parametrize("name", USUAL)


def able(case, backend, dim=None, dtype=HALF):
    """Skip what this device, or this rule, can't do."""
    if backend not in case.chooser.names:
        pytest.skip("not for these rows")
    plan = case.plan if case.chooser is TREE else None
    dim = dim or case.chooser.head_dim
    if reason := case.chooser.why_not(backend, CUDA, dtype, dim, 0.0, plan):
        pytest.skip(reason)
    return case


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def compare(case, backend, dim=None, dtype=HALF, heads=None):
    """Beside sdpa in float32 on the same numbers, and no worse than sdpa in this dtype."""
    inputs = case.inputs(dim, dtype, heads)
    expected = gradients(case.by("sdpa"), *(x.float() for x in inputs))
    torchs, found = (gradients(case.by(name), *inputs) for name in ("sdpa", backend))
    report = {}
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), found, torchs, expected, strict=True):
        assert a.shape == c.shape and a.dtype == dtype and a.isfinite().all()
        at = case.rows if name == "out" else ...
        report[name] = relative(a[at], c[at]), relative(b[at], c[at])
    print(backend, dtype, dim, {k: f"{a:.2e} {b:.2e}" for k, (a, b) in report.items()})
    for name, (off, torchs_off) in report.items():
        assert off <= BOUND, (name, report)
        # FlashAttention-2 rounds a key's gradient in each branch; their sum is rounded once more.
        shared = getattr(case.plan, "key_rows", None) is not None
        twice = backend in ("varlen", "flash_attn") and shared and name in ("dk", "dv")
        allowed = TOLERANCES["gradient_vs_torch"].value * (1.15 if twice else 1.0)
        assert off <= allowed * torchs_off or case.seen.shape[1] == 2100, (name, report)


@each_backend
@pytest.mark.parametrize("name", PACKS | RULES | TOWERS)
def test_within_the_contract(backend, name):
    compare(able((PACKS | RULES | TOWERS)[name](), backend), backend)


@each_backend
@pytest.mark.parametrize("dim", [16, 48, 64, 72, 88, 96, 104, 128, 256])
@usually
def test_other_heads(backend, dim, name):
    compare(able(USUAL[name](), backend, dim), backend, dim)


@pytest.mark.parametrize("backend", ["varlen", "flash_attn", "flash_attn_4"])
@pytest.mark.parametrize("name", ["shared, padded", "windows at the edges"])
def test_fp16(backend, name):
    case = able((PACKS | TOWERS)[name](), backend, 64, torch.float16)
    compare(case, backend, 64, torch.float16, (4, 4))


@pytest.mark.parametrize("name", TOWERS)
def test_float32_is_exact(name, no_tf32):
    case = TOWERS[name]()
    case.resolve(case.plan, 80)
    assert case.plan.choice[torch.float32] == "sdpa"
    *x, grad = case.inputs(80, torch.float32)
    found = gradients(case.by(None), *x, grad)
    exact = gradients(lambda *x: dense(*x, case.seen)[0], *(y.double() for y in (*x, grad)))
    bound = TOLERANCES["gradient_fp32"].value
    assert max(relative(a, b) for a, b in zip(found, exact, strict=True)) <= bound


@pytest.mark.parametrize(
    "backend", ["auto", *(n for n in BACKENDS if n == "sdpa" or TREE.backends[n].lse)]
)
@pytest.mark.parametrize("name", ["plain", "shared", "shared, padded", "pictures"])
def test_log_sum_exp_and_its_gradient(backend, name):
    case = (PACKS | TOWERS)[name]()
    case = case if backend == "auto" else able(case, backend)
    *x, grad = case.inputs()
    weight = torch.randn(1, case.heads[0], case.rows.shape[1], device=CUDA) * case.rows[:, None]
    run = case.by(None if backend == "auto" else backend, return_lse=True)
    found = with_lse(run, *x, grad * 0, weight)
    exact = with_lse(lambda *x: dense(*x, case.seen), *(y.double() for y in x), grad * 0, weight)
    assert found[1].dtype == torch.float32 and found[1].shape == exact[1].shape
    off = (found[1] - exact[1])[:, :, case.rows[0]].abs().max()
    peak = float(exact[1].abs().max())
    assert off <= TOLERANCES["linear_logprob"].value * max(1.0, peak / 50), float(off)
    for a, b in zip(found[2:4], exact[2:4], strict=True):
        assert relative(a, b) <= BOUND
    with torch.no_grad():
        assert relative(run(*x)[0], case.by(None if backend == "auto" else backend)(*x)) <= 1e-3


@each_backend
@usually
def test_same_bits_on_request(backend, name):
    torch.use_deterministic_algorithms(True)
    try:
        case = able(USUAL[name](), backend)
        inputs = case.inputs()
        first, second = (gradients(case.by(backend), *inputs) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each_backend
@usually
def test_nothing_waits_for_the_gpu(backend, name):
    case = able(USUAL[name](), backend)
    inputs = case.inputs()

    def run():
        case.plan.block_mask = case.plan.chosen_under = None
        case.resolve(case.plan, case.chooser.head_dim)
        gradients(case.by(backend), *inputs)

    never_waits(run)


@pytest.mark.parametrize("backend", ["sdpa", "varlen", "flash_attn_4", "flex"])
@pytest.mark.parametrize("resolved", [True, False])
@pytest.mark.parametrize("name", ["pack", "tower"])
def test_it_compiles_whole(backend, resolved, name, monkeypatch):
    torch._dynamo.reset()  # or what another case compiled makes numbers of heads symbols
    case = able(USUAL[name](), backend)
    monkeypatch.setenv(case.chooser.variable, backend)
    # a mask of blocks is made before, and so is a tower's plan
    if resolved or backend == "flex" or name == "tower":
        case.resolve(case.plan, case.chooser.head_dim)
    inputs, run = case.inputs(), case.by(None)
    way = "inductor" if backend == "flex" else "aot_eager"
    compiled = torch.compile(run, fullgraph=True, backend=way)
    pairs = zip(gradients(compiled, *inputs), gradients(run, *inputs), strict=True)
    assert max(relative(a, b) for a, b in pairs) <= 1e-3


@pytest.mark.parametrize("backend", ["varlen", "flash_attn", "flash_attn_4"])
def test_in_a_cuda_graph(backend):
    case = able(USUAL["pack"](), backend)
    *x, _ = case.inputs()
    with torch.no_grad():
        expected = case.by(backend)(*x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = case.by(backend)(*x)
        out.fill_(torch.nan)
        graph.replay()
    assert torch.equal(out, expected)


@each_backend
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["pack", "tower"])
def test_checkpointed_under_autocast(backend, reentrant, name, monkeypatch):
    """The backend that bf16 takes, of parameters in fp32, forward done twice."""
    case = able(USUAL[name](), backend)
    monkeypatch.setenv(case.chooser.variable, backend)
    *x, grad = case.inputs()
    expected = gradients(case.by(None), *x, grad)
    leaves = [y.detach().float().requires_grad_() for y in x]
    with torch.autocast("cuda", dtype=HALF):
        out = checkpoint(case.by(None), *leaves, use_reentrant=reentrant)
    out.backward(grad)
    assert relative(out, expected[0]) <= 1e-3
    for leaf, wanted in zip(leaves, expected[1:], strict=True):
        assert leaf.grad.dtype == torch.float32 and relative(leaf.grad, wanted) <= 2e-3


@each_backend
def test_no_rows(backend):
    case = able(of_pack([]), backend)
    q, k, v, grad = case.inputs()
    found = gradients(case.by(backend), q, k, v, grad)
    assert [x.shape for x in found] == [grad.shape, q.shape, k.shape, v.shape]


@each_backend
def test_tiles_and_values_in_one_product_with_queries(backend):
    """Towers split q, k, v from one output: their rows are far apart in memory."""
    case = able(USUAL["tower"](), backend)
    qkv = torch.randn(case.plan.rows, 3, 16, 80, device=CUDA, dtype=HALF)
    apart, grad = [x.transpose(0, 1)[None] for x in qkv.unbind(1)], case.inputs()[3]
    found = gradients(case.by(backend), *apart, grad)
    expected = gradients(case.by(backend), *(x.contiguous() for x in apart), grad)
    assert max(relative(a, b) for a, b in zip(found, expected, strict=True)) <= 1e-3
    able(case, backend, 64)
    q, k, v, _ = draw(5, 16, 16, 257, 64, HALF, CUDA)
    out = sequence_attention(q, k, v, plan_tiles(5, 257, CUDA), backend=backend)
    expected, _ = dense(*(x.double() for x in (q, k, v)), within([257]).cuda())
    assert relative(out, expected) <= BOUND


def test_few_rows_first_in_a_process():
    """torch's own choice for few rows without gradients is a kernel for decoding, which has no tile for these."""
    case = able(of_pack([89]), "flex", 32)
    torch._dynamo.reset()  # after longer packs, torch would trace a graph for any number of rows
    *x, _ = case.inputs(32, heads=(2, 1))
    with torch.no_grad():
        found, want = case.by("flex")(*x), case.by("sdpa")(*(y.float() for y in x))
    assert relative(found, want) <= BOUND


@pytest.mark.parametrize("backend", ["varlen", "flash_attn_4", "flex"])
def test_parts_of_the_keys_are_merged(backend):
    """A sequence's second half over the first, and over itself, beside the whole at once."""
    whole, half = able(of_pack([512]), backend), of_pack([256])
    q, k, v, _ = whole.inputs()
    expected = whole.by(backend, return_lse=True)(q, k, v)
    second = [x[:, :, 256:] for x in (q, k, v)]
    own = half.by(backend, return_lse=True)(*second)
    every = torch.ones(1, 256, 256, dtype=torch.bool, device=CUDA)
    wide = (x[:, :, :256].double() for x in (k, v))
    prefix, lse = dense(second[0].double(), *wide, every)
    merged, together = merge_attention([prefix.bfloat16(), own[0]], [lse.float(), own[1]])
    assert relative(merged, expected[0][:, 256:]) <= BOUND
    assert (together - expected[1][:, :, 256:]).abs().max() <= TOLERANCES["linear_logprob"].value


def test_settings_are_followed_and_changes_seen_without_waiting(monkeypatch):
    until, plan, rows = packed(SHARED, device=CUDA)
    q, k, v, _ = draw(1, 4, 4, len(rows), 64, HALF, CUDA)
    monkeypatch.delenv("MMPACK_ATTENTION", raising=False)
    resolve(plan, until, 64)
    assert plan.choice[HALF] in TREE.backends and plan.choice[torch.float32] == "sdpa"
    for name in ("varlen", "sdpa", "varlen"):
        monkeypatch.setenv("MMPACK_ATTENTION", name)
        out = tree_attention(q, k, v, until, plan)
        assert torch.equal(out, tree_attention(q, k, v, until, plan, backend=name))
        assert set(plan.choice.values()) == {name}
    odd = torch.zeros(1, 4, len(rows), 12, device=CUDA, dtype=HALF)
    with pytest.raises(BackendError, match="varlen can't take heads of 12"):
        tree_attention(odd, odd, odd, until, plan)
    until[:5] = 5
    ends, start, padding = rows_of_rule()
    plain = plan_attention(ends, padding, start).to(CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(ArgumentError, match="was changed since"):
            tree_attention(q, k, v, until, plan)
        made = plan_of_rule(plain, 100, True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert made.path.tolist() == path_of(made.host.until).tolist()
    assert made.blocks.rows.is_cuda and made.cu_seqlens_k.is_cuda


@pytest.mark.parametrize("dim", [72, 80])
def test_padding_of_heads_is_needed(dim, monkeypatch):
    """Without it dq is wrong on Hopper. Where this fails, the package is mended: drop the padding."""
    case = able(TOWERS["windows"](), "flash_attn_4", dim)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not Hopper")
    monkeypatch.setattr(varlen, "right_size", lambda size, device: size)
    with pytest.raises(AssertionError, match="dq"):
        compare(case, "flash_attn_4", dim)


@pytest.mark.parametrize("compiled", [False, True])
def test_cudnn_is_left_out(compiled):
    q, k, v = (x.requires_grad_() for x in draw(2, 4, 4, 704, 64, HALF, CUDA)[:3])
    attend = without_cudnn.attend
    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    mask = torch.ones(704, 704, device=CUDA, dtype=torch.bool).tril()
    for options in ({}, {"attn_mask": mask}, {"is_causal": True}):
        out = run(q, k, v, **options)
        seen, stack = set(), [out.grad_fn]
        while stack:
            node = stack.pop()
            if node is not None and node not in seen:
                seen.add(node)
                stack += [n for n, _ in node.next_functions]
        assert not any("Cudnn" in type(node).__name__ for node in seen)
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))
