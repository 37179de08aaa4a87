"""Whether two records are of one medium: the names, files, sizes and pixels that both sides recorded."""

from __future__ import annotations

import re

from mmpack.parity.causes.pair import Pair, possible, show
from mmpack.parity.causes.settings import decisive, keyed_by
from mmpack.parity.fixes import UNKNOWN
from mmpack.parity.values import same_value
from mmpack.schema.media import Medium

# a media_id made of the content, where no caller gave one
_MADE_UP = re.compile("(image|video|audio):[0-9a-f]{16}")

Cause = tuple[str, str]  # cause, evidence
# of media: compared where both sides recorded it
MEDIA_FIELDS = ("content_hash", "size")
VIDEO_FIELDS = ("fps", "frame_indices", "frame_timestamps", "second_per_grid_ts", "total_frames")
AUDIO_FIELDS = ("sampling_rate", "num_samples", "hop_length")
OF_MODALITY = {"image": (), "video": VIDEO_FIELDS, "audio": AUDIO_FIELDS}


def same_medium(a: Medium, b: Medium) -> bool:
    """Whether nothing that both sides recorded of a medium differs; names and where it came from don't count."""
    return a is b or (
        a.cache_key == b.cache_key
        and tuple(a.grid_thw) == tuple(b.grid_thw)
        and a.modality == b.modality
        and a.num_tokens == b.num_tokens
        and not differing(a, b, *MEDIA_FIELDS, *OF_MODALITY[a.modality])
    )


def differ(a: object, b: object) -> bool:
    """Both recorded, and not equal."""
    return a is not None and b is not None and not same_value(a, b)


def differing(a: Medium, b: Medium, *names: str) -> list[str]:
    """Those of the fields that both recorded, and that differ."""
    return [name for name in names if differ(getattr(a, name), getattr(b, name))]


def both(a: Medium, b: Medium, name: str) -> str:
    return f"{name}: rollout {show(getattr(a, name))}, train {show(getattr(b, name))}"


def one_file(a: Medium, b: Medium) -> bool:
    return a.file_hash is not None and a.file_hash == b.file_hash


def one_name(a: Medium, b: Medium) -> bool:
    return a.media_id == b.media_id or (a.source is not None and a.source == b.source)


def known_as_one(a: Medium, b: Medium) -> bool:
    return one_name(a, b) or one_file(a, b)


def differently_named(a: Medium, b: Medium) -> bool:
    """Whether callers gave the two media different names, and no file says that they are one."""
    made_up = any(_MADE_UP.fullmatch(m.media_id) for m in (a, b))
    return not known_as_one(a, b) and (not made_up or differ(a.source, b.source))


def other_keys(pair: Pair, a: Medium, b: Medium) -> Cause:
    if a.cache_key == b.cache_key:
        return UNKNOWN, f"{both(a, b, 'num_tokens')} under one grid"
    if family := decisive(pair, a.modality):
        return "model_family", family
    if found := keyed_by(pair, a.modality):
        return found[0], f"same grid, other cache_key; {found[1]}"
    if None in (a.content_hash, b.content_hash):
        causes = possible("exif_rotation", "alpha", "jpeg_reencode", "cache_key")
        return UNKNOWN, f"same grid, other cache_key, no content_hash on both sides; {causes}"
    return UNKNOWN, "same content and grid, other cache_key: other settings, or another key rule"


def fields_of(medium: Medium) -> tuple[str, ...]:
    """Fields of a medium that are compared where both sides recorded them; an audio has no size."""
    own = MEDIA_FIELDS if medium.modality != "audio" else ("content_hash",)
    return own + OF_MODALITY[medium.modality]


def described(medium: Medium) -> str:
    if medium.modality == "audio":
        rate = "" if medium.sampling_rate is None else f" at {medium.sampling_rate} Hz"
        count = "" if medium.num_samples is None else f" of {medium.num_samples} samples"
        return f"audio{count}{rate}, {medium.grid_thw[0]} frames, key {medium.cache_key[:12]}"
    size = "" if medium.size is None else f" of {medium.size[0]} x {medium.size[1]} px"
    return f"{medium.modality}{size}, grid {list(medium.grid_thw)}, key {medium.cache_key[:12]}"
