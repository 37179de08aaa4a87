"""Where vLLM's versions differ, 0.24 to 0.33: names that moved, and what came later.

The installed package is asked (a module, a class, a field), never its version number.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from mmpack.errors import ArgumentError, BackendError, require


def tokens_module(name: str, where: str) -> ModuleType:
    """`protocol`, `mm_serde` or `serving` of the token-in-token-out server, which 0.25 moved."""
    require("vllm.entrypoints", "vllm", where)
    moved = importlib.util.find_spec("vllm.entrypoints.scale_out") is not None
    home = "scale_out.token_in_token_out" if moved else "serve.disagg"
    return require(f"vllm.entrypoints.{home}.{name}", "vllm", where)


def protocol_class(name: str, where: str) -> Any:
    """A class of the server's protocol. `GenerateTokensResponse` is called `GenerateResponse` before 0.32."""
    protocol = tokens_module("protocol", where)
    earlier = {"GenerateTokensResponse": "GenerateResponse"}
    return getattr(protocol, name if hasattr(protocol, name) else earlier.get(name, name))


def features_of(given: Any, where: str) -> Any:
    """MultiModalFeatures of an engine input, or None for text. vLLM's own function of this is public since 0.30."""
    if given["type"] != "multimodal":
        return None
    encode = tokens_module("mm_serde", where).encode_mm_kwargs_item
    place = protocol_class("PlaceholderRangeInfo", where)
    return protocol_class("MultiModalFeatures", where)(
        mm_hashes=given["mm_hashes"],
        mm_placeholders={
            modality: [place(offset=p.offset, length=p.length) for p in ranges]
            for modality, ranges in given["mm_placeholders"].items()
        },
        kwargs_data={
            modality: [None if item is None else encode(item) for item in items]
            for modality, items in given["mm_kwargs"].items()
        },
    )


def known_settings(vllm: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that this version's `LLM` takes: before 0.28 it never normalises on the device.

    Raises: BackendError where it can't return the sampler's lists.
    """
    known = {field.name for field in dataclasses.fields(vllm.EngineArgs)}
    if "return_sampling_mask" in settings and "return_sampling_mask" not in known:
        raise BackendError(
            f"VllmEngine: kept_ids=True needs return_sampling_mask, which vLLM has since 0.28; this is "
            f"{vllm.__version__}. Fix: install vLLM 0.28 or newer, or use an engine without kept_ids"
        )
    return {name: value for name, value in settings.items() if name in known}


def media_cache(renderer: Any) -> Any:
    """The cache of inputs that are rendered with `skip_mm_cache=True`, or None."""
    if hasattr(renderer, "_mm_processor_only_cache"):  # since 0.31
        return renderer._mm_processor_only_cache
    return getattr(renderer._readonly_mm_processor, "cache", None)


def metadata_keyword(renderer: Any, videos: list[dict[str, Any]]) -> dict[str, Any]:
    """What brings the metadata of one video to a processor of seconds, where vLLM drops it: before 0.31.

    Without it the processor assumes 24 frames per second. Raises: ArgumentError for several videos: those that vLLM has
    cached don't reach the processor, and the keyword's list would not fit the others.
    """
    if renderer.get_mm_processor().data_parser.video_needs_metadata:
        return {}
    if len(videos) > 1:
        raise ArgumentError(
            f"VllmEngine: a prompt has {len(videos)} videos, of which vLLM before 0.31 drops the frame rates. "
            "Fix: pass one video per prompt, or install vLLM 0.31 or newer"
        )
    return {"video_metadata": videos}


def label_weights(engine: Any, version: str) -> None:
    """Tell an LLMEngine the version of its weights, if it keeps one: since 0.27."""
    if hasattr(engine, "set_weight_version"):
        engine.set_weight_version(version)


def label_outputs(outputs: Sequence[Any], version: str | None) -> None:
    """Say which weights sampled outputs of one version, where vLLM doesn't: before 0.32."""
    for completion in (c for output in outputs for c in output.outputs):
        if version is not None and not hasattr(completion, "weight_versions"):
            span = SimpleNamespace(start=0, end=len(completion.token_ids), version=version)
            completion.weight_versions = [span]
