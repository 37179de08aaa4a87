"""Groups kept together or split for ranks: whichever is cheaper, and the price in the stats."""

import numpy as np
import pytest
from support.groups import answered

import mmpack as mp
from mmpack.layout.forest import build_forest
from mmpack.planning import CostModel

ROWS = CostModel(row=1.0)


def group(name, prompt, answers):
    start = 1000 * (1 + int(name))
    return [
        answered(f"{name}/{k}", name, [start] * prompt, [start + 1 + k] * n)
        for k, n in enumerate(answers)
    ]


def rows_of(samples, members):
    return build_forest([samples[i] for i in members]).num_tokens


def test_a_group_that_makes_a_straggler_is_split():
    """One group of 800 rows beside four of 100: a rank would take it alone, and its prompt is short."""
    samples = group("0", 20, [195] * 4) + [
        s for g in range(1, 5) for s in group(str(g), 10, [45] * 2)
    ]
    kept = mp.plan(
        samples, max_tokens=1000, ranks=2, share_prefix=True, cost=ROWS, keep_groups=True
    )
    made = mp.plan(samples, max_tokens=1000, ranks=2, share_prefix=True, cost=ROWS)
    assert kept.stats["makespan"] == 800 and kept.stats["rows_repeated"] == 0
    assert made.stats["makespan_whole"] == 800
    assert made.stats["makespan"] == max(made.stats["loads"]) <= 620
    repeated = sum(made.bin_rows) - sum(kept.bin_rows)
    assert made.stats["rows_repeated"] == repeated > 0
    assert made.stats["repeat_cost"] == pytest.approx(repeated / sum(made.bin_rows))
    for plan in (kept, made):
        assert plan.bin_rows == [rows_of(samples, b) for b in plan.bins]
        assert sorted(i for b in plan.bins for i in b) == list(range(len(samples)))


def test_groups_stay_together_where_splitting_saves_little():
    samples = [s for g in range(8) for s in group(str(g), 300, [5 + g % 2] * 4)]
    made = mp.plan(samples, max_tokens=700, ranks=4, share_prefix=True, cost=ROWS)
    homes = {samples[i].group_id: b for b, members in enumerate(made.bins) for i in members}
    assert all(homes[samples[i].group_id] == b for b, m in enumerate(made.bins) for i in m)
    assert made.stats["rows_repeated"] == 0
    assert made.stats["makespan"] == made.stats["makespan_whole"]


def test_splitting_never_costs_the_slowest_rank_more():
    random = np.random.default_rng(5)
    for _ in range(6):
        samples = [
            s
            for g in range(int(random.integers(2, 9)))
            for s in group(str(g), int(random.integers(5, 80)), random.integers(1, 90, 4).tolist())
        ]
        plans = [
            mp.plan(
                samples, max_tokens=500, ranks=2, share_prefix=True, cost=ROWS, keep_groups=keep
            )
            for keep in (True, False)
        ]
        assert plans[1].stats["makespan"] <= plans[0].stats["makespan"]
        for plan in plans:
            assert max(plan.bin_rows) <= 500
            assert sorted(i for b in plan.bins for i in b) == list(range(len(samples)))


def test_stats_of_budgets_and_ranks():
    samples = [
        answered(f"s{k}", f"g{k}", [5], [1000 + k] * 7, (1, 2, 2 + 2 * (k % 3))) for k in range(6)
    ]
    made = mp.plan(samples, max_tokens=40, max_patches=30, max_loss_tokens=14, ranks=2, cost=ROWS)
    stats = made.stats
    assert stats["fills"] == {
        "max_tokens": sum(made.bin_rows) / (40 * stats["bins"]),
        "max_patches": sum(made.bin_patches) / (30 * stats["bins"]),
        "max_loss_tokens": sum(made.bin_loss_tokens) / (14 * stats["bins"]),
    }
    assert stats["fill"] == stats["fills"]["max_tokens"]
    assert made.bin_loss_tokens == [sum(samples[i].num_loss_tokens for i in b) for b in made.bins]
    assert stats["loads"] == [sum(made.bin_costs[b] for b in rank) for rank in made.ranks]
    patches = [sum(made.bin_patches[b] for b in rank) for rank in made.ranks]
    assert stats["media_balance"] == pytest.approx(max(patches) / np.mean(patches))
    steps = zip(*([made.bin_costs[b] for b in rank] for rank in made.ranks), strict=True)
    assert stats["lockstep"] == pytest.approx(sum(map(max, steps)) / np.mean(stats["loads"]))
    assert stats["seconds"] is None and stats["seconds_error"] is None


def test_a_calibrated_cost_predicts_seconds():
    samples = [s for g in range(4) for s in group(str(g), 30, [20] * 4)]
    cost = CostModel(row=1e-3, error=0.05)
    made = mp.plan(samples, max_tokens=200, ranks=2, share_prefix=True, cost=cost)
    assert made.stats["seconds"] == pytest.approx(made.stats["makespan"])
    assert made.stats["seconds"] == pytest.approx(1e-3 * 2 * (30 + 4 * 20))
    assert made.stats["seconds_error"] == 0.05
    # the caller's measure balances, the default's seconds are no prediction
    assert mp.plan(samples, max_tokens=200, cost=lambda *_: 1.0).stats["seconds"] is None
