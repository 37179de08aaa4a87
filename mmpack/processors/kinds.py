"""Is it a picture, a video or an audio? By what it is in memory, or by the first bytes of the file."""

from __future__ import annotations

from numbers import Real
from pathlib import Path
from typing import Any

from mmpack.schema.media import Medium

HEAD = 189  # bytes that decide: two packets of MPEG-TS
# containers of videos: MP4 and its kin, Matroska, AVI, MPEG-TS, MPEG-PS, FLV, Ogg, IVF
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp")
_STARTS = (b"\x1a\x45\xdf\xa3", b"\x00\x00\x01\xba", b"FLV\x01", b"OggS", b"DKIF")

_SOUNDS = (b"fLaC", b"ID3", *(b"\xff" + bytes([second]) for second in b"\xfb\xfa\xf3\xf2\xf1\xf9"))
_SOUND_BRANDS = (b"M4A ", b"M4B ", b"M4P ", b"F4A ", b"F4B ")
_PICTURES = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")


def kind_of_item(item: Any) -> str | None:
    """`image`, `video` or `audio`; None for bytes and paths, which may be any.

    Audio is a Medium of one, samples [n] or with channels and their rate, or an object with `array`. Videos are a
    Medium of one, a pair (frames or file, what is known of it), or frames: uint8 [n, h, w, 3] or a list.
    """
    if isinstance(item, Medium):
        return item.modality
    if isinstance(item, (bytes, bytearray, str, Path)):
        return None
    if isinstance(item, dict) and "array" in item:
        return "audio"
    if _is_sound(item):
        return "audio"
    frames = isinstance(item, (tuple, list)) or getattr(item, "ndim", 3) == 4
    return "video" if frames else "image"


def _is_sound(item: Any) -> bool:
    """Samples [n] alone, or samples of one or more channels with their rate, in either order."""
    if not (isinstance(item, tuple) and len(item) == 2):
        return getattr(item, "ndim", 0) == 1
    samples, rate = item[::-1] if isinstance(item[0], Real) else item
    if isinstance(samples, list):
        return isinstance(rate, Real) and bool(samples) and isinstance(samples[0], (Real, list))
    rows = getattr(samples, "ndim", 0)
    return rows == 1 or (rows == 2 and isinstance(rate, Real))


def is_picture(head: bytes) -> bool:
    """Does a file that begins so hold a picture?"""
    webp = head[:4] == b"RIFF" and head[8:12] == b"WEBP"
    return webp or head.startswith(_PICTURES) or brand(head) in ("avif", "heic")


def brand(head: bytes) -> str | None:
    """`avif`, `heic` or `audio` by the brand of an MP4-like file that begins so; None of videos and of other files."""
    name, others = head[8:12], head[16 : int.from_bytes(head[:4])]
    if head[4:8] != b"ftyp":
        return None
    if name in (b"mif1", b"msf1"):  # pictures of any codec
        name = b"avif" if b"avif" in others or b"avis" in others else b"heic"
    if name in (b"avif", b"avis"):
        return "avif"
    if name[:3] in (b"hei", b"hev"):
        return "heic"
    return "audio" if name in _SOUND_BRANDS else None


def kind_of_file(head: bytes) -> str:
    """`audio` or `video` if a file that begins so is one; else `image`. Ogg may be either, and counts as video."""
    riff = head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE"
    aiff = head[:4] == b"FORM" and head[8:11] == b"AIF"
    if riff or aiff or head.startswith(_SOUNDS) or brand(head) == "audio":
        return "audio"
    video = (head[4:8] in _BOXES and not is_picture(head)) or head.startswith(_STARTS)
    video |= head[:4] == b"RIFF" and head[8:12] == b"AVI "
    video |= head[:1] == b"\x47" and head[188:189] == b"\x47"
    return "video" if video else "image"
