"""Streams of which every library makes the same RGB: every version of swscale converts them without its scaler.

The others (more than 8 bits, odd sizes, full range of VP9 and AV1) go through the scaler, whose rounding differs
between versions.
"""

from __future__ import annotations

import importlib

from mmpack.video.backends.pyav import first_picture
from mmpack.video.files.container import Opened
from mmpack.video.files.interlaced import may_be_interlaced
from mmpack.video.files.packets import Packets
from mmpack.video.files.readers import OPEN_GROUPS, unpaired

FIX = "Fix: pass backend='auto'"
CONTAINERS = ("mp4", "matroska")  # others are sought in as each library can
FULL_RANGE = 2  # FFmpeg's AVCOL_RANGE_JPEG
CODECS = ("h264", "hevc", "vp8", "vp9", "av1")
FORMATS = ("yuv420p", "yuvj420p", "yuv422p", "yuvj422p")


def why_not(package: str, video: Opened, packets: Packets) -> str | None:
    """Why `package` can't give the reference's pixels of this stream, or None."""
    context = video.stream.codec_context
    codec = context.codec.canonical_name
    if codec not in CODECS:
        return f"is compared with PyAV on {', '.join(CODECS)}, and this is {codec}"
    if codec == "h264" and may_be_interlaced(context.extradata):
        return "makes other RGB than PyAV of fields (interlaced)"
    if codec == "hevc" and first_picture(video, packets).interlaced_frame:
        return "makes other RGB than PyAV of fields (interlaced)"
    scaled = context.color_range == FULL_RANGE and not context.pix_fmt.startswith("yuvj")
    if context.pix_fmt not in FORMATS or context.width % 2 or context.height % 2 or scaled:
        form = f"{context.pix_fmt}{', full range' * scaled}, {context.width}×{context.height}"
        return f"makes other RGB than PyAV of {form}"
    if (why := unpaired(package, video, packets)) is not None:
        return why
    if not any(kind in video.container.format.name for kind in CONTAINERS):
        return f"does not find every frame of {video.container.format.name}"
    if packets.open_groups:
        return OPEN_GROUPS
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:  # missing, or FFmpeg's libraries are
        extra = package.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name == extra:
            return f"is not installed (pip install 'mmpack[{extra}]')"
        return f"can't be loaded ({' '.join(str(error).split())[:200]})"
    return None
