"""A model's config as plain fields: of transformers, the dict of its config.json, or a text decoder's own."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from mmpack.errors import ArgumentError, check_number, kind_of

MOST, MOST_LAYERS = 2**31 - 1, 2**16
PARTS = ("text_config", "vision_config", "audio_config", "thinker_config", "per_layer_config")
LAYERS = ("num_hidden_layers", "depth", "encoder_layers")
# whole numbers of 0 or more, one or two
SIZES = (
    *LAYERS, "d_model", "decoder_sparse_step", "downsample_hidden_size", "embed_dim", "encoder_ffn_dim",
    "first_k_dense_replace", "full_attention_interval", "global_head_dim", "head_dim", "hidden_size",
    "hidden_size_per_layer_input", "image_size", "in_channels", "insert_layer_id", "intermediate_size", "kv_lora_rank",
    "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim",
    "mm_tokens_per_image", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_attention_heads",
    "num_channels", "num_experts", "num_experts_per_tok", "num_global_key_value_heads", "num_heads",
    "num_key_value_heads", "num_kv_shared_layers", "num_local_experts", "patch_size", "pooling_kernel_size",
    "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "shared_expert_intermediate_size", "sliding_window",
    "sliding_window_pattern", "spatial_merge_size", "temporal_patch_size", "top_k_experts", "v_head_dim", "vocab_size",
    "window_size",
)  # fmt: skip
LISTS = ("layer_types", "fullatt_block_indexes", "deepstack_visual_indexes", "mlp_only_layers")


class Fields(dict[str, Any]):
    """The fields of a config; one that is asked for and is not there is an ArgumentError."""

    def __init__(self, fields: Mapping[Any, Any], what: str):
        super().__init__(fields)
        self.what = what

    def __missing__(self, name: str) -> Any:
        raise ArgumentError(
            f"{self.what}: the config has no {name}. Fix: pass the model's whole config"
        )

    def with_own(self, layer: Mapping[str, Any]) -> Fields:
        """These fields, and instead of some those that one layer has of its own."""
        return Fields({**self, **layer}, self.what)


def fields_of(config: Any, what: str) -> Fields:
    """The fields of a config, an omni model's being its thinker's, each of a kind that can be counted with.

    Raises: ArgumentError.
    """
    fields = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(fields, Mapping):
        raise ArgumentError(
            f"{what}: config is {kind_of(config)}, expected a transformers config or its dict. "
            "Fix: pass model.config, or json.load of config.json"
        )
    checked = _checked(fields, what, "")
    thinker: Fields | None = checked.get("thinker_config")
    return thinker or checked


def _checked(fields: Mapping[Any, Any], what: str, where: str) -> Fields:
    out = Fields(fields, what)
    for name, value in fields.items():
        at = f"{where}{name}"
        if value is None:
            del out[name]  # as where it is absent
        elif name in PARTS or where.endswith("per_layer_config."):
            if not isinstance(value, Mapping):
                raise _wrong(what, at, value, "an object")
            out[name] = _checked(value, what, f"{at}.")
        elif name in SIZES:
            most = MOST_LAYERS if name in LAYERS else MOST
            sizes = value if isinstance(value, list | tuple) else [value]
            if not sizes or any(type(n) is not int or not 0 <= n <= most for n in sizes):
                raise _wrong(what, at, value, f"whole numbers of 0 to {most}")
        elif name in LISTS and not isinstance(value, list | tuple):
            raise _wrong(what, at, value, "a list")
        elif name == "mlp_ratio":
            check_number(what, at, value, least=0, most=float(MOST))
    return out


def _wrong(what: str, name: str, value: Any, expected: str) -> ArgumentError:
    return ArgumentError(
        f"{what}: the config's {name} is {reprlib.repr(value):.60}, expected {expected}. "
        "Fix: pass the model's own config"
    )


def text_of(fields: Fields) -> Fields:
    """The decoder's: below `text_config`, or at the top as in released files of Qwen2-VL and Qwen2.5-VL."""
    text: Fields | None = fields.get("text_config")
    return text or fields


def required(fields: Mapping[str, Any], names: tuple[str, ...], what: str) -> None:
    """Raise ArgumentError for fields that are missing or 0."""
    lacking = [n for n in names if not fields.get(n)]
    if lacking:
        raise ArgumentError(
            f"{what}: the config has no {', '.join(lacking)}. Fix: pass the model's whole config"
        )
