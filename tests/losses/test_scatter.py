"""scatter_rewards on a batch written by hand: three samples, the second without a loss token."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from support.samples import full_sample

from mmpack.errors import ArgumentError
from mmpack.losses.rewards.scatter import scatter_rewards
from mmpack.packing.pack import pack
from mmpack.schema.spans import Score


@dataclass
class HandBatch:
    """Sample a: tokens 3-5 in turn 0 and 9-10 in turn 1; b: none; c: tokens 2-3, no turn."""

    sample_ids: list[str] = field(default_factory=lambda: ["a", "b", "c"])
    cu_loss: torch.Tensor = field(default_factory=lambda: torch.tensor([0, 5, 5, 7]).int())
    loss_turn: torch.Tensor = field(default_factory=lambda: torch.tensor([0, 0, 0, 1, 1, -1, -1]))
    loss_token_index: torch.Tensor = field(
        default_factory=lambda: torch.tensor([3, 4, 5, 9, 10, 2, 3])
    )
    # Two regions of a: its loss tokens [1, 3), and one over no loss token; one of c.
    region_rows: torch.Tensor = field(
        default_factory=lambda: torch.tensor([[0, 1, 3], [2, 5, 6], [0, 5, 5]])
    )
    rewards: list[list[Score]] = field(default_factory=lambda: [[], [], []])


def score(value, scope="sequence", name="r"):
    return Score(name=name, value=value, scope=scope)


@pytest.mark.parametrize(
    ("scope", "last", "everywhere"),
    [
        ("sequence", [4], [0, 1, 2, 3, 4]),
        ({"turn": 0}, [2], [0, 1, 2]),
        ({"turn": 1}, [4], [3, 4]),
        ({"region": 0}, [2], [1, 2]),
        ({"span": [0, 5]}, [1], [0, 1]),
        ({"span": [5, 10]}, [3], [2, 3]),
    ],
)
def test_scopes(scope, last, everywhere):
    batch = HandBatch(rewards=[[score(6.0, scope)], [], []])
    for at, places, value in (
        ("last", last, 6.0),
        ("all", everywhere, 6.0),
        ("mean", everywhere, 6.0 / len(everywhere)),
    ):
        expected = torch.zeros(7)
        expected[places] = value
        got = scatter_rewards(batch, at=at)
        assert got.dtype == torch.float32
        assert torch.equal(got, expected)


def test_each_sample_keeps_its_own():
    batch = HandBatch(
        rewards=[
            [score(1.0)],
            [score(0.0)],
            [score(2.0, {"region": 0}), score(4.0, {"span": [3, 4]})],
        ]
    )
    assert scatter_rewards(batch).tolist() == [0, 0, 0, 0, 1, 2, 4]


def test_scores_that_meet_add_up():
    batch = HandBatch(
        rewards=[[score(1.0, name="exact"), score(0.25, {"turn": 1}, "format")], [], []],
    )
    assert scatter_rewards(batch).tolist() == [0, 0, 0, 0, 1.25, 0, 0]
    weighted = scatter_rewards(batch, weights={"format": 2.0})
    assert weighted.tolist() == [0, 0, 0, 0, 0.5, 0, 0]


def test_costs_never_enter_rewards():
    """`Sample.costs` are carried and not subtracted: there is no parameter for it."""
    sample = full_sample()
    batch = pack([sample])
    assert batch.costs == [sample.costs]
    with_costs = scatter_rewards(batch)
    sample.costs = None
    assert torch.equal(scatter_rewards(pack([sample])), with_costs)
    assert with_costs.sum() == 1.5  # "exact" and "box"
    with pytest.raises(TypeError, match="costs"):
        scatter_rewards(batch, costs=True)


@pytest.mark.parametrize(
    "rewards", [[1.0, 0.0, 2.0], torch.tensor([1.0, 0.0, 2.0]), np.array([1, 0, 2])]
)
def test_numbers_override_the_samples_own(rewards):
    batch = HandBatch(rewards=[[score(100.0)], [], []])
    assert scatter_rewards(batch, rewards).tolist() == [0, 0, 0, 0, 1, 0, 2]


def test_scores_override_the_samples_own():
    batch = HandBatch(rewards=[[score(100.0)], [], []])
    got = scatter_rewards(batch, [[score(1.0, {"turn": 0}), score(2.0)], [], []])
    assert got.tolist() == [0, 0, 1, 0, 2, 0, 0]


def test_the_sum_of_token_rewards_is_the_sum_of_the_scores():
    batch = HandBatch(rewards=[[score(0.3), score(-1.1, {"turn": 0})], [], [score(0.7)]])
    for at in ("last", "mean"):
        total = float(scatter_rewards(batch, at=at).double().sum())
        assert total == pytest.approx(0.3 - 1.1 + 0.7, abs=1e-6)


@pytest.mark.parametrize(
    ("sample", "scope"),
    [
        (1, "sequence"),
        (0, {"turn": 2}),
        (2, {"turn": 0}),
        (0, {"region": 1}),
        (2, {"region": 1}),
        (0, {"span": [6, 9]}),
        (0, {"span": [11, 99]}),
    ],
)
def test_a_score_without_a_loss_token_is_an_error_unless_it_is_zero(sample, scope):
    batch = HandBatch()
    batch.rewards[sample] = [score(1.0, scope)]
    with pytest.raises(ArgumentError) as error:
        scatter_rewards(batch)
    name = "abc"[sample]
    assert f"'r' of sample '{name}' is 1.0 for {scope!r}, which has no loss token" in str(
        error.value
    )
    batch.rewards[sample] = [score(0.0, scope)]
    assert torch.equal(scatter_rewards(batch), torch.zeros(7))


def test_numbers_may_be_tensors_in_a_list():
    assert scatter_rewards(HandBatch(), list(torch.tensor([1.0, 0.0, 2.0]))).sum() == 3


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"rewards": [1.0, 2.0]}, "rewards is of shape [2] for 3 samples"),
        ({"rewards": np.zeros((3, 1))}, "rewards is of shape [3, 1] for 3 samples"),
        ({"rewards": 1.0}, "rewards is of type float for 3 samples"),
        ({"rewards": "abc"}, "rewards is of type str for 3 samples"),
        ({"rewards": [1.0, None, 2.0]}, "rewards[1] is None, expected a number or a list of Score"),
        ({"rewards": [[1.0], [], []]}, "rewards[0] is [1.0], expected a number or a list of Score"),
        ({"weights": {"r": float("nan")}}, "weights['r'] is nan, expected a finite number"),
        ({"weights": ["r"]}, "weights is of type list, expected a dict"),
        ({"rewards": [1.0] * 3, "weights": {"typo": 1.0}}, "weights name 'typo', which no score"),
        ({"batch": [1]}, "batch is of type list, expected a PackedBatch"),
        ({"rewards": [1.0, 0.0, float("nan")]}, "'reward' of sample 'c' is nan"),
        (
            {"rewards": [[score(1.0, "episode")], [], []]},
            "scope 'episode' of sample 'a' is unknown",
        ),
        ({"rewards": b"abc"}, "rewards is of type bytes for 3 samples"),
        ({"rewards": torch.tensor(1.0)}, "rewards is of shape [] for 3 samples"),
        ({"rewards": torch.ones(3) * 1j}, "rewards are torch.complex64"),
        ({"rewards": torch.ones(3).to_sparse()}, "layout torch.sparse_coo"),
        ({"rewards": [1e39, 0.0, 0.0]}, "add up to 1e+39 on a token, which float32 can't hold"),
        ({"rewards": [[score(None)], [], []]}, "'r' of sample 'a' is None, expected a finite"),
        ({"rewards": [[score("1")], [], []]}, "'r' of sample 'a' is of type str"),
        ({"rewards": [[score(1.0, {"region": -1})], [], []]}, "which has no loss token"),
        ({"rewards": [[], [], [score(1.0, {"turn": -1})]]}, "which has no loss token"),
        ({"rewards": [[score(1.0, {"region": "x"})], [], []]}, "scope {'region': 'x'} of"),
        ({"rewards": [[score(1.0, {"span": [0]})], [], []]}, "scope {'span': [0]} of sample 'a'"),
        ({"rewards": [1.0] * 3, "weights": {}}, "weights name no score, and leave out 'reward'"),
        ({"rewards": [1.0] * 3, "weights": {1: 1.0, "typo": 2.0}}, "weights name 'typo'"),
        ({"at": np.zeros(2)}, "at is a numpy array. Fix: one of last, all, mean"),
        ({"at": "first"}, "at is 'first'. Fix: one of last, all, mean"),
    ],
)
def test_wrong_arguments_are_named(keywords, says):
    with pytest.raises(ArgumentError) as error:
        scatter_rewards(**({"batch": HandBatch()} | keywords))
    assert says in str(error.value)
    assert "Fix: " in str(error.value) and "\n" not in str(error.value)


def test_a_misspelt_weight_is_an_error_and_a_score_that_a_batch_lacks_is_none():
    batch = HandBatch(rewards=[[score(1.0, name="exact")], [], [score(3.0, name="format")]])
    with pytest.raises(
        ArgumentError, match=r"'fromat', which no score of the batch bears.*'format'"
    ):
        scatter_rewards(batch, weights={"exact": 1.0, "fromat": 0.5})
    weights = {"exact": 1.0, "format": 0.0, "iou": 0.5}  # no sample of this batch has boxes
    assert scatter_rewards(batch, weights=weights).tolist() == [0, 0, 0, 0, 1, 0, 0]
