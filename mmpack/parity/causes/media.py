"""Media that differ: which are missing, and why the same picture or video has another grid or other pixels.

Grids are (t, h, w) in patches; sizes are (width, height) in pixels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from mmpack.parity.causes.frames import (
    first_difference,
    misread,
    other_policies,
    rotated,
    same_frames_other_pixels,
)
from mmpack.parity.causes.pair import Decode, Hit, Pair, possible, show, stamp_of
from mmpack.parity.causes.settings import pixel_settings
from mmpack.parity.causes.stamps import unlike_stamps
from mmpack.parity.fixes import UNKNOWN
from mmpack.parity.frames import FrameDifference
from mmpack.schema.media import Medium

ALPHA_MODES = ("LA", "La", "RGBA", "RGBa", "PA")
TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height
ASSUMED_FPS = 24.0  # what transformers assumes where a video says nothing
# a media_id made of the content, where no caller gave one
_MADE_UP = re.compile("(image|video):[0-9a-f]{16}")
_STRANGER = "maybe another picture: no media_id, source or file_hash in common"
# what the first differing frame belongs to
_OF_FRAMES = ("frame_sampling", "fps_missing", "video_metadata", "frame_pixels", UNKNOWN)

Cause = tuple[str, str]  # cause, evidence
Places = tuple[dict[str, int], dict[str, int]]  # of each side, content_hash to index


def media_hits(pair: Pair, decode: Decode | None) -> list[Hit]:
    """One hit for each cause, at the first medium that shows it."""
    hits: dict[str, Hit] = {}
    matches = matched_media(pair.left.sample.media, pair.right.sample.media)
    for hit in [
        *_missing(pair, matches),
        *_unlike(pair, matches),
        *_stamps(pair, matches, decode),
        *_cache_keys(pair),
    ]:
        hits.setdefault(hit.cause, hit)
    return list(hits.values())


def matched_media(left: list[Medium], right: list[Medium]) -> list[tuple[int, int]] | None:
    """Pairs of indices of what is the same medium; None if one list can't be the other with some dropped."""
    if len(left) == len(right):
        return [(i, i) for i in range(len(left))]
    hashed = all(m.content_hash for m in left + right)
    for name in ("content_hash" if hashed else "cache_key", "media_id"):
        keys = [[getattr(m, name) for m in side] for side in (left, right)]
        if matches := _subsequence(*keys):
            return matches
    return None if left and right else []


def _subsequence(a: list[str], b: list[str]) -> list[tuple[int, int]] | None:
    """Pairs of indices if the shorter list is the longer one with some left out."""
    few, many = (a, b) if len(a) < len(b) else (b, a)
    out: list[tuple[int, int]] = []
    j = 0
    for i, key in enumerate(few):
        while j < len(many) and many[j] != key:
            j += 1
        if j == len(many):
            return None
        out.append((i, j) if few is a else (j, i))
        j += 1
    return out


def same_medium(a: Medium, b: Medium) -> bool:
    """Whether nothing that both sides recorded of a medium differs; names and where it came from don't count."""
    return (
        a.cache_key == b.cache_key
        and tuple(a.grid_thw) == tuple(b.grid_thw)
        and a.modality == b.modality
        and a.num_tokens == b.num_tokens
        and not _differ(a.content_hash, b.content_hash)
        and not _differ(a.size, b.size)
        and (a.modality != "video" or same_video(a, b))
    )


def same_video(a: Medium, b: Medium) -> bool:
    names = ("fps", "frame_indices", "frame_timestamps", "second_per_grid_ts", "total_frames")
    return not any(_differ(getattr(a, name), getattr(b, name)) for name in names)


def _differ(a: object, b: object) -> bool:
    """Both recorded, and not equal."""
    return a is not None and b is not None and not np.array_equal(a, b)  # type: ignore[arg-type]


