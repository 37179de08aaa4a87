"""Every attention backend on a GPU against sdpa in fp32 on the same numbers: outputs, gradients, bits, graphs."""

import numpy as np
import pytest
import torch
from support.attention import draw, gradients, packed
from torch.utils.checkpoint import checkpoint

from mmpack.contracts import TOLERANCES
from mmpack.errors import ArgumentError, BackendError
from mmpack.ops.attention import TREE, plan_attention, resolve, tree_attention

pytestmark = pytest.mark.gpu
PACKS = {
    "plain": ([700, 1, 129, 300], 0),
    "plain, padded": ([257, 64], 190),
    "shared": ([(300, [200, 1, 137]), (1, [1, 1]), (64, [(100, [30, 40]), 128]), 5], 0),
    "shared, padded": ([(600, [513, 90, 255]), (20, [300, 300])], 59),
}
each_backend = pytest.mark.parametrize("backend", list(TREE.backends))
by_sequences = pytest.mark.parametrize("backend", ["varlen", "flash_attn", "flash_attn_4"])


def skip_unless(backend, dtype=torch.bfloat16, dim=128):
    reason = TREE.explain(torch.device("cuda"), dtype, dim)[backend]
    if reason is not None:
        pytest.skip(reason)


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def compare(backend, until, plan, rows, heads, kv_heads, dim, dtype):
    lines, width = rows.shape
    q, k, v, grad = draw(lines, heads, kv_heads, width, dim, dtype, "cuda")
    grad = grad * rows[:, :, None, None]
    exact = [x.float() for x in (q, k, v, grad)]
    expected = gradients(lambda *x: tree_attention(*x, until, plan, backend="sdpa"), *exact)
    torchs = gradients(lambda *x: tree_attention(*x, until, plan, backend="sdpa"), q, k, v, grad)
    found = gradients(lambda *x: tree_attention(*x, until, plan, backend=backend), q, k, v, grad)
    for x in (expected, torchs, found):
        x[0] = x[0][rows]
    report = {}
    for name, a, b, c in zip(["out", "dq", "dk", "dv"], found, torchs, expected, strict=True):
        assert a.shape == c.shape and a.dtype == dtype and a.isfinite().all()
        report[name] = relative(a, c), relative(b, c)
    print(backend, dtype, {k: f"{a:.2e} {b:.2e}" for k, (a, b) in report.items()})
    allowed = TOLERANCES["gradient_vs_torch"].value
    for name, (off, torchs_off) in report.items():
        assert off <= TOLERANCES["gradient_bf16"].value, (name, report)
        # FlashAttention-2 rounds a key's gradient in each branch; their sum is rounded once more.
        rounds_twice = backend in ("varlen", "flash_attn") and plan.key_rows is not None
        more = 1.15 if rounds_twice and name in ("dk", "dv") else 1.0
        assert off <= more * allowed * torchs_off, (name, report)


@each_backend
@pytest.mark.parametrize("name", PACKS)
def test_packs(backend, name):
    skip_unless(backend)
    until, plan, rows = packed(*PACKS[name], device="cuda")
    compare(backend, until, plan, rows[None], 28, 4, 128, torch.bfloat16)


def test_few_rows_first_in_a_process():
    """torch's own choice for few rows without gradients is a kernel for decoding, which has no tile for these."""
    skip_unless("flex", dim=32)
    torch._dynamo.reset()  # after longer packs, torch would trace a graph for any number of rows
    until, plan, _ = packed([89], 0, device="cuda")
    q, k, v, _ = draw(1, 2, 1, 89, 32, torch.bfloat16, "cuda")
    with torch.no_grad():
        found = tree_attention(q, k, v, until, plan, backend="flex")
        want = tree_attention(q.float(), k.float(), v.float(), until, plan, backend="sdpa")
    assert relative(found, want) <= TOLERANCES["gradient_bf16"].value


@by_sequences
def test_other_heads_and_fp16(backend):
    skip_unless(backend, torch.float16, 64)
    until, plan, rows = packed(*PACKS["shared, padded"], device="cuda")
    compare(backend, until, plan, rows[None], 4, 4, 64, torch.float16)


@each_backend
def test_rectangles(backend):
    skip_unless(backend)
    lengths, width = [300, 1, 512], 512
    until = np.tile(np.arange(1, width + 1), (3, 1))
    padding = np.ones_like(until, dtype=bool)
    for b, length in enumerate(lengths):
        until[b, width - length :] = width
        padding[b, width - length :] = False
    plan = plan_attention(until, padding).to("cuda")
    seen = torch.from_numpy(until.astype(np.int32)).cuda()
    rows = torch.from_numpy(~padding).cuda()
    compare(backend, seen, plan, rows, 28, 4, 128, torch.bfloat16)


