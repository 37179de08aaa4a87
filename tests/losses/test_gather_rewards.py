"""Groups that are split over ranks: gloo processes get the bits of one process."""

import numpy as np
import pytest
import torch
from support.ranks import spawned
from torch import distributed

import mmpack as mp


def batch():
    g = torch.Generator().manual_seed(0)
    return torch.randn(13, generator=g), torch.randint(0, 4, (13,), generator=g)


def test_ranks_are_one_process(tmp_path):
    spawned(run, 2, tmp_path)


def run(rank, ranks):
    rewards, groups = batch()
    bounds = [0, 5, 13]
    mine = slice(bounds[rank], bounds[rank + 1])
    whole, index, own = mp.losses.gather_rewards(rewards[mine], groups[mine])
    assert torch.equal(whole, rewards) and torch.equal(index, groups) and own == mine
    every, first = mp.losses.gather_rewards(
        rewards[:0] if rank else rewards
    )  # one rank may have none
    assert torch.equal(every, rewards) and first == (slice(13, 13) if rank else slice(0, 13))
    for kind in ("grpo", "rloo", "dr_grpo", "loo_std", "lite_ppo", "reinforce_pp", "pass_at_k"):
        k = {"k": 2} if kind == "pass_at_k" else {}
        want = mp.group_advantages(rewards, groups, kind, **k)[mine]
        assert torch.equal(mp.group_advantages(whole, index, kind, **k)[own], want)
    by_name(rewards, groups, mine)
    by_turn(rank)
    by_score(ranks, rewards, groups, mine)
    with pytest.raises(mp.ArgumentError, match="another rank has more, fewer, or another"):
        mp.losses.gather_rewards(rewards[mine].double() if rank else rewards[mine])


def by_name(rewards, groups, mine):
    """GDPO over loss tokens and units, whose samples lie on several ranks."""
    # samples 2k and 2k + 1 are one trajectory, cut by the ranks' bounds
    unit = torch.arange(13) // 2
    first, groups, tokens = rewards[unit * 2], groups[unit * 2], torch.arange(13) + 1
    second = first.square().double()
    columns = (first, second, groups, tokens, unit)
    *whole, own = mp.losses.gather_rewards(*(column[mine] for column in columns))

    def advantages(first, second, groups, tokens, unit):
        options = {"weights": {"a": 1.0, "b": 0.5}, "num_tokens": tokens, "unit_index": unit}
        return mp.group_advantages({"a": first, "b": second}, groups, "gdpo", **options)

    assert torch.equal(advantages(*whole)[own], advantages(*columns)[mine])


def by_turn(rank):
    """Tasks whose trajectories lie on several ranks, in an order of its own on each; as docs/losses.md gathers them."""
    rng = np.random.default_rng(0)
    samples = [
        mp.Sample(
            f"s{j}", f"task{j * 5 % 3}", "qwen2_vl", np.arange(5, 30), media=[], modality_spans=[],
            loss_spans=[mp.LossSpan(2 + 4 * t, 5 + 4 * t, turn=t) for t in range(1 + j % 4)],
            rewards=[mp.Score("r", float(rng.normal()), {"turn": t}) for t in range(1 + j % 4)],
        )
        for j in range(9)
    ]  # fmt: skip
    bounds = [0, 5, 9]
    whole, part = (
        mp.losses.turns_of(samples),
        mp.losses.turns_of(samples[bounds[rank] : bounds[rank + 1]]),
    )
    assert rank == 0 or part.group_index.tolist() != whole.group_index[bounds[rank] :].tolist()
    states = mp.group_numbers([f"page{k % 3}" for k in range(len(whole))])
    begin = int(whole.cu_turns[bounds[rank]])
    mine = slice(begin, begin + len(part))
    rewards, anchor, own = mp.losses.gather_rewards(part.rewards(), states[mine])
    counts, groups, _ = mp.losses.gather_rewards(
        part.cu_turns.diff(), mp.group_numbers(part.group_ids)
    )
    cu_turns = torch.cat([counts.new_zeros(1), counts]).cumsum(0)
    assert own == mine and torch.equal(cu_turns.int(), whole.cu_turns)
    for method in ("trajectory", "returns", "process", "gigpo"):
        options = {"gamma": 0.9, "anchor": anchor if method == "gigpo" else None}
        got = mp.losses.turn_advantages(rewards, cu_turns, groups, method, **options)[own]
        given = (whole.rewards(), whole.cu_turns, whole.group_index, method)
        assert torch.equal(got, mp.losses.turn_advantages(*given, **options)[mine]), method


def by_score(ranks, rewards, groups, mine):
    """Regions of samples whose group lies on several ranks."""
    regions = [[mp.Score("iou", float(r), {"region": k}) for k in range(2)] for r in rewards]
    parts = [None] * ranks
    distributed.all_gather_object(parts, regions[mine])
    index, own = mp.losses.gather_rewards(groups[mine])
    scores = [of_sample for part in parts for of_sample in part]
    assert (
        mp.losses.score_advantages(scores, index)[own]
        == mp.losses.score_advantages(regions, groups)[mine]
    )
