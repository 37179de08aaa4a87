"""What vLLM's processor cache leaves out of an engine input: of media that come again, pixels and grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmpack.adapters.processed_media import GRIDS
from mmpack.errors import ArgumentError, BackendError

FIX = "pass cached=cached_media(llm), or inputs of render_cmpl(prompts, skip_mm_cache=True)"


def cached_media(llm: Any) -> Mapping[str, Any]:
    """The processed media that a `vllm.LLM` keeps, by vLLM's hash: `cached=` of `to_samples`. They are not copied.

    Raises: BackendError where the engine runs in a process of its own, or keeps its media in shared memory.
    """
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        raise BackendError(
            "cached_media: the engine, and its cache of media, run in another process. "
            "Fix: set VLLM_ENABLE_V1_MULTIPROCESSING=0, or pass inputs of render_cmpl(prompts, skip_mm_cache=True)"
        )
    config = llm.model_config.multimodal_config
    if core.mm_receiver_cache is None and config.mm_processor_cache_gb > 0:
        raise BackendError(
            f"cached_media: mm_processor_cache_type is {config.mm_processor_cache_type!r}. "
            "Fix: use 'lru', or pass inputs of render_cmpl(prompts, skip_mm_cache=True)"
        )
    # a view: get_and_update_item would count as a use, and the renderer's own cache not know of it
    return {} if core.mm_receiver_cache is None else dict(core.mm_receiver_cache._cache.cache)


def items_of(inputs: Sequence[Any], cached: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every processed medium that is known of, by its hash: those kept, and those of the inputs themselves."""
    own = {
        digest: item
        for given in inputs
        for modality, items in given.get("mm_kwargs", {}).items()
        for digest, item in zip(given["mm_hashes"][modality], items, strict=True)
        if whole(modality, item)
    }
    return {**cached, **own}


def whole(modality: str, item: Any) -> bool:
    """Whether an item has its data. Of media that came before it is None, or an address in shared memory."""
    return item is not None and GRIDS[modality] in item


def item_of(given: Any, modality: str, k: int, known: Mapping[str, Any], where: str) -> Any:
    """Medium `k` of an engine input, or the one kept under its hash. Raises: ArgumentError where there is none."""
    item = given["mm_kwargs"][modality][k]
    if not whole(modality, item):
        item = known.get(given["mm_hashes"][modality][k])
    if item is None:
        raise ArgumentError(
            f"{where}: {modality} {k} of an input has no pixels: they stayed in vLLM's cache. Fix: {FIX}"
        )
    return item
