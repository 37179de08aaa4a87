"""Groups that are split over ranks: gloo processes get the bits of one process."""

import pytest
import torch
from torch import distributed

import mmpack as mp


def batch():
    g = torch.Generator().manual_seed(0)
    return torch.randn(13, generator=g), torch.randint(0, 4, (13,), generator=g)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_are_one_process(tmp_path, ranks):
    torch.multiprocessing.spawn(run, (ranks, str(tmp_path / "rendezvous")), nprocs=ranks)


def run(rank, ranks, rendezvous):
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks
    )
    rewards, groups = batch()
    bounds = {2: [0, 4, 13], 3: [0, 5, 5, 13]}[ranks]  # one rank may have none
    mine = slice(bounds[rank], bounds[rank + 1])
    whole, index, own = mp.gather_rewards(rewards[mine], groups[mine])
    assert torch.equal(whole, rewards) and torch.equal(index, groups) and own == mine
    for kind in ("grpo", "rloo", "dr_grpo", "loo_std", "lite_ppo", "reinforce_pp", "pass_at_k"):
        k = {"k": 2} if kind == "pass_at_k" else {}
        want = mp.group_advantages(rewards, groups, kind, **k)[mine]
        assert torch.equal(mp.group_advantages(whole, index, kind, **k)[own], want)
    by_name(rewards, groups, mine)
    with pytest.raises(mp.ArgumentError, match="another rank has more, fewer, or another"):
        mp.gather_rewards(rewards[mine].double() if rank else rewards[mine])
    with pytest.raises(mp.ArgumentError, match="another rank has more, fewer, or another"):
        mp.gather_rewards(*[rewards[mine]] * (1 if rank else 2))
    distributed.destroy_process_group()


def by_name(rewards, groups, mine):
    """GDPO over loss tokens and units, whose samples lie on several ranks."""
    unit = (
        torch.arange(13) // 2
    )  # samples 2k and 2k + 1 are one trajectory, cut by the ranks' bounds
    first, groups, tokens = rewards[unit * 2], groups[unit * 2], torch.arange(13) + 1
    second = first.square().double()
    columns = (first, second, groups, tokens, unit)
    *whole, own = mp.gather_rewards(*(column[mine] for column in columns))

    def advantages(first, second, groups, tokens, unit):
        options = {"weights": {"a": 1.0, "b": 0.5}, "num_tokens": tokens, "unit_index": unit}
        return mp.group_advantages({"a": first, "b": second}, groups, "gdpo", **options)

    assert torch.equal(advantages(*whole)[own], advantages(*columns)[mine])


def test_wrong_columns_are_named():
    with pytest.raises(mp.ArgumentError, match=r"columns\[1\] has shape \[2\]"):
        mp.gather_rewards(torch.ones(3), torch.ones(2))
    with pytest.raises(mp.ArgumentError, match="no columns"):
        mp.gather_rewards()
