"""From runs to spans and back: against `make_sample`, which writes ids and spans by hand, and against plain loops."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.samples import make_medium, make_sample, samples

from mmpack.errors import LayoutError
from mmpack.families import get_family
from mmpack.layout.occurrences import (
    context_ids,
    match_runs,
    occurrences,
    occurring_media,
    spans_from_runs,
)
from mmpack.layout.runs import placeholder_runs, true_runs
from mmpack.schema.spans import covered

PARTS = [
    ("text", [5]),
    ("image", (1, 4, 4), "a"),
    ("text", [6]),
    ("video", (3, 4, 4), "v"),
    ("image", (1, 4, 4), "a"),
    ("video", (1, 4, 4), "w"),
    ("video", (3, 4, 4), "v"),
    ("response", [7, 8]),
]


def rows_of(spans):
    return [(s.start, s.stop, s.modality, s.media_index, s.frame) for s in spans]


@given(samples())
def test_random_samples_come_back(sample):
    family = get_family(sample.family)
    policy = covered(sample.loss_spans, len(sample))
    runs = placeholder_runs(context_ids(sample.input_ids, policy, family), family)
    _, spans = spans_from_runs(runs, occurring_media(sample), family, "test")
    assert rows_of(spans) == rows_of(sample.modality_spans)


def test_runs_and_media_that_contradict_each_other():
    family = get_family("qwen2_5_vl")
    sample = make_sample([("text", [5]), ("image", (1, 4, 4), "a")])
    runs = placeholder_runs(sample.input_ids, family)
    video = make_medium("v", (1, 4, 4), "video")
    for media in ([], [video], [*sample.media, *sample.media]):
        with pytest.raises(LayoutError, match=r"test: the ids have runs of \['image'\].*MM106"):
            match_runs(runs, media, family, "test")
    assert match_runs(runs.of("video"), [], family, "test") == []
    assert match_runs(runs.of("image"), sample.media, family, "test") == [
        (sample.media[0], [(2, 6)])
    ]


def test_occurrences_of_frames_hold_the_text_between():
    sample = make_sample(PARTS, family="qwen3_vl")
    found = occurrences(sample)
    assert [o.media_index for o in found] == [0, 1, 0, 2, 1]
    spans = [s for s in sample.modality_spans if s.media_index == 1]
    assert [(o.start, o.stop) for o in found if o.media_index == 1] == [
        (spans[0].start, spans[2].stop),
        (spans[3].start, spans[5].stop),
    ]
    assert occurring_media(sample, found[1].stop) == [sample.media[0], sample.media[1]]
    assert occurring_media(sample, found[1].stop - 1) == [sample.media[0]]


def test_sampled_placeholders_stand_for_no_medium():
    family = get_family("qwen2_vl")
    ids = np.array([1, family.image_token_id, family.image_token_id])
    assert context_ids(ids, np.array([False, False, True]), family).tolist() == [
        1,
        family.image_token_id,
        family.pad_token_id,
    ]


@given(st.lists(st.booleans(), max_size=12))
def test_true_runs_against_a_loop(flags):
    runs = true_runs(np.array(flags, dtype=bool))
    inside = [i for a, b in runs for i in range(a, b)]
    assert inside == [i for i, flag in enumerate(flags) if flag]
    assert all(b < a for (_, b), (a, _) in pairwise(runs))
