"""What was done to a picture that differs: turned, flattened, encoded again, resized twice, other limits.

Grids are (t, h, w) in patches; sizes are (width, height) in pixels.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmpack.parity.causes.alike import (
    Cause,
    both,
    differ,
    known_as_one,
    named_apart,
    one_name,
    other_keys,
)
from mmpack.parity.causes.pair import Pair, possible
from mmpack.parity.causes.settings import pixel_settings
from mmpack.parity.fixes import UNKNOWN
from mmpack.schema.media import Medium

ALPHA_MODES = ("LA", "La", "RGBA", "RGBa", "PA")
TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height
_STRANGER = "maybe another picture: no media_id, source or file_hash in common"


def image_causes(pair: Pair, a: Medium, b: Medium) -> Iterator[Cause]:
    """What was done to a picture; only possible where nothing says that it is one picture."""
    for cause, evidence in _picture_causes(pair, a, b):
        if cause == "max_pixels" or known_as_one(a, b) or _handled(cause, a, b):
            yield cause, evidence
        elif cause != UNKNOWN:
            yield UNKNOWN, f"{evidence}; {_STRANGER}; {possible(cause)}"
        elif differ(a.content_hash, b.content_hash) and "another picture" not in evidence:
            yield UNKNOWN, f"{_STRANGER}; {evidence}"
        else:
            yield cause, evidence


def _handled(cause: str, a: Medium, b: Medium) -> bool:
    """Whether sizes alone show that pictures without a name in common were handled in two ways.

    They were decoded to one size and handed on in two; for a rotation, under one EXIF orientation.
    """
    if named_apart(a, b) or differ(a.file_hash, b.file_hash) or not differ(a.size, b.size):
        return False
    if a.decoded_size is None or a.decoded_size != b.decoded_size:
        return False
    return cause == "resize_twice" or (
        cause == "exif_rotation" and a.exif_orientation == b.exif_orientation
    )


def _picture_causes(pair: Pair, a: Medium, b: Medium) -> Iterator[Cause]:
    grids = (tuple(a.grid_thw), tuple(b.grid_thw))
    regridded, repainted = grids[0] != grids[1], differ(a.content_hash, b.content_hash)
    turned = regridded and grids[0] == (grids[1][0], grids[1][2], grids[1][1])
    if turned or (differ(a.size, b.size) and _sides(a) == _sides(b)):
        yield _swapped(a, b)
        yield from _other_file(a, b)
    elif differ(a.decoded_size, b.decoded_size) and not _one_picture(a, b):
        files = a.file_hash is not None and b.file_hash is not None
        told = "another picture" if files else f"maybe another picture; {possible('resize_twice')}"
        yield UNKNOWN, f"decoded sizes differ, {both(a, b, 'decoded_size')}: {told}"
    elif differ(a.size, b.size):
        if _lying(a, b):
            yield _swapped(a, b)
        yield _resized(pair, a, b)
        yield from _other_file(a, b)
    elif repainted and ((a.size is not None and a.size == b.size) or not regridded):
        yield _pixels(a, b)
        if regridded:
            yield _limits(pair, a, b)
    elif regridded:
        yield _limits(pair, a, b)
    else:
        yield other_keys(pair, a, b)


def _lying(a: Medium, b: Medium) -> bool:
    """Whether one of two resized pictures lies on its side: their shapes are alike if one is turned, and only then."""
    if min(_sides(a) + _sides(b)) == 0 or not any(m.exif_orientation in TURNED for m in (a, b)):
        return False
    one, two = (np.log(m.size[0] / m.size[1]) for m in (a, b) if m.size)
    return bool(abs(one + two) < 0.1 < abs(one - two))


def _other_file(a: Medium, b: Medium) -> Iterator[Cause]:
    """The same picture from another file."""
    if differ(a.file_hash, b.file_hash) and one_name(a, b):
        yield "jpeg_reencode", both(a, b, "file_hash")


def _one_picture(a: Medium, b: Medium) -> bool:
    """Whether the caller says that it is, and no file says that it isn't: what came from memory may be resized."""
    decoded = a.file_hash is not None and b.file_hash is not None
    return not decoded and one_name(a, b)


def _sides(medium: Medium) -> list[int]:
    return sorted(medium.size or ())


def _swapped(a: Medium, b: Medium) -> Cause:
    turned = [m.exif_orientation for m in (a, b) if m.exif_orientation in TURNED]
    if turned:
        return "exif_rotation", f"height and width swap, exif_orientation is {turned[0]}"
    evidence = f"height and width swap, {both(a, b, 'exif_orientation')}"
    return UNKNOWN, f"{evidence}; {possible('exif_rotation')}"


def _resized(pair: Pair, a: Medium, b: Medium) -> Cause:
    limits = pixel_settings(pair, "image")
    evidence = f"{both(a, b, 'size')}, the size handed to the processor"
    if limits is None:
        return UNKNOWN, f"{evidence}; no settings; {possible('resize_twice', 'max_pixels')}"
    return "resize_twice", f"{evidence}; pixel limits {'differ too' if limits else 'are equal'}"


def _limits(pair: Pair, a: Medium, b: Medium) -> Cause:
    limits = pixel_settings(pair, "image")
    other = differ(a.content_hash, b.content_hash) and a.size != b.size
    if limits and not other:
        return "max_pixels", limits
    causes = ["max_pixels"] if limits is None or other else []
    causes += ["resize_twice"] if None in (a.size, b.size) else []
    evidence = "grids differ; pixel limits " + (
        "were not recorded" if limits is None else limits or "are equal"
    )
    if other:
        evidence += "; content differs"
    return UNKNOWN, f"{evidence}; {possible(*causes)}" if causes else evidence


def _pixels(a: Medium, b: Medium) -> Cause:
    """Same size, other pixels: the causes whose evidence is there; `unknown` if it is not exactly one."""
    causes = {}
    if any((m.exif_orientation or 1) != 1 for m in (a, b)):
        causes["exif_rotation"] = both(a, b, "exif_orientation")
    if any(m.mode in ALPHA_MODES for m in (a, b)):
        causes["alpha"] = both(a, b, "mode")
    causes |= dict(_other_file(a, b))
    if len(causes) == 1:
        cause, evidence = next(iter(causes.items()))
        return cause, f"{_same(a, b)}, other pixels; {evidence}"
    named = causes or ["exif_rotation", "alpha", "jpeg_reencode"]
    seen = "".join(f"; {evidence}" for evidence in causes.values())
    return UNKNOWN, f"{_same(a, b)}, other content_hash{seen}; {possible(*named)}"


def _same(a: Medium, b: Medium) -> str:
    return "same grid" if tuple(a.grid_thw) == tuple(b.grid_thw) else "same size"
