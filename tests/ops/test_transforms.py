"""The short ops under what torch does to a step: checkpointing, autocast, torch.compile, other derivatives, opcheck."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.losses.rewards.scores import scatter_op
from mmpack.ops.embeddings.merge import VisionRows, merge_embeddings
from mmpack.ops.rows.gather import gather_rows
from mmpack.ops.rows.inverse import inverse_index

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_device = pytest.mark.parametrize("device", DEVICES)


def vision(device):
    source = torch.tensor([-1, 0, 1, -1, 0], dtype=torch.int32)
    rows = torch.tensor([1, 2, 4], dtype=torch.int32)
    features = source[rows.long()]
    return VisionRows(
        *(x.to(device) for x in (source, rows, features, *inverse_index(features, 2)))
    )


def steps(device):
    """Of each op: a function of the tensors that it is differentiated by, and those; seeded."""
    g = torch.Generator().manual_seed(0)
    lp, old, ref, entropy, weight = (torch.randn(6, generator=g).to(device) for _ in range(5))
    adv, cu = torch.randn(2, generator=g).to(device), torch.tensor([0, 3, 6]).int().to(device)
    groups, index = torch.tensor([4, 4]).to(device), torch.tensor([0, 2, 2]).to(device)
    x, seen = torch.randn(5, 3, generator=g).to(device), torch.randn(2, 3, generator=g).to(device)
    where = vision(device)

    def policy(lp, entropy):
        options = {"kl_coef": 0.1, "entropy": entropy, "entropy_coef": 0.1}
        return mp.policy_loss(lp, adv, cu, old, ref, **options).loss

    def rewarded(lp):
        token = scatter_op(mp.group_advantages(adv, groups), cu, 6, 1.0, "mean")
        return mp.policy_loss(lp, token, cu, old).loss + (weight * token).sum()

    def merged(x, seen):
        out, levels = merge_embeddings(x, seen, where, [seen * 2])
        return (out**2).sum() + (levels[0] ** 3).sum()

    return {
        "policy_loss": (policy, (lp, entropy)),
        "advantages and scatter": (rewarded, (lp,)),
        "gather_rows": (lambda x: (gather_rows(x, index) ** 2).sum(), (x,)),
        "merge_embeddings": (merged, (x, seen)),
    }


NAMES = ("policy_loss", "advantages and scatter", "gather_rows", "merge_embeddings")
each_op = pytest.mark.parametrize("name", NAMES)


def gradients(step, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    value = step(*leaves)
    return value.detach(), *torch.autograd.grad(value, leaves)


@each_device
@each_op
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(device, name, reentrant):
    step, inputs = steps(device)[name]
    leaves = [x.clone().requires_grad_() for x in inputs]
    value = checkpoint(step, *leaves, use_reentrant=reentrant)
    value.backward()
    got = value.detach(), *(leaf.grad for leaf in leaves)
    assert all(map(torch.equal, got, gradients(step, inputs)))


@each_device
@each_op
def test_autocast(device, name):
    step, inputs = steps(device)[name]
    want = gradients(step, inputs)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = gradients(step, inputs)
    assert all(map(torch.equal, got, want))


@each_device
@each_op
def test_compile(device, name):
    step, inputs = steps(device)[name]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(gradients(compiled, inputs), gradients(step, inputs), strict=True):
        torch.testing.assert_close(got, want)


@each_device
def test_transforms_of_functions_are_refused(device):
    x, index, where = torch.randn(4, 5, 3), torch.tensor([0, 2, 2]), vision(device)
    x, index = x.to(device).requires_grad_(), index.to(device)
    refused = "it has no rule for torch.func's transforms. Fix: call it outside"
    with pytest.raises(ArgumentError, match=f"gather_rows: {refused}"):
        torch.vmap(lambda rows: gather_rows(rows, index))(x)
    with pytest.raises(ArgumentError, match=f"merge_embeddings: {refused}"):
        torch.func.grad(lambda rows: merge_embeddings(rows, x[0, :2], where)[0].sum())(x[0])


@each_device
def test_opcheck(device):
    x, index, where = (
        torch.randn(5, 3, device=device),
        torch.tensor([0, 2, 2], device=device),
        vision(device),
    )
    ops = torch.ops.mmpack
    inverse = inverse_index(index, 5)
    torch.library.opcheck(ops.gather_rows.default, (x, index))
    torch.library.opcheck(ops.sum_rows.default, (x[:3], index, *inverse, 5))
    features = torch.randn(2, 3, device=device)
    torch.library.opcheck(ops.merge_embeddings.default, (x, features, [features], *where))


@each_device
@each_op
def test_forward_mode_is_refused(device, name):
    """Without a formula torch would give no tangent, or zeros."""
    step, inputs = steps(device)[name]
    with forward_ad.dual_level(), pytest.raises((ArgumentError, NotImplementedError)):
        step(*(forward_ad.make_dual(x, torch.ones_like(x)) for x in inputs))
    with pytest.raises((ArgumentError, NotImplementedError, RuntimeError)):
        torch.func.jvp(step, inputs, inputs)


@each_device
def test_a_second_derivative_of_the_policy_loss_is_refused(device):
    step, inputs = steps(device)["policy_loss"]
    leaves = [x.clone().requires_grad_() for x in inputs]
    with pytest.raises(ArgumentError, match="a second derivative"):
        torch.autograd.grad(step(*leaves), leaves, create_graph=True)


def test_what_is_constant_in_the_policy_loss():
    cu, lp = torch.tensor([0, 3]).int(), torch.randn(3)
    leaf, one = torch.randn(3, requires_grad=True), torch.ones(1, requires_grad=True)
    out = mp.policy_loss(lp, one, cu, leaf, leaf, leaf, entropy=leaf, correction="tis", kl_coef=0.1)
    assert not out.loss.requires_grad
    out = mp.policy_loss(lp, one, cu, entropy=leaf, entropy_coef=0.5)
    out.loss.backward()
    torch.testing.assert_close(leaf.grad, torch.full((3,), -0.5 / 3))
    assert one.grad is None
