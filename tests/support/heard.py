"""Samples of families that hear, and transformers' own thinker over each of them alone: the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from support.kits import get_kit
from support.kits.samples import draw_pixels, sample_of

import mmpack as mp
from mmpack.families import FAMILIES
from mmpack.schema.sample import Sample

HEARING = [name for name, family in FAMILIES.items() if family.audio is not None]


def some_samples(name: str) -> list[Sample]:
    """Audio shorter and longer than a chunk of the tower, once and again, beside pictures, and as a video's sound."""
    kit, random = get_kit(name), np.random.default_rng(11)

    def text(count: int) -> tuple[Any, ...]:
        return "text", random.integers(0, kit.text_ids, count)

    def loss(count: int) -> tuple[Any, ...]:
        return "loss", random.integers(0, kit.text_ids, count)

    short, long = ("audio", (37, 1, 1), "short"), ("audio", (230, 1, 1), "long")
    image = ("image", kit.image, "x")
    film = ("film", ((3, 4, 4), (260, 1, 1)), "film")
    prompt = [text(3), long, text(2)]
    parts = [
        [*prompt, loss(3), short, loss(2)],
        [*prompt, loss(2), image, loss(2)],
        [text(2), short, short, text(1), loss(3)],
        [text(2), film, text(2), loss(3)],
        [text(2), film, text(2), loss(2)],
    ]
    samples = [sample_of(kit, p, f"s{i}") for i, p in enumerate(parts)]
    draw_pixels(samples)
    return samples


def thinker_inputs(sample: Sample) -> dict[str, Any]:
    """What transformers' processor would hand the thinker for this sample alone."""
    family = FAMILIES[sample.family]
    occurring = [sample.media[s.media_index] for s in sample.modality_spans if not s.chunk]
    ids = torch.tensor(sample.input_ids)[None]
    out: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    names = {"image": "pixel_values", "video": "pixel_values_videos"}
    for modality, pixels in names.items():
        own = [m for m in occurring if m.modality == modality]
        if own:
            out[pixels] = torch.cat([torch.tensor(m.pixel_values) for m in own])
            out[f"{modality}_grid_thw"] = torch.tensor([m.grid_thw for m in own])
    videos = [m for m in occurring if m.modality == "video"]
    if videos:
        out["video_second_per_grid"] = torch.tensor([m.second_per_grid_ts for m in videos])
    heard = [m for m in occurring if m.modality == "audio"]
    if heard:
        lengths = torch.tensor([m.grid_thw[0] for m in heard])
        features = torch.zeros(len(heard), family.audio.mel_bins, int(lengths.max()))
        for row, medium in zip(features, heard, strict=True):
            row[:, : medium.grid_thw[0]] = torch.tensor(medium.pixel_values).T
        out["input_features"] = features
        out["feature_attention_mask"] = (torch.arange(features.shape[2]) < lengths[:, None]).int()
    out["use_audio_in_video"] = any(s.chunk is not None for s in sample.modality_spans)
    return out


def alone(model: Any, samples: list[Sample]) -> torch.Tensor:
    """Log-probabilities of the loss tokens by the model's own forward of each sample, in the model's dtype."""
    out = []
    for sample in samples:
        logits = model(**thinker_inputs(sample)).logits[0].log_softmax(-1)
        at = sample.loss_indices
        out.append(logits[at - 1, sample.input_ids[at]])
    return torch.cat(out)


def layouts(samples: list[Sample]) -> dict[str, Callable[[], Any]]:
    return {
        "packed": lambda: mp.pack(samples),
        "shared": lambda: mp.pack(samples, share_prefix=True),
        "padded left": lambda: mp.pad(samples),
        "padded right": lambda: mp.pad(samples, side="right"),
    }
