"""verl's real AgentLoopOutput as trajectories, beside what verl's own worker makes of the same outputs."""

import numpy as np
import pytest
import torch
from PIL import Image

import mmpack as mp
from mmpack.adapters.verl import to_samples, to_trajectories
from mmpack.layout.mrope import sample_positions
from mmpack.schema.spans import Score
from mmpack.trajectory import to_samples as samples_of

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("verl_on_cpu")]
EOS = 151645


def output(fixture, number, seed, **fields):
    """An episode of three answers; a tool replies with words, then with a picture."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    rng = np.random.default_rng(seed)
    prompt = fixture.processor(fixture.messages[number], sample_id="p").input_ids.tolist()
    pixels = rng.integers(0, 256, (56, 84, 3), dtype=np.uint8)
    shot = Image.fromarray(pixels)
    pads = [151655] * fixture.processor.medium(shot).num_tokens
    parts = []
    for k, seen in enumerate(([7, 8], [9, 151652, *pads, 151653, 10], None)):
        answer = [*rng.integers(0, 1000, 2 + k).tolist(), EOS]
        parts += [(answer, 1)] + ([] if seen is None else [(seen, 0)])
    response = [i for ids, _ in parts for i in ids]
    mask = [m for ids, m in parts for _ in ids]
    return AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=response,
        response_mask=mask,
        response_logprobs=[float(-rng.exponential()) * m for m in mask],
        multi_modal_data={"images": [*fixture.pictures[number], shot]},
        num_turns=6,
        metrics=AgentLoopMetrics(),
        **fields,
    )


@pytest.fixture(scope="module")
def outputs(fixture):
    return [
        output(fixture, number, seed, reward_score=0.5 * seed)
        for seed, number in enumerate((0, 0, 1, 2))
    ]


def test_samples_are_what_verl_trains_on(fixture, outputs):
    """Oracle: the padded DataProto of verl's own worker: ids, mask, logprobs, pictures, positions."""
    from matrix.verl_trace import padded_outputs

    trajectories = to_trajectories(outputs, fixture.processor)
    width = max(len(o.response_ids) for o in outputs)
    texts = [fixture.texts[n] for n in (0, 0, 1, 2)]
    data = padded_outputs(fixture, outputs, texts, width)
    images = [o.multi_modal_data["images"] for o in outputs]
    expected = to_samples(data, fixture.processor, images=images)
    for trajectory, other, given in zip(trajectories, expected, outputs, strict=True):
        (sample,) = samples_of(trajectory)
        assert sample.input_ids.tolist() == given.prompt_ids + given.response_ids
        assert np.array_equal(sample.input_ids, other.input_ids)
        assert np.array_equal(sample.loss_indices, other.loss_indices)
        assert np.array_equal(sample.rollout_logprobs, other.rollout_logprobs)
        assert sample.media_cache_keys == other.media_cache_keys
        assert np.array_equal(sample_positions(sample)[0], other.position_ids)
        assert [(s.start, s.stop) for s in sample.observation_spans] == [
            (s.start, s.stop) for s in other.observation_spans
        ]
        assert sample.rewards == [Score("reward_score", given.reward_score)]
        assert trajectory.metadata["verl"][0]["num_turns"] == 6
    groups = [t.group_id for t in trajectories]
    assert groups[0] == groups[1] and len(set(groups)) == 3
    assert trajectories[1].trajectory_id == f"{groups[0]}/1"
    assert mp.validate([s for t in trajectories for s in samples_of(t, merge=False)]) == []


def test_an_episode_of_several_outputs_is_one_trajectory(fixture, outputs):
    """Where a loop began a new context: verl scores the last output."""
    first, second = outputs[0].model_copy(update={"reward_score": None}), outputs[1]
    (trajectory,) = to_trajectories([[first, second]], fixture.processor, group_ids=["task"])
    samples = samples_of(trajectory)
    assert [len(s.loss_spans) for s in samples] == [3, 3] and len(trajectory) == 6
    assert [len(s.rewards or ()) for s in samples] == [0, 1]
    assert {s.trajectory_id for s in samples} == {"task/0"} and mp.validate(samples) == []


def test_a_row_that_ends_in_a_cut_picture(fixture, outputs):
    full = outputs[0]
    stop = full.response_mask.index(0, 6) + 4  # within the picture's placeholders
    assert full.response_ids[stop - 1] == full.response_ids[stop] == 151655
    names = ("response_ids", "response_mask", "response_logprobs")
    short = full.model_copy(update={n: getattr(full, n)[:stop] for n in names})
    (sample,) = samples_of(to_trajectories([short], fixture.processor)[0])
    assert len(sample.loss_spans) == 2 and len(sample.media) == len(fixture.pictures[0])
    assert mp.validate(sample) == []


def test_fields(fixture, outputs):
    extra = {"turn_scores": [0.0, 0.5, 1.0], "tool_rewards": [1.0], "raw_prompt": [object()]}
    given = outputs[0].model_copy(update={"extra_fields": extra, "reward_score": None})
    for form in (given, {n: getattr(given, n) for n in type(given).model_fields}):
        (trajectory,) = to_trajectories([form], fixture.processor)
        assert [t.rewards[0].value for t in trajectory.turns] == [0.0, 0.5, 1.0]
        kept = trajectory.metadata["verl"][0]
        assert kept["extra_fields.tool_rewards"] == [1.0]
        assert kept["left_out"] == ["extra_fields.raw_prompt"] and trajectory.rewards is None


def test_routes_and_teachers_are_at_verl_s_places(fixture, outputs):
    """Oracle: verl's own `as_dict` aligns routes to tokens. Teachers as its `extract_prompt_logprobs` has them."""
    given = outputs[0]
    ids = given.prompt_ids + given.response_ids
    rng = np.random.default_rng(0)
    routes = rng.integers(0, 8, (len(ids) - 1, 2, 1)).astype(np.uint8)
    rows = {
        "teacher_ids": torch.tensor([[t, t + 1] for t in [*ids[1:], 0]], dtype=torch.int32),
        "teacher_logprobs": torch.tensor([[-t / 1e6, -9.0] for t in [*ids[1:], 0]]),
    }
    extra = {**rows, "min_global_steps": 5, "max_global_steps": 5}
    told = given.model_copy(update={"routed_experts": routes, "extra_fields": extra})
    (trajectory,) = to_trajectories([told], fixture.processor)
    (sample,) = samples_of(trajectory)
    aligned = told.as_dict()["routed_experts"].numpy()
    assert np.array_equal(sample.routed_experts, aligned) and len(aligned) == len(sample)
    lists = sample.teachers["teacher"]
    targets = sample.input_ids[sample.loss_indices]
    assert lists.ids.reshape(-1, 2).tolist() == [[t, t + 1] for t in targets.tolist()]
    assert np.allclose(lists.logprobs.reshape(-1, 2)[:, 0], -targets / 1e6)
    assert {v.version for v in sample.policy_versions} == {"5"}
    assert trajectory.metadata["verl"][0].get("left_out") is None and mp.validate(sample) == []