def _missing(pair: Pair, matches: list[tuple[int, int]] | None) -> Iterator[Hit]:
    left, right = pair.left.sample.media, pair.right.sample.media
    counts = f"{len(left)} media against {len(right)}"
    if matches is None:
        at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if _other(a, b)), 0)
        start = pair.left.start_of(at) or 0
        yield Hit(
            cause=UNKNOWN,
            field="media",
            evidence=f"{counts}, and neither list is the other with some left out; "
            + possible("dropped_image", "cache_key"),
            left=f"{len(left)} media",
            right=f"{len(right)} media",
            index=at,
            at=start,
        )
        return
    for k, (side, other) in enumerate((pair.sides, pair.sides[::-1])):
        kept = {match[k] for match in matches}
        lost = [i for i in range(len(side.sample.media)) if i not in kept]
        if lost:
            medium = side.sample.media[lost[0]]
            names = ", ".join(f"media[{i}]" for i in lost[:4])
            picture = _picture(medium)
            opened = side.start_of(lost[0])
            yield Hit(
                cause="dropped_image",
                field="media",
                evidence=f"{counts}: {other.name} lacks {names} of {side.name}",
                left=picture if k == 0 else "no such medium",
                right="no such medium" if k == 0 else picture,
                index=lost[0],
                at=max((opened or 0) - 1, 0),  # with the token that opens the medium
            )


def _other(a: Medium, b: Medium) -> bool:
    return _differ(a.content_hash, b.content_hash) or a.cache_key != b.cache_key


def _unlike(pair: Pair, matches: list[tuple[int, int]] | None) -> Iterator[Hit]:
    places = _places(pair, matches)
    for i, j in matches or ():
        a, b = pair.left.sample.media[i], pair.right.sample.media[j]
        if same_medium(a, b):
            continue
        parted = first_difference(pair, i, j) if a.modality == b.modality == "video" else None
        if _reused(a, b):
            causes = [("cache_key", f"{_one_key(i, j)}, {_both(a, b, 'content_hash')}")]
        elif moved := _moved(places, i, j, a, b):
            causes = [(UNKNOWN, moved)]
        elif a.modality != b.modality:
            causes = [(UNKNOWN, f"media[{i}] is {a.modality} in rollout, {b.modality} in train")]
        elif a.modality == "video":
            causes = list(_video_causes(pair, a, b, parted))
        else:
            causes = list(_image_causes(pair, a, b))
        resized = tuple(a.grid_thw) != tuple(b.grid_thw)
        start = pair.left.start_of(i)
        if i in pair.left.films:  # its timestamps are in the text
            start, resized = stamp_of(pair.left.films[i][0]), True
        for cause, evidence in causes:
            yield Hit(
                cause=cause,
                field="media",
                evidence=evidence,
                left=_picture(a),
                right=_picture(b),
                index=i,
                at=(0 if start is None else start) if resized else None,
                frames=parted if cause in _OF_FRAMES else None,
            )


def _stamps(
    pair: Pair, matches: list[tuple[int, int]] | None, decode: Decode | None
) -> Iterator[Hit]:
    """Timestamps that differ in the text of a video, though nothing recorded of its frames does."""
    for i, j in matches or ():
        if i not in pair.left.films or j not in pair.right.films:
            continue
        a, b = pair.left.sample.media[i], pair.right.sample.media[j]
        if told := unlike_stamps(pair, i, j, decode, same_medium(a, b)):
            cause, evidence = told
            yield Hit(
                cause=cause,
                field="media",
                evidence=evidence,
                left=_picture(a),
                right=_picture(b),
                index=i,
                at=stamp_of(pair.left.films[i][0]),
            )


def _places(pair: Pair, matches: list[tuple[int, int]] | None) -> Places:
    """Of each side, where contents stand whose partner on the other side has another one."""
    places: Places = ({}, {})
    for match in matches or ():
        both = [side.sample.media[k] for side, k in zip(pair.sides, match, strict=True)]
        if _differ(both[0].content_hash, both[1].content_hash):
            for place, medium, k in zip(places, both, match, strict=True):
                place[str(medium.content_hash)] = k
    return places


def _moved(places: Places, i: int, j: int, a: Medium, b: Medium) -> str | None:
    """Evidence that the content of a medium stands at another index of the other side."""
    if not _differ(a.content_hash, b.content_hash) or _one_file(a, b):
        return None
    if (k := places[1].get(str(a.content_hash))) is not None:
        return (
            f"another medium, other order: train media[{k}] has the content of rollout media[{i}]"
        )
    if (k := places[0].get(str(b.content_hash))) is not None:
        return (
            f"another medium, other order: rollout media[{k}] has the content of train media[{j}]"
        )
    return None


def _reused(a: Medium, b: Medium) -> bool:
    """One key for two contents: the key is the cause of whatever else differs."""
    return a.cache_key == b.cache_key and _differ(a.content_hash, b.content_hash)


