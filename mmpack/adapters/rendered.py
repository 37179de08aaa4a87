"""Prompts as an engine or a renderer made them: ids [L], and per medium a hash, its range of placeholders, its pixels.

The trainer takes them as they are: nothing is rendered, resized or expanded a second time. Pixels come with the first
request that shows a medium; a `MediaStore` has them for all that follow, which bring the hash alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, LayoutError, kind_of, needs

with needs("hf", __name__):
    import torch

from mmpack.adapters.checks import as_list, check_each, check_kind
from mmpack.adapters.episodes import reading
from mmpack.adapters.processed_media import GRIDS, PIXELS, SECONDS, media_of_inputs, name_images
from mmpack.adapters.row_sample import row_sample
from mmpack.families import Family
from mmpack.layout.occurrences import occurrences
from mmpack.processors.wrap import Processor
from mmpack.schema.media import Medium
from mmpack.schema.ragged import Ragged
from mmpack.schema.sample import Sample, as_samples
from mmpack.schema.specs import COUNT_MAX


class MediaStore(Mapping[str, Any]):
    """Processed media, each held once: cache key -> pixels [patches, patch_dim], the `media=` of `mp.pack`.

    Engines know a medium by a hash of their own, which says nothing of the settings that it was processed with: one
    store per set of settings.

    Example:
        >>> from mmpack.adapters.rendered import MediaStore
        >>> MediaStore()
        MediaStore(media=0, bytes=0)
    """

    def __init__(self) -> None:
        self._by_hash: dict[str, Medium] = {}
        self._pixels: dict[str, Any] = {}

    def medium(self, digest: str) -> Medium | None:
        """The medium of an engine's hash, without its pixels; None if it never came."""
        return self._by_hash.get(digest)

    def add(self, digest: str, medium: Medium) -> Medium:
        """Hold a medium's pixels under its cache key; the medium without them."""
        self._pixels.setdefault(medium.cache_key, medium.pixel_values)
        bare = dataclasses.replace(medium, pixel_values=None)
        return self._by_hash.setdefault(digest, bare)

    def keep_only(self, samples: Iterable[Sample]) -> None:
        """Forget the media that none of `samples` shows."""
        kept = as_samples(samples, "MediaStore.keep_only")
        shown = {medium.cache_key for sample in kept for medium in sample.media}
        self._pixels = {key: p for key, p in self._pixels.items() if key in shown}
        self._by_hash = {h: m for h, m in self._by_hash.items() if m.cache_key in shown}

    def __getitem__(self, cache_key: str) -> Any:
        return self._pixels[cache_key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pixels)

    def __len__(self) -> int:
        return len(self._pixels)

    def __repr__(self) -> str:
        return (
            f"MediaStore(media={len(self)}, bytes={sum(p.nbytes for p in self._pixels.values())})"
        )


