"""Prompts and media of an engine or a renderer with one part damaged: one line, and never another picture."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.recorded_trees import processor

from mmpack.adapters.rendered import MediaStore, RenderedMedia, rendered_sample
from mmpack.adapters.renderers import to_samples
from mmpack.errors import ArgumentError, LayoutError, MmpackError

START, END, PAD = 151652, 151653, 151655
ROW = [1, START, *[PAD] * 6, END, START, *[PAD] * 6, END, 2]
LINE = r"^[^\n]+\. Fix: [^\n]+$"


def item(seed, grid=(1, 4, 6)):
    draw = torch.Generator().manual_seed(seed)
    patches = int(np.prod(grid))
    return {
        "pixel_values": torch.randn(patches, 1176, generator=draw).bfloat16(),
        "image_grid_thw": torch.tensor(grid),
    }


def two(**changes):
    """Two pictures of one size."""
    parts = {
        "hashes": {"image": ["a", "b"]},
        "ranges": {"image": [(2, 6), (10, 6)]},
        "items": {"image": [item(1), item(2)]},
    }
    return RenderedMedia(**{**parts, **changes})


def rendered(media, store=None):
    return rendered_sample(
        "prompt", ROW, media, processor(), store=store, sample_id="s", group_id="g"
    )


DAMAGED = {
    "ranges exchanged": {"ranges": {"image": [(10, 6), (2, 6)]}},
    "ranges that overlap": {"ranges": {"image": [(2, 6), (5, 6)]}},
    "a range beyond the ids": {"ranges": {"image": [(2, 6), (100, 6)]}},
    "ranges of numbers": {"ranges": {"image": [2, 10]}},
    "a range of NaN": {"ranges": {"image": [(float("nan"), 6), (10, 6)]}},
    "no items": {"items": None},
    "a hash that is a list": {"hashes": {"image": [["a"], "b"]}},
    "pixels of None": {"items": {"image": [{**item(1), "pixel_values": None}, item(2)]}},
    "pixels of unlike rows": {
        "items": {"image": [{**item(1), "pixel_values": [[1.0], [2.0, 3.0]] * 12}, item(2)]}
    },
    "a grid of unlike rows": {
        "items": {"image": [{**item(1), "image_grid_thw": [[1], [2, 3]]}, item(2)]}
    },
    "a huge grid": {"items": {"image": [{**item(1), "image_grid_thw": [2**40] * 3}, item(2)]}},
    "two pictures of one hash": {"hashes": {"image": ["a", "a"]}},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_media(name):
    with pytest.raises(MmpackError, match=LINE):
        rendered(two(**DAMAGED[name]))


def test_pictures_that_are_exchanged():
    """Their grids say that they fill other places."""
    row = [1, START, *[PAD] * 6, END, START, *[PAD] * 4, END, 2]
    parts = {
        "hashes": {"image": ["a", "b"]},
        "ranges": {"image": [(2, 6), (10, 4)]},
        "items": {"image": [item(1), item(2, (1, 4, 4))]},
    }
    store = MediaStore()

    def read(**changes):
        media = RenderedMedia(**{**parts, **changes})
        return rendered_sample(
            "prompt", row, media, processor(), store=store, sample_id="s", group_id="g"
        )

    assert [m.num_tokens for m in read().media] == [6, 4]
    exchanged = {"image": ["b", "a"]}
    for changes in (
        {"items": {"image": [None, None]}, "hashes": exchanged},
        {"items": {"image": parts["items"]["image"][::-1]}, "hashes": {"image": ["c", "d"]}},
    ):
        with pytest.raises(LayoutError, match=r"has 6 placeholders, its grid .+ needs 4"):
            read(**changes)


def test_a_hash_never_stands_for_two_pictures():
    store = MediaStore()
    first = rendered(two(), store)
    again = rendered(two(), store)  # the same pixels, sent twice
    bare = rendered(two(items={"image": [None, None]}), store)
    assert first.media == again.media == bare.media and len(store) == 2
    for other in (item(3), item(1, (1, 6, 4))):
        with pytest.raises(ArgumentError, match="hash 'a' came with other pixels before"):
            rendered(two(items={"image": [other, item(2)]}), store)
    assert len(store) == 2


STEP = {
    "prompt_ids": [1, 2],
    "completion_ids": [3, 4],
    "completion_logprobs": [-1.0, -2.0],
    "sampling_mask": [[3, 5], [4]],
}
WRONG = {
    "prompt_ids": [None, "x", [], [1.5], 5],
    "completion_ids": [None, "x", [1.5], 5, [-1]],
    "completion_logprobs": ["x", 5, [-1.0], [None, None], ["a", "b"], [float("nan"), -1.0]],
    "sampling_mask": ["x", 5, [[3]], [["a"], ["b"]], [[3.5], [4]], [None, None]],
    "completion_mask": ["x", [1], [2, 0], 5, [None, 1]],
    "multi_modal_data": [
        "x",
        5,
        SimpleNamespace(mm_hashes=5, mm_placeholders=5, mm_items=5),
        SimpleNamespace(mm_hashes={"image": ["h"]}, mm_placeholders={"image": [5]}, mm_items={}),
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_steps_of_renderers(name):
    sampling = {"logprobs": "processed"}
    assert len(to_samples([STEP], processor(), sampling=sampling)) == 1
    for value in WRONG[name]:
        with pytest.raises(MmpackError, match=LINE):
            to_samples([{**STEP, name: value}], processor(), sampling=sampling)
