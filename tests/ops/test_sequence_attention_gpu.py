"""Every backend of a tower's attention on a GPU, against sdpa one by one in fp32 on the same numbers."""

import pytest
import torch
from support.attention import draw, gradients
from support.waits import never_waits
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from mmpack.contracts import TOLERANCES
from mmpack.errors import BackendError
from mmpack.ops.attention import (
    SEQUENCES,
    plan_sequences,
    plan_tiles,
    resolve_sequences,
    sequence_attention,
    varlen,
)

pytestmark = pytest.mark.gpu
HEADS, DIM = 16, 80  # Qwen2.5-VL's; on Hopper FlashAttention-4 gets them padded
LENGTHS = {
    "windows": [64] * 48,
    "windows at the edges": ([64] * 5 + [48]) * 5 + [32] * 5 + [24],
    "pictures": [1024, 16, 784, 2048],
    "one": [700],
}
each_backend = pytest.mark.parametrize("backend", SEQUENCES.names)
by_sequences = pytest.mark.parametrize("backend", ["varlen", "flash_attn", "flash_attn_4"])


def skip_unless(backend, dtype=torch.bfloat16, dim=DIM):
    reason = SEQUENCES.explain(torch.device("cuda"), dtype, dim)[backend]
    if reason is not None:
        pytest.skip(reason)


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def one_by_one(q, k, v, lengths):
    pieces = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    return torch.cat([scaled_dot_product_attention(*p).transpose(1, 2) for p in pieces], dim=1)


def compare(backend, lengths, dim, dtype):
    plan = plan_sequences(lengths).to("cuda")
    q, k, v, grad = draw(1, HEADS, HEADS, plan.rows, dim, dtype, "cuda")
    exact = [x.double() for x in (q, k, v, grad)]
    expected = gradients(lambda *x: one_by_one(*x, lengths), *exact)
    torchs = gradients(lambda *x: one_by_one(*x, lengths), q, k, v, grad)
    found = gradients(lambda *x: sequence_attention(*x, plan, backend=backend), q, k, v, grad)
    report = {}
    for name, a, b, c in zip(["out", "dq", "dk", "dv"], found, torchs, expected, strict=True):
        assert a.shape == c.shape and a.dtype == dtype and a.isfinite().all()
        report[name] = relative(a, c), relative(b, c)
    print(backend, dtype, dim, {k: f"{a:.2e} {b:.2e}" for k, (a, b) in report.items()})
    half = dtype in (torch.bfloat16, torch.float16)
    most = TOLERANCES["gradient_bf16" if half else "gradient_fp32"].value
    for name, (off, torchs_off) in report.items():
        assert off <= most, (name, report)
        if half:
            assert off <= TOLERANCES["gradient_vs_torch"].value * torchs_off, (name, report)


@each_backend
@pytest.mark.parametrize("dim", [16, 48, 64, 72, 80, 88, 96, 104, 128])
@pytest.mark.parametrize("name", LENGTHS)
def test_within_the_contract(backend, dim, name):
    skip_unless(backend, dim=dim)
    compare(backend, LENGTHS[name], dim, torch.bfloat16)


@each_backend
def test_fp16(backend):
    skip_unless(backend, torch.float16)
    compare(backend, LENGTHS["windows at the edges"], DIM, torch.float16)


@pytest.mark.parametrize("name", LENGTHS)
def test_float32_is_exact(name, no_tf32):
    plan = plan_sequences(LENGTHS[name]).to("cuda")
    resolve_sequences(plan, plan.cu_seqlens.device, 80)
    assert plan.choice[torch.float32] == "sdpa"
    compare("sdpa", LENGTHS[name], 80, torch.float32)


@each_backend
def test_tiles(backend):
    skip_unless(backend, dim=64)
    q, k, v, _ = draw(5, HEADS, HEADS, 257, 64, torch.bfloat16, "cuda")
    out = sequence_attention(q, k, v, plan_tiles(5, 257, q.device), backend=backend)
    expected = scaled_dot_product_attention(*(x.double() for x in (q, k, v))).transpose(1, 2)
    assert relative(out, expected) <= TOLERANCES["gradient_bf16"].value


