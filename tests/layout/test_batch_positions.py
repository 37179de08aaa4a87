"""Positions of many samples in one go, against transformers' own of each, and what is wrong with one of them."""

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from support.layouts import random_layout
from test_mrope import kinds_of, upstream

import mmpack as mp
from mmpack.errors import LayoutError
from mmpack.families import get_family
from mmpack.layout.batch_positions import batch_positions
from mmpack.layout.runs import placeholder_runs

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")


def sample_of(layout, family, number):
    """A sample of ids and grids; media come in the order of their runs."""
    ids, *grids, seconds = layout
    left = {"image": list(map(tuple, grids[0])), "video": list(map(tuple, grids[1]))}
    media, spans, open_frames = [], [], 0
    for kind, (start, stop) in zip(
        placeholder_runs(ids, family).modalities, placeholder_runs(ids, family).bounds, strict=True
    ):
        if not open_frames:
            grid = left[kind].pop(0)
            known = {"second_per_grid_ts": seconds.pop(0)} if kind == "video" else {}
            tokens = family.vision_tokens(grid)
            name = f"{number}/{len(media)}"
            media.append(mp.Medium(name, kind, name, grid, tokens, **known))
            frames = open_frames = family.spans_of(kind, grid)
        frame = frames - open_frames if family.in_pieces(kind) else None
        spans.append(mp.schema.ModalitySpan(start, stop, kind, len(media) - 1, frame))
        open_frames -= 1
    return mp.Sample(str(number), "g", family.name, ids, media, spans, [])


def drawn(name, count, seed=0):
    rng, family = np.random.default_rng(seed), get_family(name)
    layouts = [random_layout(rng, family) for _ in range(count)]
    copies = [(ids, im, vi, list(s)) for ids, im, vi, s in layouts]
    return layouts, [sample_of(layout, family, k) for k, layout in enumerate(copies)], family


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_to_get_rope_index_of_each(name):
    layouts, samples, family = drawn(name, 20)
    model = upstream(name)
    if name == "qwen2_5_vl" and Version(transformers.__version__) < Version("5.19"):
        for sample in samples:
            sample.processor = {"position_rule": "grid_int"}
    found = batch_positions(samples, family)
    ends = np.cumsum([0, *map(len, samples)])
    assert found.dtype == np.int64 and found.shape == (3, ends[-1])
    for k, (ids, images, videos, seconds) in enumerate(layouts):
        extra = {"second_per_grid_ts": torch.tensor(seconds)} if name == "qwen2_5_vl" else {}
        wanted, _ = model.get_rope_index(
            torch.tensor(ids)[None],
            mm_token_type_ids=kinds_of(ids, family, model.config).int()[None],
            image_grid_thw=torch.tensor(images) if images else None,
            video_grid_thw=torch.tensor(videos) if videos else None,
            **(extra if videos else {}),
        )
        assert np.array_equal(found[:, ends[k] : ends[k + 1]], wanted[:, 0].numpy())


def test_recorded_positions_and_other_rules_keep_their_place():
    _, samples, family = drawn("qwen2_5_vl", 6, seed=1)
    samples[1].position_ids = np.full((3, len(samples[1])), 7)
    samples[4].processor = {"position_rule": "max"}
    apart = [batch_positions([s], family) for s in samples]
    assert (apart[1] == 7).all()
    assert np.array_equal(batch_positions(samples, family), np.concatenate(apart, axis=1))
    assert batch_positions([], family).shape == (3, 0)


def test_no_run_and_no_grid_reaches_into_the_next_sample():
    """One sample ends with a picture and the next begins with one; one has a grid too many, the next one too few."""
    family = get_family("qwen2_vl")
    image = family.image_token_id

    def picture(ids, name, grids, spans):
        media = [mp.Medium(f"{name}{k}", "image", f"{name}{k}", g, 4) for k, g in enumerate(grids)]
        listed = [mp.schema.ModalitySpan(a, a + 4, "image", k) for k, a in enumerate(spans)]
        return mp.Sample(name, "g", family.name, np.array(ids), media, listed, [])

    a = picture([5, *[image] * 4], "a", [(1, 4, 4)], [1])
    b = picture([*[image] * 4, 6], "b", [(1, 4, 4)], [0])
    found = batch_positions([a, b], family)
    assert found.tolist() == [
        [0, 1, 1, 1, 1, 0, 0, 0, 0, 2],
        [0, 1, 1, 2, 2, 0, 0, 1, 1, 2],
        [0, 1, 2, 1, 2, 0, 1, 0, 1, 2],
    ]
    surplus = picture([5, *[image] * 4, 5], "a", [(1, 4, 4)] * 2, [1, 1])
    lacking = picture([*[image] * 4, 6, *[image] * 4], "b", [(1, 4, 4)], [0])
    with pytest.raises(LayoutError, match=r"1 runs of image tokens, but 2 grids.*MM107"):
        batch_positions([surplus, lacking], family)
    with pytest.raises(LayoutError, match=r"first without one is \[5, 9\).*MM104"):
        batch_positions([a, lacking], family)
