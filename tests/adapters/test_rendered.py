"""Prompts that an engine made, as samples: against the sample that a processor makes of the same pictures."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_inputs import PICTURES, SIZES, rendered

import mmpack as mp
from mmpack.adapters.rendered import MediaStore, RenderedMedia, kept_lists, rendered_sample
from mmpack.demo.qwen_processor import qwen_vl_processor
from mmpack.errors import ArgumentError, LayoutError

HF = qwen_vl_processor(min_pixels=28 * 28, max_pixels=16 * 28 * 28)


@pytest.fixture(scope="module")
def processor():
    return mp.wrap_processor(HF)


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, len(SIZES) - 1), max_size=3), st.integers(0, 3)),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_prompts_are_those_of_the_processor_whatever_came_before(processor, prompts, keep):
    """Each prompt brings the pixels of pictures that no earlier one showed, and hashes of the others."""
    store = MediaStore() if keep else None
    sent: set[str] = set()
    made, wanted = [], []
    for k, (numbers, words) in enumerate(prompts):
        ids, media = rendered(HF, numbers, words, sent if keep else set())
        pictures = [PICTURES[n] for n in numbers]
        names = {"sample_id": f"{k}", "group_id": "g"}
        own = processor.from_ids(ids, media=pictures, loss_spans=[(len(ids), len(ids))], **names)
        wanted.append(own)
        more = {"store": store, "images": pictures}
        made.append(rendered_sample("prompt", ids, media, processor, **more, **names))
    assert mp.validate(made) == []
    report = mp.compare(made, wanted)
    assert not report.findings, report.lines()
    shown = {n for numbers, _ in prompts for n in numbers}
    if keep:
        assert len(store) == len(shown) and all(
            m.pixel_values is None for s in made for m in s.media
        )
    a, b = mp.pack(made, media=store), mp.pack(wanted)
    assert a.media_cache_keys == b.media_cache_keys
    assert (a.pixel_values is None) == (not shown)
    if shown:
        assert np.array_equal(a.pixel_values.numpy(), b.pixel_values.numpy())


def test_media_without_pictures_are_known_by_their_pixels(processor):
    ids, media = rendered(HF, [0, 1, 0], 2, set())
    a, b = (rendered_sample("p", ids, media, processor, sample_id="s", group_id="g") for _ in "ab")
    assert a.media_cache_keys == b.media_cache_keys and len(set(a.media_cache_keys)) == 2
    assert [s.media_index for s in a.modality_spans] == [0, 1, 0]
    assert mp.pack([a]).pixel_values is not None


def test_a_store_forgets_what_no_sample_shows(processor):
    store = MediaStore()
    names = {"store": store, "group_id": "g"}
    made = [
        rendered_sample("p", *rendered(HF, [n], 1, set()), processor, sample_id=str(n), **names)
        for n in (0, 1)
    ]
    assert len(store) == 2 and repr(store).startswith("MediaStore(media=2, bytes=")
    store.keep_only(made[1:])
    assert list(store) == made[1].media_cache_keys
    ids, media = rendered(HF, [0], 1, {"hash-0"})
    with pytest.raises(
        ArgumentError, match=r"p/image/0 has no pixels, and its hash 'hash-0' is new here"
    ):
        rendered_sample("p", ids, media, processor, sample_id="s", **names)


@pytest.mark.parametrize(
    "change, error, why",
    [
        ({"ranges": [(1, 2)]}, LayoutError, r"should fill tokens \[1, 3\)"),
        ({"items": []}, ArgumentError, "items has 0 entries"),
        ({"items": 7}, ArgumentError, "expected a list"),
        ({"items": [{}]}, ArgumentError, "not embeddings"),
        *(
            ({"items": [{"pixel_values": [], "image_grid_thw": g}]}, ArgumentError, "expected t, h")
            for g in ([1, 2], [[0, 2, 2]], [[1, 2, 2], [1, 2, 2]], [[1.0, 2.0, 2.0]], "text")
        ),
        (
            {"items": [{"pixel_values": np.zeros((3, 1176)), "image_grid_thw": [[1, 2, 2]]}]},
            ArgumentError,
            "patches of pixels",
        ),
        ({"hashes": [], "ranges": [], "items": []}, LayoutError, "a medium was dropped"),
    ],
)
def test_lists_that_do_not_fit_are_refused(processor, change, error, why):
    ids, media = rendered(HF, [0], 1, set())
    wrong = dataclasses.replace(media, **{name: {"image": x} for name, x in change.items()})
    with pytest.raises(error, match=why):
        rendered_sample("p", ids, wrong, processor, sample_id="s", group_id="g")


@pytest.mark.parametrize(
    "ids", [None, "text", [], [[1], [2, 3]], [1.5], [-1], [[1]], 4, [2**63], [2**31]]
)
def test_what_is_no_prompt_is_refused(processor, ids):
    with pytest.raises(ArgumentError, match="expected ids"):
        rendered_sample("p", ids, RenderedMedia(), processor, sample_id="s", group_id="g")


def test_kept_ids_need_processed_logprobs():
    kept = kept_lists([[7, 3], [5]], 2, {"logprobs": "processed"}, "here")
    assert [ids.tolist() for ids in kept.lists()] == [[3, 7], [5]]
    for sampling in (None, {}, {"logprobs": "raw"}):
        with pytest.raises(
            ArgumentError, match=r"of kind (None|'raw'): these must be over the ids kept"
        ):
            kept_lists([[7]], 1, sampling, "here")
    for lists in (None, 3, [[1]]):
        with pytest.raises(ArgumentError, match="for 2 sampled tokens"):
            kept_lists(lists, 2, {"logprobs": "processed"}, "here")
