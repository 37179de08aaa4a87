"""A tiny Qwen2.5-VL of mbridge's on Megatron's local layers, and transformers' with the same weights as its oracle."""

from __future__ import annotations

import re
import sys
from copy import deepcopy
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import megatron
import numpy as np
import torch
from mbridge.models.qwen2_5_vl import Qwen2_5VLBridge
from mbridge.models.qwen2_5_vl.attention import Qwen2_5VLSelfAttention
from mbridge.models.qwen2_5_vl.model import Qwen2_5VLModel
from mbridge.models.qwen2_5_vl.transformer_config import (
    get_vision_model_config,
    get_vision_projection_config,
)
from megatron.core import parallel_state as ps
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.mlp import MLPSubmodules
from support.megatron_models import FAMILY, VOCAB, config_of, weights_of, wrapped
from support.models import with_pixels
from support.samples import make_medium
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

import mmpack as mp
from mmpack.families import FAMILIES, get_family
from mmpack.families.register import register_family
from mmpack.schema.spans import LossSpan, ModalitySpan

TOWER = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 2}
PLACES = ("image_token_id", "video_token_id", "vision_start_id", "vision_end_id")
IDS = {
    "image_token_id": FAMILY.image_token_id,
    "video_token_id": FAMILY.video_token_id,
    "vision_start_token_id": FAMILY.vision_start_id,
    "vision_end_token_id": FAMILY.vision_end_id,
    "tie_word_embeddings": False,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}


TEXT_CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPE,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
QWEN3 = replace(
    get_family("qwen3_vl"),
    name="few_ids_3",
    model_types=("few_ids_3",),
    **{name: getattr(FAMILY, name) for name in ("vocab_size", "pad_token_id", *PLACES)},
)
if QWEN3.name not in FAMILIES:
    register_family(QWEN3)


def build_vlm(sizes: dict[str, Any], **options: Any) -> list[Any]:
    """This rank's stage in Megatron's DDP, in training; weights follow from their names."""
    own = Qwen2_5VLSelfAttention.forward
    if not hasattr(
        own, "_told_less"
    ):  # mbridge 0.15.1 knows fewer arguments than Megatron-Core 0.16.1 has

        def forward(self: Any, *args: Any, rotary_pos_cos_sin: Any = None, **kwargs: Any) -> Any:
            return own(self, *args, **kwargs)

        forward._told_less = True
        Qwen2_5VLSelfAttention.forward = forward
    config = config_of(sizes, layernorm_epsilon=1e-6, **options)
    seen = get_vision_model_config(deepcopy(config))
    for name, value in TOWER.items():
        setattr(seen, name, value)
    seen.num_query_groups, seen.kv_channels, seen.fullatt_block_indexes = 2, 16, [1]
    seen.pipeline_model_parallel_size, seen.virtual_pipeline_model_parallel_size = 1, None
    seen.recompute_granularity = None
    merger = get_vision_projection_config(deepcopy(seen), 32, 2)
    merger.hidden_size = config.hidden_size
    model = Qwen2_5VLModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        VOCAB,
        128,
        seen,
        get_vit_layer_with_local_spec(),
        merger,
        MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        image_token_id=FAMILY.image_token_id,
        video_token_id=FAMILY.video_token_id,
    )
    model.model_type = ModelType.encoder_or_decoder  # as mbridge's get_model does
    return [wrapped(model, config)]


def build_qwen3_vl(sizes: dict[str, Any], **options: Any) -> list[Any]:
    """Megatron-Bridge's Qwen3-VL, dense, whose deepstack goes into both layers."""
    own = "bridge.models.qwen_vl.modelling_qwen3_vl"
    for name in ("bridge", "bridge.models", "bridge.models.qwen_vl", own):
        # their __init__ imports Transformer Engine
        package = ModuleType(f"megatron.{name}")
        package.__path__ = [f"{path}/{name.replace('.', '/')}" for path in megatron.__path__]
        sys.modules.setdefault(package.__name__, package)
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import rope
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model import Qwen3VLModel
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_config import (
        Qwen3VLTransformerConfig,
    )

    # which transformers 5 has no more
    rope.Qwen3VLTextRotaryEmbedding.apply_interleaved_mrope = _interleaved
    whole = qwen3_config()
    more = {
        "vocab_size": VOCAB,
        "language_max_sequence_length": 128,
        "hf_text_config": whole.text_config,
    }
    more |= {"image_token_id": FAMILY.image_token_id, "qk_layernorm": True, "add_qkv_bias": False}
    config = config_of(sizes, Qwen3VLTransformerConfig, layernorm_epsilon=1e-6, **more, **options)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = Qwen3VLModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        whole.vision_config,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        pg_collection=groups,
    )
    model.model_type = ModelType.encoder_or_decoder
    return [wrapped(model, config)]


def _interleaved(self: Any, freqs: torch.Tensor, sections: list[int]) -> torch.Tensor:
    """[3, B, S, d] -> [B, S, d]: every third of time's frequencies is height's, and every third width's."""
    out = freqs[0].clone()
    for row in (1, 2):
        out[..., row : 3 * sections[row] : 3] = freqs[row, ..., row : 3 * sections[row] : 3]
    return out


