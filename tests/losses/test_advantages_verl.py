"""gae and group_advantages beside verl's own functions, on padded rectangles in float64."""

import numpy as np
import pytest
import torch

from mmpack.losses.advantages.group import group_advantages
from mmpack.losses.returns.returns import gae

pytestmark = pytest.mark.verl

LENGTHS = [3, 1, 7, 2, 12, 5, 4, 9]
B, WIDTH = len(LENGTHS), max(LENGTHS)
GROUPINGS = [[0, 0, 1, 1, 1, 2, 2, 2], [5, 0, 5, 0, 5, 0, 5, 9], [0, 1, 2, 3, 4, 4, 4, 4]]
CLOSE = {"rtol": 2e-6, "atol": 2e-6}


def mask_of(lengths):
    return torch.tensor([[float(t < n) for t in range(WIDTH)] for n in lengths]).double()


def outcome(rewards):
    """[B] -> [B, WIDTH] float64: each reward on its sample's last token, as verl keeps it."""
    out = torch.zeros(B, WIDTH, dtype=torch.float64)
    out[torch.arange(B), torch.tensor(LENGTHS) - 1] = rewards.double()
    return out


def drawn(seed, binary=False):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (B,), generator=g).float() if binary else torch.randn(B, generator=g)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.95, 0.9), (1.0, 0.0)])
@pytest.mark.parametrize("observed", [False, True])
def test_gae(gamma, lam, observed):
    """Also where tokens of tools lie between those of the policy: verl's mask skips them, cu_loss leaves them out."""
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return
    from verl.utils.torch_functional import masked_whiten

    g = torch.Generator().manual_seed(0)
    mask = mask_of(LENGTHS)
    if observed:
        mask[2, 2:5] = mask[4, 3:4] = mask[4, 8:11] = 0
    rewards, values = (torch.randn(B, WIDTH, generator=g).double() * mask for _ in range(2))
    want, returns = compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    cu = torch.tensor([0, *mask.sum(1).int().tolist()]).cumsum(0)
    flat, flat_values = rewards[mask == 1].float(), values[mask == 1].float()
    got, got_returns = gae(flat, flat_values, cu, gamma, lam)
    torch.testing.assert_close(got_returns.double(), returns[mask == 1], **CLOSE)
    padded = torch.zeros_like(mask)
    padded[mask == 1] = got.double()  # verl whitens them; that is left to the caller here
    torch.testing.assert_close(masked_whiten(padded, mask)[mask == 1], want[mask == 1], **CLOSE)


KINDS = {
    "grpo": ("compute_grpo_outcome_advantage", {}),
    "dr_grpo": ("compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
    "rloo": ("compute_rloo_outcome_advantage", {}),
}


@pytest.mark.parametrize("groups", GROUPINGS)
@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_within_groups(kind, binary, groups):
    from verl.trainer.ppo import core_algos

    name, options = KINDS[kind]
    rewards = drawn(1, binary)
    want, _ = getattr(core_algos, name)(
        outcome(rewards), mask_of(LENGTHS), np.array(groups), **options
    )
    got = group_advantages(rewards, torch.tensor(groups), kind, eps=1e-6)
    # verl passes the bare reward of a group of one on; here it has nothing to be compared with
    alone = torch.tensor([groups.count(group) == 1 for group in groups])
    assert not got[alone].any()
    torch.testing.assert_close(got.double()[~alone], want[~alone, 0], **CLOSE)


@pytest.mark.parametrize("groups", GROUPINGS)
@pytest.mark.parametrize("weights", [None, {"exact": 1.0, "format": 0.25}])
def test_gdpo(groups, weights):
    """verl whitens over loss tokens (num_tokens), and passes the reward of a group of one on: those are left out."""
    from verl.trainer.ppo.core_algos import compute_gdpo_outcome_advantage

    if any(groups.count(group) == 1 for group in groups):
        groups = [group // 2 for group in range(B)]
    rewards = {"exact": drawn(3, binary=True), "format": drawn(4)}
    mask = mask_of(LENGTHS)
    config = {"gdpo_reward_keys": list(rewards)}
    if weights is not None:
        config["gdpo_reward_weights"] = list(weights.values())
    want, _ = compute_gdpo_outcome_advantage(
        outcome(rewards["exact"]),
        mask,
        np.array(groups),
        config=config,
        non_tensor_batch={name: column.numpy() for name, column in rewards.items()},
        batch={
            "prompts": torch.zeros(B, 2),
            "attention_mask": torch.cat([torch.ones(B, 2), mask], 1).long(),
        },
    )
    num_tokens = torch.tensor(LENGTHS)
    index = torch.tensor(groups)
    got = group_advantages(rewards, index, "gdpo", weights=weights, num_tokens=num_tokens)
    torch.testing.assert_close(got.double(), want[:, 0].double(), rtol=1e-5, atol=1e-5)
    over_samples = group_advantages(rewards, index, "gdpo", weights=weights)
    assert (over_samples - want[:, 0]).abs().max() > 1e-3


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_returns_of_tokens(gamma):
    """REINFORCE++'s discounted returns, before verl whitens them."""
    from types import SimpleNamespace

    from verl.trainer.ppo.core_algos import compute_reinforce_plus_plus_outcome_advantage

    from mmpack.losses.returns.returns import discounted_returns

    mask = mask_of(LENGTHS)
    rewards = torch.randn(B, WIDTH, generator=torch.Generator().manual_seed(5)).double() * mask
    _, want = compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask, config=SimpleNamespace(gamma=gamma)
    )
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    got = discounted_returns(rewards[mask == 1].float(), cu, gamma)
    torch.testing.assert_close(got.double(), want[mask == 1], **CLOSE)
