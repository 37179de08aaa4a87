"""scatter_rewards on a batch written by hand: three samples, the second without a loss token."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from support.samples import full_sample

from mmpack.errors import ArgumentError
from mmpack.losses.rewards.scatter import scatter_rewards
from mmpack.packing.pack import pack
from mmpack.packing.pad import pad
from mmpack.packing.places import LossPlaces
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
    ("sample", "scope"),
    [
        (1, "sequence"),
        (2, {"turn": 0}),
        (2, {"turn": -1}),
        (0, {"region": 1}),
        (0, {"region": -1}),
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


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"rewards": np.zeros((3, 1))}, "rewards is of shape [3, 1] for 3 samples"),
        ({"rewards": torch.tensor(1.0)}, "rewards is of shape [] for 3 samples"),
        ({"rewards": 1.0}, "rewards is of type float for 3 samples"),
        ({"rewards": "abc"}, "rewards is of type str for 3 samples"),
        ({"rewards": [1.0, None, 2.0]}, "rewards[1] is None, expected a number or a list of Score"),
        ({"rewards": [[1.0], [], []]}, "rewards[0] is [1.0], expected a number or a list of Score"),
        ({"rewards": [torch.tensor(1j), 0, 0]}, "rewards[0] is tensor(0.+1.j)"),
        ({"rewards": torch.ones(3) * 1j}, "rewards are torch.complex64"),
        ({"rewards": torch.ones(3).to_sparse()}, "layout torch.sparse_coo"),
        ({"rewards": torch.zeros(3, device="meta")}, "on the meta device"),
        ({"rewards": [1e39, 0.0, 0.0]}, "add up to 1e+39 on one token, which float32 can't hold"),
        ({"rewards": [10**400, 0, 0]}, "'reward' of sample 'a' is too large for a float"),
        ({"rewards": [1.0, 0.0, float("nan")]}, "'reward' of sample 'c' is nan"),
        ({"rewards": [[score("1")], [], []]}, "'r' of sample 'a' is of type str"),
        ({"rewards": [[score(1.0, name=["r"])], [], []]}, "the name of a score is of type list"),
        ({"rewards": [[score(1.0, "episode")], [], []]}, "scope 'episode' of sample 'a' is"),
        ({"rewards": [[score(1.0, {"region": "x"})], [], []]}, "scope {'region': 'x'} of"),
        ({"rewards": [[score(1.0, {"span": [0]})], [], []]}, "scope {'span': [0]} of sample 'a'"),
        ({"rewards": [[score(1.0, {"span": [[1], [2]]})], [], []]}, "is unknown"),
        ({"weights": {"r": float("nan")}}, "weights['r'] is nan, expected a finite number"),
        ({"weights": ["r"]}, "weights is of type list, expected a dict"),
        ({"rewards": [1.0] * 3, "weights": {}}, "weights name no score and leave out 'reward'"),
        ({"at": np.zeros(2)}, "at is a numpy array. Fix: use one of last, all, mean"),
        ({"at": {"format": "first"}}, "at['format'] is 'first'. Fix: use one of last, all"),
    ],
)
def test_wrong_arguments_are_named(keywords, says):
    with pytest.raises(ArgumentError) as error:
        scatter_rewards(**({"batch": HandBatch()} | keywords))
    assert says in str(error.value)
    assert "Fix: " in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "rewards", [[1.0, torch.tensor(0.0), 2.0], torch.tensor([1.0, 0.0, 2.0]), np.array([1, 0, 2])]
)
def test_numbers_override_the_samples_own(rewards):
    batch = HandBatch(rewards=[[score(100.0)], [], []])
    assert scatter_rewards(batch, rewards).tolist() == [0, 0, 0, 0, 1, 0, 2]


def test_a_misspelt_weight_is_an_error_and_a_score_that_a_batch_lacks_is_none():
    batch = HandBatch(rewards=[[score(1.0, name="exact")], [], [score(3.0, name="format")]])
    with pytest.raises(ArgumentError, match=r"'fromat', which no score of the batch has.*'format'"):
        scatter_rewards(batch, weights={"exact": 1.0, "fromat": 0.5})
    weights = {"exact": 1.0, "format": 0.0, "iou": 0.5}  # no sample of this batch has boxes
    assert scatter_rewards(batch, weights=weights).tolist() == [0, 0, 0, 0, 1, 0, 0]


def loop(batch, scores, weights, at):
    """Each score by a look at every token: [N] float64, in the order of the scores."""
    out = [0.0] * len(batch.loss_turn)
    cu, turn, token = (x.tolist() for x in (batch.cu_loss, batch.loss_turn, batch.loss_token_index))
    for b, of_sample in enumerate(scores):
        regions = [row for row in batch.region_rows.tolist() if row[0] == b]
        for one in of_sample:
            mine = range(cu[b], cu[b + 1])
            if one.scope != "sequence":
                ((kind, value),) = one.scope.items()
                if kind == "turn":
                    mine = [i for i in mine if turn[i] == value]
                elif kind == "span":
                    mine = [i for i in mine if value[0] <= token[i] < value[1]]
                else:
                    mine = range(*regions[value][1:]) if value < len(regions) else []
            where = at.get(one.name, "last") if isinstance(at, dict) else at
            share = weights.get(one.name, 1.0) * one.value
            for i in list(mine)[-1:] if where == "last" else mine:
                out[i] += share / len(mine) if where == "mean" else share
    return out


def random_batch(rng):
    """Samples of some runs of loss tokens in turns that may come again, with regions that overlap."""
    turns, tokens, regions, counts = [], [], [], []
    for b in range(rng.integers(1, 6)):
        token, begin = 0, len(turns)
        for _ in range(rng.integers(0, 5)):
            token += rng.integers(1, 4)
            size, turn = rng.integers(1, 6), rng.integers(-1, 3)
            turns += [turn] * size
            tokens += range(token, token + size)
            token += size
        counts.append(len(turns) - begin)
        for _ in range(rng.integers(0, 3)):
            first, stop = np.sort(rng.integers(begin, len(turns) + 1, 2))
            regions.append((b, first, stop))
    rng.shuffle(regions)
    return HandBatch(
        sample_ids=[str(b) for b in range(len(counts))],
        cu_loss=torch.tensor([0, *counts]).cumsum(0).int(),
        loss_turn=torch.tensor(turns, dtype=torch.int32),
        loss_token_index=torch.tensor(tokens, dtype=torch.int32),
        region_rows=torch.tensor(regions, dtype=torch.int32).reshape(-1, 3),
        rewards=[[] for _ in counts],
    )


def random_scores(rng, batch):
    """Some for every sample, of every scope; the value is 0 where the scope may have no loss token."""
    out = []
    for b in range(len(batch.sample_ids)):
        scores = []
        for _ in range(rng.integers(0, 9)):
            first = int(rng.integers(-2, 20))
            scope = [
                "sequence",
                {"turn": int(rng.integers(0, 4))},
                {"region": int(rng.integers(0, 3))},
                {"span": [first, first + int(rng.integers(0, 15))]},
            ][rng.integers(0, 4)]
            one = score(float(rng.normal()), scope, "abc"[rng.integers(0, 3)])
            try:
                scatter_rewards(
                    batch, [[one] if c == b else [] for c in range(len(batch.sample_ids))]
                )
            except ArgumentError:
                one.value = 0.0
            scores.append(one)
        out.append(scores)
    return out


@pytest.mark.parametrize("seed", range(12))
def test_scores_of_all_scopes_by_a_loop_over_tokens(seed):
    """Overlaps, turns in several runs, samples without a token: the sums of a loop, to the last bit."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng)
    scores = random_scores(rng, batch)
    weights = {"a": 1.5, "b": -0.25, "c": 1.0}
    for at in ("last", "all", "mean", {"a": "all", "b": "mean", "c": "last"}):
        if isinstance(at, dict):  # only names that are there
            at = {k: v for k, v in at.items() if any(s.name == k for one in scores for s in one)}
        wanted = torch.tensor(loop(batch, scores, weights, at), dtype=torch.float64).float()
        assert torch.equal(scatter_rewards(batch, scores, weights=weights, at=at), wanted)


