"""Both ops of logprobs on a GPU, as a training step holds them: beside PyTorch's own, autocast and checkpointing."""

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mmpack.contracts import TOLERANCES
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.selected import selected_logprobs

pytestmark = [pytest.mark.kernel, pytest.mark.gpu]

COUNT, WIDTH, VOCAB = 1111, 520, 20_011


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setenv("MMPACK_BACKEND", "auto")


def problem(op, dtype):
    """Leaves of the op, targets, and the gradient that comes in."""
    targets = torch.randint(0, VOCAB, (COUNT,), device="cuda")
    up = torch.randn(COUNT, device="cuda")
    if op == "logits":
        return [torch.randn(COUNT, VOCAB, device="cuda").mul_(3).to(dtype)], targets, up
    hidden = torch.randn(COUNT, WIDTH, device="cuda").to(dtype)
    weight = torch.randn(VOCAB, WIDTH, device="cuda").mul_(0.1).to(dtype)
    return [hidden, weight], targets, up


def ours(leaves, targets):
    if len(leaves) == 1:
        return selected_logprobs(leaves[0], targets, None, 0.8)
    return linear_selected_logprobs(*leaves, targets, None, None, 0.8)


def torchs(leaves, targets):
    """What one writes in PyTorch: the product in the inputs' dtype, the softmax in float32 or better."""
    z = leaves[0] if len(leaves) == 1 else functional.linear(*leaves)
    z = z.to(torch.promote_types(z.dtype, torch.float32)) / 0.8
    return z.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def gradients(run, tensors, targets, up):
    leaves = [x.clone().requires_grad_() for x in tensors]
    lp = run(leaves, targets)
    lp.backward(up.to(lp.dtype))
    return [x.grad for x in leaves]


@pytest.mark.parametrize("op", ["logits", "hidden"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_are_no_worse_than_pytorchs_own(op, dtype):
    tensors, targets, up = problem(op, dtype)
    right = gradients(torchs, [x.double() for x in tensors], targets, up)
    found = [gradients(run, tensors, targets, up) for run in (ours, torchs)]
    for got, theirs, want in zip(*found, right, strict=True):
        error, own = ((x.double() - want).norm() / want.norm() for x in (got, theirs))
        assert error <= TOLERANCES["gradient_vs_torch"].value * own


@pytest.mark.parametrize("op", ["logits", "hidden"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(op, reentrant):
    tensors, targets, up = problem(op, torch.bfloat16)

    def again(leaves, targets):
        return checkpoint(lambda *x: ours(x, targets), *leaves, use_reentrant=reentrant)

    expected = gradients(ours, tensors, targets, up)
    for a, b in zip(gradients(again, tensors, targets, up), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("op", ["logits", "hidden"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_changes_nothing(op, dtype):
    tensors, targets, up = problem(op, dtype)

    def cast(leaves, targets):
        with torch.autocast("cuda", torch.bfloat16):
            return ours(leaves, targets)

    assert torch.equal(cast(tensors, targets), ours(tensors, targets))
    expected = gradients(ours, tensors, targets, up)
    for a, b in zip(gradients(cast, tensors, targets, up), expected, strict=True):
        assert torch.equal(a, b)