VISION_CONFIG = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
}


def qwen3_config() -> Any:
    return Qwen3VLConfig(
        text_config=TEXT_CONFIG
        | {"head_dim": 16, "rope_parameters": ROPE | {"mrope_interleaved": True}},
        vision_config=VISION_CONFIG | {"patch_size": 16, "deepstack_visual_indexes": [0, 1]},
        **IDS,
    )


def transformers_model(qwen3: bool = False) -> Any:
    if qwen3:
        return Qwen3VLForConditionalGeneration(qwen3_config()).eval()
    config = Qwen2_5_VLConfig(
        text_config=TEXT_CONFIG,
        vision_config=VISION_CONFIG | {"fullatt_block_indexes": [1]},
        **IDS,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def in_transformers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights or gradients of the whole Megatron model by transformers' names, as mbridge converts them."""
    bridge = object.__new__(Qwen2_5VLBridge)
    bridge.make_vocab_size_divisible_by = None
    bridge.hf_config = SimpleNamespace(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vision_config=SimpleNamespace(num_heads=2, hidden_size=32),
    )
    own = {}
    if (
        "vision_model.pos_embed.weight" in tensors
    ):  # Qwen3-VL: a tower of transformers', and norms of heads
        for name in [
            n for n in tensors if n.startswith("vision_model.") or "_layernorm.weight" in n
        ]:
            key = name.replace("vision_model.", "model.visual.").replace(
                "self_attention.", "self_attn."
            )
            key = key.replace("language_model.decoder.", "model.language_model.")
            key = key.replace("q_layernorm", "q_norm").replace("k_layernorm", "k_norm")
            if "vision_model" in name or "_norm." in key:
                own[key] = name
    out = {key: tensors[name] for key, name in own.items()}
    for name, value in tensors.items():
        if name in own.values():
            continue
        fused = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        fused = fused.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        for key, part in zip(*bridge._weight_to_hf_format(fused, value), strict=True):
            key = re.sub(r"^model\.", "model.language_model.", key)
            out[re.sub(r"^visual\.", "model.visual.", key)] = part
    return out


def pictured_samples(
    groups: list[list[str]], seed: int = 0, family: str = FAMILY.name
) -> list[mp.Sample]:
    """Three responses for each prompt, which has pictures of these names; a name ends with its grid, as "a:4x6"."""
    rng = np.random.default_rng(seed)
    out = []
    for g, names in enumerate(groups):
        prompt, media, spans = rng.integers(0, 500, 5).tolist(), [], []
        for name in names:
            height, width = map(int, name.split(":")[1].split("x"))
            medium = make_medium(name, (1, height, width))
            if medium.media_id not in [m.media_id for m in media]:
                media.append(medium)
            start = len(prompt) + 1
            prompt += [FAMILY.vision_start_id, *[FAMILY.image_token_id] * medium.num_tokens]
            at = [m.media_id for m in media].index(name)
            spans.append(ModalitySpan(start, len(prompt), "image", at))
            prompt += [FAMILY.vision_end_id, *rng.integers(0, 500, 2).tolist()]
        for k in range(3):
            own = rng.integers(0, 500, int(rng.integers(2, 6))).tolist()
            sample = mp.Sample(
                sample_id=f"{seed}.{g}/{k}",
                group_id=f"{seed}.{g}",
                family=family,
                input_ids=np.asarray(prompt + own, dtype=np.int64),
                media=[deepcopy(m) for m in media],
                modality_spans=list(spans),
                loss_spans=[LossSpan(len(prompt), len(prompt) + len(own), "response", None)],
            )
            out.append(sample)
    return with_pixels(out)


def by_transformers(
    batches: list[list[mp.Sample]], tensors: dict[str, torch.Tensor], qwen3: bool = False
) -> Any:
    """Oracle: log-probabilities of each micro-batch, sample by sample, and gradients by transformers' names."""
    model = transformers_model(qwen3)
    model.load_state_dict(in_transformers(tensors))
    found = []
    for samples in batches:
        logprobs = [transformers_alone(model, s) for s in samples]
        targets = [torch.as_tensor(s.input_ids)[torch.as_tensor(s.loss_indices)] for s in samples]
        loss = (torch.cat(logprobs) * weights_of(torch.cat(targets))).sum()
        (loss / len(batches)).backward()
        found.append(torch.cat(logprobs).detach())
    return found, {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }


def transformers_alone(model: Any, sample: mp.Sample) -> torch.Tensor:
    ids = torch.as_tensor(sample.input_ids)[None]
    given: dict[str, Any] = {"mm_token_type_ids": (ids == FAMILY.image_token_id).int()}
    order = [span.media_index for span in sample.modality_spans]
    if order:
        media = [sample.media[i] for i in order]
        given["pixel_values"] = torch.cat([torch.as_tensor(m.pixel_values) for m in media])
        given["image_grid_thw"] = torch.tensor([m.grid_thw for m in media])
    out = model(input_ids=ids, use_cache=False, **given).logits[0]
    where = torch.as_tensor(sample.loss_indices)
    return out[where - 1].log_softmax(-1).gather(1, ids[0, where, None])[:, 0]
