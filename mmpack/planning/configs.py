"""A model's config as plain fields: of transformers, the dict of its config.json, or a text decoder's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmpack.errors import ArgumentError, kind_of

Fields = Mapping[str, Any]


def fields_of(config: Any, what: str) -> Fields:
    """The fields of a config, an omni model's being its thinker's. Raises ArgumentError."""
    fields = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(fields, Mapping):
        raise ArgumentError(
            f"{what}: config is {kind_of(config)}, expected a transformers config or its dict. "
            "Fix: pass model.config, or json.load of config.json"
        )
    return fields.get("thinker_config") or fields


def text_of(fields: Fields) -> Fields:
    """The decoder's: below `text_config`, or at the top as in released files of Qwen2-VL and Qwen2.5-VL."""
    return fields.get("text_config") or fields


def required(fields: Fields, names: tuple[str, ...], what: str) -> None:
    """Raise ArgumentError for fields that are missing or 0."""
    lacking = [n for n in names if not fields.get(n)]
    if lacking:
        raise ArgumentError(
            f"{what}: the config has no {', '.join(lacking)}. Fix: pass the model's whole config"
        )
