"""The models of the step's benchmark: real shapes, random weights, gradient checkpointing."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import transformers
from torch.distributed.fsdp import fully_shard

from mmpack.adapters.transformers.modules import decoder_layers, tower_blocks
from mmpack.demo.tiny_models import tiny_model
from mmpack.errors import ArgumentError, BackendError, installed_version

VOCABULARY = 151_936


@dataclass(frozen=True)
class Shape:
    """A model: its family, transformers' prefix of class names, and the two halves of its config."""

    family: str
    name: str
    text: dict[str, Any]
    vision: dict[str, Any]


def _qwen2_5(hidden: int, intermediate: int, layers: int, heads: int, key_heads: int) -> Shape:
    text = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 24, 24],
        },
    }
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "num_heads": 16,
        "intermediate_size": 3420,
        "out_hidden_size": hidden,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    }
    return Shape("qwen2_5_vl", "Qwen2_5_VL", text, vision)


MODELS = {
    "qwen2.5-vl-7b": _qwen2_5(3584, 18944, 28, 28, 4),
    "qwen2.5-vl-3b": _qwen2_5(2048, 11008, 36, 16, 2),
    "qwen3-vl-8b": Shape(
        "qwen3_vl",
        "Qwen3VL",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "pad_token_id": 151643,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        {
            "depth": 27,
            "hidden_size": 1152,
            "num_heads": 16,
            "intermediate_size": 4304,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    ),
}


def build(name: str, device: Any, layers: int | None = None, tiny: bool = False) -> Any:
    """The model in training mode with gradient checkpointing, weights by seed 0; bf16 on a GPU, float32 on a CPU.

    Args: `layers`: decoder layers, fewer than the model's own for a try. `tiny`: `smoke`'s model of the family.
    """
    shape = MODELS[name]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if tiny:
        model = tiny_model(shape.family, dtype=dtype).to(device)
    else:
        cut = {} if layers is None else {"num_hidden_layers": layers}
        model = random_model(replace(shape, text=shape.text | cut), device, dtype)
    with warnings.catch_warnings():
        # a newer transformers would have it called by another name, which older ones lack
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def random_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of this shape, weights by seed 0, made on `device` in `dtype`; sdpa."""
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": 32_768} | shape.text
    config = getattr(transformers, f"{shape.name}Config")(
        text_config=text, vision_config=shape.vision, tie_word_embeddings=False
    )
    architecture = getattr(transformers, f"{shape.name}ForConditionalGeneration")
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return architecture._from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)


def shard(model: Any) -> Any:
    """FSDP2 over the decoder's layers, the tower's blocks and the rest."""
    for layer in [*decoder_layers(model), *tower_blocks(model)]:
        fully_shard(layer)
    return fully_shard(model)


LIGER_PATCHES = ("liger-kernel", "transformers")


def patch_by_liger(names: list[str]) -> None:
    """Put Liger's norms, rotary embedding and SwiGLU into transformers' classes, for this process.

    Raises: MissingExtraError without liger-kernel; BackendError for one that can't patch this transformers.
    """
    liger = liger_module("transformers")
    for family in sorted({MODELS[name].family for name in names}):
        apply = getattr(liger, f"apply_liger_kernel_to_{family}")
        try:
            apply(fused_linear_cross_entropy=False)
        except ImportError as error:
            versions = " and ".join(f"{p} {installed_version(p)}" for p in LIGER_PATCHES)
            raise BackendError(
                f"benchmarks.step --liger: {versions} don't work together for {family} ({error}). "
                f"Fix: install a newer liger-kernel, or an older transformers"
            ) from error


def liger_module(name: str) -> ModuleType:
    """`liger_kernel.<name>`. Raises: ArgumentError where it is not installed."""
    try:
        return importlib.import_module(f"liger_kernel.{name}")
    except ModuleNotFoundError as error:
        raise ArgumentError(
            f"benchmarks.step: {error.name} is not installed. Fix: pip install liger-kernel"
        ) from None
