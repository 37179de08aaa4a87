"""prime-rl's traces and training samples as trajectories: what they say besides their tree, and what is refused."""

import dataclasses

import numpy as np
import pytest
from support.recorded_trees import (
    drawn,
    processor,
    trace,
    training_samples,
    turn_of,
)

import mmpack as mp
from mmpack.adapters.prime_rl import to_trajectories
from mmpack.errors import ArgumentError
from mmpack.schema.spans import Score
from mmpack.trajectory import to_samples as samples_of


def test_what_a_trace_says_besides():
    turns = [turn_of(([1, 2], []), [3, 4], 0), turn_of(([1, 2, 3, 4, 5], []), [6], 1)]
    (episode,) = to_trajectories([trace(turns)], processor(), policy_versions=[7])
    for turn, told in zip(episode.turns, turns, strict=True):
        reference = turn.teachers["reference"]
        assert reference.ids.tolist() == told.response_ids.tolist()
        assert reference.logprobs.tolist() == (told.logprobs - 1).tolist()
        assert turn.finish_reason == "stop"
        (version,) = turn.policy_versions
        start = len(turn.context_ids)
        assert (version.start, version.stop, version.version) == (start, len(turn), "7")
    # as prime-rl counts it: score times weight
    assert mp.trajectory.trajectory_groups(samples_of(episode)).rewards.tolist() == [1.25]
    assert episode.verifiers == [Score("turns", float(len(turns)))]
    (episode,) = to_trajectories([training_samples(turns)], processor())
    assert episode.metadata["prime_rl"][0]["temperature"] == 0.7


def node(parent, ids, sampled=False, role="assistant", content="", **more):
    """Of a sampled node the first id is the template's, if there are several."""
    mask = [sampled and (k > 0 or len(ids) == 1) for k in range(len(ids))]
    given = {"parent": parent, "sampled": sampled, "token_ids": ids, "mask": mask}
    return given | {"message": {"role": role, "content": content}} | more


def simple(at=None, **fields):
    """A question, an answer, what a tool said, an answer; and another answer to the question."""
    nodes = [
        node(None, [1, 2], role="user"),
        node(0, [3, 4, 5], True),
        node(1, [6], role="tool"),
        node(2, [7], True),
        node(0, [3, 9], True),
    ]
    if at is not None:
        nodes[at] |= fields
    return {"nodes": nodes}


def test_the_generation_prompt_of_an_answer_is_context():
    given = simple(1, advantages=[0.5, 0.5])
    (episode,) = to_trajectories([given], processor(), group_ids=["task"])
    assert [(t.context_ids.tolist(), t.response_ids.tolist()) for t in episode.turns] == [
        ([1, 2, 3], [4, 5]),
        ([1, 2, 3, 4, 5, 6], [7]),
        ([1, 2, 3], [9]),
    ]
    assert [t.source for t in episode.turns] == ["environment", "tool", "user"]
    assert (episode.trajectory_id, episode.rewards) == ("task/0", None)
    assert episode.metadata["prime_rl"]["unread"] == ["advantages"]


@dataclasses.dataclass
class Encoded:
    dtype: str
    shape: list
    data: bytes


def test_pixels_in_place_of_pictures():
    """`mm_kwargs` of a sample and `mm_items` of a node hold what the renderer's processor made."""
    shot = processor().medium(drawn(0))
    prompt = [1, 151652, *[151655] * shot.num_tokens, 151653]
    pixels = np.ascontiguousarray(shot.pixel_values, np.float32)
    arrays = {"pixel_values": pixels, "image_grid_thw": np.array([shot.grid_thw])}
    encoded = {k: Encoded(str(v.dtype), list(v.shape), v.tobytes()) for k, v in arrays.items()}
    mask = [False] * len(prompt) + [True]
    sample = {"token_ids": [*prompt, 5], "mask": mask, "logprobs": [0.0] * len(mask)}
    part = {"type": "image_url", "image_url": {"url": "https://nowhere/a.png"}}
    sidecar = {"mm_items": {"image": [arrays]}}
    asked = node(None, prompt, role="user", content=[part], multi_modal_data=sidecar)
    nodes = [asked, node(0, [5], True)]
    made = to_trajectories([[sample | {"mm_kwargs": encoded}], {"nodes": nodes}], processor())
    for episode in made:
        (found,) = samples_of(episode)
        assert np.array_equal(found.media[0].pixel_values, pixels) and mp.validate(found) == []
    assert made[0].group_id == made[1].group_id
    known = {"https://nowhere/a.png": drawn(0)}
    (episode,) = to_trajectories([{"nodes": nodes}], processor(), media=known)
    assert samples_of(episode)[0].media[0].cache_key == shot.cache_key
    del asked["multi_modal_data"]
    with pytest.raises(ArgumentError, match="is not among the media"):
        to_trajectories([{"nodes": nodes}], processor())


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({}, "has no nodes"),
        ({"nodes": simple()["nodes"][:1]}, "has no sampled node"),
        (simple(1, mask=[True]), "has no token_ids with a mask"),
        (simple(3, parent=9), "its parents lead to 9"),
        (simple(1, parent=1), "its parents lead to 1"),
        (simple(1, logprobs=[-1.0]), "logprobs has 1 values for 2 sampled tokens"),
        (simple(1, reference_logprobs=[-1.0]), "reference_logprobs has 1 values"),
        (simple(1, sampling_mask={"ids": [4], "counts": [1]}), "sampling_mask has 1 counts"),
        (simple(1, sampling_mask={"ids": [4], "counts": [1, 0]}), "keeps no id at token 2"),
        ([{"token_ids": [1, 2], "mask": [False, False]}], "a mask that holds a 1"),
        ([{"token_ids": [1], "mask": [True], "logprobs": [0.0] * 2}], "logprobs has 2 values"),
        ("trace", "is of type str"),
        (None, "is None"),
    ],
)
def test_what_can_t_be_read_is_refused(rollout, message):
    with pytest.raises(ArgumentError, match=rf"{message}.*Fix: "):
        to_trajectories([rollout], processor())


def test_arguments():
    for rollouts, options, message in (
        (simple(), {}, "rollouts is of type dict"),
        ([simple()], {"media": []}, "media is of type list"),
        ([simple()], {"policy_versions": [1, 2]}, "policy_versions has 2 entries"),
    ):
        with pytest.raises(ArgumentError, match=message):
            to_trajectories(rollouts, processor(), **options)
