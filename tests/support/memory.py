"""Models and packs whose bytes tests count: wide enough that a row's activations are what counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from support.live_bytes import LiveBytes
from support.models import with_pixels
from support.samples import make_sample
from support.tiny_models import tiny_model

import mmpack as mp
from mmpack.adapters.transformers import packed_logprobs
from mmpack.ops.linear_attention import SegmentPlan
from mmpack.packing.batch import PackedBatch
from mmpack.planning.memory import Load
from mmpack.versions import takes_encoded_media

GRID = (1, 24, 24)


def counted_model(family: str, dtype: torch.dtype = torch.float32, layers: int = 4) -> Any:
    """Decoder 256 wide, MLP of 1,024; tower 128 wide. The embedding is frozen: its gradient would be most of all."""
    with torch.device("meta"):
        whole = tiny_model(family)
    config = whole.config
    text, tower = config.text_config, config.vision_config
    text.update({"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": layers})
    text.update({"num_attention_heads": 4, "num_key_value_heads": 2})
    if getattr(text, "head_dim", None):
        text.head_dim = 64
    if getattr(text, "layer_types", None):
        linear = "linear_attention" if family == "qwen3_5" else "full_attention"
        text.layer_types = [linear] * (layers - 1) + ["full_attention"]
    if "mrope_section" in (getattr(text, "rope_parameters", None) or {}):
        # not in place: every tiny model has this dict
        sections = [3, 3, 2] if family == "qwen3_5" else [8, 12, 12]
        text.rope_parameters = text.rope_parameters | {"mrope_section": sections}
    if family == "qwen2_vl":
        tower.embed_dim, tower.hidden_size = 128, 256
    else:
        tower.hidden_size, tower.intermediate_size = 128, 512
        if family == "internvl":
            tower.image_size = [GRID[1] * 14, GRID[2] * 14]
            config.image_seq_length = GRID[1] * GRID[2] // 4
        else:
            tower.out_hidden_size = 256
    torch.manual_seed(0)
    model = type(whole)(config).to(dtype).train()
    model.get_input_embeddings().requires_grad_(False)
    return model


def some_pack(
    family: str, share_prefix: bool, pictures: bool = True, prompt: int = 500
) -> PackedBatch:
    media = [("image", GRID, "x")] if pictures else []
    parts = [[("text", range(prompt)), *media, ("response", range(k, k + 24))] for k in (100, 300)]
    samples = [make_sample(p, f"s{k}", family=family) for k, p in enumerate(parts)]
    return mp.pack(with_pixels(samples), share_prefix=share_prefix)


def load_of(batch: PackedBatch, model: Any) -> Load:
    """As the model runs the batch: before transformers 5.19 a picture is encoded for each run of placeholders."""
    keys = batch.attention_plan.key_rows
    patches = np.diff(batch.patch_offsets.numpy())
    if not takes_encoded_media(model):
        patches = patches[batch.media_order]
    return Load(
        len(batch.input_ids),
        len(batch.loss_rows),
        int(patches.sum()),
        0 if keys is None else len(keys),
        len(batch.vision_rows.features),
        *linear_load(batch.segment_plan),
    )


def linear_load(plan: SegmentPlan | None) -> tuple[int, int]:
    """Chunks, and segments that start from another's state."""
    if plan is None:
        return 0, 0
    chunks = sum(math.ceil(n / 64) for n in np.diff(plan.offsets).tolist())
    return chunks, int((plan.parents >= 0).sum())


def peak_bytes(model: Any, batch: PackedBatch, grad: bool = True) -> int:
    """Counted bytes of a pass, and its backward, beyond weights, gradients and the batch."""
    known = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            known.append(parameter.grad)
    known += [t for t in vars(batch).values() if torch.is_tensor(t)]
    with LiveBytes(known) as live, torch.set_grad_enabled(grad):
        values = packed_logprobs(model, batch)
        if grad:
            values.sum().backward()
        del values
    return live.peak