def _image_causes(pair: Pair, a: Medium, b: Medium) -> Iterator[Cause]:
    """What was done to a picture; only possible where nothing says that it is one picture."""
    for cause, evidence in _picture_causes(pair, a, b):
        if cause == "max_pixels" or _known_as_one(a, b) or _handled(cause, a, b):
            yield cause, evidence
        elif cause != UNKNOWN:
            yield UNKNOWN, f"{evidence}; {_STRANGER}; {possible(cause)}"
        elif _differ(a.content_hash, b.content_hash) and "another picture" not in evidence:
            yield UNKNOWN, f"{_STRANGER}; {evidence}"
        else:
            yield cause, evidence


def _known_as_one(a: Medium, b: Medium) -> bool:
    return _one_name(a, b) or _one_file(a, b)


def _one_file(a: Medium, b: Medium) -> bool:
    return a.file_hash is not None and a.file_hash == b.file_hash


def _handled(cause: str, a: Medium, b: Medium) -> bool:
    """Whether sizes alone show that pictures without a name in common were handled in two ways.

    They were decoded to one size and handed on in two; for a rotation, under one EXIF orientation.
    """
    if _named_apart(a, b) or _differ(a.file_hash, b.file_hash) or not _differ(a.size, b.size):
        return False
    if a.decoded_size is None or a.decoded_size != b.decoded_size:
        return False
    return cause == "resize_twice" or (
        cause == "exif_rotation" and a.exif_orientation == b.exif_orientation
    )


def _named_apart(a: Medium, b: Medium) -> bool:
    """Whether callers gave the two other names."""
    made_up = any(_MADE_UP.fullmatch(m.media_id) for m in (a, b))
    return not _one_name(a, b) and (not made_up or _differ(a.source, b.source))


def _picture_causes(pair: Pair, a: Medium, b: Medium) -> Iterator[Cause]:
    grids = (tuple(a.grid_thw), tuple(b.grid_thw))
    regridded, repainted = grids[0] != grids[1], _differ(a.content_hash, b.content_hash)
    turned = regridded and grids[0] == (grids[1][0], grids[1][2], grids[1][1])
    if turned or (_differ(a.size, b.size) and _sides(a) == _sides(b)):
        yield _swapped(a, b)
        yield from _other_file(a, b)
    elif _differ(a.decoded_size, b.decoded_size) and not _one_picture(a, b):
        files = a.file_hash is not None and b.file_hash is not None
        told = "another picture" if files else f"maybe another picture; {possible('resize_twice')}"
        yield UNKNOWN, f"decoded sizes differ, {_both(a, b, 'decoded_size')}: {told}"
    elif _differ(a.size, b.size):
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
        yield _keys(pair, a, b)


def _lying(a: Medium, b: Medium) -> bool:
    """Whether one of two resized pictures lies on its side: their shapes are alike if one is turned, and only then."""
    if min(_sides(a) + _sides(b)) == 0 or not any(m.exif_orientation in TURNED for m in (a, b)):
        return False
    one, two = (np.log(m.size[0] / m.size[1]) for m in (a, b) if m.size)
    return bool(abs(one + two) < 0.1 < abs(one - two))


def _other_file(a: Medium, b: Medium) -> Iterator[Cause]:
    """The same picture from another file."""
    if _differ(a.file_hash, b.file_hash) and _one_name(a, b):
        yield "jpeg_reencode", _both(a, b, "file_hash")


def _one_name(a: Medium, b: Medium) -> bool:
    return a.media_id == b.media_id or (a.source is not None and a.source == b.source)


def _one_picture(a: Medium, b: Medium) -> bool:
    """Whether the caller says that it is, and no file says that it isn't: what came from memory may be resized."""
    decoded = a.file_hash is not None and b.file_hash is not None
    return not decoded and _one_name(a, b)


def _sides(medium: Medium) -> list[int]:
    return sorted(medium.size or ())


def _swapped(a: Medium, b: Medium) -> Cause:
    turned = [m.exif_orientation for m in (a, b) if m.exif_orientation in TURNED]
    if turned:
        return "exif_rotation", f"height and width swap, exif_orientation is {turned[0]}"
    evidence = f"height and width swap, {_both(a, b, 'exif_orientation')}"
    return UNKNOWN, f"{evidence}; {possible('exif_rotation')}"