@each_backend
def test_values_in_one_product_with_queries(backend):
    """Towers split q, k, v from one output: their rows are far apart in memory."""
    skip_unless(backend)
    plan = plan_sequences(LENGTHS["windows at the edges"]).to("cuda")
    qkv = torch.randn(plan.rows, 3, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    apart = [x.transpose(0, 1)[None] for x in qkv.unbind(1)]
    grad = torch.randn(1, plan.rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)

    def attend(*x):
        return sequence_attention(*x, plan, backend=backend)

    found = gradients(attend, *apart, grad)
    expected = gradients(attend, *(x.contiguous() for x in apart), grad)
    assert max(relative(a, b) for a, b in zip(found, expected, strict=True)) <= 1e-3


@each_backend
def test_same_bits_on_request(backend):
    torch.use_deterministic_algorithms(True)
    try:
        skip_unless(backend)
        plan = plan_sequences([3000, 1500, 64]).to("cuda")
        q, k, v, grad = draw(1, HEADS, HEADS, plan.rows, DIM, torch.bfloat16, "cuda")
        first, second = (
            gradients(lambda *x: sequence_attention(*x, plan, backend=backend), q, k, v, grad)
            for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each_backend
def test_nothing_waits_for_the_gpu(backend):
    skip_unless(backend)
    plan = plan_sequences(LENGTHS["windows at the edges"]).pin_memory()
    plan = plan.to("cuda", non_blocking=True)
    q, k, v, grad = draw(1, HEADS, HEADS, plan.rows, DIM, torch.bfloat16, "cuda")

    def run():
        plan.block_mask = plan.chosen_under = None
        resolve_sequences(plan, q.device, DIM)
        gradients(lambda *x: sequence_attention(*x, plan, backend=backend), q, k, v, grad)

    never_waits(run)


@pytest.mark.parametrize("backend", ["sdpa", "varlen", "flash_attn_4", "flex"])
def test_it_compiles_whole(backend, monkeypatch):
    skip_unless(backend)
    monkeypatch.setenv("MMPACK_TOWER_ATTENTION", backend)
    plan = plan_sequences(LENGTHS["windows at the edges"]).to("cuda")
    q, k, v, grad = draw(1, HEADS, HEADS, plan.rows, DIM, torch.bfloat16, "cuda")
    resolve_sequences(plan, q.device, DIM)

    def attend(*x):
        return sequence_attention(*x, plan)

    compiled = torch.compile(
        attend, fullgraph=True, backend="inductor" if backend == "flex" else "aot_eager"
    )
    pairs = zip(gradients(compiled, q, k, v, grad), gradients(attend, q, k, v, grad), strict=True)
    assert max(relative(a, b) for a, b in pairs) <= 1e-3


@each_backend
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_under_autocast(backend, reentrant, monkeypatch):
    skip_unless(backend)
    monkeypatch.setenv("MMPACK_TOWER_ATTENTION", backend)
    plan = plan_sequences(LENGTHS["windows at the edges"]).to("cuda")
    q, k, v, grad = draw(1, HEADS, HEADS, plan.rows, DIM, torch.bfloat16, "cuda")

    def attend(*x):
        return sequence_attention(*x, plan)

    expected = gradients(attend, q, k, v, grad)
    leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = checkpoint(attend, *leaves, use_reentrant=reentrant)
    out.backward(grad)
    assert relative(out, expected[0]) <= 1e-3
    for leaf, wanted in zip(leaves, expected[1:], strict=True):
        assert leaf.grad.dtype == torch.float32 and relative(leaf.grad, wanted) <= 2e-3


@pytest.mark.parametrize("dim", [72, 80])
def test_padding_of_heads_is_needed(dim, monkeypatch):
    """Without it dq is wrong on Hopper. Where this fails, the package is mended: drop the padding."""
    skip_unless("flash_attn_4", dim=dim)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not Hopper")
    monkeypatch.setattr(varlen, "right_size", lambda size, device: size)
    with pytest.raises(AssertionError, match="dq"):
        compare("flash_attn_4", LENGTHS["windows"], dim, torch.bfloat16)


def test_what_auto_takes(monkeypatch):
    monkeypatch.delenv("MMPACK_TOWER_ATTENTION", raising=False)
    plan = plan_sequences([64] * 8).to("cuda")
    resolve_sequences(plan, plan.cu_seqlens.device, 80)
    able = [n for n, why in SEQUENCES.explain(plan.cu_seqlens.device).items() if why is None]
    assert plan.choice[torch.bfloat16] in able
    print("auto takes", plan.choice[torch.bfloat16], "of", able)
    assert plan.choice[torch.float32] == plan.choice[torch.float64] == "sdpa"
    monkeypatch.setenv("MMPACK_TOWER_ATTENTION", "varlen")
    q = torch.zeros(1, 2, plan.rows, 12, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(BackendError, match="varlen can't take heads of 12"):
        sequence_attention(q, q, q, plan)
