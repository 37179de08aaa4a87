"""Codec ids of one piece of audio that differ: flips of a quantizer, or another thing."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpack.parity.causes.pair import Hit, Pair, possible
from mmpack.parity.codec import CodecFlips, codec_flips
from mmpack.parity.fixes import UNKNOWN
from mmpack.schema.codec import CodecIds

MOST = 0.5  # share of frames that near ties flip at one level, at most: other weights change nearly all
STRETCH = 8  # neighbours that all differ, none of them the frame before once more: near ties are scattered
RARE = 1e-3  # how often such a stretch may be chance
SHIFTS = 16  # frames by which a level may be off


def codec_hits(pair: Pair) -> list[Hit]:
    """One hit for each piece of audio whose ids differ, where both sides recorded as many pieces."""
    left, right = (side.sample.codec_ids or [] for side in pair.sides)
    if len(left) != len(right):
        return []
    return [hit for k, (a, b) in enumerate(zip(left, right, strict=True)) for hit in _hits(k, a, b)]


def _hits(k: int, a: CodecIds, b: CodecIds) -> list[Hit]:
    where = f"codec_ids[{k}]"
    for name in ("codec", "codebook_sizes", "frame_rate"):
        if getattr(a, name) != getattr(b, name):
            shown = f"{getattr(a, name)!s:.40}", f"{getattr(b, name)!s:.40}"
            return [_hit(UNKNOWN, f"{where}: {name} differs, so it is another codec", *shown)]
    known = a.content_hash is not None and b.content_hash is not None
    if known and a.content_hash != b.content_hash:
        shown = f"{a.content_hash:.19}", f"{b.content_hash:.19}"
        return [_hit(UNKNOWN, f"{where}: the encoder was handed other samples", *shown)]
    if a.codes.shape != b.codes.shape:
        shown = f"{list(a.codes.shape)}", f"{list(b.codes.shape)}"
        return [_hit(UNKNOWN, f"{where}: another number of levels or frames", *shown)]
    flips = codec_flips(a.codes, b.codes)
    if flips.place is None:
        return []
    level, frame = flips.place
    ids = (f"id {x.codes[level, frame]} at level {level}, frame {frame}" for x in (a, b))
    evidence = f"{where}: {_counts(flips)}{_shapes(a, b)}"
    if why := _no_flips(a.codes, b.codes, flips):
        return [_hit(UNKNOWN, f"{evidence}; {why}", *ids)]
    if not known:
        evidence += f"; no content_hash says that the audio is the same; {possible('codec_flip')}"
        return [_hit(UNKNOWN, evidence, *ids)]
    return [_hit("codec_flip", f"{evidence}; the samples and the codec are the same", *ids)]


def _no_flips(a: np.ndarray, b: np.ndarray, flips: CodecFlips) -> str:
    """Say what differs in a way that near ties do not; empty if they may have made it."""
    for level, (ids, other) in enumerate(zip(a, b, strict=True)):
        if by := _shift(ids, other):
            plural = "s" if abs(by) > 1 else ""
            way = "later" if by > 0 else "earlier"
            return f"train's level {level} is {abs(by)} frame{plural} {way}, exactly"
    level = int(flips.first_rate.argmax())
    if flips.first_rate[level] > MOST:
        return f"too many for near ties at level {level}, weights or settings differ"
    start, stop = _stretch(a, b)
    if stop > start:
        return f"one stretch, frames {start} to {stop - 1}, differs throughout, where near ties are scattered"
    return ""


def _shift(a: np.ndarray, b: np.ndarray) -> int:
    """By how many frames `b` is later than `a` where this explains all that differs; 0 if nothing does."""
    unlike = int((a != b).sum())
    for by in range(1, min(SHIFTS + 1, len(a), unlike)):  # fewer may lie beyond the overlap
        if np.array_equal(a[:-by], b[by:]):
            return by
        if np.array_equal(a[by:], b[:-by]):
            return -by
    return 0


def _stretch(a: np.ndarray, b: np.ndarray) -> tuple[int, int]:
    """[start, stop) of neighbouring frames that differ, too many for chance; (0, 0) if there are none.

    A frame like the one before, on both sides, is decided as that was, and counts no more.
    """
    both = np.concatenate([a, b])
    new = np.concatenate([[True], (both[:, 1:] != both[:, :-1]).any(axis=0)])
    at = np.flatnonzero(new)
    unlike = (a != b).any(axis=0)[at]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], unlike, [False]])))
    starts, stops = edges[::2], edges[1::2]
    k = int((stops - starts).argmax())
    length = int(stops[k] - starts[k])
    outside = (int(unlike.sum()) - length) / max(len(at) - length, 1)
    if length < STRETCH or len(at) * max(outside, 1 / len(at)) ** length > RARE:
        return 0, 0
    last = int(at[stops[k]]) if stops[k] < len(at) else a.shape[1]
    return int(at[starts[k]]), last


def _counts(flips: CodecFlips) -> str:
    levels = ", ".join(f"{rate:.2%}" for rate in flips.rate[:8])
    more = ", …" if len(flips.rate) > 8 else ""
    return f"ids of {flips.frames_flipped} of {flips.frames} frames differ, by level {levels}{more}"


def _shapes(a: CodecIds, b: CodecIds) -> str:
    shapes: list[Any] = [x.metadata.get("batch_shape") for x in (a, b)]
    return "" if None in shapes else f"; encoded in batches {shapes[0]!s:.40} and {shapes[1]!s:.40}"


def _hit(cause: str, evidence: str, left: str, right: str) -> Hit:
    return Hit(cause, "codec_ids", evidence, left, right)
