"""Logprobs of one sample whose prefix is cached: KV gathered from a store, a forward of what follows, KV written back.

The model runs as it is, detached, with transformers' DynamicCache. Pictures of the prefix are not encoded; those that
what follows sees come from the index's feature store.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Hashable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from mmpack.adapters.transformers.attention import attach, is_attached
from mmpack.adapters.transformers.heads import (
    Asked,
    has_own_forward,
    head_of,
    logit_cap,
    read_hidden,
    reader,
)
from mmpack.adapters.transformers.inputs import refuse_options, refuse_other_batch
from mmpack.adapters.transformers.layer_rules import head_dim_of, layer_rules
from mmpack.adapters.transformers.rope import rope_rules
from mmpack.adapters.transformers.tower import encode_some, kept_or_encoded
from mmpack.adapters.transformers.unwrap import is_sharded, unwrap
from mmpack.cache.index import PrefixIndex
from mmpack.cache.rows import RowStore
from mmpack.cache.tower import Levels, Tower
from mmpack.errors import ArgumentError, ModelError, check_flag, check_number, kind_of
from mmpack.families import family_of_config
from mmpack.ops.rows.gather import gather_rows
from mmpack.packing.batch import PackedBatch
from mmpack.packing.pack import pack
from mmpack.schema.sample import Sample
from mmpack.versions import cache_argument

_versions: dict[Hashable, str] = {}
_lock = Lock()
_PROCESS = uuid.uuid4().hex


@dataclass(frozen=True)
class PrefixLogprobs:
    """float32 [N] of a sample's loss tokens, and what it took."""

    logprobs: Tensor
    cached_tokens: int  # whose KV came from the store
    added_tokens: int  # whose KV went into it
    patches_encoded: int


def version_of(model: Any) -> str:
    """A name of what a model computes now: values of all weights and buffers, adapters' state, autocast, attention.

    Nothing of it changed between two calls that give one name. Names are of this process. Reads all weights, and waits
    for the device. Raises: ModelError for a model that is random (dropout), or sharded.
    """
    whole = unwrap(model, "version_of")
    if is_sharded(whole):
        raise ModelError(
            "version_of: the model is sharded, and this rank has only a part. Fix: name the version yourself, weights=…"
        )
    tower = Tower((whole,), (whole.get_decoder().config._attn_implementation,))
    _refuse_random(tower, "version_of")
    known = (tower.digest(), tower.how())  # holds the hooks, so that no other one gets their place
    with _lock:
        return _versions.setdefault(known, f"{_PROCESS}-{os.getpid()}-{len(_versions)}")


def kv_bytes_per_token(model: Any) -> int:
    """Bytes of keys and values of one token, in all layers that have some of their own: `PrefixIndex`'s argument.

    Raises: ModelError for a model with other than full attention.
    """
    whole = unwrap(model, "kv_bytes_per_token")
    text = _full_attention(whole, "kv_bytes_per_token")
    layers = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    size = whole.get_input_embeddings().weight.element_size()
    return int(layers * _kv_width(text) * size)


def _kv_width(text: Any) -> int:
    """Numbers that a layer keeps of a token."""
    if hasattr(text, "kv_lora_rank"):  # latent attention keeps what keys and values are made of
        return int(text.kv_lora_rank + text.qk_rope_head_dim)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(2 * heads * head_dim_of(text))


