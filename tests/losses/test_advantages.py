"""group_advantages against Python's statistics module, group by group, and TRL's nanstd."""

import statistics
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmpack.contracts import TOLERANCES
from mmpack.errors import ArgumentError
from mmpack.losses.advantages.group import group_advantages

BOUND = TOLERANCES["advantage"].value
KINDS = ("grpo", "rloo", "dr_grpo", "lite_ppo", "reinforce_pp")


def oracle(rewards, groups, kind, eps):
    def std(values):
        return statistics.stdev(values) if len(values) > 1 else 0.0

    def scaled(values, stds):
        return [v / (s + eps) if s else 0.0 for v, s in zip(values, stds, strict=True)]

    members = [[r for r, g in zip(rewards, groups, strict=True) if g == mine] for mine in groups]
    centred = [r - statistics.mean(m) for r, m in zip(rewards, members, strict=True)]
    if kind == "grpo":
        return scaled(centred, [std(m) for m in members])
    if kind == "dr_grpo":
        return centred
    if kind == "rloo":
        others = [
            (sum(m) - r) / (len(m) - 1) if len(m) > 1 else r
            for r, m in zip(rewards, members, strict=True)
        ]
        return [r - o for r, o in zip(rewards, others, strict=True)]
    if kind == "lite_ppo":
        return scaled(centred, [std(rewards)] * len(rewards))
    a = [c if len(m) > 1 else r for c, r, m in zip(centred, rewards, members, strict=True)]
    return scaled([x - statistics.mean(a) for x in a], [std(a)] * len(a))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([-1.0, 0.0, 0.25, 1.0, 2.5]), st.sampled_from([-7, 0, 3, 10**12])
        ),
        min_size=1,
        max_size=24,
    ),
    st.sampled_from(KINDS),
    st.sampled_from([1e-6, 1e-4, 0.0]),
)
def test_against_statistics(pairs, kind, eps):
    rewards, groups = [r for r, _ in pairs], [g for _, g in pairs]
    got = group_advantages(torch.tensor(rewards), torch.tensor(groups), kind, eps)
    assert got.dtype == torch.float32
    expected = torch.tensor(oracle(rewards, groups, kind, eps))
    torch.testing.assert_close(got, expected, rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize("kind", ["grpo", "lite_ppo"])
def test_against_trl(kind):
    from trl.trainer.utils import nanstd  # not on every GPU machine, whose tests are below

    rewards = torch.randn(24)
    grouped = rewards.double().view(4, 6)
    std = nanstd(grouped, dim=1)[:, None] if kind == "grpo" else nanstd(grouped.flatten())
    expected = ((grouped - grouped.mean(1, keepdim=True)) / (std + 1e-4)).flatten()
    got = group_advantages(rewards, torch.arange(4).repeat_interleave(6), kind, eps=1e-4)
    torch.testing.assert_close(got.double(), expected, rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize("kind", KINDS)
def test_order_does_not_matter(kind):
    rewards, groups = torch.randn(40), torch.randint(0, 6, (40,))
    order = torch.randperm(40)
    shuffled = group_advantages(rewards[order], groups[order], kind)
    torch.testing.assert_close(
        shuffled, group_advantages(rewards, groups, kind)[order], rtol=BOUND, atol=BOUND
    )


@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_are_equal_and_groups_of_one(kind):
    equal = group_advantages(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64), kind)
    assert torch.equal(equal, torch.zeros(7))
    single = group_advantages(torch.tensor([0.7]), torch.tensor([3]), kind)
    assert torch.equal(single, torch.zeros(1))
    none = group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), kind)
    assert none.shape == (0,)


def test_one_sample_a_prompt():
    rewards, groups = torch.tensor([0.0, 1.0, 3.0]), torch.arange(3)
    for kind in ("grpo", "rloo", "dr_grpo", "lite_ppo"):
        with pytest.warns(UserWarning, match="each of 3 samples is alone in its group.*Fix: "):
            assert torch.equal(group_advantages(rewards, groups, kind), torch.zeros(3))
    expected = (rewards - rewards.mean()) / rewards.std()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = group_advantages(rewards, groups, "reinforce_pp")
        # one of several groups may have one sample
        group_advantages(rewards, torch.tensor([0, 0, 1]))
        group_advantages(rewards, groups, check=False)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_that_is_no_number_is_named(kind, value):
    rewards, groups = torch.arange(40.0), torch.arange(40) // 4
    rewards[[7, 9]] = value
    with pytest.raises(ArgumentError, match=rf"rewards\[7\] is {value}, rewards\[9\].*\(2 of 40"):
        group_advantages(rewards, groups, kind)
    assert not group_advantages(rewards, groups, kind, check=False)[4:12].isfinite().all()


def test_wrong_arguments_are_named():
    with pytest.raises(ArgumentError, match=r"kind is 'gae'\. Fix: use one of grpo"):
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), "gae")
    with pytest.raises(ArgumentError, match=r"rewards has shape \[2\].*group_index \[3\]"):
        group_advantages(torch.zeros(2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ArgumentError, match=r"dtype torch.int64"):
        group_advantages(torch.ones(2).long(), torch.zeros(2, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_agrees_and_never_waits(kind):
    rewards, groups = torch.randn(40), torch.randint(0, 6, (40,))
    on_gpu = rewards.cuda(), groups.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = group_advantages(*on_gpu, kind, check=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = group_advantages(rewards, groups, kind)
    torch.testing.assert_close(got.cpu(), expected, rtol=BOUND, atol=BOUND)


def test_groups_are_whole_numbers():
    with pytest.raises(
        ArgumentError, match=r"group_index \[4\] and torch.float32, expected .* integers"
    ):
        group_advantages(torch.randn(4), torch.tensor([0.2, 0.7, 0.2, 0.7]))


@pytest.mark.parametrize("kind", ["grpo", "rloo", "dr_grpo", "lite_ppo", "reinforce_pp", "tokens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_have_no_advantage_without_eps_too(kind, dtype):
    """0.1 + 0.1 + 0.1 is not 0.3: what rounding leaves is not scaled to a std of 1."""
    for size in range(2, 12):
        rewards = torch.tensor([0.1] * size + [-1e6 / 3] * size, dtype=dtype)
        groups = torch.arange(2).repeat_interleave(size)
        tokens = {"num_tokens": 7 * torch.arange(1, 2 * size + 1)} if kind == "tokens" else {}
        name = "reinforce_pp" if kind == "tokens" else kind
        assert not group_advantages(rewards, groups, name, eps=0.0, **tokens).any()
