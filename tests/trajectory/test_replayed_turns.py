"""Kept ids, teachers and routes of turns, through samples, cuts and back, each token keeping its own."""

import dataclasses

import numpy as np
import pytest
from support.samples import kept_of, make_sample, routes_of, teacher_of
from support.trajectories import episode, grown

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.schema.ragged import Ragged
from mmpack.schema.routes import compact_routes
from mmpack.trajectory import Turn, from_samples, to_samples, truncate, window


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


def test_the_last_token_was_not_run_yet():
    turns = told(grown())
    for turn in turns:
        turn.routed_experts[-1] = 0
    (sample,) = to_samples(episode(turns))
    assert_own(sample)


def test_routes_of_only_some_turns_are_not_merged():
    turns = told(grown())
    turns[2].routed_experts = None
    assert [s.turn for s in to_samples(episode(turns))] == [0, 2]


def test_kept_ids_of_only_some_turns():
    turns = told(grown())
    turns[1].kept_ids = None
    with pytest.raises(
        ArgumentError, match=r"to_samples: 2 of 3 turns of one sample have kept_ids"
    ):
        to_samples(episode(turns))
    assert [s.kept_ids is None for s in to_samples(episode(turns), merge=False)] == [
        False,
        True,
        False,
    ]


def test_a_teacher_of_only_some_turns():
    turns = told(grown())
    turns[1].teachers = None
    (sample,) = to_samples(episode(turns))
    own = [len(turn.response_ids) for turn in turns]
    assert sample.teachers["t"].lengths.tolist() == [2] * own[0] + [0] * own[1] + [2] * own[2]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kept_ids", [[1], [2]]),
        ("kept_ids", Ragged.of([[1]])),
        ("kept_ids", Ragged.of([[1], [2]], [[-1.0], [-1.0]])),
        ("teachers", {"t": Ragged.of([[1], [2]])}),
        ("teachers", {"t": Ragged.of([[1]], [[-1.0]])}),
        ("teachers", [1]),
        ("routed_experts", np.zeros((5, 1, 1))),
        ("routed_experts", np.zeros((4, 1, 1), np.uint8)),
        ("routed_experts", [[[1]]] * 5),
    ],
)
def test_what_is_not_of_a_turn(name, value):
    with pytest.raises(ArgumentError, match=r"^Turn: .+ Fix: ") as caught:
        Turn([1, 2, 3], [4, 5], **{name: value})
    assert "\n" not in str(caught.value) and name in str(caught.value)


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


def test_ids_that_stand_in_have_no_routes():
    (sample,) = to_samples(episode(told(grown(4))))
    options = {"side": "left", "changed_context": True, "instead_ids": [5, 6]}
    with pytest.raises(ArgumentError, match=r"replace what is cut have none\. Fix: "):
        truncate(sample, len(sample) - 3, **options)
    sample.routed_experts = None
    assert truncate(sample, len(sample) - 3, **options).tokens


def test_a_window_of_a_history_makes_a_turn():
    (history,) = to_samples(episode(told(grown())))
    context = window(history, 1)
    ids = [*context.input_ids.tolist(), 900, 901]
    turn = context.turn([900, 901], kept_ids=lists([900, 901]), routed_experts=taken(ids))
    turn.teachers = {"t": taught([900, 901])}
    assert_own(*to_samples(episode([turn])))


def test_frames_that_are_dropped_take_their_routes():
    sample = make_sample(
        [("text", [1]), ("video", (3, 4, 4), "clip"), ("text", [2]), ("response", [10, 11], 0)]
    )
    rng = np.random.default_rng(0)
    sample.routed_experts, sample.kept_ids = routes_of(sample, rng), lists([10, 11])
    out = mp.video.drop_frames(sample, 0, [1])
    start = sample.modality_spans[0].start
    stays = np.r_[: start + 4, start + 8 : len(sample)]
    assert out.routed_experts.tolist() == sample.routed_experts[stays].tolist()
    assert out.kept_ids == sample.kept_ids and len(out.routed_experts) == len(out)


# ---- of the processor -----------------------------------------------------------------------------


def appended(processor, sample, ids=(900, 901), **fields):
    return processor.append(sample, observation_ids=[5, 6], response_ids=ids, **fields)


@pytest.fixture(scope="module")
def processor():
    from mmpack.demo.qwen_processor import qwen_vl_processor

    return mp.wrap_processor(qwen_vl_processor("qwen2_5_vl"))


def test_append_joins_what_is_replayed(processor):
    rng = np.random.default_rng(0)
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
    with pytest.raises(ArgumentError, match="the response has no kept_ids"):
        appended(processor, first, **(more | {"kept_ids": None}))
    with pytest.raises(ArgumentError, match="the response has none"):
        appended(processor, first, **(more | {"routed_experts": None}))
    with pytest.raises(ArgumentError, match="routes for 8 tokens, expected 9"):
        appended(processor, first, **(more | {"routed_experts": taken(whole[:-1])}))
    with pytest.raises(ArgumentError, match="earlier tokens differ from"):
        other = routes_of(make_sample([("text", whole)]), rng, 1, 2, 128)
        appended(processor, first, **(more | {"routed_experts": other}))
    with pytest.raises(ArgumentError, match="has 1 lists for 2 response ids"):
        appended(processor, first, **(more | {"kept_ids": lists([900])}))
    with pytest.raises(ArgumentError, match="kept_ids"):
        appended(processor, first, **(more | {"kept_ids": [[900], [901]]}))
    both = appended(processor, first, **(more | {"teachers": {"u": taught([900, 901])}}))
    assert {name: own.lengths.tolist() for name, own in both.teachers.items()} == {
        "t": [2, 2, 0, 0],
        "u": [0, 0, 2, 2],
    }


def test_helpers_make_what_the_rules_allow():
    sample = make_sample([("text", [1]), ("response", [2, 3], 0)])
    rng = np.random.default_rng(0)
    sample.kept_ids, sample.teachers = kept_of(sample, rng), {"t": teacher_of(sample, rng)}
    assert mp.validate(sample) == []
