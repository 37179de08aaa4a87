"""share_prefix="auto": what sharing saves against what it adds, by the measured costs; never dearer than either way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.samples import make_sample

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.families import get_family
from mmpack.layout.forest import build_forest
from mmpack.planning.cost import H200, family_cost
from mmpack.planning.counts import counts_of_forest


def group(name, prompt, responses, start=0):
    """Samples of one prompt; what follows it differs from the first token on."""
    head = [("text", range(start, start + prompt))]
    return [
        make_sample(
            [*head, ("response", range(9000 + 500 * k, 9000 + 500 * k + n))], f"{name}{k}", name
        )
        for k, n in enumerate(responses)
    ]


def time_of(plan, samples):
    """Of the slowest rank, by the bins' own forests."""
    cost, times = family_cost(None), []
    for members, share in zip(plan.bins, plan.share, strict=True):
        chosen = [samples[i] for i in members]
        held = counts_of_forest(build_forest(chosen, share), cost.spans)
        loss = sum(s.num_loss_tokens for s in chosen)
        times.append(cost.seconds(held._replace(loss_tokens=loss)))
    return max((sum(times[b] for b in rank) for rank in plan.ranks), default=0.0)


@st.composite
def batches(draw):
    out = []
    for g in range(draw(st.integers(1, 4))):
        prompt = draw(st.sampled_from([1, 2, 5, 40, 300]))
        lengths = draw(st.lists(st.sampled_from([1, 3, 30, 200]), min_size=1, max_size=4))
        out += group(f"g{g}", prompt, lengths, start=1000 * g)
    return out


@settings(max_examples=30, deadline=None)
@given(batches(), st.sampled_from([501, 700, 3000]), st.integers(1, 2))
def test_never_dearer_than_plain_or_shared(samples, max_tokens, ranks):
    if len(samples) % ranks:
        samples = samples[:-1]
    if not samples:
        return
    plans = {
        how: mp.plan(samples, max_tokens=max_tokens, ranks=ranks, share_prefix=how)
        for how in (False, True, "auto")
    }
    least = min(time_of(plans[how], samples) for how in (False, True))
    assert time_of(plans["auto"], samples) <= least * (1 + 1e-12)
    made = plans["auto"]
    assert sorted(i for b in made.bins for i in b) == list(range(len(samples)))
    for members, share, rows in zip(made.bins, made.share, made.bin_rows, strict=True):
        batch = mp.pack([samples[i] for i in members], share_prefix=share)
        assert len(batch.input_ids) == rows <= max_tokens
    assert plans[True].share == [True] * len(plans[True].bins)
    assert plans[False].share == [False] * len(plans[False].bins)


@settings(max_examples=20, deadline=None)
@given(batches())
def test_the_plan_s_layout_is_the_kernels(samples):
    """Rows, pairs and gathered keys, counted from segments, are those of the packed batch's attention plan."""
    for share in (False, True):
        forest = build_forest(samples, share)
        found, plan = counts_of_forest(forest), mp.pack(samples, share_prefix=share).attention_plan
        assert (found.rows, found.keys, found.pairs) == (plan.rows, plan.gathered, plan.pairs)


def test_other_words_are_refused():
    samples = group("g", 2, [3])
    for call in (lambda how: mp.plan(samples, max_tokens=9, share_prefix=how),
                 lambda how: mp.pack(samples, share_prefix=how)):  # fmt: skip
        with pytest.raises(ArgumentError, match=r"share_prefix is 'always'. Fix: pass True"):
            call("always")


def test_linear_attention_costs_by_waves_and_by_pairs_of_a_few_layers():
    """Each depth of a forest runs after the one above it, so short prefixes are not worth one."""
    hybrid = get_family("qwen3_5")
    assert family_cost(hybrid).pair == pytest.approx(family_cost(None).pair / 4)
    assert family_cost(hybrid).wave == 21 * H200.wave
    for prompt, count, pays in ((60, 4, False), (1200, 8, True)):
        samples = group("a", prompt, [5] * count)
        for sample in samples:
            sample.family = "qwen3_5"
        plain, shared = (counts_of_forest(build_forest(samples, share)) for share in (False, True))
        assert (plain.waves, shared.waves) == (0, 1)
        assert family_cost(None).sharing_pays(plain, shared)
        assert family_cost(hybrid).sharing_pays(plain, shared) == pays
        assert (mp.pack(samples, share_prefix="auto").cu_seqlens is None) == pays
        plan = mp.plan(samples, max_tokens=20_000, share_prefix="auto")
        assert plan.share == [pays]
    assert family_cost(get_family("qwen3_vl")) == family_cost(None)
