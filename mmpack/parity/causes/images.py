"""Causes by which an image differs: rotated, flattened, encoded again, resized twice, other limits.

Each cause is a claim with a verdict: proved, excluded, or possible. Only what is proved is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mmpack.parity.causes import looks, sizes
from mmpack.parity.causes.alike import (
    Cause,
    both,
    differ,
    differently_named,
    differing,
    known_as_one,
    one_file,
    one_name,
    other_keys,
)
from mmpack.parity.causes.pair import Pair, possible, view_of
from mmpack.parity.causes.settings import decisive, settings_of
from mmpack.parity.fixes import UNKNOWN
from mmpack.schema.media import Medium

ALPHA_MODES = ("LA", "La", "RGBA", "RGBa", "PA")
GRAY_MODES = ("1", "L", "LA", "I", "I;16", "F")
_STRANGER = "may be another image: no media_id, source or file_hash in common"


@dataclass(frozen=True)
class Claim:
    """`proved`: True, the rivals are excluded; None, it is possible; False, it is excluded."""

    cause: str
    proved: bool | None
    evidence: str


def image_causes(pair: Pair, a: Medium, b: Medium) -> Iterator[Cause]:
    """Yield each cause that is proved of a picture, else one `unknown` with what is possible."""
    handed = differ(a.size, b.size) or differ(a.content_hash, b.content_hash)
    views, cut = _views(pair, a, b, handed)
    if views:
        yield views
    if cut:
        return
    claims = _handed(pair, a, b) if handed or sizes.swapped(a, b) else []
    proved = [claim for claim in claims if claim.proved]
    if claims and not proved:
        yield _unproved(a, b, claims)
    yield from ((claim.cause, claim.evidence) for claim in proved)
    if proved and any(c.cause == "resize_twice" and not c.proved for c in claims):
        yield _unproved(a, b, claims)  # nothing that is proved changes a size
    if views:
        return
    if tuple(a.grid_thw) != tuple(b.grid_thw):
        yield from _grid(pair, a, b, explained=bool(claims))
    elif not claims:
        yield other_keys(pair, a, b)


def _views(pair: Pair, a: Medium, b: Medium, handed: bool) -> tuple[Cause | None, bool]:
    """The cause by which a picture's views differ, and whether nothing else can be said of this one.

    Of one picture, only settings make other views.
    """
    one, two = view_of(a), view_of(b)
    if one is None or two is None:
        return None, False
    settings = settings_of(pair, "image", "view_settings")
    slices = [f"{rows} × {columns}" for _, rows, columns in (one, two)]
    evidence = f"slices: rollout {slices[0]}, train {slices[1]}" if one != two else ""
    if not settings and not evidence and pair.recut:
        evidence = "another picture has other slices"
    if not settings and not evidence:
        return None, False
    evidence = "; ".join(filter(None, [evidence, settings]))
    if not settings and handed:
        return (UNKNOWN, f"{evidence}; {possible('view_settings', 'resize_twice')}"), False
    return ("view_settings", evidence), one[0] > 0 or not handed


def _handed(pair: Pair, a: Medium, b: Medium) -> list[Claim]:
    """Claims of how the processors came to be handed different pictures."""
    turned = _turned(a, b)
    tags = [m.exif_orientation for m in (a, b) if m.exif_orientation]
    turn = tags[0] if turned.proved else 1
    claims = [turned, _flattened(a, b), _reencoded(a, b, turn)]
    if not differ(a.size, b.size):
        return claims[:1] if turned.proved and not claims[2].proved else claims
    if not sizes.swapped(a, b):
        claims.append(_resized(pair, a, b, bool(turned.proved)))
    hidden = "alpha" if turned.proved else ""  # a turned picture's thumbnails are unlike anyway
    proved = [c for c in claims[1:] if c.proved and c.cause != hidden]
    return [turned, *proved, *(c for c in claims[3:] if not c.proved)]


def _unproved(a: Medium, b: Medium, claims: list[Claim]) -> Cause:
    open_ = [claim for claim in claims if claim.proved is None]
    unlike = differing(a, b, "size", "decoded_size", "content_hash")
    evidence = "; ".join([both(a, b, n) for n in unlike] or ["height and width of the grids swap"])
    details = [claim.evidence for claim in open_ if claim.evidence]
    if looks.alike(a, b) is False and not any(claim.proved for claim in claims):
        details.append(
            "thumbnails differ: another image, or one that was cropped, padded or painted"
        )
    elif not known_as_one(a, b):
        details.append(_STRANGER)
    if open_:
        details.append(possible(*(claim.cause for claim in open_)))
    return UNKNOWN, "; ".join([evidence, *details])


def _turned(a: Medium, b: Medium) -> Claim:
    """Sizes say of each side whether it was turned; where they don't, thumbnails do."""
    tags = [o for m in (a, b) if (o := m.exif_orientation or 1) != 1]
    evidence = both(a, b, "exif_orientation") if tags else ""
    swapped = sizes.swapped(a, b) or sizes.lying(a, b)
    if swapped:
        evidence = f"height and width swap, {both(a, b, 'exif_orientation')}"
    if not tags:
        known = a.exif_orientation is not None and b.exif_orientation is not None
        return Claim("exif_rotation", None if swapped and not known else False, evidence)
    sides = [sizes.upright(m) for m in (a, b)]
    one = known_as_one(a, b) or not differently_named(a, b)
    if None not in sides and (swapped or sides[0] == sides[1]):
        proved: bool | None = (one or None) if sides[0] != sides[1] else False
        if proved:
            evidence += (
                "; one side's size is that of the rotated image, the other's that of the file"
            )
    else:
        proved = looks.turned(a, b, tags[0])
        if proved is None and swapped and known_as_one(a, b):
            proved = True
        if proved and not one:
            proved = None
    return Claim("exif_rotation", proved, evidence)