def test_places_by_name():
    batch = HandBatch(rewards=[[score(1.0, name="format"), score(8.0, name="answer")], [], []])
    got = scatter_rewards(batch, at={"format": "all", "answer": "last"})
    assert got.tolist() == [1, 1, 1, 1, 9, 0, 0]
    assert scatter_rewards(batch, at={"format": "mean"}).tolist() == pytest.approx(
        [0.2, 0.2, 0.2, 0.2, 8.2, 0, 0]
    )
    with pytest.raises(
        ArgumentError, match=r"at names 'formt', which no score .*'answer', 'format'"
    ):
        scatter_rewards(batch, at={"formt": "all"})


def test_sources_in_one_call():
    batch = HandBatch(rewards=[[score(1.0)], [], []])
    verifiers = [[], [], [score(0.5, {"span": [2, 3]}, "ocr")]]
    penalty = {"length": np.array([-0.25, 0.0, -0.5])}
    got = scatter_rewards(
        batch, batch.rewards, verifiers, penalty, weights={"r": 2, "ocr": 1, "length": 4}
    )
    assert got.tolist() == [0, 0, 0, 0, 1, 0.5, -2]
    assert torch.equal(
        scatter_rewards(batch, None, verifiers), scatter_rewards(batch, batch.rewards, verifiers)
    )
    with pytest.raises(ArgumentError, match="argument 4 is None, expected scores"):
        scatter_rewards(batch, batch.rewards, verifiers, None)
    with pytest.raises(ArgumentError, match=r"rewards\['length'\] is of shape \[2\] for 3 samples"):
        scatter_rewards(batch, {"length": [0.0, 1.0]})


