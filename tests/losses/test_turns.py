"""Turns, their returns and advantages against loops over trajectories in Python floats."""

import numpy as np
import pytest
import torch

import mmpack as mp

CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def deviation(values):
    return np.std(values, ddof=1) if len(values) > 1 else 0.0


def normal(values, kind):
    mean, std = np.mean(values), deviation(values)
    if kind == "dr_grpo":
        return [v - mean for v in values]
    if kind in ("rloo", "loo_std"):
        others = [np.delete(values, k) for k in range(len(values))]
        apart = [v - np.mean(o) if len(o) else 0.0 for v, o in zip(values, others, strict=True)]
        if kind == "rloo":
            return apart
        stds = [deviation(o) for o in others]
        return [d / (s + 1e-6) if s > 1e-12 else d for d, s in zip(apart, stds, strict=True)]
    return [(v - mean) / (std + 1e-6) if std > 1e-12 else 0.0 for v in values]


def by_key(values, keys, kind):
    out = [0.0] * len(values)
    for key in set(keys):
        mine = [i for i, other in enumerate(keys) if other == key]
        for i, v in zip(mine, normal([values[i] for i in mine], kind), strict=True):
            out[i] = v
    return np.array(out)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "loo_std"])
def test_methods_against_loops(kind):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 6, 9)
    groups = rng.integers(0, 3, 9)
    rewards = rng.normal(size=lengths.sum())
    anchor = rng.integers(0, 3, lengths.sum())
    whose = np.repeat(np.arange(9), lengths)
    group = groups[whose].tolist()
    returns, to_end = np.zeros(len(rewards)), np.zeros(len(rewards))
    process = by_key(rewards, group, kind)
    for i in reversed(range(len(rewards))):
        more = i + 1 < len(rewards) and whose[i + 1] == whose[i]
        returns[i] = rewards[i] + 0.9 * (returns[i + 1] if more else 0)
        to_end[i] = process[i] + 0.9 * (to_end[i + 1] if more else 0)
    totals = [rewards[whose == j].sum() for j in range(9)]
    episode = by_key(totals, groups.tolist(), kind)[whose]
    step = by_key(returns, list(zip(group, anchor.tolist(), strict=True)), kind)
    want = {
        "trajectory": episode,
        "returns": by_key(returns, group, kind),
        "process": to_end,
        "gigpo": episode + 0.5 * step,
    }
    cu = torch.tensor([0, *lengths.tolist()]).cumsum(0)
    for method, expected in want.items():
        given = {"anchor": torch.from_numpy(anchor), "omega": 0.5} if method == "gigpo" else {}
        got = mp.losses.turn_advantages(
            torch.from_numpy(rewards),
            cu,
            torch.from_numpy(groups),
            method,
            kind,
            gamma=0.9,
            **given,
        )
        np.testing.assert_allclose(got.numpy(), expected, **CLOSE)


@pytest.mark.parametrize("kind", ["grpo", "loo_std"])
@pytest.mark.parametrize("method", ["returns", "gigpo"])
def test_returns_that_are_close_are_told_apart(method, kind):
    """A large reward at the end and small ones before: returns differ by less than float32 tells of their size."""
    small = np.array([3, 1, 7, 2, 5, 11]) * 1e-5
    rewards = np.stack([small, np.full(6, 10.0)], 1).astype(np.float32).reshape(-1)
    returns = rewards.reshape(6, 2).astype(np.float64)[:, ::-1].cumsum(1)[:, ::-1].reshape(-1)
    cu, groups = torch.arange(0, 13, 2), torch.zeros(6, dtype=torch.int64)
    anchor = torch.tensor([0, 1] * 6)
    if method == "returns":
        want, given = by_key(returns, [0] * 12, kind), {}
    else:
        given = {"anchor": anchor}
        totals = by_key(returns[::2], [0] * 6, kind).repeat(2)
        want = totals + by_key(returns, anchor.tolist(), kind)
    got = mp.losses.turn_advantages(torch.from_numpy(rewards), cu, groups, method, kind, **given)
    error = np.abs(got.double().numpy() - want) / np.maximum(1, np.abs(want))
    # 2^-32 of 10 against a std of 4e-5; float32 returns are off by 2^-24 of 10
    assert error.max() < 2e-4


def sample(name, spans, turn=None, trajectory="t", rewards=()):
    stop = max(s.stop for s in spans)
    return mp.Sample(
        name, "g", "qwen2_vl", np.arange(5, 6 + stop), media=[], modality_spans=[],
        loss_spans=list(spans), trajectory_id=trajectory, turn=turn, rewards=list(rewards),
    )  # fmt: skip