def _resized(pair: Pair, a: Medium, b: Medium, turned: bool) -> Claim:
    """One side's size is a resize's of the other's: by its limits, or by thumbnails that are alike."""
    assert a.size is not None and b.size is not None
    size = b.size[::-1] if turned else b.size
    evidence = f"{both(a, b, 'size')}, the size handed to the processor"
    if differ(a.file_hash, b.file_hash) and differ(a.decoded_size, b.decoded_size):
        return Claim("resize_twice", None, f"{evidence}; files of other sizes")
    parts: Any = tuple(side.setting("image") for side in pair.sides)
    look, fitted = looks.alike(a, b), sizes.refitted(a.size, size, parts)
    if look is False and not turned and not looks.flattened(a, b):
        return Claim("resize_twice", False, evidence)
    proved = False
    if fitted:
        evidence += ", one is what a loader's resize makes of the other"
        proved = bool(known_as_one(a, b) or _one_origin(a, b) or look)
    elif fitted is False and sizes.rescaled(a.size, size) and looks.closely(a, b):
        evidence += ", thumbnails are alike"
        proved = True
    return Claim("resize_twice", (proved and not differently_named(a, b)) or None, evidence)


def _one_origin(a: Medium, b: Medium) -> bool:
    """Whether pictures without a name in common were decoded to one size, and no file says that they are two."""
    files = differ(a.file_hash, b.file_hash) or a.decoded_size is None
    return not files and a.decoded_size == b.decoded_size and not differently_named(a, b)


def _flattened(a: Medium, b: Medium) -> Claim:
    """A see-through picture whose other side is it over another grey."""
    clear = [looks.about(m, "transparent") for m in (a, b)]
    maybe = [c is None and m.mode in ALPHA_MODES for c, m in zip(clear, (a, b), strict=True)]
    if True not in clear and True not in maybe:
        return Claim("alpha", False, "")
    proved = looks.flattened(a, b)
    if proved and differently_named(a, b):
        proved = None
    evidence = f"same size, other pixels; {both(a, b, 'mode')}"
    if proved:
        evidence += "; one is the other over another background, by thumbnails"
    return Claim("alpha", proved, evidence)


def _reencoded(a: Medium, b: Medium, turn: int) -> Claim:
    """Two files of one look, at least one of them in a lossy format. `turn`: by which one side was turned."""
    formats = [looks.about(m, "format") for m in (a, b)]
    lossy = [f in looks.LOSSY for f in formats]
    files = differ(a.file_hash, b.file_hash)
    lossless = None not in formats and not any(lossy)
    if lossless or one_file(a, b) or not (files or any(lossy)):
        return Claim("jpeg_reencode", False, "")
    greyed = any(
        is_lossy and m.mode in GRAY_MODES and other.mode not in (*GRAY_MODES, None)
        for is_lossy, m, other in zip(lossy, (a, b), (b, a), strict=True)
    )
    flattened = looks.flattened(a, b)  # JPEG has no transparency: alpha is named too
    look = flattened or (looks.alike(a, b) if turn == 1 else looks.turned(a, b, turn))
    proved = look
    if look:
        two_kinds = None not in formats and lossy[0] != lossy[1]
        # files of one format may be two pictures, such as screenshots: they must be nearly equal
        levels = looks.UNLIKE if two_kinds else looks.SAME
        near = flattened or looks.closely(a, b, turn, levels)
        proved = (any(lossy) and (files or two_kinds) and near) or None
    if proved and (greyed or differently_named(a, b) or (all(lossy) and not one_name(a, b))):
        proved = None
    evidence = f"{both(a, b, 'file_hash')}, formats {formats[0]} and {formats[1]}"
    return Claim("jpeg_reencode", proved, evidence + (", thumbnails are alike" if proved else ""))


def _grid(pair: Pair, a: Medium, b: Medium, explained: bool) -> Iterator[Cause]:
    """The settings that a grid follows from; nothing where it follows from the sizes handed to the processor."""
    limits, family = settings_of(pair, "image", "max_pixels"), decisive(pair, "image")
    if family:
        yield "model_family", family
    parts = [side.setting("image") for side in pair.sides]
    if a.size and b.size:
        made = [sizes.grid_of(a.size, parts[0]), sizes.grid_of(b.size, parts[1])]
        if made == [tuple(a.grid_thw), tuple(b.grid_thw)]:
            one = _bound(a.size, parts[0], parts[1], made[0])
            if limits and (one or _bound(b.size, parts[1], parts[0], made[1])):
                yield "max_pixels", limits
            return
    if family or (explained and not limits):
        return
    if limits and not explained and (a.size is None or a.size == b.size):
        yield "max_pixels", limits
        return
    evidence = "grids differ; pixel limits " + (
        "were not recorded" if limits is None else limits or "are equal"
    )
    causes = ["max_pixels"] if limits is None or explained else []
    causes += ["resize_twice"] if None in (a.size, b.size) else []
    yield UNKNOWN, f"{evidence}; {possible(*causes)}" if causes else evidence


def _bound(size: tuple[int, int], part: Any, other: Any, made: Any) -> bool:
    """Whether the other side's limits give another grid."""
    limits = {name: other[name] for name in ("min_pixels", "max_pixels") if name in other}
    return sizes.grid_of(size, part | limits) != made
