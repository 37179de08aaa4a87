"""Windows over the last screenshots, and cuts to a budget: pictures, actions and observations stay whole."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.samples import full_sample, make_sample
from support.trajectories import episode, grown, joined, screen, shot

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.layout.mrope import sample_positions
from mmpack.schema.spans import RegionSpan, Score
from mmpack.trajectory import Turn, pieces, to_samples, truncate, window

PAD, START, END = 151655, 151652, 151653
TURNS = st.lists(
    st.tuples(st.sampled_from(["a0", "b0", "c1", None]), st.integers(0, 3), st.integers(1, 4)),
    min_size=1,
    max_size=6,
)


def history(turns, ends_in_observation=False):
    """A sample and its parts, (kind, ids, media, turn): an observation and a response per turn."""
    parts = []
    for k, (name, words, answer) in enumerate(turns):
        text = list(range(10 * k, 10 * k + words + 1))
        seen = (text, []) if name is None else screen(text, shot(name))
        parts.append(("observation" if k else "prompt", *seen, k))
        parts.append(("response", list(range(500 + 10 * k, 500 + 10 * k + answer)), [], k))
    if ends_in_observation:
        parts.pop()
    made, so_far = [], []
    for kind, ids, media, _ in parts:
        if kind == "response":
            seen = joined(*[(i, m) for _, i, m, _ in so_far])
            made.append(Turn(seen[0], ids, seen[1], -np.ones(len(ids))))
        so_far.append((kind, ids, media, 0))
    last = parts[-1]
    tail = (
        {} if last[0] == "response" else {"observation_ids": last[1], "observation_media": last[2]}
    )
    if not made:
        return None, parts
    made[-1] = dataclasses.replace(made[-1], **tail)
    (sample,) = to_samples(episode(made), keep_last_observation=True)
    assert sample.input_ids.tolist() == [i for _, ids, _, _ in parts for i in ids]
    return sample, parts


def without_picture(ids):
    """What is left of a screen's ids without the picture and its markers."""
    return [i for i in ids if i not in (PAD, START, END)]


