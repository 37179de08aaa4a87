"""plan's other budgets, what it leaves for later or out, and its file: against counts taken by hand."""

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.samples import make_sample as drawn_sample
from test_plan import batches, make_sample, of_length

import mmpack as mp
from mmpack.errors import ArgumentError, PlanError
from mmpack.planning.plan import Plan, plan
from mmpack.schema.spans import PolicyVersion


@settings(max_examples=50)
@given(batches(), st.integers(8, 30), st.integers(0, 40), st.booleans())
def test_loss_tokens_and_bytes_bound_a_bin(samples, loss, patches, share):
    budgets = {"max_loss_tokens": loss, "max_media_bytes": 4 * 1176 * patches}
    made = plan(samples, max_tokens=60, **budgets, share_prefix=share, on_invalid="drop")
    for members in made.bins:
        chosen = [samples[i] for i in members]
        assert sum(s.num_loss_tokens for s in chosen) <= loss
        media = {m.cache_key: int(np.prod(m.grid_thw)) for s in chosen for m in s.media}
        assert sum(media.values()) <= patches
    for dropped in made.dropped:
        assert "max_media_bytes is" in dropped.reason or "max_loss_tokens is" in dropped.reason


def test_pixels_that_are_held_count_as_they_are():
    samples = [make_sample(f"s{k}", f"g{k}", [1], [2], k) for k in range(2)]  # 4 and 8 patches
    for s, dtype in zip(samples, (torch.uint8, torch.float32), strict=True):
        s.media[0].pixel_values = torch.zeros(s.num_patches, 1176, dtype=dtype)
    held = 1176 * (4 + 4 * 8)
    assert len(plan(samples, max_tokens=99, max_media_bytes=held).bins) == 1
    assert len(plan(samples, max_tokens=99, max_media_bytes=held - 1).bins) == 2


def test_features_of_an_audio_count_as_they_will_be():
    parts = [("text", [1]), ("audio", (150, 1, 1), "call"), ("response", [5])]
    sample = drawn_sample(parts, family="qwen2_5_omni")
    needed = 4 * 150 * 128  # float32, mel bins of released models
    assert plan([sample], max_tokens=99, max_media_bytes=needed).total_samples == 1
    with pytest.raises(PlanError, match=f"max_media_bytes={needed} would take it"):
        plan([sample], max_tokens=99, max_media_bytes=needed - 1)


def test_the_error_says_what_would_let_all_in():
    samples = [of_length(n, "g", f"s{n}") for n in (4, 11, 25)]
    samples.append(make_sample("p", "g", [1], [2, 3], 2))
    with pytest.raises(
        PlanError,
        match=r"3 samples are over a budget: max_tokens=25, max_patches=12 would take them all$",
    ):
        plan(samples, max_tokens=10, max_patches=3)
    assert plan(samples, max_tokens=25, max_patches=12).total_samples == 4
    with pytest.raises(
        PlanError, match=r"the only one over a budget: max_loss_tokens=2 would take it$"
    ):
        plan(samples, max_tokens=25, max_loss_tokens=1)


def test_the_longest_groups_are_left_for_later():
    lengths = [(3, 4), (9, 2), (5, 5), (20, 1), (6, 6)]
    samples = [
        of_length(n, f"g{g}", f"s{g}{k}")
        for g, pair in enumerate(lengths)
        for k, n in enumerate(pair)
    ]
    made = plan(samples, max_tokens=20, defer_tail=0.4)
    assert made.deferred == [2, 3, 6, 7]  # groups 1 and 3: 9 and 20 tokens
    assert sorted(i for b in made.bins for i in b) == [0, 1, 4, 5, 8, 9]
    assert made.total_samples == 6
    later = plan([samples[i] for i in made.deferred], max_tokens=20)
    assert later.total_samples == 4 and later.deferred == []
    assert plan(samples, max_tokens=20, defer_tail=0.19).deferred == []
    for wrong in (1, -0.1, "a"):
        with pytest.raises(ArgumentError, match="defer_tail"):
            plan(samples, max_tokens=20, defer_tail=wrong)


