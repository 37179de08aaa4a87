"""value_loss against torch's own mean squared error and PPO's clipped formula on a padded rectangle."""

import pytest
import torch

from mmpack.losses.value import value_loss

CU = torch.tensor([0, 4, 4, 9])


def test_plain_is_half_the_mean_squared_error():
    values, returns = torch.randn(2, 9).unbind()
    values.requires_grad_()
    loss = value_loss(values, returns, CU)
    loss.backward()
    leaf = values.detach().double().requires_grad_()
    expected = 0.5 * torch.nn.functional.mse_loss(leaf, returns.double())
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(values.grad.double(), leaf.grad, rtol=1e-6, atol=0)


def test_clipped_against_a_padded_rectangle():
    values, returns, old = torch.randn(3, 9).unbind()
    loss = value_loss(values, returns, CU, old, 0.2, "sequence_mean_token_mean", total_samples=6)
    rows = []
    for v, r, o in zip(*(x.double().split([4, 5]) for x in (values, returns, old)), strict=True):
        near = torch.min(torch.max(v, o - 0.2), o + 0.2)
        rows.append(0.5 * torch.max((v - r) ** 2, (near - r) ** 2).mean())
    assert float(loss) == pytest.approx(float(sum(rows)) / 6, rel=1e-6)
    assert (
        float(loss)
        > float(value_loss(values, returns, CU, None, None, "sequence_mean_token_mean")) / 2
    )


def test_scale_and_no_loss_token():
    values, returns = torch.randn(2, 9).unbind()
    once = value_loss(values, returns, CU)
    torch.testing.assert_close(value_loss(values, returns, CU, scale=4.0), 4 * once)
    empty = torch.zeros(0, requires_grad=True)
    loss = value_loss(empty, empty.detach(), torch.tensor([0, 0]))
    loss.backward()
    assert float(loss.detach()) == 0.0
