"""What configs don't say of layers and towers, by the start of their `model_type`: planning counts by it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class DecoderKind:
    normed: bool = False  # queries and keys have norms
    # attention's output is gated, norms keep float32, and most layers are gated delta nets
    gated: bool = False


@dataclass(frozen=True)
class TowerKind:
    """`mlp`: "gelu", "quick_gelu", or "swiglu" (three products, and RMSNorm in what memory has terms for).

    `merging`: how patches become tokens, a way of planning/flops.py. `tiles`: pictures are cut into tiles, with
    learned positions, and what each half of a block adds is scaled. `ratio`: a config gives the MLP's width as a
    multiple of `embed_dim`. `in_memory`: planning/memory.py has terms for it.
    """

    mlp: str = "gelu"
    merging: str = "beside"
    tiles: bool = False
    ratio: bool = False
    in_memory: bool = False


_DECODERS = {
    "qwen2": DecoderKind(),
    "qwen3": DecoderKind(normed=True),
    "qwen3_5": DecoderKind(normed=True, gated=True),
    "internvl": DecoderKind(),
}
_TOWERS = {
    "qwen2_vl": TowerKind("quick_gelu", ratio=True, in_memory=True),
    "qwen2_5_vl": TowerKind("swiglu", in_memory=True),
    "qwen2_5_omni": TowerKind("swiglu"),
    "qwen3_vl": TowerKind(in_memory=True),
    "qwen3_5": TowerKind(in_memory=True),
    "internvl": TowerKind(merging="folded", tiles=True, in_memory=True),
    "glm": TowerKind(merging="convolved"),
    "glm4v": TowerKind("swiglu", "convolved"),
    "gemma": TowerKind(merging="pooled"),
    "gemma4": TowerKind("swiglu", "pooled"),
    "siglip": TowerKind(merging="pooled"),
    "pixtral": TowerKind("swiglu", "mixed"),
    "minicpmv": TowerKind(merging="twice"),
    "smolvlm": TowerKind(merging="product"),
    "idefics3": TowerKind(merging="product"),
    "llava_onevision": TowerKind(merging="unmerged"),
}

# The config of a model for costs where none is known: Qwen2.5-VL-7B's; and what linear layers of Qwen3.5 have.
REFERENCE = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "vocab_size": 152_064,
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
LINEAR_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def decoder_kind(model_type: str) -> DecoderKind | None:
    """The kind of a decoder; None for one that is not known."""
    return _DECODERS.get(_start(model_type, _DECODERS))


def tower_kind(*model_types: str) -> TowerKind:
    """The kind of a tower by the first name that is known, else the commonest, without terms for memory."""
    known = (_TOWERS.get(_start(name, _TOWERS)) for name in model_types)
    return next((kind for kind in known if kind), TowerKind())


def _start(model_type: str, known: Iterable[str]) -> str:
    return max((name for name in known if model_type.startswith(name)), key=len, default="")
