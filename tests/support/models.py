"""Tiny models and made-up pixels for the adapter's tests; values and gradients of a batch's logprobs."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from mmpack.adapters.transformers import packed_logprobs
from mmpack.families import get_family
from mmpack.schema.sample import Sample
from mmpack.smoke.tiny_models import tiny_model, tiny_qwen2_5_vl

Gradients = dict[str, torch.Tensor]
PATCH_DIM = get_family("qwen2_5_vl").patch_dim  # 3 channels · 2 frames · 14 · 14


def with_pixels(samples: list[Sample]) -> list[Sample]:
    """Give each medium random pixels that follow from its cache key."""
    for sample in samples:
        for medium in sample.media:
            seed = int(hashlib.sha256(medium.cache_key.encode()).hexdigest()[:8], 16)
            patch_dim = get_family(sample.family).patch_dim
            shape = (int(np.prod(medium.grid_thw)), patch_dim)
            pixels = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
            medium.pixel_values = pixels
    return samples


def small_model(family: str, factor: float = 4) -> Any:
    """`tiny_model` at half its width, spread out: the same layers, vocabulary and tower; two queries per key."""
    with torch.device("meta"):
        whole = tiny_model(family)
    config = whole.config
    config.text_config.update({"hidden_size": 64, "num_attention_heads": 2})
    config.text_config.update({"num_key_value_heads": 1})
    tower = config.vision_config
    if family == "qwen2_vl":
        tower.hidden_size = 64  # of its output; its own width is embed_dim
    elif hasattr(tower, "out_hidden_size"):
        tower.out_hidden_size = 64
    torch.manual_seed(0)
    return spread_out(type(whole)(config), factor).eval()


def smallest_qwen2_5_vl(tied: bool = True) -> Any:
    """A quarter of `tiny_qwen2_5_vl`, spread out, for tests that run many passes; `tied`: the head is the embedding."""
    config = tiny_qwen2_5_vl().config
    config.text_config.update({"hidden_size": 32, "intermediate_size": 64})
    config.text_config.update({"num_attention_heads": 1, "num_key_value_heads": 1})
    config.vision_config.out_hidden_size = 32
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = tied
    torch.manual_seed(0)
    return spread_out(Qwen2_5_VLForConditionalGeneration(config)).eval()


def spread_out(model: Any, factor: float = 4) -> Any:
    """Larger weights, by `factor`, so that attention is far from uniform and a wrong row shows in the logprobs."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "layers" in name:
                parameter.mul_(factor)
    return model


def weights_of(batch: Any) -> torch.Tensor:
    """float32 [N]: a weight for each loss token, that follows from its id and its index in the sample."""
    return (1 + (batch.loss_targets % 7 + batch.loss_token_index % 5).float()) / 10


def logprobs_and_gradients(model: Any, batch: Any, **kwargs: Any) -> tuple[torch.Tensor, Gradients]:
    """float32 [N], and the gradient of their weighted sum, by parameter."""
    model.zero_grad(set_to_none=True)
    logprobs = packed_logprobs(model, batch, **kwargs)
    (logprobs * weights_of(batch)).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return logprobs.detach(), gradients


def relative_difference(a: Gradients, b: Gradients) -> float:
    """Frobenius norm of the difference of two sets of gradients, over that of the second."""
    assert a.keys() == b.keys()
    off = sum((a[n].double() - b[n].double()).square().sum() for n in a)
    return float((off / sum(g.double().square().sum() for g in b.values())).sqrt())
