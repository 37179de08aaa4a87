"""Positions of families that hear, against transformers' own `get_rope_index`, a video's sound included."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from support.heard import HEARING
from support.kits import get_kit

import mmpack as mp
from mmpack.families import get_family
from mmpack.layout.tmrope import interleaved

pytestmark = [
    pytest.mark.adapter,
    pytest.mark.skipif(
        not get_kit(HEARING[0]).available,
        reason="this transformers keeps an Omni's towers beside its text model",
    ),
]
MODELS = {"qwen2_5_omni": "Qwen2_5Omni", "qwen3_omni_moe": "Qwen3OmniMoe"}


def upstream(name: str):
    """transformers' method, on what it reads of a model."""
    model = getattr(transformers, MODELS[name] + "ThinkerModel")
    config = get_kit(name).model_config()
    self = SimpleNamespace(config=config, spatial_merge_size=2)
    for method in ("get_llm_pos_ids_for_vision", "get_chunked_index"):
        setattr(self, method, getattr(model, method).__get__(self))
    return model.get_rope_index.__get__(self)


def drawn(rng: np.random.Generator, name: str, sound: bool):
    """ids, and their media by `mrope_positions`' names; of videos all have sound, or none."""
    family = get_family(name)
    audio = family.audio
    start, end = family.vision_start_id, family.vision_end_id
    steps = [0.5, 1.0, 2.0, 4.0, 0.7, 1 / 3] if audio.cuts_times else [1.0, 2.0, 4.0]
    ids: list[int] = []
    media = {
        name: []
        for name in (
            *("image_grid_thw", "video_grid_thw"),
            *("second_per_grid_ts", "audio_feature_lengths"),
        )
    }
    for kind in rng.integers(0, 3, rng.integers(1, 5)):
        ids += rng.integers(1, 999, rng.integers(0, 4)).tolist()
        frames = int(rng.integers(3, 600))
        heard = [audio.token_id] * audio.tokens(frames)
        side = (2 * int(rng.integers(1, 5)), 2 * int(rng.integers(1, 5)))
        if kind == 0:
            media["image_grid_thw"].append((1, *side))
            count = family.vision_tokens((1, *side))
            ids += [start, *[family.image_token_id] * count, end]
            continue
        if kind == 1 or sound:
            media["audio_feature_lengths"].append(frames)
        if kind == 1:
            ids += [audio.start_id, *heard, audio.end_id]
            continue
        grid, seconds = (int(rng.integers(1, 7)), *side), float(rng.choice(steps))
        media["video_grid_thw"].append(grid)
        media["second_per_grid_ts"].append(seconds)
        if sound:
            mine = interleaved(audio, grid, 2, seconds, family.tokens_per_second, len(heard))
            run = np.where(mine, family.video_token_id, audio.token_id).tolist()
            ids += [start, audio.start_id, *run, audio.end_id, end]
        else:
            ids += [start, *[family.video_token_id] * family.vision_tokens(grid), end]
    ids += rng.integers(1, 999, rng.integers(1, 4)).tolist()
    return ids, {key: value or None for key, value in media.items()}


@pytest.mark.parametrize("name", HEARING)
def test_equal_to_get_rope_index(name):
    rng, rope_index = np.random.default_rng(0), upstream(name)
    for trial in range(60):
        ids, media = drawn(rng, name, sound := bool(trial % 2))
        tensors = {k: None if v is None else torch.tensor(v) for k, v in media.items()}
        rows = torch.tensor([ids])
        wanted, delta = rope_index(
            rows,
            tensors["image_grid_thw"],
            tensors["video_grid_thw"],
            torch.ones_like(rows),
            sound and media["video_grid_thw"] is not None,
            tensors["audio_feature_lengths"],
            tensors["second_per_grid_ts"],
        )
        found, found_delta = mp.mrope_positions(ids, name, **media)
        assert found.dtype == np.int64
        assert np.array_equal(found, wanted[:, 0].numpy()), (trial, media)
        assert found_delta == int(delta)


def test_what_does_not_fit_names_the_audio():
    audio = get_family("qwen2_5_omni").audio
    ids = [7, audio.start_id, *[audio.token_id] * 25, audio.end_id, 8]
    with pytest.raises(
        mp.LayoutError, match=r"25 tokens, but its grid \[200, 1, 1\] gives 50"
    ) as error:
        mp.mrope_positions(ids, "qwen2_5_omni", audio_feature_lengths=[200])
    assert error.value.code == "MM101" and error.value.span == (2, 27)
    with pytest.raises(mp.LayoutError, match="1 runs of audio tokens, 0 grids") as error:
        mp.mrope_positions(ids, "qwen2_5_omni")
    assert error.value.code == "MM104"
    with pytest.raises(mp.LayoutError, match="1 runs of audio tokens, 2 grids") as error:
        mp.mrope_positions(ids, "qwen2_5_omni", audio_feature_lengths=[100, 100])
    assert error.value.code == "MM107"
    with pytest.raises(mp.ArgumentError, match="are not lengths"):
        mp.mrope_positions(ids, "qwen2_5_omni", audio_feature_lengths=["long"])


def test_positions_between_two_are_refused():
    """Qwen3-Omni's are fractions where seconds × 13 is none; upstream's are floats."""
    family = get_family("qwen3_omni_moe")
    ids = [family.vision_start_id, *[family.video_token_id] * 2, family.vision_end_id]
    with pytest.raises(mp.ArgumentError, match="between two whole positions at 13 per second"):
        mp.mrope_positions(
            ids, "qwen3_omni_moe", video_grid_thw=[(2, 2, 2)], second_per_grid_ts=[0.7]
        )
