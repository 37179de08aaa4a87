"""Log-sum-exp of every attention backend on a GPU, and its gradient, against scores written out in float64."""

import pytest
import torch
from support.attention import draw, packed

from mmpack.contracts import TOLERANCES
from mmpack.errors import BackendError
from mmpack.ops.attention import (
    SEQUENCES,
    TREE,
    merge_attention,
    plan_sequences,
    sequence_attention,
    tree_attention,
)

pytestmark = pytest.mark.gpu
PACKS = {
    "plain": ([700, 1, 129, 300], 0),
    "shared": ([(300, [200, 1, 137]), (1, [1, 1]), (64, [(100, [30, 40]), 128]), 5], 0),
    "shared, padded": ([(600, [513, 90, 255]), (20, [300, 300])], 59),
}
WITH_LSE = ["sdpa", *(name for name, backend in TREE.backends.items() if backend.lse)]
PICTURES = [1024, 64, 64, 64, 40, 24, 8, 700, 333]


def skip_unless(chooser, backend, dtype=torch.bfloat16, dim=128):
    reason = chooser.explain(torch.device("cuda"), dtype, dim)[backend]
    if reason is not None:
        pytest.skip(reason)


def of_scores(q, k, seen):
    """[B, heads, T] of seen [T, T], in float64."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return torch.logsumexp(scores, -1)


def with_gradients(function, q, k, weight):
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    lse = function(*leaves)
    return [lse.detach(), *torch.autograd.grad(lse, leaves, weight.to(lse.dtype))]


def compare(attend, seen, rows, heads, kv_heads, dim, dtype):
    """attend: q, k, v, return_lse -> what attention returns."""
    q, k, v, _ = draw(1, heads, kv_heads, len(rows), dim, dtype, "cuda")
    weight = torch.randn(1, heads, len(rows), device="cuda", dtype=torch.float64) * rows
    found = with_gradients(lambda *x: attend(*x, v, True)[1], q, k, weight)
    exact = with_gradients(lambda *x: of_scores(*x, seen), q.double(), k.double(), weight)
    assert found[0].dtype == torch.float32 and found[0].shape == (1, heads, len(rows))
    off = (found[0] - exact[0])[:, :, rows].abs().max()
    bound = TOLERANCES["linear_logprob"].value
    assert off <= bound * max(1.0, float(exact[0].abs().max()) / 50), float(off)
    for name, a, b in zip(("dq", "dk"), found[1:], exact[1:], strict=True):
        error = float((a.double() - b).norm() / b.norm())
        assert error <= TOLERANCES["gradient_bf16"].value, (name, error)
    with torch.no_grad():
        out, plain = attend(q, k, v, True)[0], attend(q, k, v, False)
    assert (out - plain).double().norm() <= 1e-3 * plain.double().norm()


@pytest.mark.parametrize("name", PACKS)
@pytest.mark.parametrize("backend", WITH_LSE)
def test_packs(backend, name):
    skip_unless(TREE, backend)
    until, plan, rows = packed(*PACKS[name], device="cuda")
    at = torch.arange(len(rows), device="cuda")
    seen = (at[None] <= at[:, None]) & (at[:, None] < until)

    def attend(q, k, v, return_lse):
        return tree_attention(q, k, v, until, plan, backend=backend, return_lse=return_lse)

    compare(attend, seen, rows, 28, 4, 128, torch.bfloat16)


@pytest.mark.parametrize("backend", WITH_LSE)
def test_fp16_and_other_heads(backend):
    skip_unless(TREE, backend, torch.float16, 64)
    until, plan, rows = packed(*PACKS["shared"], device="cuda")
    at = torch.arange(len(rows), device="cuda")
    seen = (at[None] <= at[:, None]) & (at[:, None] < until)

    def attend(q, k, v, return_lse):
        return tree_attention(q, k, v, until, plan, backend=backend, return_lse=return_lse)

    compare(attend, seen, rows, 4, 4, 64, torch.float16)


@pytest.mark.parametrize("backend", SEQUENCES.names)
def test_sequences(backend):
    dim = 80
    skip_unless(SEQUENCES, backend, dim=dim)
    plan = plan_sequences(PICTURES).to("cuda")
    own = torch.repeat_interleave(torch.arange(len(PICTURES)), torch.tensor(PICTURES)).cuda()

    def attend(q, k, v, return_lse):
        return sequence_attention(q, k, v, plan, backend=backend, return_lse=return_lse)

    rows = torch.ones(len(own), dtype=torch.bool, device="cuda")
    compare(attend, own[:, None] == own, rows, 16, 16, dim, torch.bfloat16)


def test_auto_gives_it_whatever_it_chose(monkeypatch):
    monkeypatch.delenv("MMPACK_ATTENTION", raising=False)
    until, plan, rows = packed(*PACKS["shared"], device="cuda")
    at = torch.arange(len(rows), device="cuda")
    seen = (at[None] <= at[:, None]) & (at[:, None] < until)

    def attend(q, k, v, return_lse):
        return tree_attention(q, k, v, until, plan, return_lse=return_lse)

    compare(attend, seen, rows, 28, 4, 128, torch.bfloat16)


def test_a_backend_without_is_refused_by_name():
    skip_unless(TREE, "flex_flash")
    until, plan, rows = packed(*PACKS["shared"], device="cuda")
    q, k, v, _ = draw(1, 28, 4, len(rows), 128, torch.bfloat16, "cuda")
    with pytest.raises(BackendError, match="flex_flash was requested, but returns no log-sum-exp"):
        tree_attention(q, k, v, until, plan, backend="flex_flash", return_lse=True)


@pytest.mark.parametrize("backend", ["varlen", "flash_attn_4", "flex"])
def test_parts_of_the_keys_are_merged(backend):
    """A sequence's second half over the first, and over itself, beside the whole at once."""
    skip_unless(TREE, backend)
    until, plan, _ = packed([512], device="cuda")
    half, half_plan, _ = packed([256], device="cuda")
    q, k, v, _ = draw(1, 28, 4, 512, 128, torch.bfloat16, "cuda")
    whole = tree_attention(q, k, v, until, plan, backend=backend, return_lse=True)
    second = [x[:, :, 256:] for x in (q, k, v)]
    own = tree_attention(*second, half, half_plan, backend=backend, return_lse=True)
    wide_k, wide_v = (x[:, :, :256].repeat_interleave(7, 1).double() for x in (k, v))
    scores = second[0].double() @ wide_k.mT * 128**-0.5
    prefix = (scores.softmax(-1) @ wide_v).transpose(1, 2).bfloat16()
    lse = torch.logsumexp(scores, -1).float()
    merged, together = merge_attention([prefix, own[0]], [lse, own[1]])
    error = (merged - whole[0][:, 256:]).double().norm() / whole[0][:, 256:].double().norm()
    assert float(error) <= TOLERANCES["gradient_bf16"].value
    assert (together - whole[1][:, :, 256:]).abs().max() <= TOLERANCES["linear_logprob"].value
