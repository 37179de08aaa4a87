"""Where a context only grew, per-turn samples and one long sample are one training problem: tokens, loss, gradients.

Rows and patches are counted: what samples of a trajectory have in common is computed once.
"""

import dataclasses

import pytest
import torch
from support.models import relative_difference, small_model, with_pixels
from support.trajectories import episode, grown, joined, screen, shot
from support.trajectory_step import step

import mmpack as mp
from mmpack.contracts import TOLERANCES
from mmpack.trajectory import Turn, to_samples

pytestmark = pytest.mark.adapter
LAYOUTS = TOLERANCES["layouts"].value
GRADIENTS = TOLERANCES["parameter_gradient_fp32"].value


@pytest.fixture(
    scope="module", params=[pytest.param("qwen2_5_vl", marks=pytest.mark.slow), "qwen3_vl"]
)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    return small_model(family)


def made(trajectories, merge):
    return with_pixels([s for t in trajectories for s in to_samples(t, merge=merge)])


def test_per_turn_samples_and_one_long_sample_are_the_same_step(model, family):
    """Of two episodes whose contexts only grew. The forest of the turns is the long sample: nothing twice."""
    episodes = [episode(grown(3, family, seed), f"e{seed}", family) for seed in range(2)]
    long, per_turn = made(episodes, True), made(episodes, False)
    assert (len(long), len(per_turn)) == (2, 6)
    one = step(model, long, False)
    assert one[0].num_tokens == sum(len(t.turns[-1]) for t in episodes)
    screenshots = {m.cache_key: m.num_patches for t in episodes for u in t.turns for m in u.media}
    found = {}
    for samples, share in ((per_turn, False), (per_turn, True), (long, True)):
        batch, *values, gradients = step(model, samples, share)
        found[share] = batch if samples is per_turn else found[share]
        assert torch.equal(batch.loss_targets, one[0].loss_targets)
        assert batch.loss_turn.tolist() == one[0].loss_turn.tolist()
        columns = [b.loss_columns["rollout_logprobs"] for b in (batch, one[0])]
        assert torch.equal(*columns)
        assert torch.allclose(values[0], one[1], atol=LAYOUTS, rtol=0)
        assert torch.allclose(values[1], one[2], atol=1e-6, rtol=1e-5)
        # each is within the tolerance of float64
        assert relative_difference(gradients, one[3]) < 2 * GRADIENTS
        assert batch.stats["patches"] == sum(screenshots.values())
    for name in ("input_ids", "position_ids"):
        assert torch.equal(getattr(found[True], name), getattr(batch, name))
    assert sum(map(len, per_turn)) > 1.5 * batch.num_tokens
    assert len(batch.media) == len(screenshots)


def branching(family):
    """A context that grows over three turns, one retry of the second and a branch behind the first."""
    one, two, three = grown(3, family)
    retry = dataclasses.replace(two, response_ids=two.response_ids[::-1].copy())
    ids, media = joined((one.input_ids.tolist(), one.media), screen([55], shot("d9"), family))
    return episode([one, two, three, retry, Turn(ids, [6, 7], media, [-1.0, -2.0])], "e", family)


def test_a_branch_and_a_retry_cost_only_what_is_new(model, family):
    trajectory = branching(family)
    one, _, three, retry, branch = trajectory.turns
    rows = len(three) + len(retry.response_ids) + len(branch) - len(one)
    picture = shot("d9").num_patches
    known = {m.cache_key: m.num_patches for m in three.media}
    for merge in (True, False):
        samples = with_pixels(to_samples(trajectory, merge=merge))
        batch = mp.pack(samples, share_prefix=True)
        assert batch.num_tokens == rows
        assert batch.stats["patches"] == sum(known.values()) + picture
        alone = [step(model, [s], False, [1.0])[1] for s in samples]
        together = step(model, samples, True, [1.0])[1]
        assert torch.allclose(together, torch.cat(alone), atol=LAYOUTS, rtol=0)


def test_a_sliding_window_shares_its_beginning_and_encodes_each_screenshot_once(model, family):
    """The system's words, then the last two screenshots: each a picture with words of its own."""
    shots = [screen([60 + k], shot(f"{'abcd'[k % 4]}{k}"), family) for k in range(5)]
    turns = []
    for k in range(5):
        ids, media = joined(([1, 2, 3, 4], []), *shots[max(0, k - 1) : k + 1])
        turns.append(Turn(ids, [200 + k, 300 + k], media, [-1.0, -1.0]))
    samples = made([episode(turns, "w", family)], True)
    assert [s.sample_id for s in samples] == [f"w/{k}" for k in range(5)]
    batch = mp.pack(samples, share_prefix=True)
    # the first two windows begin with the first screenshot; then only the four words are common
    first = len(turns[0].context_ids)
    assert batch.num_tokens == sum(map(len, samples)) - first - 3 * 4
    keys = {m.cache_key: m.num_patches for t in turns for m in t.media}
    assert len(batch.media) == len(keys) == 5
    assert batch.stats["patches"] == sum(keys.values())
    # in the sequence four screenshots stand twice, at other places
    assert sum(len(s.media) for s in samples) == 9
    alone = [step(model, [s], False, [1.0])[1] for s in samples]
    together = step(model, samples, True, [1.0])[1]
    assert torch.allclose(together, torch.cat(alone), atol=LAYOUTS, rtol=0)