def prefix_logprobs(
    model: Any,
    sample: Sample,
    index: PrefixIndex,
    kv: RowStore,
    *,
    temperature: float = 1.0,
    weights: str | None = None,
    adapter: str = "",
    max_patches: int | None = None,
    kept_ids: bool = True,
) -> PrefixLogprobs:
    """Logprobs of a sample's loss tokens, without gradients; only what follows its cached prefix is computed.

    They are within the contract of two layouts of what `packed_logprobs` gives. The row before the first loss token is
    always computed. KV of the sample's whole blocks is in the store afterwards, as far as the budget goes.

    Args:
        model: as transformers made it, its text model detached.
        index, kv: of one another: `RowStore(index.num_rows)`. Media come from `index.features`, if it has a store.
        weights: the version's name; default `version_of(model)`, which reads all weights.
        adapter: the name of an adapter, in addition to it.
        max_patches: see `model_inputs`.
        kept_ids: over the sample's kept ids, where it has some; see `packed_logprobs`.

    Raises: ModelError for a model that is attached, random, sharded or has other than full attention, for a sample with
    routes, and before transformers 5.19 for one with media; ArgumentError for arguments that don't fit together.
    """
    whole = unwrap(model, "prefix_logprobs")
    check_number("prefix_logprobs", "temperature", temperature, above=0)
    check_flag("prefix_logprobs", "kept_ids", kept_ids)
    _refuse(whole, sample, index, kv)
    keys = index.keys(
        sample, weights=version_of(model) if weights is None else weights, adapter=adapter
    )
    batch = pack([sample])
    refuse_other_batch(batch, whole, "prefix_logprobs")
    if sample.media or max_patches is not None:
        refuse_options(whole, index.features, max_patches, "prefix_logprobs")
    first = sample.loss_spans[0].start if sample.loss_spans else len(sample)
    device = whole.get_input_embeddings().weight.device
    # the tower as packed passes run it, so that they and this share features
    with torch.no_grad(), attach(model, text=False):
        with index.hold(keys, limit=first - 1) as hit:
            cache = _filled(kv, hit.rows)
            hidden, patches = _suffix(whole, batch, cache, hit.tokens, index, max_patches)
            on_device = _shifted(batch.to(device), hit.tokens)
            head = head_of(whole)
            asked = Asked(temperature, kept_ids=kept_ids)
            read = reader(head, on_device, asked, logit_cap(whole))
            logprobs = read_hidden(head, read, hidden)
        with index.reserve(keys, packed_rows=np.arange(len(sample)), pack=sample.sample_id) as new:
            if new.stop > new.start:
                kv.write(new.rows, _rows_of(cache, new.start, new.stop, index))
    return PrefixLogprobs(logprobs, hit.tokens, new.stop - new.start, patches)


def _refuse(whole: Any, sample: Sample, index: PrefixIndex, kv: RowStore) -> None:
    for name, value, kind in (
        ("sample", sample, Sample),
        ("index", index, PrefixIndex),
        ("kv", kv, RowStore),
    ):
        if not isinstance(value, kind):
            raise ArgumentError(
                f"prefix_logprobs: {name} is {kind_of(value)}, expected a {kind.__name__}. Fix: pass one"
            )
    if kv.rows != index.num_rows:
        raise ArgumentError(
            f"prefix_logprobs: the store has {kv.rows} rows, the index has {index.num_rows}. "
            "Fix: make it by RowStore(index.num_rows)"
        )
    if sample.routed_experts is not None:
        raise ModelError(
            "prefix_logprobs: the sample has routed_experts, and KV in the store is of the model's own routes. "
            "Fix: use packed_logprobs, which replays them, or set routed_experts of the sample to None"
        )
    if is_attached(whole):
        raise ModelError(
            "prefix_logprobs: the model is attached, and packed rows have no KV cache. Fix: call detach(model) first"
        )
    if is_sharded(whole):
        raise ModelError("prefix_logprobs: the model is sharded. Fix: pass an unsharded copy")
    if not (has_own_forward(whole) and has_own_forward(whole.model)):
        raise ModelError(
            "prefix_logprobs: the model's forward was changed, or a hook is on its output, and only the text model and "
            "the head are run. Fix: use packed_logprobs, which runs all of it"
        )
    _full_attention(whole, "prefix_logprobs")
    _refuse_random(Tower((whole,)), "prefix_logprobs")


def _refuse_random(tower: Tower, what: str) -> None:
    if tower.random is not None:
        raise ModelError(
            f"{what}: {tower.random} is in training mode and random (dropout), so its KV can't be used again. "
            "Fix: set dropout to 0, or call model.eval()"
        )


def _full_attention(whole: Any, what: str) -> Any:
    """The text model's config."""
    text = whole.config.get_text_config()
    types = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    rules, family = layer_rules(whole, what), family_of_config(whole.config)
    if types or rules or rope_rules(whole) or family.packing != "yes":
        why = {
            "linear attention": "linear_attention" in types,
            "sliding windows": any(rule.window for rule in rules),
            "pictures that see both ways": any(rule.two_way for rule in rules),
            "RoPE that depends on length": bool(rope_rules(whole)),
        }
        named = ", ".join(name for name, has in why.items() if has) or family.name
        raise ModelError(
            f"{what}: a cached prefix is the KV of each token before it, and the model has {named}. Fix: use a model "
            "with full, causal attention in all layers; packed_logprobs shares prefixes of this one"
        )
    return text