@dataclass(frozen=True)
class RenderedMedia:
    """The media of one prompt, by modality and in order of appearance: parallel lists.

    Args:
        hashes: what the engine calls each medium.
        ranges: (offset, length) of its placeholders, in tokens.
        items: what a processor made of it, by transformers' names (`pixel_values`, `image_grid_thw`, …), tensors or
            arrays; None for a medium that was sent before.
    """

    hashes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ranges: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    items: Mapping[str, Sequence[Mapping[str, Any] | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, hashes: Any, placeholders: Any, items: Any) -> RenderedMedia:
        """The runs of placeholders with `offset` and `length`, as engines and renderers have them."""
        ranges = {
            modality: [(place.offset, place.length) for place in places]
            for modality, places in (placeholders or {}).items()
        }
        return cls(hashes or {}, ranges, items or {})


def rendered_sample(
    where: str,
    input_ids: Sequence[int] | np.ndarray,
    media: RenderedMedia,
    processor: Processor,
    *,
    scored: np.ndarray | None = None,
    response_start: int | None = None,
    store: MediaStore | None = None,
    images: Sequence[Any] | None = None,
    **fields: Any,
) -> Sample:
    """A sample of exactly these ids and media.

    Args:
        where: begins errors; names the prompt.
        input_ids: int [L], expanded: one id per vision token.
        processor: `mp.wrap_processor` of the engine's processor; its family and settings are recorded.
        scored: bool [L], the loss tokens; None: there are none.
        response_start: token index at which the prompt ends; None: all of it is prompt.
        store: takes the pixels, and has those of media that were sent before; samples hold none then. None: each sample
            holds its own.
        images: the pictures that were handed in, in order; media are then known by their content, as those that
            `mp.wrap_processor` makes. None: by their processed pixels.
        fields: further ones of Sample.

    Raises: ArgumentError for lists that do not fit each other, for another modality, and for a medium whose pixels are
    nowhere; LayoutError where placeholders, ranges and grids contradict each other.
    """
    ids = token_ids(input_ids, where)
    found = _media(where, media, processor, store, images)
    start = len(ids) if response_start is None else response_start
    sample = row_sample(
        where,
        ids,
        found,
        np.zeros(len(ids), dtype=bool) if scored is None else scored,
        processor.family,
        response_start=start,
        processor=processor,
        **fields,
    )
    _check_ranges(where, sample, media.ranges, processor.family)
    return sample


def token_ids(given: Any, where: str) -> np.ndarray:
    """int64 [L]. Raises: ArgumentError for what is no list of ids."""
    try:
        ids = np.asarray(given if isinstance(given, list | tuple | np.ndarray) else None)
    except ValueError:  # lists of unlike length
        ids = np.zeros(())
    whole = ids.ndim == 1 and len(ids) and ids.dtype.kind in "iu"
    if not whole or not 0 <= ids.min() <= ids.max() <= COUNT_MAX:
        raise ArgumentError(
            f"{where}: token ids are {kind_of(given)}, expected ids [L] from 0 on. Fix: pass the prompt's ids"
        )
    return ids.astype(np.int64)


def kept_lists(lists: Any, tokens: int, sampling: Mapping[str, Any] | None, where: str) -> Ragged:
    """An engine's `sampling_mask`, the ids that its sampler kept, one list per sampled token.

    Args: `sampling`: of Sample; its logprobs must be over these ids.

    Raises: ArgumentError where there is not one list per token, and where logprobs are not "processed".
    """
    if not isinstance(lists, Sequence) or len(lists) != tokens:
        found = len(lists) if isinstance(lists, Sequence) else kind_of(lists)
        raise ArgumentError(
            f"{where} has {found} lists of kept ids for {tokens} sampled tokens. "
            "Fix: pass whole outputs, not parts of them"
        )
    check_kind(f"{where}: sampling", sampling, Mapping | None, 'pass {"logprobs": "processed"}')
    kind = (sampling or {}).get("logprobs")
    if kind != "processed":
        raise ArgumentError(
            f"{where} has the ids that the sampler kept, and logprobs of kind {kind!r:.40}: these must be over the "
            'ids kept. Fix: set logprobs_mode="processed_logprobs" in the engine, and pass '
            'sampling={"logprobs": "processed", …}'
        )
    try:
        return Ragged.of(lists)
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from None


def _media(
    where: str,
    given: RenderedMedia,
    processor: Processor,
    store: MediaStore | None,
    images: Sequence[Any] | None,
) -> dict[str, list[Medium]]:
    """The media by modality, in order; new ones go to the store."""
    for name in ("hashes", "ranges", "items"):
        lists = getattr(given, name)
        check_kind(f"{where}: {name}", lists, Mapping, "pass a dict, with a list per modality")
    if unread := [name for name in given.hashes if name not in GRIDS]:
        raise ArgumentError(
            f"{where} has media of modality {unread[0]!r:.40}, expected {' or '.join(GRIDS)}. Fix: drop them"
        )
    out: dict[str, list[Medium]] = {}
    for modality in GRIDS:
        hashes = as_list(given.hashes.get(modality), f"{where}: hashes of {modality}")
        items = as_list(given.items.get(modality), f"{where}: items of {modality}")
        pictures = images if modality == "image" else None
        lists = {"ranges": given.ranges.get(modality, []), "items": items, "images": pictures}
        check_each(where, len(hashes), f"{modality} hashes", lists)
        out[modality] = []
        fresh: list[tuple[Medium, Any]] = []
        new: dict[str, Medium] = {}  # of this prompt
        for k, (digest, item) in enumerate(zip(hashes, items, strict=True)):
            at = f"{where}/{modality}/{k}"
            with reading(at):
                known = new.get(digest) or (None if store is None else store.medium(digest))
            if known is not None and item is not None:
                _check_same(at, known, item, digest, store)
            if known is None:
                known = new[digest] = processed_medium(at, modality, item, digest, processor.family)
                if pictures is not None:
                    fresh.append((known, pictures[k]))
            out[modality].append(known)
        if fresh:
            made = {"image": [medium for medium, _ in fresh]}
            name_images(made, [image for _, image in fresh], processor, where)
        if store is not None:
            held = {digest: store.add(digest, medium) for digest, medium in new.items()}
            out[modality] = [held.get(h, m) for h, m in zip(hashes, out[modality], strict=True)]
    return out


def processed_medium(
    at: str, modality: str, item: Mapping[str, Any] | None, digest: str, family: Family
) -> Medium:
    """A medium that is known by its processed pixels. Args: `at`: begins errors. `item`, `digest`: of `RenderedMedia`.

    Raises: ArgumentError where it has no pixels.
    """
    if item is None:
        raise ArgumentError(
            f"{at} has no pixels, and its hash {digest!r:.40} is new here. Fix: pass a store= that has seen the first "
            "request with it, or a request that holds all pixels"
        )
    pixels, grids = PIXELS[modality], GRIDS[modality]
    if not isinstance(item, Mapping) or item.get(pixels) is None or grids not in item:
        raise ArgumentError(
            f"{at} has no {pixels} and {grids}. Fix: pass processed media, not embeddings; or None in place of the "
            "whole item, and a store that has seen it"
        )
    with reading(at):
        grid = np.atleast_2d(np.asarray(item[grids]))
    if grid.shape != (1, 3) or grid.dtype.kind not in "iu" or grid.min() < 1:
        raise ArgumentError(
            f"{at}: its grid is {grid.tolist()!r:.40}, expected t, h and w in patches. Fix: pass one item per medium"
        )
    inputs = dict(item) | {grids: grid}
    seconds = inputs.pop(SECONDS, None)
    if seconds is not None:
        inputs[SECONDS] = np.asarray(seconds, dtype=np.float64).reshape(-1)
    with reading(at):
        [medium] = media_of_inputs(inputs, family, at)[modality]
    if medium.pixel_values.ndim != 2:
        raise ArgumentError(
            f"{at}: {pixels} has shape {list(medium.pixel_values.shape)}, expected [patches, patch_dim]. "
            "Fix: pass pixels as the processor made them"
        )
    medium.metadata = {"vllm_hash": digest}  # as `mp.cache` reads it
    return medium


def _check_same(
    at: str, known: Medium, item: Mapping[str, Any], digest: str, store: MediaStore | None
) -> None:
    """Raise ArgumentError where a hash that is known comes with other pixels: one of both would be lost."""
    held = known.pixel_values
    if held is None and store is not None:
        held = store[known.cache_key]
    with reading(at):
        pixels = torch.as_tensor(item[PIXELS[known.modality]]).cpu()
        grid = tuple(np.asarray(item[GRIDS[known.modality]]).reshape(-1).tolist())
        same = (
            grid == tuple(known.grid_thw)
            and pixels.shape == held.shape
            and bool((pixels == held).all())
        )
    if not same:
        raise ArgumentError(
            f"{at}: hash {digest!r:.40} came with other pixels before. "
            "Fix: keep one store per set of settings, and pass the "
            "engine's own hashes"
        )


def _check_ranges(
    where: str, sample: Sample, ranges: Mapping[str, Sequence[tuple[int, int]]], family: Family
) -> None:
    """Raise LayoutError unless each medium's placeholders are where the engine says."""
    found: dict[str, list[tuple[int, int]]] = {}
    for place in occurrences(sample):
        medium = sample.media[place.media_index]
        modality = medium.modality
        pad = family.placeholder_ids[modality]
        tokens = int((sample.input_ids[place.start : place.stop] == pad).sum())
        if tokens != medium.num_tokens:
            raise LayoutError(
                f"{where}: the {modality} at token {place.start} has {tokens} placeholders, its grid "
                f"{list(medium.grid_thw)} needs {medium.num_tokens}. "
                "Fix: pass ids and media of one request, in one order",
                "MM101",
            )
        found.setdefault(modality, []).append((place.start, place.stop))
    for modality, places in found.items():
        framed = family.in_pieces(modality)  # with text between
        for (start, stop), said in zip(places, ranges[modality], strict=True):
            with reading(f"{where}: ranges of {modality}"):
                offset, length = (index(edge) for edge in said)
            within = offset <= start and stop <= offset + length
            if not within or not (framed or (start, stop) == (offset, offset + length)):
                raise LayoutError(
                    f"{where}: a {modality} should fill tokens [{offset}, {offset + length}), its placeholders are "
                    f"at [{start}, {stop}). Fix: pass ids and ranges of one request",
                    "MM106",
                )
