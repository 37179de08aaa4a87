"""Turns to samples: each token that was sampled is loss once, after exactly what the policy saw; and back."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from support.trajectories import (
    episode,
    grown,
    joined,
    scored_of_samples,
    scored_of_turns,
    screen,
    shot,
    trajectories,
)

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.schema.spans import ActionSpan, Cost, ObservationSpan, PolicyVersion, RegionSpan, Score
from mmpack.trajectory import Turn, from_samples, pieces, to_samples, truncate


def of_turns(samples):
    """The turns whose loss each sample holds."""
    return [sorted({s.turn for s in sample.loss_spans}) for sample in samples]


@given(trajectories(silent=True))
@settings(max_examples=60, deadline=None)
def test_each_sampled_token_is_loss_once_after_what_the_policy_saw(trajectory):
    expected = scored_of_turns(trajectory.turns)
    for merge in (True, False):
        samples = to_samples(trajectory, merge=merge)
        assert mp.validate(samples) == []
        assert scored_of_samples(samples) == expected
        assert sorted(t for turns in of_turns(samples) for t in turns) == list(
            range(len(trajectory))
        )
    merged, per_turn = to_samples(trajectory), to_samples(trajectory, merge=False)
    assert len(merged) <= len(per_turn) == len(trajectory)
    assert {s.sample_id for s in merged} <= {s.sample_id for s in per_turn}


@given(trajectories(silent=True))
@settings(max_examples=40, deadline=None)
def test_samples_are_read_back_as_the_turns_they_came_of(trajectory):
    expected = scored_of_turns(trajectory.turns)
    for merge in (True, False):
        (again,) = from_samples(to_samples(trajectory, merge=merge))
        # branches come behind the turns that they left; the turns are the same
        assert scored_of_turns(again.turns) == expected
        assert scored_of_samples(to_samples(again)) == expected
        wrote = [
            sorted(
                t.response_ids.tolist()
                for t in e.turns
                if t.loss_spans == [] and len(t.response_ids)
            )
            for e in (again, trajectory)
        ]
        assert wrote[0] == wrote[1]
        sizes = [sorted(map(len, to_samples(t))) for t in (again, trajectory)]
        assert sizes[0] == sizes[1]


def test_a_context_that_grows_is_one_sample():
    turns = grown(4)
    (sample,) = to_samples(episode(turns))
    assert sample.input_ids.tolist() == turns[-1].input_ids.tolist()
    assert of_turns([sample]) == [[0, 1, 2, 3]]
    assert [(s.source, s.turn) for s in sample.observation_spans] == [
        ("screenshot", k) for k in (1, 2, 3)
    ]
    # between two responses all is an observation, to the token
    edges = [
        (a.stop, b.start) for a, b in zip(sample.loss_spans, sample.loss_spans[1:], strict=False)
    ]
    assert [(s.start, s.stop) for s in sample.observation_spans] == edges
    assert len(sample.media) == 3 and len(sample.modality_spans) == 4  # a0 comes twice


def test_what_does_not_go_on_begins_a_sample():
    """A window, a summary, a branch and a retry, beside the context that grew."""
    one, two, three = grown(3)
    ids, media = joined(([1, 2], []), screen([9], three.media[-1]))
    window = Turn(ids, [8], media)
    summary = Turn([1, 2, 60, 61], [7])
    retry = dataclasses.replace(two, response_ids=np.array([5, 5]), logprobs=None)
    ids, media = joined((one.input_ids.tolist(), one.media), screen([55], shot("d9")))
    branch = Turn(ids, [6], media)
    turns = [one, two, three, window, summary, retry, branch]
    samples = to_samples(episode(turns))
    assert of_turns(samples) == [[0, 1, 2], [3], [4], [5], [6]]
    assert [s.sample_id for s in samples] == ["e/0", "e/3", "e/4", "e/5", "e/6"]
    assert [s.turn for s in samples] == [0, 3, 4, 5, 6]
    retried = samples[3]
    # the first response is context there, and what came between an observation
    assert retried.input_ids.tolist() == retry.input_ids.tolist()
    assert retried.loss_indices.tolist() == [len(two.context_ids), len(two.context_ids) + 1]
    assert [(s.start, s.stop) for s in retried.observation_spans] == [
        (len(one), len(two.context_ids))
    ]


def test_a_branch_goes_on_from_the_longest_turn_and_only_one_may_join():
    root, left, right = Turn([1], [2]), Turn([1, 2, 3], [4]), Turn([1, 2, 3], [5])
    leaf = Turn([1, 2, 3, 5, 6], [7])
    samples = to_samples(episode([root, left, right, leaf]))
    assert of_turns(samples) == [[0, 1], [2, 3]]
    assert samples[1].input_ids.tolist() == [1, 2, 3, 5, 6, 7]


def test_scores_are_counted_once_and_by_turn():
    one, two, three = grown(3)
    start = len(two.context_ids)
    two = dataclasses.replace(
        two,
        rewards=[Score("step", 0.5), Score("box", 1.0, {"region": 0})],
        costs=[mp.schema.Cost("slow", 0.25, {"span": [start, start + 1]})],
        region_spans=[RegionSpan(start, start + 2, 1, point=(1.0, 2.0))],
        action_spans=[ActionSpan(start, start + 2, {"action": "click"})],
        policy_versions=[PolicyVersion(start, len(two), "w1")],
    )
    window = Turn([1, 2, 9], [8], rewards=[Score("step", 0.25)])
    fields = {
        "rewards": [Score("task", 1.0), Score("shaped", 2.0, {"turn": 0})],
        "coordinate_system": "absolute_pixels",
    }
    trajectory = episode([one, two, three, window], **fields)
    for merge in (True, False):
        samples = to_samples(trajectory, merge=merge)
        assert mp.validate(samples) == []
        held = [(s.name, s.value) for sample in samples for s in sample.rewards or ()]
        twice = [("step", 0.25), ("step", 0.5), ("task", 1.0)]
        assert sorted(held) == [("box", 1.0), ("shaped", 2.0), *twice]
        # the second turn is in the first sample, or its own
        own = samples[0 if merge else 1]
        assert Score("step", 0.5, {"turn": 1}) in own.rewards
        assert own.action_spans[0].turn == 1 and own.costs[0].scope["span"] == [start, start + 1]
        assert own.region_spans[0].media_index == 1
        assert [s.scope for s in samples[-1].rewards] == [{"turn": 3}, "sequence"]
        (again,) = from_samples(samples)
        assert again.rewards == [Score("task", 1.0)]
        assert [s.value for t in again.turns for s in t.rewards or ()] == [2.0, 0.5, 1.0, 0.25]
        assert to_samples(again, merge=merge)[0].rewards[0].scope == {"turn": 0}


def test_what_came_back_last_is_kept_where_asked():
    ids, media = screen([9, 9], shot("b7"))
    turn = Turn([1, 2], [3], observation_ids=ids, observation_media=media, source="tool")
    (bare,), (whole,) = (
        to_samples(episode([turn])),
        to_samples(episode([turn]), keep_last_observation=True),
    )
    assert bare.input_ids.tolist() == [1, 2, 3] and bare.media == []
    assert whole.input_ids.tolist() == [1, 2, 3, *ids] and len(whole.media) == 1
    assert whole.observation_spans == [ObservationSpan(3, 3 + len(ids), "tool", 1)]
    assert mp.validate(whole) == [] and whole.num_loss_tokens == 1
    (again,) = from_samples([whole])
    assert (
        again.turns[0].observation_ids.tolist() == ids
        and len(again.turns[0].observation_media) == 1
    )


def test_a_turn_without_an_answer_and_one_without_logprobs():
    one, two, three = grown(3)
    aborted = Turn([1, 2, 3], [], finish_reason="abort")
    (sample,) = to_samples(episode([aborted]))
    assert sample.num_loss_tokens == 0 and sample.loss_spans[0].turn == 0
    assert sample.finish_reason == "abort" and mp.validate(sample) == []
    (merged,) = to_samples(episode([one, dataclasses.replace(two, logprobs=None), three]))
    assert merged.rollout_logprobs is None
    assert to_samples(episode([one, two]), merge=False)[1].rollout_logprobs is not None


def test_a_placeholder_that_the_policy_sampled_stands_for_no_medium():
    """It is text in the contexts that follow; the rule names it where it is loss."""
    pad = 151655
    one = Turn([1, 2], [pad, 3])
    ids, media = joined(([1, 2, pad, 3], []), screen([4], shot("a1")))
    samples = to_samples(episode([one, Turn(ids, [5], media)]))
    assert len(samples) == 1 and [s.start for s in samples[0].modality_spans] == [6]
    assert {p.code for p in mp.validate(samples)} == {"MM104", "MM203"}


def test_thought_and_action_are_kinds_of_loss():
    """Loss spans of a turn say what its tokens are, and which carry none."""
    start = 2
    spans = [mp.LossSpan(2, 4, "reasoning"), mp.LossSpan(5, 7, "action")]
    one = Turn([1, 2], [3, 4, 5, 6, 7], logprobs=[-1, -2, -3, -4, -5], loss_spans=spans)
    two = Turn([1, 2, 3, 4, 5, 6, 7, 8], [9], logprobs=[-6])
    (sample,) = to_samples(episode([one, two]))
    assert [(s.start, s.stop, s.kind, s.turn) for s in sample.loss_spans] == [
        (start, 4, "reasoning", 0),
        (5, 7, "action", 0),
        (8, 9, "response", 1),
    ]
    assert sample.rollout_logprobs.tolist() == [-1, -2, -4, -5, -6]
    assert mp.validate(sample) == []
    (again,) = from_samples([sample])
    assert again.turns[0].response_ids.tolist() == [3, 4, 5, 6, 7]
    assert [s.kind for s in again.turns[0].loss_spans] == ["reasoning", "action"]
    assert to_samples(again) == [sample]


def test_the_score_of_an_episode_is_where_its_last_loss_token_is():
    """The engine's last answer was empty, and its context rewritten: no token there takes a score."""
    turns = [Turn([1, 2], [3]), Turn([1, 9], [])]
    first, empty = to_samples(episode(turns, rewards=[Score("task", 1.0)], costs=[Cost("c", 2.0)]))
    assert first.rewards[0].value == 1.0 and first.costs[0].value == 2.0
    assert empty.rewards is None and empty.costs is None
    assert mp.validate([first, empty]) == []
    back = from_samples([first, empty])[0]
    assert [s.value for s in back.rewards] == [1.0] and back.turns[0].rewards is None


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("silent", [0, 2])
def test_a_turn_without_loss_keeps_its_number_and_its_scores(tmp_path, merge, silent):
    """Through samples, a trace file, packs, and back: nothing is counted anew, and no score is lost."""
    turns = [
        dataclasses.replace(t, rewards=[Score("step", float(k + 1))], costs=[mp.schema.Cost("slow", k + 1.0)])
        for k, t in enumerate(grown(3))
    ]  # fmt: skip
    start = len(turns[silent].context_ids)
    inside = Score("form", 0.25, {"span": [start, start + 1]})
    turns[silent] = dataclasses.replace(
        turns[silent], loss_spans=[], logprobs=None, rewards=[*turns[silent].rewards, inside]
    )
    samples = to_samples(episode(turns, rewards=[Score("task", 10.0)]), merge=merge)
    assert mp.validate(samples) == []
    path = tmp_path / ("t.jsonl" if merge else "t.parquet")
    mp.write_trace(path, samples)
    assert list(mp.read_trace(path)) == samples
    (again,) = from_samples(mp.read_trace(path))
    assert len(again.turns) == 3 and again.turns[silent].loss_spans == []
    for one, two in zip(turns, again.turns, strict=True):
        assert two.response_ids.tolist() == one.response_ids.tolist()
        assert (two.rewards, two.costs) == (one.rewards, one.costs)
    assert to_samples(again, merge=merge) == samples
    # logprobs of the turns that have loss stay
    scored = [s for s in samples if s.num_loss_tokens]
    assert all(s.rollout_logprobs is not None for s in scored)

    per_turn = [1.0, 2.0, 3.0]
    per_turn[silent] += 0.25
    per_turn[1 if silent == 2 else 2] += 10.0  # the outcome: of the last turn that has a loss token
    of_turns = mp.losses.turns_of(samples)
    assert of_turns.turn.tolist() == [0, 1, 2] and of_turns.rewards().tolist() == per_turn
    assert of_turns.rewards(weights={"form": 1.0}).tolist()[silent] == 0.25
    returns = mp.discounted_returns(of_turns.rewards(), of_turns.cu_turns, gamma=0.5)
    want = per_turn[0] + 0.5 * per_turn[1] + 0.25 * per_turn[2]
    assert returns[0].item() == pytest.approx(want)
    batch = mp.pack(samples, loss_columns={"returns": of_turns.columns(returns)})
    assert silent not in batch.loss_turn.tolist()
    assert batch.loss_columns["returns"].tolist() == returns[batch.loss_turn].tolist()
    with pytest.raises(ArgumentError, match=r"for {'turn': \d}, which has no loss token.*turns_of"):
        mp.scatter_rewards(batch)
    with pytest.raises(ArgumentError, match="which has no loss token"):
        mp.losses.scatter_costs(batch)


def test_a_turn_without_loss_is_cut_whole():
    turns = grown(3)
    turns[1] = dataclasses.replace(turns[1], loss_spans=[], rewards=[Score("step", 1.0)])
    (sample,) = to_samples(episode(turns))
    middle = (len(turns[1].context_ids), len(turns[1]))
    assert middle in [(p.start, p.stop) for p in pieces(sample) if p.kind == "response"]
    cut = truncate(sample, len(turns[2]) - 1)  # the last turn goes
    assert cut.turns == (2,) and mp.validate(cut.sample) == []
    assert cut.sample.rewards == [Score("step", 1.0, {"turn": 1})]
    cut = truncate(sample, len(turns[0]) + 1)
    assert cut.turns == (1, 2) and not cut.sample.rewards and cut.scores == ("rewards: step",)