def test_one_long_sample_and_a_sample_per_turn_are_the_same_turns():
    rewards = [
        mp.Score("a", 1.0, {"turn": 0}),
        mp.Score("b", 3.0),
        mp.Score("c", 0.5, {"span": [2, 3]}),
    ]
    long = mp.losses.turns_of(
        [sample("s", [mp.LossSpan(2, 4, turn=0), mp.LossSpan(6, 9, turn=1)], rewards=rewards)]
    )
    parts = mp.losses.turns_of(
        [
            sample("p0", [mp.LossSpan(2, 4)], 0, rewards=[rewards[0], rewards[2]]),
            sample("p1", [mp.LossSpan(6, 9)], 1, rewards=[rewards[1]]),
        ]
    )
    for turns in (long, parts):
        assert turns.cu_turns.tolist() == [0, 2] and turns.turn.tolist() == [0, 1]
        assert turns.rewards().tolist() == [1.5, 3.0]
        assert turns.token_turn.tolist() == [0, 0, 1, 1, 1]
    assert [x.tolist() for x in parts.columns(torch.tensor([7.0, 8.0]))] == [[7, 7], [8, 8, 8]]
    assert parts.sample_trajectory.tolist() == [0, 0]
    with pytest.raises(mp.ArgumentError, match="have no turn, but trajectory 't' has several"):
        mp.losses.turns_of([sample("a", [mp.LossSpan(2, 3)]), sample("b", [mp.LossSpan(2, 3)])])


def test_regions_beside_regions():
    near, far, alone = (
        mp.Score("iou", v, {"region": k}) for v, k in ((0.75, 0), (0.25, 3), (0.5, 0))
    )
    got = mp.losses.score_advantages([[near], [far], [alone]], [0, 0, 1], "dr_grpo")
    assert [s.value for (s,) in got] == [0.25, -0.25, 0.0]
    apart = mp.losses.score_advantages([[near], [far]], [0, 0], "dr_grpo", within="scope")
    assert [s.value for (s,) in apart] == [0.0, 0.0]
    one = mp.losses.score_advantages([near, [far]], np.array([3, 3]), "dr_grpo")
    assert [[s.value for s in of] for of in one] == [[0.25], [-0.25]]


def per_turn(name, number, own, rewards=()):
    """A sample of one turn, its two spans with `own` turn."""
    spans = [mp.LossSpan(2, 4, turn=own), mp.LossSpan(6, 9, turn=own)]
    return sample(name, spans, number, rewards=rewards)


@pytest.mark.parametrize("own", [None, 0, "same"])
def test_a_sample_per_turn_bears_its_turn_in_every_place(own):
    """Spans without a turn, counted from 0 by a processor, or numbered in the trajectory: all say one turn."""
    samples = [
        per_turn(f"p{k}", k, k if own == "same" else own, [mp.Score("r", k + 1.0, {"turn": k})])
        for k in range(3)
    ]
    for one in samples:
        assert mp.validate(one) == []
    batch = mp.pack(samples)
    assert batch.loss_turn.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert mp.pad(samples).loss_turn.tolist() == batch.loss_turn.tolist()
    want = [0, 0, 0, 0, 1.0, 0, 0, 0, 0, 2.0, 0, 0, 0, 0, 3.0]
    assert mp.scatter_rewards(batch).tolist() == want
    turns = mp.losses.turns_of(samples)
    assert turns.turn.tolist() == [0, 1, 2] and turns.rewards().tolist() == [1.0, 2.0, 3.0]
    assert mp.trajectory.group_index(samples, by="step").tolist() == [0, 1, 2]


def test_a_turn_that_the_sample_lacks_is_named():
    (problem,) = mp.validate(per_turn("p", 2, None, [mp.Score("r", 1.0, {"turn": 1})]))
    assert problem.code == "MM304" and "is of turn 1" in problem.message
    silent = per_turn("p", 2, None, [mp.Score("r", 1.0, {"turn": 2})])
    silent.loss_spans = [mp.LossSpan(4, 4)]
    assert [p.code for p in mp.validate(silent) if p.code == "MM305"] == ["MM305"]


def test_turns_counted_from_0_in_each_sample_are_not_taken_for_others():
    """A tool's answer within a turn: two runs of tokens, which a processor calls 0 and 1."""
    runs = [mp.LossSpan(2, 4, turn=0), mp.LossSpan(6, 9, turn=1)]
    with pytest.raises(
        mp.ArgumentError, match=r"are of turn 0, before turn 2 of the sample\. Fix: "
    ):
        mp.losses.turns_of([sample("a", runs, 0), sample("b", runs, 2)])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["grpo", "loo_std"])
@pytest.mark.parametrize("method", ["trajectory", "returns", "process", "gigpo"])
def test_on_a_gpu_without_a_wait(method, kind):
    """10,000 turns of 1,000 trajectories: the CPU's numbers, and nobody waits for the GPU."""
    g = torch.Generator().manual_seed(0)
    rewards, cu = torch.randn(10_000, generator=g), torch.arange(0, 10_001, 10)
    groups, anchor = torch.randint(0, 90, (1_000,), generator=g), torch.arange(10_000) % 7
    given = [rewards, cu, groups, method, kind]
    options = {"gamma": 0.9, "check": False, "anchor": anchor if method == "gigpo" else None}
    want = mp.losses.turn_advantages(*given, **options)
    moved = [x.cuda() if isinstance(x, torch.Tensor) else x for x in given]
    options = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    mp.losses.turn_advantages(*moved, **options)  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = mp.losses.turn_advantages(*moved, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(got.cpu(), want, **CLOSE)
