"""Rewards and costs don't mix: mypy refuses each way, and so does each function when it runs."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.samples import full_sample, make_sample

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.losses.constrained import Costs, Rewards, constrained_advantages

ROOT = Path(__file__).resolve().parents[3]
GROUPS = torch.tensor([0, 0])
CU = torch.tensor([0, 1, 2]).int()

# Each line that ends in "# no" must be refused by mypy, and no other.
SNIPPET = """
import torch
import mmpack as mp
from mmpack.losses.constrained import *

x, groups = torch.ones(2), torch.tensor([0, 0])
cu = torch.tensor([0, 1, 2])
paid, charged = Rewards({"r": x}), Costs({"c": x})
scores, costs = [[mp.Score("r", 1.0)]], [[mp.schema.Cost("c", 1.0)]]
batch = mp.pack([])
paid + charged  # no
x + charged  # no
charged * 2.0  # no
-charged  # no
charged.tensor("c")  # no
paid.tensor("r")
mp.scatter_rewards(batch, scores)
mp.scatter_rewards(batch, costs)  # no
mp.losses.scatter_costs(batch, costs)
mp.losses.scatter_costs(batch, scores)  # no
mp.group_advantages(paid.tensor("r"), groups)
mp.group_advantages(charged, groups)  # no
mp.policy_loss(x, charged.advantages(groups), cu)  # no
mp.gae(charged, x, cu)  # no
constrained_advantages(paid.advantages(groups), charged.advantages(groups), {"c": 1.0})
constrained_advantages(charged.advantages(groups), paid.advantages(groups), {"c": 1.0})  # no
mp.policy_loss(x, constrained_advantages(paid.advantages(), charged.advantages(), {"c": 1.0}), cu)
multiplier = LagrangeMultiplier({"c": 1.0})
multiplier.update(charged)
multiplier.update(paid)  # no
multiplier.update(charged.advantages(groups))  # no
sample = mp.Sample("s", "g", "qwen2_vl", mp.pack([]).input_ids.numpy(), [], [], [])
sample.costs = costs[0]
sample.costs = scores[0]  # no
Rewards.of([sample])
typed: Costs = Rewards({"r": x})  # no
other: Costs = charged.map(torch.relu).total()
"""


@pytest.mark.slow
def test_mypy_refuses_each_mixture_and_nothing_else(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "snippet.py").write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml"]
    command += ["--follow-imports=silent", "--no-error-summary", str(tmp_path / "snippet.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    refused = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error: " in line}
    wanted = {i for i, line in enumerate(SNIPPET.splitlines(), 1) if line.endswith("# no")}
    assert refused == wanted, done.stdout


def named(cls, **values):
    return cls({name: torch.tensor(numbers) for name, numbers in values.items()})


PAID, CHARGED = named(Rewards, r=[1.0, 2.0]), named(Costs, c=[1.0, 2.0])


@pytest.mark.parametrize(
    "mix",
    [
        lambda: PAID + CHARGED,
        lambda: -CHARGED,
        lambda: torch.ones(2) + CHARGED,
        lambda: np.ones(2) - CHARGED,
        lambda: torch.stack([PAID, CHARGED]),
        lambda: sum([PAID, CHARGED]),
        lambda: mp.group_advantages(CHARGED, GROUPS),
        lambda: mp.policy_loss(torch.zeros(2), CHARGED.advantages(GROUPS), CU),
        lambda: mp.gae(CHARGED, torch.zeros(2), CU),
        lambda: constrained_advantages(PAID, CHARGED, {"c": 1.0}),
        lambda: constrained_advantages(
            CHARGED.advantages(GROUPS), CHARGED.advantages(GROUPS), {"c": 1.0}
        ),
        lambda: mp.scatter_rewards(mp.pack([full_sample()]), named(Costs, c=[1.0])),
        lambda: mp.scatter_rewards(mp.pack([full_sample()]), [[mp.schema.Cost("c", 1.0)]]),
        lambda: mp.losses.scatter_costs(mp.pack([full_sample()]), [[mp.Score("c", 1.0)]]),
        lambda: mp.losses.scatter_costs(mp.pack([full_sample()]), named(Rewards, r=[1.0])),
    ],
)
def test_each_mixture_is_one_line(mix):
    with pytest.raises(ArgumentError, match=r"^[^\n]+Fix: [^\n]+$"):
        mix()


def test_what_it_holds_does_not_change():
    numbers = {"c": torch.tensor([1.0, 2.0], requires_grad=True)}
    costs = Costs(numbers)
    numbers["d"] = torch.ones(3)
    assert costs.names == ("c",)
    assert costs.mean() == {"c": 1.5} and costs.sums() == ({"c": 3.0}, 2)
    assert repr(costs) == "Costs('c'; 2 per sample)"


def test_each_change_keeps_type_and_names():
    x = torch.tensor([-3.0, 0.5, 4.0])
    for cls in (Rewards, Costs):
        scores = cls({"a": x, "b": 2 * x})
        clipped = scores.map(lambda value: value.clamp(-1.0, 1.0))
        assert type(clipped) is cls
        assert clipped.mean() == {"a": 0.5 / 3, "b": 1.0 / 3}
        total = scores.total({"b": 0.5, "a": 2.0}, name="all")
        assert type(total) is cls and total.mean() == {"all": 1.5}
        assert scores.select("b").names == ("b",)
        assert scores.to("cpu").names == ("a", "b")


def test_advantages_are_those_of_group_advantages():
    x, groups = torch.tensor([1.0, 0.0, 3.0, 5.0]), torch.tensor([0, 0, 1, 1])
    for kind in ("grpo", "dr_grpo"):
        wanted = mp.group_advantages(x, groups, kind)
        got = constrained_advantages(
            Rewards({"r": x}).advantages(groups, kind),
            Costs({"c": x}).advantages(groups, kind),
            {"c": 3.0},
        )
        torch.testing.assert_close(got, (wanted - 3 * wanted) / 4)
    whole = Rewards({"r": x}).advantages(kind="grpo")
    alone = mp.group_advantages(x, torch.zeros(4).long())
    none = Costs({"c": torch.zeros(4)}).advantages(groups)
    assert torch.equal(constrained_advantages(whole, none, {"c": 0.0}), alone)


def test_several_constraints_and_rewards():
    generator = torch.Generator().manual_seed(1)
    a, b, c, d = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    paid, charged = Rewards({"a": a, "b": b}), Costs({"c": c, "d": d})
    got = constrained_advantages(
        paid.advantages(groups, "dr_grpo"),
        charged.advantages(groups, "dr_grpo"),
        {"d": 2.0, "c": 0.25},
    )
    mixed = (a + b - 0.25 * c - 2 * d).numpy().reshape(2, 3)
    wanted = (mixed - mixed.mean(axis=1, keepdims=True)).ravel() / 3.25
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-6, atol=1e-6)


def test_scores_of_samples():
    one, two = full_sample("one"), full_sample("two")
    one.costs = [
        mp.schema.Cost("harm", 1.0),
        mp.schema.Cost("harm", 0.5, {"turn": 1}),
        mp.schema.Cost("slow", 2.0),
    ]
    two.costs = [mp.schema.Cost("harm", 0.0)]
    with pytest.raises(ArgumentError, match="sample 'two' has no cost 'slow'"):
        Costs.of([one, two])
    assert Costs.of([one, two], missing=0.0).mean() == {"harm": 0.75, "slow": 1.0}
    assert Costs.of([one, two], names=["harm"]).names == ("harm",)
    assert Rewards.of([one, two]).tensor("exact").tolist() == [1.0, 1.0]
    verdicts = mp.losses.score_columns([one.verifiers], ["format"])
    assert Rewards(verdicts).tensor("format").tolist() == [1.0]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Costs({}), "an empty dict"),
        (lambda: Costs({"c": [1.0]}), "c is of type list"),
        (lambda: Costs({"": torch.ones(1)}), "a name is ''"),
        (lambda: Costs({"c": torch.ones(1, 2)}), r"shape \[1, 2\]"),
        (lambda: Costs({"c": torch.ones(1).long()}), "int64"),
        (lambda: Costs({"c": torch.tensor([0.0, float("nan")])}), r"c\[1\] is nan"),
        (lambda: Costs({"a": torch.ones(1), "b": torch.ones(2)}), r"b has shape \[2\]"),
        (lambda: Costs({"a": torch.ones(1)}, per="turn"), "per is 'turn'"),
        (lambda: CHARGED.total({"c": -1.0}), "the sign of a cost"),
        (lambda: CHARGED.select("d"), "a name is 'd'"),
        (lambda: CHARGED.per_sample(CU), "per sample already"),
        (lambda: named(Costs, c=[]).mean(), "no sample"),
        (lambda: Costs({"c": torch.ones(2)}, per="token").advantages(GROUPS), "per token"),
        (lambda: CHARGED.advantages_by(lambda _, x: x[:1]), r"shape \[1\]"),
        (
            lambda: constrained_advantages(PAID.advantages(), CHARGED.advantages(), {"d": 1.0}),
            "multipliers are of d, but the costs are c",
        ),
        (
            lambda: constrained_advantages(PAID.advantages(), CHARGED.advantages(), {"c": -1.0}),
            "multiplier of 'c' is -1.0",
        ),
        (
            lambda: constrained_advantages(
                PAID.advantages(), named(Costs, c=[1.0, 2.0, 3.0]).advantages(), {"c": 1.0}
            ),
            "the same samples",
        ),
    ],
)
def test_wrong_arguments_are_one_line(make, match):
    with pytest.raises(ArgumentError, match=match) as caught:
        make()
    assert "\n" not in str(caught.value) and "Fix: " in str(caught.value)


# ---- scattered -----------------------------------------------------------------------------------


def scattered_samples():
    one = make_sample([("text", range(3)), ("response", range(4), 0), ("response", range(2), 1)])
    two = make_sample([("text", range(2)), ("response", range(3))], sample_id="s1")
    one.costs = [mp.schema.Cost("harm", 1.0, {"turn": 0}), mp.schema.Cost("slow", 0.5)]
    two.costs = [mp.schema.Cost("harm", 2.0)]
    return [one, two]


@pytest.mark.parametrize("layout", [mp.pack, mp.pad])
def test_costs_land_where_scores_of_their_scope_would(layout):
    batch = layout(scattered_samples())
    for at in ("last", "all", "mean"):
        costs = mp.losses.scatter_costs(batch, at=at)
        assert costs.names == ("harm", "slow") and costs.per == "token"
        for name in costs.names:
            scores = [[mp.Score(c.name, c.value, c.scope) for c in row] for row in batch.costs]
            wanted = mp.scatter_rewards(
                batch, scores, weights={"harm": 0.0, "slow": 0.0, name: 1.0}, at=at
            )
            assert torch.equal(costs.select(name)._values[name], wanted)
    assert mp.losses.scatter_costs(batch).per_sample(batch.cu_loss).sums() == (
        {"harm": 3.0, "slow": 0.5},
        2,
    )


def test_costs_per_sample_are_scattered_and_come_back():
    batch = mp.pack(scattered_samples())
    costs = Costs({"harm": torch.tensor([1.0, 0.25]), "slow": torch.tensor([0.0, 3.0])})
    tokens = mp.losses.scatter_costs(batch, costs, at="mean")
    again = tokens.per_sample(batch.cu_loss)
    assert again.sums() == costs.sums()
    assert mp.losses.scatter_costs(batch, costs, names=["slow"]).names == ("slow",)


def test_names_hold_where_a_batch_has_none():
    bare = make_sample([("text", range(2)), ("response", range(3))])
    assert mp.losses.scatter_costs(mp.pack([bare]), names=["harm"]).mean() == {"harm": 0.0}
    with pytest.raises(ArgumentError, match="no sample of the batch has a cost"):
        mp.losses.scatter_costs(mp.pack([bare]))


def test_a_cost_without_a_token_is_an_error_of_scatter_costs():
    empty = make_sample([("text", range(2))])
    with pytest.raises(ArgumentError, match=r"^scatter_costs: 'harm' .* no loss token"):
        mp.losses.scatter_costs(mp.pack([empty]), [[mp.schema.Cost("harm", 1.0)]])
    with pytest.raises(ArgumentError, match=r"^scatter_costs: at is 'first'"):
        mp.losses.scatter_costs(mp.pack([empty]), [[mp.schema.Cost("harm", 0.0)]], at="first")
    with pytest.raises(ArgumentError, match="of length 2 for 1 samples"):
        mp.losses.scatter_costs(mp.pack([empty]), [[], []])
    with pytest.raises(ArgumentError, match="batch is of type list"):
        mp.losses.scatter_costs([empty])
