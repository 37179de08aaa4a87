"""Kept ids, teachers and routes of turns, through samples, cuts and back, each token keeping its own."""

import dataclasses

import numpy as np
import pytest
from support.trajectories import episode, grown

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.schema.ragged import Ragged
from mmpack.schema.routes import compact_routes
from mmpack.trajectory import from_samples, to_samples, truncate


def lists(ids):
    """A token's own list: itself and the next two."""
    return Ragged.of([[i, i + 1, i + 2] for i in ids])


def taught(ids):
    return Ragged.of([[i, i + 1] for i in ids], [[-1.0 - i / 1000, -2.0] for i in ids])


def taken(ids):
    """A token's own routes: they follow from its id and place."""
    return compact_routes([[[(i + k) % 64, 64 + k % 8]] for k, i in enumerate(ids)], 128)


def told(turns):
    """Turns with all that is to be replayed."""
    return [
        dataclasses.replace(
            turn,
            kept_ids=lists(turn.response_ids.tolist()),
            teachers={"t": taught(turn.response_ids.tolist())},
            routed_experts=taken(turn.input_ids.tolist()),
        )
        for turn in turns
    ]


def assert_own(sample):
    """Each token of a sample has what was recorded of it."""
    ids = sample.input_ids
    targets = ids[sample.loss_indices].tolist()
    assert sample.kept_ids == lists(targets)
    assert sample.teachers == {"t": taught(targets)}
    if sample.routed_experts is not None:
        read = int(sample.loss_indices.max())
        assert sample.routed_experts[:read].tolist() == taken(ids.tolist())[:read].tolist()
    assert mp.validate(sample) == []


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_each_loss_token_keeps_its_own(merge, keep):
    turns = told(grown())
    turns[-1].observation_ids = np.array([7, 8])
    samples = to_samples(episode(turns), merge=merge, keep_last_observation=keep)
    assert len(samples) == (1 if merge else 3)
    for sample in samples:
        assert_own(sample)
    back = [
        s
        for t in from_samples(samples)
        for s in to_samples(t, merge=merge, keep_last_observation=keep)
    ]
    assert len(back) == len(samples)
    for sample in back:
        assert_own(sample)


def test_loss_spans_within_a_response():
    (turn, *_) = told(grown(1))
    start = len(turn.context_ids)
    turn.loss_spans = [mp.LossSpan(start, start + 1), mp.LossSpan(start + 2, start + 3)]
    (sample,) = to_samples(episode([turn]))
    assert sample.num_loss_tokens == 2
    assert_own(sample)
    (back,) = from_samples([sample])
    assert back.turns[0].kept_ids.lengths.tolist() == [3, 0, 3]  # no loss, no list
    assert_own(*to_samples(back))


@pytest.mark.parametrize("at", [0, -2])
def test_a_turn_that_took_other_routes_begins_a_sample(at):
    turns = told(grown())
    before = len(turns[0])
    turns[1].routed_experts[(at + before) % before, 0, 0] += 1
    turns[2].routed_experts[(at + before) % before, 0, 0] += 1
    samples = to_samples(episode(turns))
    assert [s.turn for s in samples] == [0, 1] and samples[1].loss_spans[-1].turn == 2


def test_a_teacher_of_only_some_turns():
    turns = told(grown())
    turns[1].teachers = None
    (sample,) = to_samples(episode(turns))
    own = [len(turn.response_ids) for turn in turns]
    assert sample.teachers["t"].lengths.tolist() == [2] * own[0] + [0] * own[1] + [2] * own[2]


@pytest.mark.parametrize("side", ["right", "left"])
def test_cuts_take_what_they_cut(side):
    (sample,) = to_samples(episode(told(grown(4))))
    last = next(s for s in sample.loss_spans if s.turn == 3)
    most = len(sample) - 3
    cut = truncate(sample, most, side, changed_context=side == "left")
    out = cut.sample
    kept = np.r_[0 : cut.start, cut.stop : len(sample)]
    assert cut.tokens and len(out) == len(kept) and last.stop == len(sample)
    targets = out.input_ids[out.loss_indices].tolist()
    assert out.kept_ids == lists(targets) and out.teachers == {"t": taught(targets)}
    assert out.routed_experts.tolist() == sample.routed_experts[kept].tolist()
    assert mp.validate(out) == []


# ---- of the processor -----------------------------------------------------------------------------


def appended(processor, sample, ids=(900, 901), **fields):
    return processor.append(sample, observation_ids=[5, 6], response_ids=ids, **fields)


@pytest.fixture(scope="module")
def processor():
    from mmpack.demo.qwen_processor import qwen_vl_processor

    return mp.wrap_processor(qwen_vl_processor("qwen2_5_vl"))


def test_append_joins_what_is_replayed(processor):
    first = processor.from_ids(
        [1, 2, 3, 10, 11],
        sample_id="s",
        loss_spans=[(3, 5)],
        kept_ids=lists([10, 11]),
        teachers={"t": taught([10, 11])},
        routed_experts=taken([1, 2, 3, 10, 11]),
    )
    assert_own(first)
    whole = [1, 2, 3, 10, 11, 5, 6, 900, 901]
    more = {
        "kept_ids": lists([900, 901]),
        "teachers": {"t": taught([900, 901])},
        "routed_experts": taken(whole),
    }
    assert_own(appended(processor, first, **more))
    seen = processor.append(first, observation_ids=[5, 6])
    assert seen.routed_experts.shape[0] == 7 and mp.validate(seen) == []
    assert_own(processor.append(seen, response_ids=[900, 901], **more))
    for change, message in (
        ({"kept_ids": None}, "the response has no kept_ids"),
        ({"kept_ids": lists([900])}, "has 1 lists for 2 response ids"),
        ({"routed_experts": None}, "the response has none"),
        ({"routed_experts": taken(whole[:-1])}, "routes for 8 tokens, expected 9"),
        ({"routed_experts": taken([7, *whole[1:]])}, "earlier tokens differ from"),
    ):
        with pytest.raises(ArgumentError, match=message):
            appended(processor, first, **(more | change))
    both = appended(processor, first, **(more | {"teachers": {"u": taught([900, 901])}}))
    assert {name: own.lengths.tolist() for name, own in both.teachers.items()} == {
        "t": [2, 2, 0, 0],
        "u": [0, 0, 2, 2],
    }
