"""`from_records`: the tree of an episode from requests and from rows, each token with what was recorded of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from support.recorded_trees import (
    chains,
    drawn,
    kept_of,
    parents,
    processor,
    routes_of,
    said,
    trees,
    versions,
)
from support.trajectories import scored_of_samples, scored_of_turns

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.schema.ragged import Ragged
from mmpack.schema.spans import Score
from mmpack.trajectory import Record, branches, from_records, from_samples, to_samples

PAD = 151655


def read(records, **options):
    return from_records(records, processor(), trajectory_id="e", group_id="task", **options)


def request(turn):
    """A turn as a request of its own."""
    start = len(turn.context_ids)
    return Record(
        turn.context_ids,
        turn.response_ids,
        media=turn.media,
        logprobs=turn.logprobs,
        policy_versions=[
            (v.start - start, v.stop - start, v.version) for v in turn.policy_versions
        ],
        kept_ids=kept_of(turn.response_ids.tolist()),
        teachers=turn.teachers,
        routed_experts=turn.routed_experts[:-1],
        finish_reason="stop",
    )


def row(turns, chain):
    """Turns that go on from each other as one row with a mask."""
    first, last = turns[chain[0]], turns[chain[-1]]
    start, ids = len(first.context_ids), last.input_ids
    mask, logprobs = np.zeros(len(ids), int), np.full(len(ids), np.nan, np.float32)
    kept, spans = [[] for _ in ids], []
    for k in chain:
        at, own = len(turns[k].context_ids), len(turns[k].response_ids)
        mask[at : at + own], logprobs[at : at + own] = 1, turns[k].logprobs
        kept[at : at + own] = kept_of(turns[k].response_ids.tolist())
        spans += [(v.start - start, v.stop - start, v.version) for v in turns[k].policy_versions]
    return Record(
        ids[:start],
        ids[start:],
        mask[start:],
        last.media,
        logprobs[start:],
        spans,
        Ragged.of(kept[start:]),
        routed_experts=last.routed_experts,
    )


@settings(deadline=None, max_examples=20)
@given(trees())
def test_requests_come_back_as_they_were(turns):
    episode = read([request(t) for t in turns])
    assert said(episode.turns) == said(turns)
    assert [b.parent for b in branches(episode)] == parents(turns)
    for turn, told in zip(episode.turns, turns, strict=True):
        assert versions(turn) == versions(told)
        assert turn.kept_ids == told.kept_ids and turn.teachers == told.teachers
        ran = len(told) - 1
        assert np.array_equal(turn.routed_experts[:ran], told.routed_experts[:ran])
    samples = to_samples(episode)
    assert len(samples) == len(chains(turns)) and mp.validate(samples) == []
    assert scored_of_samples(samples) == scored_of_turns(turns)
    assert sorted(said(from_samples(samples)[0].turns)) == sorted(said(turns))


@settings(deadline=None, max_examples=20)
@given(trees())
def test_rows_are_the_same_tree(turns):
    """In the order of their last answers, as a gateway lists them: no turn before the one that it goes on from."""
    rows = [row(turns, chain) for chain in sorted(chains(turns), key=lambda c: c[-1])]
    episode = read(rows)
    assert sorted(said(episode.turns)) == sorted(said(turns))
    assert len([p for p in parents(episode.turns) if p is not None]) == len(
        [p for p in parents(turns) if p is not None]
    )
    samples = to_samples(episode)
    assert scored_of_samples(samples) == scored_of_turns(turns) and mp.validate(samples) == []
    whole = {(tuple(t.input_ids), tuple(m.cache_key for m in t.media)): t for t in turns}
    for turn in episode.turns:
        told = whole[tuple(turn.input_ids), tuple(m.cache_key for m in turn.media)]
        assert turn.kept_ids == told.kept_ids
        ran = len(turn) - 1
        assert np.array_equal(turn.routed_experts[:ran], told.routed_experts[:ran])


def test_rows_that_repeat_a_turn_have_it_once():
    """Two paths of one tree, each with its whole mask: the shared answer is trained once."""
    rows = [
        Record([1], [2, 3, 4], [1, 0, 1], logprobs=[-0.5, 0, -1]),
        Record([1], [2, 5, 6], [1, 0, 1], logprobs=[-0.5, 0, -2]),
    ]
    episode = read(rows)
    assert [t.input_ids.tolist() for t in episode.turns] == [[1, 2], [1, 2, 3, 4], [1, 2, 5, 6]]
    assert [b.parent for b in branches(episode)] == [None, 0, 0]
    # another logprob: it was sampled twice
    rows[1].logprobs = [-0.25, 0, -2]
    assert len(read(rows)) == 4
    # two completions that happen to be equal are two
    assert len(read([Record([1], [2], logprobs=[-0.5])] * 2)) == 2


def test_a_prompt_that_was_sent_again():
    """Both answers are loss, or the last one's and those that the episode went on from."""
    calls = [
        Record([1], [2], request=0, rewards=0.5),
        Record([1], [3], request=0),
        Record([1], [4], request=1),
        Record([1, 3, 5], [6], request=2),
    ]
    assert [s.num_loss_tokens for s in to_samples(read(calls))] == [1, 2, 1]
    episode = read(calls, resampled="last")
    assert [t.loss_spans for t in episode.turns] == [[], None, None, None]
    assert episode.turns[0].metadata["replaced"] == {"by": 2, "rewards": [["reward", 0.5]]}
    samples = to_samples(episode)
    assert [s.loss_indices.tolist() for s in samples] == [[], [1, 3], [1]]
    assert mp.validate(samples) == []
    # completions of one request replace nothing
    both = read(calls[:2], resampled="last")
    assert [t.loss_spans for t in both.turns] == [None, None]


