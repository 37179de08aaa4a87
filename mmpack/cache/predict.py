"""Predict the tokens of each prompt that an engine takes from its prefix cache, by vLLM's rules (numpy).

Only whole blocks are cached, and never is the last token of a prompt taken, for its logits are needed. Blocks are the
same if their ids are, the media in them, at their places, and all before.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mmpack.cache.keys import chained
from mmpack.errors import ArgumentError, check_flag, check_whole, kind_of
from mmpack.layout.occurrences import occurrences
from mmpack.schema.media import Medium
from mmpack.schema.plain_json import canonical_json
from mmpack.schema.sample import Sample, as_samples


def predict_cached_tokens(
    samples: Sequence[Sample],
    *,
    block_size: int = 16,
    prefix_caching: bool = True,
    together: bool = False,
    num_blocks: int | None = None,
    adapters: Sequence[str | None] | None = None,
    media_key: Callable[[Medium], str] | None = None,
) -> list[int]:
    """`num_cached_tokens` of each sample's request, from an empty cache: what `prefix_cached_tokens` records.

    A request is the prompt of a sample, up to its first loss token (all of it, where there is none); what follows was
    generated, and all but its last token is cached too. Full attention in every layer.

    Args:
        samples: in the order in which they were asked for.
        block_size: the engine's.
        prefix_caching: False, or prompt logprobs asked for: nothing is taken.
        together: all requests in one batch, their prompts before any response; else one after the other.
        num_blocks: that the engine's cache has for tokens (vLLM keeps one of `num_gpu_blocks` for itself): the blocks
            that were freed first are given to others first. None: never full. Not for requests `together`.
        adapters: name of the adapter of each request, None for none.
        media_key: what the engine tells media apart by. Default: vLLM's own hash where `to_samples` recorded it, else
            cache key and seconds.

    Raises: ArgumentError for other arguments, and for a request that is larger than the cache.

    Example:
        >>> import mmpack as mp
        >>> from mmpack.cache import predict_cached_tokens
        >>> text = {"schema_version": "1", "group_id": "q", "family": "qwen2_vl", "media": [], "modality_spans": []}
        >>> samples = [
        ...     mp.Sample.from_dict(text | {"sample_id": str(k), "input_ids": [*range(33)], "loss_spans": []})
        ...     for k in range(3)
        ... ]
        >>> predict_cached_tokens(samples, block_size=16)
        [0, 32, 32]
    """
    check_whole("predict_cached_tokens", "block_size", block_size)
    for name, flag in (("prefix_caching", prefix_caching), ("together", together)):
        check_flag("predict_cached_tokens", name, flag)
    if media_key is not None and not callable(media_key):
        raise ArgumentError(
            f"predict_cached_tokens: media_key is {kind_of(media_key)}. Fix: pass a function of a medium"
        )
    samples = as_samples(samples, "predict_cached_tokens")
    names = [""] * len(samples) if adapters is None else _names(adapters, len(samples))
    if num_blocks is not None:
        check_whole("predict_cached_tokens", "num_blocks", num_blocks)
        if together:
            raise ArgumentError(
                "predict_cached_tokens: num_blocks is for requests one after the other. Fix: pass together=False"
            )
    if not prefix_caching:
        return [0] * len(samples)
    cache = _Blocks(block_size, num_blocks)
    out = []
    for i, sample in enumerate(samples):
        keys = _engine_keys(sample, block_size, names[i], media_key)
        prompt = sample.loss_spans[0].start if sample.loss_spans else len(sample)
        out.append(cache.run(keys, prompt, prompt if together else len(sample)))
    return out


class _Blocks:
    """An engine's blocks while one request after the other runs. Blocks are numbers; free ones in order of reuse."""

    def __init__(self, block_size: int, num_blocks: int | None):
        self.block_size, self.num_blocks = block_size, num_blocks
        self.cached: dict[bytes, list[int]] = {}  # blocks of equal content, the first is found
        self.key_of: dict[int, bytes] = {}
        self.free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(num_blocks or 0))
        self.given = 0

    def run(self, keys: list[bytes], prompt: int, length: int) -> int:
        """Tokens of a prompt that are taken; the request then runs to `length` tokens and ends."""
        size = self.block_size
        own: list[int] = []
        for key in keys[: max(prompt - 1, 0) // size]:
            if key not in self.cached:
                break
            own.append(self.cached[key][0])
        taken = len(own) * size
        for block in own:
            self.free.pop(block, None)
        # the last token that was generated is never fed
        computed = max(prompt, length - 1)
        while len(own) * size < computed:
            own.append(self._take())
        whole = computed // size
        for key, block in zip(keys[:whole], own[:whole], strict=True):
            if block not in self.key_of:
                self.cached.setdefault(key, []).append(block)
                self.key_of[block] = key
        self._give_back(own)
        return taken

    def _take(self) -> int:
        if self.num_blocks is None:
            self.given += 1
            return self.given
        if not self.free:
            raise ArgumentError(
                f"predict_cached_tokens: a request needs more than the {self.num_blocks} blocks of the cache. "
                "Fix: pass the engine's num_blocks"
            )
        block, _ = self.free.popitem(last=False)
        key = self.key_of.pop(block, None)
        if key is not None:
            self.cached[key].remove(block)
            if not self.cached[key]:
                del self.cached[key]
        return block

    def _give_back(self, own: list[int]) -> None:
        """Free blocks: those without a key are reused first, then a request's last ones."""
        if self.num_blocks is None:
            return
        bare = [b for b in reversed(own) if b not in self.key_of]
        for block in reversed(bare):
            self.free[block] = None
            self.free.move_to_end(block, last=False)
        for block in reversed(own):
            if block in self.key_of:
                self.free[block] = None


def _names(adapters: Any, count: int) -> list[str]:
    """One per request; None is no adapter, as "" is."""
    listed = isinstance(adapters, Sequence) and not isinstance(adapters, str | bytes)
    named = listed and all(name is None or isinstance(name, str) for name in adapters)
    if not named or len(adapters) != count:
        found = f"{len(adapters)} adapters" if named else f"adapters is {kind_of(adapters)}"
        raise ArgumentError(
            f"predict_cached_tokens: {found}, for {count} samples. Fix: pass a name or None per sample"
        )
    return [name or "" for name in adapters]


def _engine_keys(
    sample: Sample, block_size: int, adapter: str, media_key: Callable[[Medium], str] | None
) -> list[bytes]:
    """Return an engine's keys: without positions, which follow from ids and media."""
    places = [
        (start, stop, hashlib.sha256(_told(media_key, sample.media[m])).digest())
        for start, stop, m in occurrences(sample)
    ]
    first = hashlib.sha256(b"mmpack.engine.1\0" + _bytes(adapter)).digest()
    ids = np.asarray(sample.input_ids, dtype=np.int64)[:, None]
    return list(chained(first, ids, block_size, places))


def _told(media_key: Callable[[Medium], str] | None, medium: Medium) -> bytes:
    name = _media_key(medium) if media_key is None else media_key(medium)
    if not isinstance(name, str):
        source = "metadata['vllm_hash']" if media_key is None else "what media_key gives"
        raise ArgumentError(
            f"predict_cached_tokens: {medium.media_id!r:.60}: {source} is {kind_of(name)}, expected a str. "
            "Fix: pass the name by which the engine tells media apart"
        )
    return _bytes(name)


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def _media_key(medium: Medium) -> str:
    known = medium.metadata.get("vllm_hash")
    return known or canonical_json([medium.cache_key, medium.second_per_grid_ts])
