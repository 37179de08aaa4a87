"""kl_divergence against exact enumeration: a categorical policy whose every token is summed over, in float64."""

import pytest
import torch

from mmpack.losses.kl import kl_divergence


def policies(seed):
    g = torch.Generator().manual_seed(seed)
    theta = torch.randn(7, generator=g, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(7, generator=g, dtype=torch.float64), 0)
    return theta, ref


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_expected_gradient_is_that_of_the_kl(kind):
    theta, ref = policies(0)
    lp = torch.log_softmax(theta, 0)
    # Sampling weighs each token's gradient with its probability; the weight itself is not differentiated.
    (lp.detach().exp() * kl_divergence(lp, ref, kind)).sum().backward()
    got = theta.grad.clone()

    theta.grad = None
    lp = torch.log_softmax(theta, 0)
    torch.nn.functional.kl_div(ref, lp, log_target=True, reduction="sum").backward()
    torch.testing.assert_close(got, theta.grad, rtol=1e-12, atol=1e-14)
    assert theta.grad.abs().max() > 1e-2


def test_k1_and_k3_have_the_expected_value_of_the_kl():
    theta, ref = policies(1)
    lp = torch.log_softmax(theta, 0).detach()
    exact = torch.nn.functional.kl_div(ref, lp, log_target=True, reduction="sum")
    for kind in ("k1", "k3"):
        torch.testing.assert_close((lp.exp() * kl_divergence(lp, ref, kind)).sum(), exact)


@pytest.mark.parametrize("gap", [-100.0, 100.0])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_extreme_gaps_stay_finite(gap, kind):
    lp = torch.tensor([-1.0], requires_grad=True)
    value = kl_divergence(lp, lp.detach() - gap, kind)
    value.sum().backward()
    assert value.float().isfinite().all()
    assert float(lp.grad) == pytest.approx(gap)


def test_the_reference_gets_no_gradient():
    lp, ref = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    kl_divergence(lp, ref, "k3").sum().backward()
    assert ref.grad is None
