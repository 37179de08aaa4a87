"""Packs of videos against each sample by itself, by the model's own attention: shared, with images between, cut."""

import numpy as np
import pytest
import torch
from support.families import LAYOUTS
from support.models import small_model, with_pixels
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.contracts import TOLERANCES
from mmpack.video.drop import drop_frames

pytestmark = pytest.mark.adapter


def samples_of(name):
    """A prompt with a film that two answers share; three films with pictures between; one of the films again."""
    rng = np.random.default_rng(5)

    def words(n):
        return rng.integers(0, 151643, n)

    films = {
        k: ("video", grid, k)
        for k, grid in {"f": (3, 4, 4), "g": (2, 4, 8), "h": (1, 8, 4)}.items()
    }
    pictures = [("image", (1, 4, 6), "x"), ("image", (1, 4, 4), "y")]
    prompt = [("text", words(4)), films["f"], ("text", words(3))]
    parts = [
        [*prompt, ("response", words(3))],
        [*prompt, ("response", words(5)), pictures[0], ("response", words(2), 1)],
        [
            ("text", words(2)),
            films["g"],
            pictures[1],
            films["f"],
            pictures[0],
            films["h"],
            ("response", words(4)),
        ],
        [films["h"], ("text", words(1)), films["h"], ("response", words(2))],
    ]
    samples = [make_sample(p, f"s{i}", f"g{i // 2}", family=name) for i, p in enumerate(parts)]
    seconds = {"f": 0.48, "g": 1 / 3, "h": 1 / 24}
    for sample in samples:
        for medium in sample.media:
            if name == "qwen2_5_vl" and medium.modality == "video":
                medium.second_per_grid_ts = seconds[medium.media_id]
    return with_pixels(samples)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_videos_in_every_layout(name):
    model, samples = small_model(name), samples_of(name)
    short = drop_frames(samples[0], 0, [1])
    short.sample_id = "shorter"
    samples.append(short)
    assert mp.validate(samples) == []
    with torch.no_grad():
        wanted = torch.cat([packed_logprobs(model, mp.pad([s])) for s in samples])
        with attach(model):
            for layout, make in LAYOUTS.items():
                batch = make(samples)
                values = packed_logprobs(model, batch)
                assert (values - wanted).abs().max() <= TOLERANCES["layouts"].value, layout
                if layout == "shared":
                    assert len(batch.media) == 6  # f, g, h, x, y and the shorter f
                    assert batch.stats["tokens"] < batch.stats["tokens_unshared"]
    assert not torch.equal(wanted[:3], wanted[-3:])  # the dropped frames mattered