def _filled(kv: RowStore, rows: np.ndarray) -> DynamicCache:
    """A cache of these rows, one layer per two tensors of the store."""
    cache = DynamicCache()
    if len(rows):
        held = [x.transpose(0, 1)[None] for x in kv.read(rows)]
        for layer, (keys, values) in enumerate(zip(held[::2], held[1::2], strict=True)):
            cache.update(keys, values, layer)
    return cache


def _rows_of(cache: DynamicCache, start: int, stop: int, index: PrefixIndex) -> list[Tensor]:
    """Keys and values [K, heads, head_dim] of each layer of the cache that has some."""
    held: list[Any] = cache.layers
    layers = [layer for layer in held if layer.keys is not None and layer.keys.numel()]
    both = [x for layer in layers for x in (layer.keys, layer.values)]
    rows = [x[0, :, start:stop].transpose(0, 1).contiguous() for x in both]
    found = sum(x.nbytes for x in rows) // (stop - start)
    if found != index.bytes_per_token:
        raise ArgumentError(
            f"prefix_logprobs: a token's KV takes {found} bytes, the index counts {index.bytes_per_token}. "
            "Fix: make it by PrefixIndex(…, bytes_per_token=kv_bytes_per_token(model))"
        )
    return rows


def _suffix(
    whole: Any,
    batch: PackedBatch,
    cache: DynamicCache,
    cached: int,
    index: PrefixIndex,
    max_patches: int | None,
) -> tuple[Tensor, int]:
    """Hidden states [1, L - cached, H], and how many patches were encoded."""
    embed = whole.get_input_embeddings()
    device = embed.weight.device
    embeds = embed(batch.input_ids[cached:].to(device))
    positions = batch.position_ids[-3:, cached:].to(device)
    more: dict[str, Any] = {}
    source = batch.vision_rows.source[cached:].numpy()
    seen = np.flatnonzero(source >= 0)
    patches = 0
    if len(seen):
        offsets = batch.vision_token_offsets.numpy()
        of = np.searchsorted(offsets, source[seen], side="right") - 1
        media = np.unique(of)  # of what follows; others are not needed
        made, patches = _features(whole, batch, media.tolist(), index, max_patches)
        sizes = np.diff(offsets)[media]
        begin = np.cumsum(sizes) - sizes
        rows = source[seen] - offsets[of] + begin[np.searchsorted(media, of)]
        gathered = [
            gather_rows(torch.cat(level), torch.from_numpy(rows).to(device))
            for level in zip(*made, strict=True)
        ]
        places = torch.from_numpy(seen).to(device)
        embeds = embeds.index_copy(0, places, gathered[0].to(embeds.dtype))
        if len(gathered) > 1:
            mask = torch.from_numpy(source >= 0).to(device)
            more = {"visual_pos_masks": mask[None], "deepstack_visual_embeds": gathered[1:]}
    decoder = whole.model.get_decoder()
    more[cache_argument(decoder)] = cache
    hidden: Tensor = decoder(
        inputs_embeds=embeds[None],
        position_ids=positions[:, None] if len(positions) > 1 else positions,
        use_cache=True,
        **more,
    ).last_hidden_state
    return hidden, patches


def _features(
    whole: Any, batch: PackedBatch, media: list[int], index: PrefixIndex, max_patches: int | None
) -> tuple[list[Levels], int]:
    """Features of each of `media`, by the index's store where it has one; and how many patches were encoded."""
    ran: list[int] = []
    on_device = batch.to(whole.get_input_embeddings().weight.device)

    def encode(chosen: list[int]) -> list[Levels]:
        own = [media[i] for i in chosen]
        ran.extend(own)
        return encode_some(whole, on_device, own, max_patches)

    made = kept_or_encoded(whole, batch, media, index.features, encode)
    return made, sum(batch.media[i].num_patches for i in ran)


def _shifted(batch: PackedBatch, cached: int) -> PackedBatch:
    """The batch as a reader of hidden states sees it that begin at row `cached`."""
    return dataclasses.replace(
        batch,
        loss_rows=batch.loss_rows - cached,
        loss_rows_unique=batch.loss_rows_unique - cached,
    )
