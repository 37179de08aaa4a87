"""Keys of cached prefixes: one per block of tokens, chained, so that equal keys mean equal prefixes (numpy).

A block's key covers the key before it, its ids, its positions, and the media in it at their places. The first key
covers what holds for the whole prefix: family, position rule, version of the weights, adapter, and the block size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, check_whole, kind_of
from mmpack.families import get_family
from mmpack.layout.batch_positions import positions_of
from mmpack.layout.fingerprint import media_name
from mmpack.layout.occurrences import occurrences
from mmpack.schema.plain_json import canonical_json
from mmpack.schema.sample import Sample

KEY_BYTES = 32  # a collision among n keys has odds of n² / 2^257
# token indices [start, stop) of an occurrence, and what names its medium
Place = tuple[int, int, bytes]


@dataclass(frozen=True)
class PrefixKeys:
    """One key of 32 bytes per whole block of a sample. `media`: each occurrence, as the feature store names it."""

    blocks: tuple[bytes, ...]
    block_size: int
    num_tokens: int
    media: tuple[tuple[int, int, str], ...] = ()  # start, stop, name

    def __len__(self) -> int:
        return len(self.blocks)


def prefix_keys(
    sample: Sample,
    block_size: int = 16,
    *,
    weights: str,
    adapter: str = "",
    position_rule: str | None = None,
    positions: np.ndarray | None = None,
) -> PrefixKeys:
    """The keys of a sample's whole blocks of `block_size` tokens; the tokens after the last one have none.

    Args:
        weights, adapter: versions of what computes the KV: other names, other keys. `version_of(model)` of
            `mmpack.adapters.transformers` reads them from the values.
        position_rule: by default what the sample's processor recorded, else the family's first.
        positions: int64 [rows, L]; by default the sample's recorded ones, else computed by the family's rule.

    Raises: ArgumentError for what is no sample, no names, positions of another shape or type, and masked tokens.

    Example:
        >>> import mmpack as mp
        >>> from mmpack.cache import prefix_keys
        >>> text = {"schema_version": "1", "group_id": "q", "family": "qwen2_vl", "media": [], "modality_spans": []}
        >>> a, b = [
        ...     mp.Sample.from_dict(text | {"sample_id": str(k), "input_ids": [5, 6, 7, k], "loss_spans": []})
        ...     for k in range(2)
        ... ]
        >>> a, b = [prefix_keys(s, 2, weights="step-1").blocks for s in (a, b)]
        >>> a[0] == b[0], a[1] == b[1]
        (True, False)
    """
    _check(sample, block_size, weights, adapter, position_rule)
    family = get_family(sample.family)
    rule = (
        position_rule or (sample.processor or {}).get("position_rule") or family.position_rules[0]
    )
    positions = _positions(positions_of(sample) if positions is None else positions, len(sample))
    about = {
        "adapter": adapter,
        "block_size": int(block_size),
        "family": family.name,
        "position_rows": len(positions),
        "position_rule": str(rule),
        "weights": weights,
    }
    media, places = [], []
    for start, stop, m in occurrences(sample):
        medium = sample.media[m]
        media.append((start, stop, media_name(medium)))
        # seconds move positions: two videos of equal frames are two
        named = canonical_json([media[-1][2], medium.second_per_grid_ts])
        places.append((start, stop, hashlib.sha256(named.encode()).digest()))
    first = hashlib.sha256(b"mmpack.prefix.1\0" + canonical_json(about).encode()).digest()
    columns = np.column_stack([sample.input_ids, positions.T])
    blocks = tuple(chained(first, columns, block_size, places))
    return PrefixKeys(blocks, int(block_size), len(sample), tuple(media))


def chained(
    first: bytes, columns: np.ndarray, block_size: int, places: Sequence[Place] = ()
) -> Iterator[bytes]:
    """The key of each whole block of tokens, each of the key before it (`first` at the beginning).

    Args: `columns`: int [L, C] of each token: its id, its positions. `places`: sorted, disjoint.
    """
    values = np.ascontiguousarray(columns, dtype="<i8")
    key, at = first, 0
    for start, stop in pairwise(range(0, len(values) + 1, block_size)):
        digest = hashlib.blake2b(key, digest_size=KEY_BYTES)
        digest.update(values[start:stop].data)
        while at < len(places) and places[at][1] <= start:
            at += 1
        for begin, end, name in _until(places, at, stop):
            # all parts are of fixed length, so no two lists of parts are the same bytes
            digest.update(np.array([begin - start, end - start], dtype="<i8").tobytes() + name)
        key = digest.digest()
        yield key


def _until(places: Sequence[Place], at: int, stop: int) -> Iterator[Place]:
    while at < len(places) and places[at][0] < stop:
        yield places[at]
        at += 1


def whole_numbers(what: str, name: str, values: Any) -> np.ndarray:
    """Return an array of whole numbers. Raises: ArgumentError, as `what`, for what is none."""
    try:
        found = np.asarray(values)
    except (TypeError, ValueError, OverflowError):  # rows of unlike lengths, tensors of a GPU
        found = np.empty(0, object)
    if found.dtype.kind not in "iu":
        raise ArgumentError(
            f"{what}: {name} is {kind_of(values)}, dtype {found.dtype}, expected whole numbers. Fix: pass an int array"
        )
    return found


def _positions(given: Any, length: int) -> np.ndarray:
    """int64 [rows, L]."""
    found = whole_numbers("prefix_keys", "positions", given)
    if found.ndim != 2 or found.shape[1] != length:
        raise ArgumentError(
            f"prefix_keys: positions have shape {list(found.shape)}, but the sample has {length} tokens. "
            "Fix: pass whole numbers [rows, L]"
        )
    # of uint64 those that int64 can't tell apart
    if found.dtype == np.uint64 and (found > np.iinfo(np.int64).max).any():
        raise ArgumentError("prefix_keys: positions are beyond int64. Fix: pass int64 [rows, L]")
    return found.astype(np.int64)


def _check(
    sample: Sample, block_size: int, weights: str, adapter: str, position_rule: str | None
) -> None:
    if not isinstance(sample, Sample):
        raise ArgumentError(
            f"prefix_keys: sample is {kind_of(sample)}, expected a Sample. Fix: pass one sample"
        )
    check_whole("prefix_keys", "block_size", block_size)
    mask = sample.attention_mask
    if mask is not None and not np.all(mask):
        raise ArgumentError(
            f"prefix_keys: {sample.sample_id!r:.60} has masked tokens, which keys can't tell from others. "
            "Fix: cut them off; mp.validate names them"
        )
    names = {"weights": weights, "adapter": adapter, "position_rule": position_rule}
    for name, value in names.items():
        if not isinstance(value, str) and not (name == "position_rule" and value is None):
            raise ArgumentError(
                f"prefix_keys: {name} is {kind_of(value)}, expected a str. Fix: pass the version's name"
            )
    if not weights:
        raise ArgumentError(
            "prefix_keys: weights is empty, so keys could not tell weights apart. Fix: name their version"
        )
