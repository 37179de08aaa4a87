"""What both ops of logprobs refuse in one line, and what they take: meta and fake tensors among themselves."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from mmpack.errors import ArgumentError
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.selected import selected_logprobs

TARGETS = torch.tensor([1, 4, 0])


def from_logits(x, targets=TARGETS):
    return selected_logprobs(x @ torch.ones(x.shape[1], 7, dtype=x.dtype, device=x.device), targets)


def from_hidden(x, targets=TARGETS):
    weight = torch.ones(7, x.shape[1], dtype=x.dtype, device=x.device)
    return linear_selected_logprobs(x, weight, targets)


each_op = pytest.mark.parametrize("op", [from_logits, from_hidden])


@pytest.fixture
def x(device):
    return torch.randn(3, 8, device=device)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


@each_op
def test_unlike_devices(op, x):
    with pytest.raises(ArgumentError, match=r"targets on meta\. Fix: move all to one device$"):
        op(x, TARGETS.to("meta"))
    if x.is_cuda:
        with pytest.raises(ArgumentError, match="is on cuda:0 and targets on cpu"):
            op(x, TARGETS)


@each_op
def test_forward_mode_is_refused(op, x):
    targets = TARGETS.to(x.device)
    with pytest.raises(ArgumentError, match=r"no forward-mode derivative\. Fix: "):
        torch.func.jvp(lambda y: op(y, targets), (x,), (torch.ones_like(x),))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(ArgumentError, match="no forward-mode derivative"):
            op(dual, targets)


@each_op
def test_a_second_derivative_is_refused(op, x):
    x.requires_grad_()
    (grad,) = torch.autograd.grad(op(x, TARGETS.to(x.device)).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        grad.square().sum().backward()


@each_op
def test_shapes_of_meta_and_fake_tensors(op, x):
    assert op(x.to("meta"), TARGETS.to("meta")).shape == (3,)
    targets = TARGETS.to(x.device)
    with FakeTensorMode() as mode:
        found = op(mode.from_tensor(x), mode.from_tensor(targets))
    assert found.shape == (3,)
    assert found.device == x.device


@pytest.mark.parametrize("op", [selected_logprobs, linear_selected_logprobs])
def test_entropy_is_a_flag(op):
    x = torch.randn(3, 8)
    inputs = (x, TARGETS) if op is selected_logprobs else (x, torch.randn(7, 8), TARGETS)
    with pytest.raises(ArgumentError, match=r"entropy is of type str, expected a bool\. Fix: "):
        op(*inputs, entropy="yes")


def test_a_group_is_a_process_group():
    inputs = torch.randn(3, 8), torch.randn(7, 8), TARGETS
    with pytest.raises(ArgumentError, match=r"group is of type int, .* Fix: "):
        linear_selected_logprobs(*inputs, group=-100)  # what new_group gives ranks outside of it