def test_routes_that_the_engine_left_out_are_those_of_the_turn_before():
    """vLLM's routed_experts_prompt_start: the cached part is not returned again."""
    whole = [1, 2, 3, 4, 5, 6]
    calls = [
        Record(whole[:2], whole[2:4], routed_experts=routes_of(whole)[:3]),
        Record(whole[:5], whole[5:], routed_experts=routes_of(whole)[3:5], routes_start=3),
    ]
    (sample,) = to_samples(read(calls))
    assert sample.routed_experts[:5].tolist() == routes_of(whole)[:5].tolist()
    calls[1].routes_start, calls[1].routed_experts = 4, routes_of(whole)[4:5]
    with pytest.raises(
        ArgumentError, match=r"records\[1\]: routed_experts begin at token 4, .+ Fix: "
    ):
        read(calls)  # the row of the last sampled token is in neither
    with pytest.raises(ArgumentError, match=r"routed_experts end at token 1, but the answer at 4"):
        read([Record([1, 2], [3, 4], routed_experts=routes_of([1]))])


def test_layers_without_experts_are_left_out():
    """Engines write zeros for them; an expert twice (MM336) would else be in each."""
    taken = np.array([[[0, 0], [1, 2]], [[0, 0], [0, 3]], [[0, 0], [2, 0]]])
    calls = [Record([1, 2], [3, 4], routed_experts=taken)]
    calls.append(Record([1, 2, 3, 4], [5], routed_experts=taken[2:], routes_start=3))
    (sample,) = to_samples(read(calls))
    assert sample.routed_experts[:4].tolist() == taken[[0, 1, 2, 2], 1:].tolist()
    assert mp.validate(sample) == []
    one = np.zeros((3, 2, 1), int)  # of one expert a token: it may be expert 0
    assert read([Record([1, 2], [3, 4], routed_experts=one)]).turns[0].routed_experts.shape[1] == 2


def test_rewards_of_records_turns_and_tokens():
    mask = [1, 1, 0, 1]

    def one(**fields):
        return read([Record([1], [2, 3, 4, 5], mask, **fields)]).turns

    assert [t.rewards for t in one(rewards=0.5)] == [None, [Score("reward", 0.5)]]
    paid = one(turn_rewards=[0.0, 1.0], score="step")
    assert [t.rewards for t in paid] == [[Score("step", 0.0)], [Score("step", 1.0)]]
    paid = one(rewards=[0, 0.25, 0.5, 1.0])
    assert [[(s.scope, s.value) for s in t.rewards] for t in paid] == [
        [({"span": [2, 3]}, 0.25), ("sequence", 0.5)],
        [({"span": [4, 5]}, 1.0)],
    ]
    samples = to_samples(read([Record([1], [2, 3, 4, 5], mask, rewards=[0, 0.25, 0.5, 1.0])]))
    assert mp.validate(samples) == []
    assert mp.trajectory.trajectory_groups(samples).rewards.tolist() == [1.75]


def test_a_placeholder_that_was_sampled_stands_for_no_medium():
    """Also in the prompts behind it, whatever the order of the records."""
    shot = processor().medium(drawn(0))
    shown = [151652, *[PAD] * shot.num_tokens, 151653]
    first = Record([1, 2], [PAD, 3])
    second = Record([1, 2, PAD, 3, *shown, 4], [5], media=[shot])
    for records in ([first, second], [second, first]):
        (sample,) = to_samples(read(records))
        assert sample.loss_indices.tolist() == [2, 3, len(sample) - 1] and len(sample.media) == 1
        # validate names it, as in any sample
        assert {p.code for p in mp.validate(sample)} == {"MM104", "MM203"}


def test_single_placeholders_are_expanded():
    shot = processor().medium(drawn(0))
    run = [PAD] * shot.num_tokens
    short = [
        Record([1, 151652, PAD, 151653], [5, 6, 7], [1, 1, 0], [shot], policy_versions="v1"),
        Record([1, 151652, PAD, 151653, 5, 6, 8], [9], media=[shot]),
    ]
    episode = read(short, expanded=False)
    (sample,) = to_samples(episode)
    assert sample.input_ids.tolist() == [1, 151652, *run, 151653, 5, 6, 8, 9]
    start = len(sample) - 4
    assert versions(episode.turns[0]) == [(start, start + 2, "v1")]


GOOD = Record([1, 2], [3, 4])


def test_a_row_cut_within_its_last_picture():
    """verl cuts rows at response_length and keeps all images."""
    shots = [processor().medium(drawn(k)) for k in range(2)]
    prompt, seen = ([1, 151652, *[PAD] * m.num_tokens, 151653, 9] for m in shots)
    for cut in range(1, len(seen) - 3):  # one placeholder is left
        ids = [5, 6, *seen[:-cut]]
        mask = [1, 1, *[0] * (len(seen) - cut)]
        (sample,) = to_samples(read([Record(prompt, ids, mask, shots)]))
        assert sample.input_ids.tolist() == [*prompt, 5, 6] and len(sample.media) == 1
        assert mp.validate(sample) == []
