"""Rewards in TRL's trainer: infinite ones are refused, None (NaN) is left to TRL."""

import pytest
import torch

from mmpack.adapters.trl import MmpackGRPO
from mmpack.errors import ArgumentError


class Stock:
    reward_func_names = ("length", "format")

    def _calculate_rewards(self, rewards):
        return torch.tensor(rewards)


class Trainer(MmpackGRPO, Stock):
    def __init__(self):
        pass


def test_an_infinite_reward_is_named():
    with pytest.raises(ArgumentError, match="format gave -inf to completion 1 of 2") as caught:
        Trainer()._calculate_rewards([[0.0, 1.0], [2.0, -float("inf")]])
    assert "\n" not in str(caught.value)


def test_none_is_trls_own():
    rewards = Trainer()._calculate_rewards([[0.0, float("nan")], [2.0, 1.0]])
    assert torch.equal(rewards.isnan(), torch.tensor([[False, True], [False, False]]))


def test_trl_has_the_method():
    trl = pytest.importorskip("trl")
    assert callable(trl.GRPOTrainer._calculate_rewards)