def test_verifiers_reach_the_batch():
    sample = full_sample()
    sample.verifiers = [Score("ocr", 0.5, {"region": 0})]
    for batch in (pack([sample]), pad([sample])):
        assert batch.verifiers == [sample.verifiers]
        first, stop = batch.region_rows[0, 1:].tolist()
        got = scatter_rewards(batch, batch.verifiers, at="all")
        assert got.nonzero()[:, 0].tolist() == list(range(first, stop))


def test_a_score_that_is_left_out_is_not_looked_at():
    batch = HandBatch(rewards=[[score(float("nan"), "episode", "judge"), score(2.0)], [], []])
    assert scatter_rewards(batch, weights={"r": 1.0}).sum() == 2


def test_a_packed_batch_knows_its_places_on_the_host():
    """As its tensors say: a copy on a GPU is not read for them."""
    sample = full_sample()
    batch = pack([sample, sample])
    tensors = (batch.cu_loss, batch.loss_turn, batch.loss_token_index, batch.region_rows)
    wanted = LossPlaces.of(*(x.numpy() for x in tensors))
    for name in ("offsets", "runs", "regions"):
        assert np.array_equal(getattr(batch.loss_places, name), getattr(wanted, name))
    assert len(wanted.runs) and len(wanted.regions)


def test_thousands_of_turns_by_numpy():
    """A score per turn and two over all: in time that does not grow with turns times tokens."""
    turns, size = 2_000, 100
    rng = np.random.default_rng(0)
    values = rng.normal(size=turns)
    turn = torch.arange(turns).repeat_interleave(size).int()
    batch = HandBatch(
        sample_ids=["s"],
        cu_loss=torch.tensor([0, turns * size]).int(),
        loss_turn=turn,
        loss_token_index=torch.arange(1, turns * size + 1).int(),
        region_rows=torch.zeros(0, 3).int(),
        rewards=[[score(v, {"turn": k}) for k, v in enumerate(values)] + [score(1.0), score(2.0)]],
    )
    assert torch.equal(
        scatter_rewards(batch, at="all"), torch.from_numpy(np.repeat(values + 1 + 2, size)).float()
    )


def as_if_on_a_gpu(batch, monkeypatch):
    """Tensors [B] are then not read, as on a GPU; the plain ops compute on the CPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    return batch


def test_numbers_on_a_gpu_and_scores_of_the_host_together(monkeypatch):
    batch = HandBatch(rewards=[[score(1.0, {"turn": 0})], [], [score(0.25)]])
    judge, other = torch.tensor([3.0, float("nan"), -1.0]), torch.tensor([10.0, 7.0, 20.0])
    as_if_on_a_gpu(batch, monkeypatch)
    named = {"judge": judge, "other": other}
    weights = {"r": 2.0, "judge": 0.5, "other": 1}
    got = scatter_rewards(batch, batch.rewards, named, weights=weights, at={"judge": "mean"})
    assert got.tolist() == pytest.approx([0.3, 0.3, 2.3, 0.3, 10.3, -0.25, 20.25])
    alone = scatter_rewards(batch, judge, at="all")
    assert alone.tolist() == [3, 3, 3, 3, 3, -1, -1]
    left_out = scatter_rewards(batch, batch.rewards, named, weights={"r": 1.0})
    assert left_out.tolist() == [0, 0, 1, 0, 0, 0, 0.25]


@pytest.mark.gpu
def test_scores_on_a_gpu_never_wait():
    samples = [full_sample(), full_sample()]
    samples[1].verifiers = [Score("ocr", 0.5, {"region": 0})]
    batch = pack(samples)
    judge = torch.tensor([0.1, -0.7])
    keywords = {"at": {"judge": "mean", "ocr": "all"}}
    host = scatter_rewards(batch, batch.rewards, batch.verifiers, {"judge": judge}, **keywords)
    moved, judge = batch.to("cuda"), judge.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = scatter_rewards(moved, batch.rewards, batch.verifiers, {"judge": judge}, **keywords)
        only_host = scatter_rewards(moved, batch.rewards, batch.verifiers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(got.cpu(), host, rtol=0, atol=1e-7)
    assert torch.equal(only_host.cpu(), scatter_rewards(batch, batch.rewards, batch.verifiers))