def versioned(name, *versions):
    sample = make_sample(name, name, [1, 2], [3] * (2 * len(versions)))
    sample.policy_versions = [
        PolicyVersion(2 + 2 * k, 4 + 2 * k, v) for k, v in enumerate(versions)
    ]
    return sample


def test_samples_of_weights_that_are_too_old_are_left_out():
    samples = [
        versioned("a", "7"),
        versioned("b", "4", "7"),
        versioned("c", "5"),
        of_length(3, "d", "d"),
    ]
    made = plan(samples, max_tokens=20, max_policy_lag=2)
    assert [d.sample_id for d in made.dropped] == ["b"]
    (problem,) = made.dropped[0].problems
    assert problem.code == "MM409" and "weights '4', 3 versions behind" in problem.message
    assert plan(samples, max_tokens=20, max_policy_lag=3).dropped == []
    assert plan(samples, max_tokens=20).dropped == []


def test_names_of_weights_want_an_order():
    samples = [versioned("a", "new"), versioned("b", "old", "new")]
    with pytest.raises(
        ArgumentError, match=r"'new' names weights but is not a number.* Fix: pass policy_versions="
    ):
        plan(samples, max_tokens=20, max_policy_lag=0)
    order = ["oldest", "old", "new", "newest"]
    # 'newest' is what trains now
    made = plan(samples, max_tokens=20, max_policy_lag=1, policy_versions=order)
    assert [d.sample_id for d in made.dropped] == ["b"]
    with pytest.raises(ArgumentError, match="lacks 'old'"):
        plan(samples, max_tokens=20, max_policy_lag=1, policy_versions=["new"])
    with pytest.raises(ArgumentError, match="distinct names"):
        plan(samples, max_tokens=20, max_policy_lag=1, policy_versions=["old", "new", "new"])
    with pytest.raises(ArgumentError, match="without max_policy_lag"):
        plan(samples, max_tokens=20, policy_versions=order)


@settings(max_examples=30)
@given(batches(), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_another_order_makes_the_same_plan(samples, ranks, share, seed):
    samples = samples[: len(samples) // ranks * ranks]
    other = list(samples)
    random.Random(seed).shuffle(other)
    plans = [
        plan(given, max_tokens=30, max_patches=12, ranks=ranks, share_prefix=share)
        for given in (samples, other)
    ]
    of_ranks = [
        [sorted(sorted(given[i].sample_id for i in p.bins[b]) for b in rank) for rank in p.ranks]
        for p, given in zip(plans, (samples, other), strict=True)
    ]
    assert of_ranks[0] == of_ranks[1]
    assert plans[0].stats == plans[1].stats


def test_a_plan_is_a_file(tmp_path):
    samples = [of_length(3 + k, f"g{k // 2}", f"s{k}") for k in range(8)]
    samples.append(of_length(99, "long", "long"))
    made = mp.plan(samples, max_tokens=20, ranks=2, on_invalid="drop", defer_tail=0.3)
    assert made.dropped and made.deferred
    path = tmp_path / "plan.json"
    made.save(path)
    assert Plan.load(path) == made == Plan.load(path, samples)
    with pytest.raises(PlanError, match=r"of other samples, or of these in another order.*Fix"):
        Plan.load(path, samples[::-1])
    with pytest.raises(PlanError, match=r"Plan\.save: .*Fix"):
        made.save(tmp_path / "none" / "plan.json")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d | {"format": "mmpack.plan.9"}, "is not a plan of format"),
        (lambda d: d | {"bins": [[0, 0]]}, "not distinct indices"),
        (lambda d: d | {"ranks": [[0, 0]]}, "each bin exactly once"),
        (lambda d: d | {"total_samples": 9}, "totals don't match"),
        (lambda d: d | {"share": []}, "differ in length from bins"),
    ],
)
def test_damaged_files_are_named(tmp_path, change, why):
    path = tmp_path / "plan.json"
    plan([of_length(3)], max_tokens=8).save(path)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(PlanError, match=f"{why}.*Fix:"):
        Plan.load(path)
    with pytest.raises(PlanError, match=r"can't be read.* Fix: name a file that Plan.save wrote"):
        Plan.load(tmp_path / "none.json")
