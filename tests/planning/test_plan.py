"""plan: budgets, groups, ranks and drops, against counts taken by hand from the samples."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpack.errors import ArgumentError, PlanError, SchemaError
from mmpack.planning.cost import CostModel, family_cost
from mmpack.planning.counts import plain_counts
from mmpack.planning.memory import Load, memory_model
from mmpack.planning.plan import Plan, plan
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, ModalitySpan

IMAGE = 151655


def make_sample(name, group, prompt, response, medium=None, family="qwen2_5_vl"):
    """A prompt (ids), an image (number k: 4·(k+1) patches in a row of grids) or none, a response."""
    media, spans, image = [], [], []
    if medium is not None:
        image = [IMAGE] * (medium + 1)
        grid = (1, 2, 2 * (medium + 1))
        media = [Medium(f"m{medium}", "image", f"key{medium}", grid, medium + 1)]
        spans = [ModalitySpan(len(prompt), len(prompt) + len(image), "image", 0)]
    ids = [*prompt, *image, *response]
    loss = (
        [LossSpan(len(ids) - len(response), len(ids))]
        if response and len(response) < len(ids)
        else []
    )
    return Sample(name, group, family, np.array(ids, dtype=np.int64), media, spans, loss)


def of_length(length, group="g", name="s"):
    return make_sample(name, group, [1] * length, [])


def rows_of(samples, share):
    """Rows of a pack: with sharing, the number of distinct prefixes (by id and medium)."""
    if not share:
        return sum(len(s) for s in samples)
    seen = set()
    for s in samples:
        tokens = [(int(i), s.media[0].cache_key if i == IMAGE else "") for i in s.input_ids]
        seen |= {tuple(tokens[: n + 1]) for n in range(len(tokens))}
    return len(seen)


def patches_of(samples):
    return sum({m.cache_key: int(np.prod(m.grid_thw)) for s in samples for m in s.media}.values())


@st.composite
def batches(draw):
    """Samples of a few groups, in mixed order; every sample has at most 15 tokens and 12 patches."""
    samples = []
    ids = st.integers(1, 3)
    for group in range(draw(st.integers(0, 5))):
        prompt = draw(st.lists(ids, max_size=6))
        medium = draw(st.none() | st.integers(0, 2))
        for _ in range(draw(st.integers(1, 4))):
            response = draw(st.lists(ids, max_size=6))
            samples.append(make_sample(f"s{len(samples)}", f"g{group}", prompt, response, medium))
    return draw(st.permutations(samples))


@settings(max_examples=100)
@given(
    batches(),
    st.integers(15, 60),
    st.none() | st.integers(12, 24),
    st.none() | st.integers(1, 6),
    st.integers(1, 4),
    st.booleans(),
)
def test_plans_obey_every_budget(samples, max_tokens, max_patches, max_samples, ranks, share):
    budgets = {"max_tokens": max_tokens, "max_patches": max_patches, "max_samples": max_samples}
    made = plan(samples, **budgets, ranks=ranks, share_prefix=share)

    def fits(chosen):
        return (
            rows_of(chosen, share) <= max_tokens
            and (max_patches is None or patches_of(chosen) <= max_patches)
            and (max_samples is None or len(chosen) <= max_samples)
        )

    bins = [[samples[i] for i in b] for b in made.bins]
    idle = bins.count([])
    assert all(fits(b) for b in bins) and all(bins[: len(bins) - idle])
    # only where every sample is a bin of its own, and there is no multiple of the ranks of them
    assert not idle or (len(bins) - idle == len(samples) and idle < ranks)
    assert made.stats["idle_bins"] == idle
    assert sorted(i for b in made.bins for i in b) == list(range(len(samples)))
    assert sorted(b for rank in made.ranks for b in rank) == list(range(len(bins)))
    assert len(made.ranks) == ranks and len({len(rank) for rank in made.ranks}) == 1
    if ranks == 1:
        for group in {s.group_id for s in samples}:
            members = [s for s in samples if s.group_id == group]
            homes = sum(any(s.group_id == group for s in b) for b in bins)
            assert homes == 1 or not fits(members)
    assert made.total_samples == len(samples) and made.dropped == []
    assert made.total_tokens == sum(s.num_loss_tokens for s in samples)
    assert made.stats["bins"] == len(bins)
    assert made.stats["rows_padded"] == sum(len(b) * max(map(len, b)) for b in bins if b)
    assert made.stats["rows_packed"] == sum(map(len, samples))
    assert made.stats["rows_shared"] == (sum(rows_of(b, True) for b in bins) if share else None)
    assert made.stats["patches"] == sum(map(patches_of, bins))
    assert made.stats["patches_padded"] == sum(patches_of([s]) for s in samples)
    assert plan(samples, **budgets, ranks=ranks, share_prefix=share) == made


def test_ranks_get_equal_bins_of_like_cost():
    random = np.random.default_rng(0)
    samples = [
        of_length(int(n), f"g{k // 4}", f"s{k}")
        for k, n in enumerate(random.integers(50, 900, 256))
    ]
    made = plan(samples, max_tokens=8192, ranks=8)
    assert len(made.bins) % 8 == 0 and made.stats["balance"] < 1.02
    for group in range(64):
        homes = [b for b in made.bins if any(samples[i].group_id == f"g{group}" for i in b)]
        assert len(homes) == 1
    model = family_cost(None)
    loss = [sum(samples[i].num_loss_tokens for i in b) for b in made.bins]
    counts = [plain_counts([len(samples[i]) for i in b]) for b in made.bins]
    costs = [model.seconds(c._replace(loss_tokens=n)) for c, n in zip(counts, loss, strict=True)]
    loads = [sum(costs[b] for b in rank) for rank in made.ranks]
    assert made.stats["balance"] == pytest.approx(max(loads) / np.mean(loads), rel=1e-12)
    for rank in made.ranks:
        assert [costs[b] for b in rank] == sorted((costs[b] for b in rank), reverse=True)


def test_bins_stay_empty_where_samples_are_too_few_for_the_ranks(tmp_path):
    samples = [of_length(8, f"g{k}", f"s{k}") for k in range(5)]
    made = plan(samples, max_tokens=8, ranks=4)
    assert made.bins == [[0], [1], [2], [3], [4], [], [], []]
    # the costliest first, and the idle ones spread
    assert sorted([len(made.bins[b]) for b in rank] for rank in made.ranks) == [[1, 0]] * 3 + [
        [1, 1]
    ]
    assert made.stats["bins"] == 8 and made.stats["idle_bins"] == 3 and made.stats["fill"] == 1.0
    one = plan(samples[:1], max_tokens=8, ranks=2, share_prefix="auto", cost=lambda *_: 7.0)
    assert one.bins == [[0], []] and one.ranks == [[0], [1]] and one.stats["balance"] == 2.0
    one.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json", samples[:1]) == one


def test_the_cost_decides_what_is_even():
    text = [of_length(40, f"t{k}", f"t{k}") for k in range(4)]
    seen = [make_sample(f"v{k}", f"v{k}", [1] * 37, [], 2) for k in range(4)]
    for part in (CostModel(patch=1), lambda rows, pairs, patches: patches):
        made = plan(text + seen, max_tokens=160, ranks=2, cost=part)
        assert made.stats["balance"] == 1.0
        loads = [sum(i >= 4 for b in rank for i in made.bins[b]) for rank in made.ranks]
        assert loads == [1, 1] or loads == [2, 2]


def test_shared_rows_and_their_pairs_cost_once():
    group = [make_sample(f"s{k}", "g", [1] * 6, [k + 2] * 4) for k in range(3)]
    asked = []
    plan(group, max_tokens=100, share_prefix=True, cost=lambda *x: asked.append(x) or 1.0)
    assert asked == [(6 + 3 * 4, 6**2 + 3 * (10**2 - 6**2), 0)]


def test_a_sample_over_a_budget_is_named():
    samples = [of_length(4, "g", "small"), of_length(11, "g", "big")]
    with pytest.raises(
        PlanError, match=r"samples\[1\] big.* has 11 tokens, max_tokens is 10 \(MM405\)"
    ):
        plan(samples, max_tokens=10)
    made = plan(samples, max_tokens=10, on_invalid="drop")
    assert made.bins == [[0]] and made.total_samples == 1
    (dropped,) = made.dropped
    assert (dropped.index, dropped.sample_id, dropped.group_id) == (1, "big", "g")
    assert "11 tokens" in dropped.reason and dropped.problems[0].code == "MM405"
    pictured = [make_sample("p", "g", [1], [2], 2)]
    with pytest.raises(PlanError, match=r"has 12 patches, max_patches is 11 \(MM405\)"):
        plan(pictured, max_tokens=10, max_patches=11)
    assert plan(pictured, max_tokens=10, max_patches=12).bins == [[0]]


def test_a_piece_of_a_repeated_medium_fits_by_itself():
    twice = make_sample("p", "g", [1], [], 0)
    twice.media *= 2  # one picture, twice
    twice.input_ids = np.array([1, IMAGE, 2, IMAGE])
    twice.modality_spans = [ModalitySpan(1, 2, "image", 0), ModalitySpan(3, 4, "image", 1)]
    assert plan([twice], max_tokens=4, max_patches=4).stats["patches"] == 4


def test_broken_samples_are_raised_together_or_dropped():
    good, first, second = (make_sample(n, "g", [1, 2], [3], 0) for n in ("good", "a", "b"))
    first.loss_spans = [LossSpan(0, 1)]
    second.media[0].num_tokens = 7
    with pytest.raises(SchemaError) as caught:
        plan([good, first, second], max_tokens=10)
    assert [(p.sample_id, p.code) for p in caught.value.problems] == [
        ("a", "MM202"),
        ("b", "MM108"),
    ]
    made = plan([good, first, second], max_tokens=10, on_invalid="drop")
    assert made.bins == [[0]] and [(d.index, d.group_id) for d in made.dropped] == [
        (1, "g"),
        (2, "g"),
    ]
    assert "MM202" in made.dropped[0].reason and "MM108" in made.dropped[1].reason


@pytest.mark.parametrize(
    ("field", "value"), [("media", None), ("media", [None]), ("loss_spans", None)]
)
def test_malformed_samples_are_dropped_without_a_raw_error(field, value):
    good, bad = (make_sample(n, "g", [1, 2], [3], 0) for n in ("good", "bad"))
    setattr(bad, field, value)
    made = plan([good, bad], max_tokens=10, on_invalid="drop")
    assert made.bins == [[0]] and made.total_tokens == 1
    assert [d.sample_id for d in made.dropped] == ["bad"]


def test_two_families_are_refused():
    samples = [make_sample("a", "g", [1], []), make_sample("b", "g", [1], [], family="qwen2_vl")]
    with pytest.raises(PlanError, match=r"samples\[0\] is of family qwen2_5_vl.*MM406"):
        plan(samples, max_tokens=10)


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": 0}, {"max_patches": -1}, {"ranks": 0}, {"on_invalid": "skip"}, {"cost": 0}],
)
def test_wrong_arguments_are_named(wrong):
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        plan([of_length(3)], **{"max_tokens": 10, **wrong})


@pytest.mark.parametrize("cost", [float("nan"), -1.0, None])
def test_a_cost_that_is_none(cost):
    with pytest.raises(ArgumentError, match=r"plan: cost\(\d+, \d+, \d+\) is .* Fix: return what"):
        plan([of_length(3)], max_tokens=10, cost=lambda rows, pairs, patches: cost)


def test_the_plan_does_not_depend_on_hash_seeds():
    program = (
        "import json, test_plan as t\n"
        "s = [t.make_sample(f's{k}', f'g{k % 5}', [1 + k % 5] * 4, [k % 3 + 7] * (k % 6), k % 3) for k in range(40)]\n"
        "p = t.plan(s, max_tokens=40, max_patches=20, ranks=3, share_prefix=True)\n"
        "print(json.dumps([p.bins, p.ranks, p.stats]))"
    )
    here = Path(__file__).resolve()
    env = {"PYTHONHASHSEED": "77", "PYTHONPATH": f"{here.parent}:{here.parents[2]}"}
    command = [sys.executable, "-c", program]
    other = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    samples = [
        make_sample(f"s{k}", f"g{k % 5}", [1 + k % 5] * 4, [k % 3 + 7] * (k % 6), k % 3)
        for k in range(40)
    ]
    made = plan(samples, max_tokens=40, max_patches=20, ranks=3, share_prefix=True)
    assert json.loads(other) == json.loads(json.dumps([made.bins, made.ranks, made.stats]))


CONFIG = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "vocab_size": 1000,
}


def test_memory_gives_max_tokens():
    """Every bin fits by the model's own terms, also where shares differ from sample to sample."""
    samples = [
        make_sample(f"s{k}", f"g{k // 2}", [1] * (3 + k), [7 + k] * (9 - k)) for k in range(8)
    ]
    terms = memory_model(CONFIG)
    for share in (False, True, "auto"):
        made = plan(samples, share_prefix=share, model=CONFIG, memory=300_000)
        assert len(made.bins) > 1 and max(made.bin_rows) <= made.stats["max_tokens_grad"]
        for members, rows in zip(made.bins, made.bin_rows, strict=True):
            loss = sum(samples[i].num_loss_tokens for i in members)
            keys = sum(len(samples[i]) for i in members)
            assert terms.peak(Load(rows, loss, 0, keys)) <= 300_000
    given = plan(samples, max_tokens=50, model=CONFIG, memory=300_000)
    assert (
        given.stats["max_tokens_grad"]
        == plan(samples, model=CONFIG, memory=300_000).stats["max_tokens_grad"]
    )


def test_memory_and_model_go_together():
    samples = [of_length(4)]
    for wrong, what in (
        ({}, "max_tokens is None"),
        ({"memory": 10**9}, "memory is given without model"),
        ({"model": {"model_type": "llava"}, "memory": 10**9}, "of type 'llava'"),
        ({"model": CONFIG, "memory": "40GB"}, "plan: memory is of type str"),
    ):
        with pytest.raises(ArgumentError, match=what):
            plan(samples, **wrong)
    with pytest.raises(PlanError, match=r"10 bytes take no pack of this model\. Fix: pass"):
        plan(samples, model=CONFIG, memory=10)
