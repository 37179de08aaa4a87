"""Is it a picture, a video or an audio? By what it is in memory, or by the first bytes of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmpack.schema.media import Medium

HEAD = 189  # bytes that decide: two packets of MPEG-TS
# containers of videos: MP4 and its kin, Matroska, AVI, MPEG-TS, MPEG-PS, FLV, Ogg, IVF
_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp")
_STARTS = (b"\x1a\x45\xdf\xa3", b"\x00\x00\x01\xba", b"FLV\x01", b"OggS", b"DKIF")

_SOUNDS = (b"fLaC", b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")
_PICTURES = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_AVIF = (b"avif", b"avis")
_HEIF = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


def kind_of_item(item: Any) -> str | None:
    """`image`, `video` or `audio`; None for bytes and paths, which may be any.

    Audio is a Medium of one, (samples [n], rate), or an object with `array`. Videos are a Medium of one, a pair (frames
    or file, what is known of it), or frames: uint8 [n, h, w, 3] or a list.
    """
    if isinstance(item, Medium):
        return item.modality
    if isinstance(item, (bytes, bytearray, str, Path)):
        return None
    if isinstance(item, dict) and "array" in item:
        return "audio"
    if isinstance(item, tuple) and len(item) == 2 and getattr(item[0], "ndim", 0) == 1:
        return "audio"
    frames = isinstance(item, (tuple, list)) or getattr(item, "ndim", 3) == 4
    return "video" if frames else "image"


def is_picture(head: bytes) -> bool:
    """Does a file that begins so hold a picture?"""
    boxed = head[4:8] == b"ftyp" and head[8:12] in (*_AVIF, *_HEIF)
    return boxed or head.startswith(_PICTURES) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")


def is_heif(head: bytes) -> bool:
    """Does a file that begins so hold a picture as iPhones write it, which Pillow does not read?

    By its brands (ISO 14496-12, ftyp): AVIF may name `mif1` first and itself behind.
    """
    size = int.from_bytes(head[:4], "big")
    brands = {head[i : i + 4] for i in range(8, min(size, len(head)), 4)}
    return head[4:8] == b"ftyp" and head[8:12] in _HEIF and not brands & {*_AVIF}


def kind_of_file(head: bytes) -> str:
    """`audio` or `video` if a file that begins so is one; else `image`. Ogg may be either, and counts as video."""
    if head.startswith(_SOUNDS) or (head[:4] == b"RIFF" and head[8:12] == b"WAVE"):
        return "audio"
    video = head[4:8] in _BOXES or head.startswith(_STARTS)
    video |= head[:4] == b"RIFF" and head[8:12] == b"AVI "
    video |= head[:1] == b"\x47" and head[188:189] == b"\x47"
    return "video" if video and not is_picture(head) else "image"
