"""Tiny models and made-up pixels for the adapter's tests; values and gradients of a batch's logprobs."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from conformance.oracle import (
    Gradients,
    logprobs_and_gradients,
    relative_difference,
    weights_of,
)
from support.kits import get_kit
from support.kits.base import spread_out
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLModel

from mmpack.families import get_family
from mmpack.schema.sample import Sample

__all__ = [
    "PATCH_DIM",
    "Gradients",
    "logprobs_and_gradients",
    "needs_encoded_media",
    "relative_difference",
    "small_model",
    "smallest_qwen2_5_vl",
    "spread_out",
    "weights_of",
    "with_pixels",
]
needs_encoded_media = pytest.mark.skipif(
    "mm_encoder_outputs" not in inspect.signature(Qwen2_5_VLModel.forward).parameters,
    reason="transformers before 5.19",
)
PATCH_DIM = get_family("qwen2_5_vl").patch_dim  # 3 channels · 2 frames · 14 · 14


def with_pixels(samples: list[Sample]) -> list[Sample]:
    """Give each medium random pixels that follow from its cache key."""
    for sample in samples:
        for medium in sample.media:
            seed = int(hashlib.sha256(medium.cache_key.encode()).hexdigest()[:8], 16)
            shape = get_family(sample.family).pixel_shape(medium.grid_thw, medium.modality)
            pixels = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
            medium.pixel_values = pixels
    return samples


def small_model(family: str, factor: float | None = None) -> Any:
    """`tiny_model` at half its width, spread out: the same layers, vocabulary and tower; two queries per key.

    Skips the test where this transformers lacks the model.
    """
    kit = get_kit(family)
    if not kit.available:
        pytest.skip(f"this transformers has no model of {family}")
    return kit.small(spread=factor)


def smallest_qwen2_5_vl(tied: bool = True) -> Any:
    """A quarter of `tiny_qwen2_5_vl`, spread out, for tests that run many passes; `tied`: the head is the embedding."""
    config = get_kit("qwen2_5_vl").model_config()
    config.text_config.update({"hidden_size": 32, "intermediate_size": 64})
    config.text_config.update({"num_attention_heads": 1, "num_key_value_heads": 1})
    config.vision_config.out_hidden_size = 32
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = tied
    torch.manual_seed(0)
    return spread_out(Qwen2_5_VLForConditionalGeneration(config)).eval()
