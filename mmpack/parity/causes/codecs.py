"""Codec ids of one piece of audio that differ: flips of a quantizer, or another thing."""

from __future__ import annotations

from typing import Any

from mmpack.parity.causes.pair import Hit, Pair, possible
from mmpack.parity.codec import CodecFlips, codec_flips
from mmpack.parity.fixes import UNKNOWN
from mmpack.schema.codec import CodecIds

MOST = 0.5  # share of frames that near ties flip at level 0, at most: weights that differ change nearly all


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
    if flips.rate[0] > MOST:
        return [
            _hit(UNKNOWN, f"{evidence}; too many for near ties, weights or settings differ", *ids)
        ]
    if not known:
        evidence += f"; no content_hash says that the audio is the same; {possible('codec_flip')}"
        return [_hit(UNKNOWN, evidence, *ids)]
    return [_hit("codec_flip", f"{evidence}; the samples and the codec are the same", *ids)]


def _counts(flips: CodecFlips) -> str:
    levels = ", ".join(f"{rate:.2%}" for rate in flips.rate[:8])
    more = ", …" if len(flips.rate) > 8 else ""
    return f"ids of {flips.frames_flipped} of {flips.frames} frames differ, by level {levels}{more}"


def _shapes(a: CodecIds, b: CodecIds) -> str:
    shapes: list[Any] = [x.metadata.get("batch_shape") for x in (a, b)]
    return "" if None in shapes else f"; encoded in batches {shapes[0]!s:.40} and {shapes[1]!s:.40}"


def _hit(cause: str, evidence: str, left: str, right: str) -> Hit:
    return Hit(cause, "codec_ids", evidence, left, right)
