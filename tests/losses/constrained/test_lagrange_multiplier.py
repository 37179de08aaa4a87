"""LagrangeMultiplier: the updates by the papers' formulas, bounds, state, ranks."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ranks import spawned
from torch import distributed

from mmpack.errors import ArgumentError
from mmpack.losses.constrained import PID, Costs, DualAscent, LagrangeMultiplier, Rewards

COSTS = st.lists(st.floats(-10, 10), min_size=1, max_size=20)


def algorithm_2(costs, limit, kp, ki, kd, initial=0.0):
    """arXiv 2007.03964, Algorithm 2, line by line in numpy; the first step has no cost before it.

    `initial` is ki · I before it, as in OmniSafe's PIDLagrangian.
    """
    integral, before, out = np.float64(initial / ki), None, []
    for cost in costs:
        delta = cost - limit
        derivative = np.maximum(cost - before, 0) if before is not None else 0
        integral = np.maximum(integral + delta, 0)
        out.append(float(np.maximum(kp * delta + ki * integral + kd * derivative, 0)))
        before = cost
    return out


@given(COSTS, st.floats(-2, 2), st.floats(0, 5))
def test_pid_is_the_paper_s_algorithm(costs, limit, initial):
    multiplier = LagrangeMultiplier({"c": limit}, PID(0.3, 0.2, 0.1), initial=initial)
    assert multiplier.values == {"c": initial}
    got = [multiplier.update({"c": cost})["c"] for cost in costs]
    np.testing.assert_allclose(got, algorithm_2(costs, limit, 0.3, 0.2, 0.1, initial), atol=1e-12)


@given(COSTS, st.sampled_from([DualAscent(2.0), PID(1.0, 0.5, 3.0)]))
def test_it_stays_within_its_bounds(costs, rule):
    multiplier = LagrangeMultiplier({"c": 0.0}, rule, maximum=1.5)
    for cost in costs:
        assert 0.0 <= multiplier.update({"c": cost})["c"] <= 1.5


def test_a_saturated_integral_does_not_wind_up():
    """After many costly batches λ leaves its maximum with the first cheap one; without the bound it would take long."""
    rule = PID(0.0, 0.1, 0.0)
    bounded = LagrangeMultiplier({"c": 0.0}, rule, maximum=1.0)
    unbounded = LagrangeMultiplier({"c": 0.0}, rule)
    for _ in range(100):
        bounded.update({"c": 1.0})
        unbounded.update({"c": 1.0})
    assert bounded.values["c"] == pytest.approx(1.0)
    assert unbounded.values["c"] == pytest.approx(10.0)
    assert bounded.update({"c": -1.0})["c"] == pytest.approx(0.9)


@pytest.mark.parametrize("rule", [DualAscent(0.3), PID(0.3, 0.2, 0.1)])
def test_a_saved_state_goes_on_to_the_same_bits(rule):
    costs = np.random.default_rng(0).normal(size=40).tolist()
    limits = {"a": 0.1, "b": -0.1}
    whole = LagrangeMultiplier(limits, rule, initial=0.5, maximum=2.0)
    for cost in costs[:20]:
        whole.update({"a": cost, "b": -cost})
    restored = LagrangeMultiplier(limits, rule, maximum=2.0)
    restored.load_state_dict(json.loads(json.dumps(whole.state_dict(), allow_nan=False)))
    for cost in costs[20:]:
        assert whole.update({"a": cost, "b": -cost}) == restored.update({"a": cost, "b": -cost})
    assert whole.state_dict() == restored.state_dict() and whole.steps == 40


GOOD = {
    "rule": "DualAscent",
    "steps": 1,
    "states": {"c": {"value": 1.0, "integral": 0.0, "previous": None}},
}


def changed(**fields):
    return GOOD | fields


def states(**fields):
    return changed(states={"c": GOOD["states"]["c"] | fields})


@pytest.mark.parametrize(
    ("state", "match"),
    [
        (None, "not a state"),
        (changed(rule="PID"), "'PID'"),
        (changed(steps=-1), "steps is -1"),
        (changed(states={"d": GOOD["states"]["c"]}), "lacks 'c'"),
        (states(value=-1.0), "value of 'c' is -1.0"),
        (states(value=9.0), "value of 'c' is 9.0"),
        (states(integral="1"), "integral of 'c'"),
        (states(previous=math.inf), "before of 'c'"),
        (states(more=1), "'c' is"),
    ],
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(state, match):
    multiplier = LagrangeMultiplier({"c": 0.0}, DualAscent(), initial=0.5, maximum=2.0)
    with pytest.raises(ArgumentError, match=match):
        multiplier.load_state_dict(state)
    assert multiplier.values == {"c": 0.5} and multiplier.steps == 0


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: LagrangeMultiplier({}), "limits is {}"),
        (lambda: LagrangeMultiplier({"c": math.nan}), "limit of 'c' is nan"),
        (lambda: LagrangeMultiplier({"c": 1.0}, "pid"), "rule is of type str"),
        (lambda: LagrangeMultiplier({"c": 1.0}, initial=-1.0), "initial value of 'c' is -1.0"),
        (lambda: LagrangeMultiplier({"c": 1.0}, initial={"d": 1.0}), "initial lacks 'c'"),
        (lambda: LagrangeMultiplier({"c": 1.0}, initial=2.0, maximum=1.0), "up to 1"),
        (lambda: DualAscent(0.0), "learning_rate is 0.0"),
        (lambda: PID(-1.0, 1.0, 1.0), "kp is -1.0"),
        (lambda: PID(1.0, 0.0, 1.0), "ki is 0"),
        (lambda: LagrangeMultiplier({"c": 1.0}).update(torch.ones(2)), "costs is of type Tensor"),
        (lambda: LagrangeMultiplier({"c": 1.0}).update({"d": 1.0}), "lacks 'c'"),
        (lambda: LagrangeMultiplier({"c": 1.0}).update(Rewards({"c": torch.ones(2)})), "Rewards"),
        (
            lambda: LagrangeMultiplier({"c": 1.0}).update(Costs({"c": torch.ones(2)}, per="token")),
            "per token, but limits are per sample",
        ),
        (lambda: LagrangeMultiplier({"c": 1.0}).update(Costs({"c": torch.ones(0)})), "no sample"),
    ],
)
def test_wrong_arguments_are_one_line(make, match):
    with pytest.raises(ArgumentError, match=match) as caught:
        make()
    assert "\n" not in str(caught.value) and "Fix: " in str(caught.value)


def test_a_nan_changes_nothing():
    multiplier = LagrangeMultiplier({"a": 0.0, "b": 0.0}, DualAscent(1.0))
    with pytest.raises(ArgumentError, match="'b' is nan"):
        multiplier.update({"a": 1.0, "b": math.nan})
    assert multiplier.values == {"a": 0.0, "b": 0.0} and multiplier.steps == 0


# ---- ranks ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_move_to_the_same_bits_as_one_process(tmp_path):
    spawned(run, 2, tmp_path, str(tmp_path))
    values = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert values[0] == values[1]
    alone = LagrangeMultiplier({"c": 0.2}, PID(0.3, 0.2, 0.1))
    wanted = [alone.update(Costs({"c": torch.tensor(x)}))["c"] for x in ([1, 2.5, 0, 4], [5.0])]
    assert values[0] == pytest.approx(wanted, abs=1e-12)


def run(rank, ranks, folder):
    multiplier = LagrangeMultiplier({"c": 0.2}, PID(0.3, 0.2, 0.1))
    parts = [([1.0], [2.5, 0.0, 4.0]), ([], [5.0])]
    out = [
        multiplier.update(Costs({"c": torch.tensor(of_ranks[rank])}), distributed.group.WORLD)["c"]
        for of_ranks in parts
    ]
    # A fault of one rank is an error on both, and neither waits for the other.
    bad = Costs({"c": torch.ones(1)}) if rank else {"c": 1.0}
    with pytest.raises(ArgumentError, match=r"\(rank 0\)"):
        multiplier.update(bad, distributed.group.WORLD)
    with pytest.raises(ArgumentError, match="the same names"):
        multiplier.update(Costs({f"c{rank}": torch.ones(1)}), distributed.group.WORLD)
    with pytest.raises(ArgumentError, match="no rank has a sample"):
        multiplier.update(Costs({"c": torch.ones(0)}), distributed.group.WORLD)
    with open(f"{folder}/{rank}.json", "w", encoding="utf-8") as file:
        json.dump(out, file)