def _resized(pair: Pair, a: Medium, b: Medium) -> Cause:
    limits = pixel_settings(pair, "image")
    evidence = f"{_both(a, b, 'size')}, the size handed to the processor"
    if limits is None:
        return UNKNOWN, f"{evidence}; no settings; {possible('resize_twice', 'max_pixels')}"
    return "resize_twice", f"{evidence}; pixel limits {'differ too' if limits else 'are equal'}"


def _limits(pair: Pair, a: Medium, b: Medium) -> Cause:
    limits = pixel_settings(pair, "image")
    other = _differ(a.content_hash, b.content_hash) and a.size != b.size
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
        causes["exif_rotation"] = _both(a, b, "exif_orientation")
    if any(m.mode in ALPHA_MODES for m in (a, b)):
        causes["alpha"] = _both(a, b, "mode")
    causes |= dict(_other_file(a, b))
    if len(causes) == 1:
        cause, evidence = next(iter(causes.items()))
        return cause, f"{_same(a, b)}, other pixels; {evidence}"
    named = causes or ["exif_rotation", "alpha", "jpeg_reencode"]
    seen = "".join(f"; {evidence}" for evidence in causes.values())
    return UNKNOWN, f"{_same(a, b)}, other content_hash{seen}; {possible(*named)}"


def _same(a: Medium, b: Medium) -> str:
    return "same grid" if tuple(a.grid_thw) == tuple(b.grid_thw) else "same size"


def _keys(pair: Pair, a: Medium, b: Medium) -> Cause:
    if a.cache_key == b.cache_key:
        return UNKNOWN, f"{_both(a, b, 'num_tokens')} under one grid"
    limits = pixel_settings(pair, a.modality)
    if limits:
        return "max_pixels", f"same grid, other cache_key; {limits}"
    if None in (a.content_hash, b.content_hash):
        causes = possible("exif_rotation", "alpha", "jpeg_reencode", "cache_key")
        return UNKNOWN, f"same grid, other cache_key, no content_hash on both sides; {causes}"
    return UNKNOWN, "same content and grid, other cache_key: other settings, or another key rule"


def _video_causes(
    pair: Pair, a: Medium, b: Medium, parted: FrameDifference | None
) -> Iterator[Cause]:
    """What was done to a video; only possible where what was recorded of its file differs."""
    causes = list(_film_causes(pair, a, b, parted))
    names = () if _one_file(a, b) else ("total_frames", "decoded_size", "file_hash")
    unlike = [name for name in names if _differ(getattr(a, name), getattr(b, name))]
    if rotated(a, b) and "decoded_size" in unlike:
        unlike.remove("decoded_size")
    if not _known_as_one(a, b) and _named_apart(a, b):
        unlike += ["media_id", *(["source"] if _differ(a.source, b.source) else [])]
    named = [cause for cause, _ in causes if cause not in (UNKNOWN, "max_pixels")]
    if not unlike or not named:
        yield from causes
        return
    evidence = "; ".join(_both(a, b, name) for name in unlike)
    yield UNKNOWN, f"another video, or another file of it: {evidence}; {possible(*named)}"
    yield from (told for told in causes if told[0] == "max_pixels")


