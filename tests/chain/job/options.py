"""What `python -m chain` is asked for, and the shape of the model that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.step.models import MODELS, Shape
from mmpack.errors import check_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
QWEN3_5 = Shape(
    "qwen3_5",
    "Qwen3_5",
    {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248_320,
        "pad_token_id": 248044,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
    MODELS["qwen3-vl-8b"].vision,
)
FAMILIES = {
    "qwen2.5-vl": MODELS["qwen2.5-vl-7b"],
    "qwen3-vl": MODELS["qwen3-vl-8b"],
    "qwen3.5": QWEN3_5,
}
SIZES = ("tiny", "layer")
ONE_PROCESS = (
    "batch", "pictures", "padding", "packed", "shared", "processor_cache", "feature_cache",
    "prefix_cache",
)  # fmt: skip
RANKS = ("tensor_parallel", "sequence_parallel", "fsdp")
AXES = (*ONE_PROCESS, *RANKS)


@dataclass(frozen=True)
class Options:
    """`tp`: ranks of the tensor-parallel axis. `layers`: of the decoder. `invariant`: within `mmpack.invariant`."""

    model: str = "qwen2.5-vl"
    size: str = "tiny"
    dtype: str = "float32"
    device: str = "cpu"
    axes: Sequence[str] = ONE_PROCESS
    tp: Sequence[int] = (1, 2, 4)
    layers: int = 2
    seed: int = 0
    invariant: bool = False

    def __post_init__(self) -> None:
        for name, names in (("model", FAMILIES), ("size", SIZES), ("dtype", DTYPES)):
            check_name("chain", name, getattr(self, name), names)
        for axis in self.axes:
            check_name("chain", "axis", axis, AXES)


def shape_of(options: Options) -> Shape:
    """Real widths and few layers; or a tiny model whose heads four ranks divide, with logits that are far from even."""
    real = FAMILIES[options.model]
    hybrid = real.family == "qwen3_5"
    deep = {"deepstack_visual_indexes": [0, 1]} if real.family == "qwen3_vl" else {}
    windows = {"fullatt_block_indexes": [1]} if real.family == "qwen2_5_vl" else {}
    vision = real.vision | {"depth": 2} | deep | windows
    text = real.text | {"num_hidden_layers": options.layers}
    if hybrid:  # both kinds of layers, the last one with full attention
        kinds = ["full_attention", "linear_attention"] * options.layers
        text["layer_types"] = kinds[: options.layers][::-1]
    if options.size == "layer":
        return replace(real, text=text, vision=vision)
    sections: dict[str, Any] = {"mrope_section": [3, 3, 2] if deep else [2, 1, 1]}
    if hybrid:
        sections["partial_rotary_factor"] = 0.5
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        text |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    text |= {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "initializer_range": 0.1,
        "rope_parameters": real.text["rope_parameters"] | sections,
    }
    if "head_dim" in text:
        text["head_dim"] = 16
    if hybrid:  # its norm of small states lets rounding grow
        text["initializer_range"] = 0.05
    vision |= {
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 128,
        "out_hidden_size": 64,
        "initializer_range": 0.1,
    }
    return replace(real, text=text, vision=vision)