@given(TURNS, st.integers(0, 5), st.lists(st.integers(800, 900), max_size=2), st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_older_pictures_go_whole_and_all_text_stays(turns, last, instead, pinned):
    sample, parts = history(turns, ends_in_observation=True)
    assume(sample is not None)
    context = window(sample, last, dropped_ids=instead, pinned=pinned)
    shown = [k for k, (_, _, media, _) in enumerate(parts) if media]
    gone = shown[pinned : max(pinned, len(shown) - last)]
    expected = []
    for k, (_, ids, _, _) in enumerate(parts):
        if k in gone:
            at = ids.index(START)
            ids = [*ids[:at], *instead, ids[-1]]
        expected += ids
    assert context.input_ids.tolist() == expected
    kept = [m.cache_key for k, (_, _, media, _) in enumerate(parts) if k not in gone for m in media]
    assert [m.cache_key for m in context.media] == kept
    assert len(context.dropped) == len(gone)
    (made,) = to_samples(episode([context.turn([1, 2], logprobs=[-1, -2])]))
    assert mp.validate(made) == [] and made.loss_indices.tolist() == [
        len(expected),
        len(expected) + 1,
    ]


@given(TURNS, st.integers(1, 4), st.lists(st.integers(800, 900), max_size=2))
@settings(max_examples=40, deadline=None)
def test_older_turns_go_whole_and_the_prompt_stays(turns, last, instead):
    sample, parts = history(turns, ends_in_observation=True)
    assume(sample is not None)
    context = window(sample, last, what="turns", dropped_ids=instead)
    shown = [k for k, (kind, _, media, _) in enumerate(parts) if media and kind == "observation"]
    first = shown[-last] if len(shown) > last else 1
    middle = instead if first > 2 else []
    first = first if first > 2 else 1
    expected = [i for _, ids, _, _ in [parts[0], (0, middle, 0, 0), *parts[first:]] for i in ids]
    assert context.input_ids.tolist() == expected
    kept = [m.cache_key for _, _, media, _ in [parts[0], *parts[first:]] for m in media]
    assert [m.cache_key for m in context.media] == kept


def test_pieces_tile_a_sample_and_cover_what_may_not_be_cut():
    sample = full_sample()
    found = pieces(sample)
    assert [p.start for p in found] == [0, *[p.stop for p in found[:-1]]]
    assert found[-1].stop == len(sample)
    edges = {p.start for p in found} | {len(sample)}
    whole = [*sample.loss_spans, *sample.observation_spans, *sample.action_spans]
    whole += [*sample.region_spans, *sample.modality_spans]
    for span in whole:
        assert not any(span.start < edge < span.stop for edge in edges)
    # the markers stay with their picture
    for span in sample.modality_spans:
        assert not {span.start, span.stop} & edges


def inside(sample, at):
    """Whether a cut at `at` goes through something: by its spans alone."""
    spans = [(s.start - 1, s.stop + 1) for s in sample.modality_spans]
    for name in ("loss_spans", "observation_spans", "action_spans"):
        spans += [(s.start, s.stop) for s in getattr(sample, name) or ()]
    return any(a < at < b for a, b in spans)


@given(TURNS, st.integers(1, 120))
@settings(max_examples=60, deadline=None)
def test_the_right_is_cut_behind_the_last_response_that_fits(turns, budget):
    sample, _ = history(turns)
    sample.rewards = [Score("step", 0.5, {"turn": k}) for k in range(len(turns))]
    sample.rewards.append(Score("task", 1.0))
    ends = [s.stop for s in sample.loss_spans]
    fits = [end for end in ends if end <= budget]
    if not fits:
        with pytest.raises(ArgumentError, match=r"can't be cut to \d+ .* no response ends"):
            truncate(sample, budget)
        return
    cut = truncate(sample, budget)
    out, stop = cut.sample, len(sample) if len(sample) <= budget else fits[-1]
    assert out.input_ids.tolist() == sample.input_ids[:stop].tolist()
    assert not inside(sample, stop) and mp.validate(out) == []
    kept = len(fits)
    assert len(out.loss_spans) == kept and cut.tokens == len(sample) - stop
    assert cut.turns == tuple(range(kept, len(turns)))
    assert cut.loss_tokens == sample.num_loss_tokens - out.num_loss_tokens
    assert len(out.rollout_logprobs) == out.num_loss_tokens
    assert [s.scope for s in out.rewards] == [{"turn": k} for k in range(kept)] + ["sequence"]
    assert cut.scores == ("rewards: step",) * (len(turns) - kept)
    before, after = ({m.cache_key for m in s.media} for s in (sample, out))
    assert set(cut.media) == before - after


@given(TURNS, st.integers(1, 120), st.lists(st.integers(800, 900), max_size=2))
@settings(max_examples=60, deadline=None)
def test_the_left_is_cut_up_to_an_observation(turns, budget, instead):
    sample, parts = history(turns, ends_in_observation=True)
    assume(sample is not None)
    head, length = len(parts[0][1]), len(sample)
    starts = [s.start for s in sample.observation_spans or () if s.start > head]
    fits = [at for at in starts if head + len(instead) + length - at <= budget]
    if length > budget and not fits:
        with pytest.raises(ArgumentError, match="Fix: raise max_tokens"):
            truncate(sample, budget, "left", instead_ids=instead, changed_context=True)
        return
    sample.rewards = [Score("s", 1.0, {"span": [s.start, s.stop]}) for s in sample.loss_spans]
    sample.position_ids = sample_positions(sample)[0]
    cut = truncate(sample, budget, "left", instead_ids=instead, changed_context=True)
    if length <= budget:
        assert cut.sample is sample and cut.tokens == 0
        return
    at = fits[0]
    expected = [*sample.input_ids[:head], *instead, *sample.input_ids[at:]]
    assert cut.sample.input_ids.tolist() == expected
    assert (cut.start, cut.stop) == (head, at) and not inside(sample, at)
    assert mp.validate(cut.sample) == []
    assert cut.sample.metadata["changed_context"] == {"cut": [head, at]}
    # what is loss still is the same token; spans and scores behind the cut move, the others go
    shift = len(instead) - (at - head)

    def moved(spans):
        return [(s.start + shift, s.stop + shift) for s in spans if s.start >= at]

    for name in ("loss_spans", "observation_spans"):
        assert [(s.start, s.stop) for s in getattr(cut.sample, name)] == moved(
            getattr(sample, name)
        )
    assert [tuple(s.scope["span"]) for s in cut.sample.rewards] == moved(sample.loss_spans)
    assert np.array_equal(cut.sample.position_ids, sample_positions(cut.sample)[0])


def test_the_tokens_of_numbers_follow_a_cut():
    pieces = [b"is ", b"(1", b"2,", b"34)"]
    parts = [("image", (1, 4, 6), "a"), ("observation", [0], 1), ("response", [0], 1)]
    parts += [("observation", [0], 2), ("response", [0, 1, 2, 3], 2)]
    sample = mp.grounding.annotate(make_sample(parts), pieces.__getitem__)
    cut = truncate(sample, len(sample) - 1, "left", changed_context=True).sample
    assert len(cut) == len(sample) - 2
    assert cut.region_spans == mp.grounding.find(cut, pieces.__getitem__).regions


def test_regions_in_a_picture_that_is_gone():
    one, two, three = grown(3)
    start = len(two.context_ids)
    region = RegionSpan(start, start + 1, 1, bbox=(0.0, 0.0, 4.0, 4.0), label="second")
    two = dataclasses.replace(
        two, region_spans=[region], rewards=[Score("iou", 1.0, {"region": 0})]
    )
    start = len(three.context_ids)
    later = RegionSpan(start, start + 1, 0, point=(1.0, 1.0), label="first picture")
    three = dataclasses.replace(
        three, region_spans=[later], rewards=[Score("hit", 1.0, {"region": 0})]
    )
    (sample,) = to_samples(episode([one, two, three], coordinate_system="absolute_pixels"))
    assert mp.validate(sample) == []
    rest = sample.observation_spans[1].start
    head = len(one.context_ids)
    cut = truncate(sample, head + len(sample) - rest, "left", changed_context=True)
    assert (cut.start, cut.stop) == (head, rest)
    assert [r.label for r in cut.sample.region_spans] == ["first picture"]
    assert [(s.name, s.scope) for s in cut.sample.rewards] == [("hit", {"region": 0})]
    assert cut.scores == ("rewards: iou",) and mp.validate(cut.sample) == []


def test_a_beginning_to_keep_is_made_of_whole_pieces():
    ids, media = joined(([1, 2], []), screen([3], shot("a0")), screen([4, 5], shot("b0")))
    (sample,) = to_samples(episode([Turn(ids, [6], media)]))
    with pytest.raises(ArgumentError, match="there is no observation"):
        truncate(sample, len(sample) - 1, "left", changed_context=True)
    with pytest.raises(ArgumentError, match="keep is 5, which lies in a medium"):
        truncate(sample, len(sample) - 1, "left", keep=5)
    with pytest.raises(ArgumentError, match="beyond the sample"):
        truncate(sample, 3, "left", keep=99)
    cut = truncate(sample, len(sample) - 1, "left", keep=2, changed_context=True)
    # the word before the first picture can go alone; the picture stays whole
    assert cut.sample.input_ids.tolist() == [1, 2, *ids[3:], 6]
    cut = truncate(sample, len(sample) - 2, "left", keep=2, changed_context=True)
    assert cut.sample.input_ids.tolist() == [1, 2, *ids[ids.index(77) :], 6]
    assert len(cut.media) == 1 and mp.validate(cut.sample) == []


def test_a_video_in_frames_keeps_its_seconds():
    """Qwen3-VL writes them as text before each frame."""
    parts = [("text", [1]), ("video", (2, 2, 4), "film"), ("text", [2]), ("image", (1, 2, 4), "a")]
    sample = make_sample([*parts, ("response", [3])], family="qwen3_vl")
    film, words, picture, answer = pieces(sample)
    assert (film.start, film.kind) == (0, "medium")  # the word, the seconds, the frames
    assert film.stop == sample.modality_spans[1].stop + 1
    assert (words.kind, picture.kind, answer.kind) == ("text", "medium", "response")
    with pytest.raises(
        ArgumentError, match=r"has its seconds as text.*would stay.*what='turns', or pin it"
    ):
        window(sample, 1)
    assert len(window(sample, 0, pinned=1).media) == 1
    same = make_sample([*parts, ("response", [3])], family="qwen2_5_vl")
    assert [m.modality for m in window(same, 1).media] == ["image"]