def _film_causes(
    pair: Pair, a: Medium, b: Medium, parted: FrameDifference | None
) -> Iterator[Cause]:
    (ta, *plane_a), (tb, *plane_b) = a.grid_thw, b.grid_thw
    seen = False
    first = f"; {parted}" if parted and parted.place is not None else ""
    turned = rotated(a, b)
    if turned:
        yield "video_rotation", turned
        seen = True
    if assumed := _assumed_fps(pair, a, b):
        yield "fps_missing", assumed + first
        seen = True
    if told := misread(a, b, rates=not assumed):
        yield "video_metadata", told + first
        seen = True
    if _differ(a.frame_indices, b.frame_indices):
        yield "frame_sampling", _frames(a, b) + first
        seen = True
    elif ta != tb and not seen:
        causes = possible("frame_sampling", "fps_missing")
        counts = f"{ta} against {tb} temporal patches, no frame_indices on both sides"
        yield UNKNOWN, f"{counts}{first}; {causes}"
        seen = True
    if not turned and same_frames_other_pixels(a, b):
        evidence = f"same frames and size, {_both(a, b, 'content_hash')}"
        yield "frame_pixels", f"{evidence}: another decoder, other colours, or turned by 180°"
        seen = True
    if plane_a != plane_b and plane_a == plane_b[::-1]:
        if not turned:
            grid = f"h, w of the grid swap: {plane_a} against {plane_b}"
            yield UNKNOWN, f"{grid}, {_both(a, b, 'size')}; {possible('video_rotation')}"
        seen = True
    elif plane_a != plane_b:
        limits = pixel_settings(pair, "video")
        grid = f"h, w of the grid: {plane_a} against {plane_b}"
        if limits:
            yield "max_pixels", limits
        elif policies := other_policies(pair, a, b):
            yield "video_budget", f"{grid}, each by its own rule; {policies}"
        elif limits is None:
            yield UNKNOWN, f"{grid}; no settings; {possible('video_budget', 'max_pixels')}"
        else:
            yield "video_budget", f"{grid}, under equal pixel limits"
        seen = True
    if not seen and _differ(a.second_per_grid_ts, b.second_per_grid_ts):
        yield "second_per_grid_ts", _both(a, b, "second_per_grid_ts")
        seen = True
    if not seen:
        names = ("fps", "frame_timestamps", "total_frames", "size", "content_hash", "num_tokens")
        unlike = [name for name in names if _differ(getattr(a, name), getattr(b, name))]
        if unlike:
            yield UNKNOWN, "; ".join(_both(a, b, name) for name in unlike) + first
        else:
            yield _keys(pair, a, b)


def _assumed_fps(pair: Pair, a: Medium, b: Medium) -> str | None:
    """One side's seconds are its frames over 24, the other side knows another fps.

    By the timestamps, or by `second_per_grid_ts`: frames of a temporal patch over the assumed 24.
    """
    for m, other in ((a, b), (b, a)):
        if m.fps not in (None, ASSUMED_FPS) or other.fps in (None, ASSUMED_FPS):
            continue
        if m.second_per_grid_ts is not None and other.second_per_grid_ts is not None:
            step = pair.left.family.temporal_patch_size / ASSUMED_FPS
            assumed = np.isclose(m.second_per_grid_ts, step, rtol=1e-3)
            if assumed and not np.isclose(other.second_per_grid_ts, step, rtol=1e-3):
                seconds = _both(a, b, "second_per_grid_ts")
                return f"{_both(a, b, 'fps')}; {seconds}: one side's are its frames over 24"
        if m.frame_indices is None or m.frame_timestamps is None:
            continue
        counted = np.asarray(m.frame_indices) / ASSUMED_FPS
        stamps = np.asarray(m.frame_timestamps)
        if len(stamps) and len(stamps) == len(counted) and np.allclose(stamps, counted, atol=1e-3):
            return f"{_both(a, b, 'fps')}; one side's timestamps are its frames over 24"
    return None


def _cache_keys(pair: Pair) -> Iterator[Hit]:
    """One key for two contents or grids, across the two sides."""
    mine = {m.cache_key: (i, m) for i, m in reversed(list(enumerate(pair.left.sample.media)))}
    for j, b in enumerate(pair.right.sample.media):
        if b.cache_key not in mine:
            continue
        i, a = mine[b.cache_key]
        unlike = [
            name
            for name in ("content_hash", "grid_thw")
            if _differ(getattr(a, name), getattr(b, name))
        ]
        if unlike:
            yield Hit(
                cause="cache_key",
                field="media",
                evidence=f"{_one_key(i, j)}, " + "; ".join(_both(a, b, name) for name in unlike),
                left=_picture(a),
                right=_picture(b),
                index=i,
            )


def _one_key(i: int, j: int) -> str:
    return f"rollout media[{i}] and train media[{j}] have one cache_key"


def _both(a: Medium, b: Medium, name: str) -> str:
    return f"{name}: rollout {show(getattr(a, name))}, train {show(getattr(b, name))}"


def _frames(a: Medium, b: Medium) -> str:
    one, two = (len(np.asarray(m.frame_indices)) for m in (a, b))
    return f"{one} frames against {two}"


def _picture(medium: Medium) -> str:
    size = "" if medium.size is None else f" of {medium.size[0]} x {medium.size[1]} px"
    return f"{medium.modality}{size}, grid {list(medium.grid_thw)}, key {medium.cache_key[:12]}"