@each_backend
def test_same_bits_on_request(backend):
    torch.use_deterministic_algorithms(True)
    try:
        skip_unless(backend)
        until, plan, rows = packed([(1500, [600, 500, 700]), 900], device="cuda")
        q, k, v, grad = draw(1, 28, 4, len(rows), 128, torch.bfloat16, "cuda")
        first, second = (
            gradients(lambda *x: tree_attention(*x, until, plan, backend=backend), q, k, v, grad)
            for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each_backend
def test_nothing_waits_for_the_gpu(backend):
    skip_unless(backend)
    until, plan, rows = packed(*PACKS["shared"], device="cuda")
    q, k, v, grad = draw(1, 28, 4, len(rows), 128, torch.bfloat16, "cuda")

    def run(p):
        resolve(p, until, 128)
        gradients(lambda *x: tree_attention(*x, until, p, backend=backend), q, k, v, grad)

    run(plan)
    plan = plan.to("cuda")  # forgets its blocks
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["varlen", "flash_attn_4", "flex"])
@pytest.mark.parametrize("resolved", [True, False])
def test_it_compiles_whole(backend, resolved, monkeypatch):
    skip_unless(backend)
    monkeypatch.setenv("MMPACK_ATTENTION", backend)
    until, plan, rows = packed(*PACKS["shared"], device="cuda")
    if resolved or backend == "flex":  # a mask of blocks is made before
        resolve(plan, until, 128)
    q, k, v, grad = draw(1, 28, 4, len(rows), 128, torch.bfloat16, "cuda")

    def attend(*x):
        return tree_attention(*x, until, plan)

    compiled = torch.compile(
        attend, fullgraph=True, backend="inductor" if backend == "flex" else "aot_eager"
    )
    pairs = zip(gradients(compiled, q, k, v, grad), gradients(attend, q, k, v, grad), strict=True)
    assert max(relative(a, b) for a, b in pairs) <= 1e-3


@by_sequences
def test_in_a_cuda_graph(backend):
    skip_unless(backend)
    until, plan, rows = packed(*PACKS["shared"], device="cuda")
    q, k, v, _ = draw(1, 28, 4, len(rows), 128, torch.bfloat16, "cuda")
    with torch.no_grad():
        expected = tree_attention(q, k, v, until, plan, backend=backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = tree_attention(q, k, v, until, plan, backend=backend)
        out.fill_(torch.nan)
        graph.replay()
    assert torch.equal(out, expected)


@each_backend
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_under_autocast(backend, reentrant, monkeypatch):
    """The backend that bf16 takes, of parameters in fp32, forward done twice."""
    skip_unless(backend)
    monkeypatch.setenv("MMPACK_ATTENTION", backend)
    until, plan, rows = packed(*PACKS["shared"], device="cuda")
    q, k, v, grad = draw(1, 28, 4, len(rows), 128, torch.bfloat16, "cuda")

    def attend(*x):
        return tree_attention(*x, until, plan)

    expected = gradients(attend, q, k, v, grad)
    leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = checkpoint(attend, *leaves, use_reentrant=reentrant)
    out.backward(grad)
    assert torch.equal(out, expected[0])
    for leaf, wanted in zip(leaves, expected[1:], strict=True):
        assert leaf.grad.dtype == torch.float32 and relative(leaf.grad, wanted) <= 1e-3


@each_backend
def test_no_rows(backend, monkeypatch):
    skip_unless(backend)
    monkeypatch.setenv("MMPACK_ATTENTION", backend)
    until = np.zeros(0, dtype=np.int32)
    plan = plan_attention(until, until == 1).to("cuda")
    q, k, v, grad = draw(1, 28, 4, 0, 128, torch.bfloat16, "cuda")
    seen = torch.from_numpy(until).cuda()
    found = gradients(lambda *x: tree_attention(*x, seen, plan), q, k, v, grad)
    assert [x.shape for x in found] == [grad.shape, q.shape, k.shape, v.shape]


def test_a_change_of_visible_until_is_seen_without_waiting():
    until, plan, rows = packed(*PACKS["shared"], device="cuda")
    q, k, v, _ = draw(1, 28, 4, len(rows), 128, torch.bfloat16, "cuda")
    tree_attention(q, k, v, until, plan)
    until[:5] = 5
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(ArgumentError, match="was changed since"):
            tree_attention(q, k, v, until, plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_plan_follows_the_present_settings(monkeypatch):
    until, plan, rows = packed(*PACKS["shared"], device="cuda")
    q, k, v, _ = draw(1, 4, 4, len(rows), 64, torch.bfloat16, "cuda")
    for name in ("varlen", "sdpa", "varlen"):
        monkeypatch.setenv("MMPACK_ATTENTION", name)
        out = tree_attention(q, k, v, until, plan)
        assert torch.equal(out, tree_attention(q, k, v, until, plan, backend=name))
        assert set(plan.choice.values()) == {name}
    odd = torch.zeros(1, 4, len(rows), 12, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(BackendError, match="varlen can't take heads of 12"):
        tree_attention(odd, odd, odd, until, plan)


def test_flash_attn_4_is_a_sound_op():
    skip_unless("flash_attn_4")
    from mmpack.ops.attention import varlen  # noqa: F401  (registers it)

    q = torch.randn(70, 4, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    k, v = (torch.randn(70, 2, 64, device="cuda", dtype=q.dtype, requires_grad=True) for _ in "kv")
    cu = torch.tensor([0, 30, 70], device="cuda", dtype=torch.int32)
    operands = (q, k, v, cu, cu, 40, 40, True, None, None, False)
    torch.library.opcheck(torch.ops.mmpack.flash_attn_4.default, operands)


def test_auto_takes_a_fast_one_for_half_precision_and_sdpa_for_the_rest(monkeypatch):
    monkeypatch.delenv("MMPACK_ATTENTION", raising=False)
    until, plan, _ = packed(*PACKS["shared"], device="cuda")
    resolve(plan, until, 128)
    assert plan.choice[torch.bfloat16] in TREE.backends
    assert plan.choice[torch.float32] == "sdpa"
