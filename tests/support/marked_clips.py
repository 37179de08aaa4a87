"""Small video files, made when a test asks for them. A picture carries its number: a test reads it from the pixels.

The number is written upright as sixteen black or white blocks, their negative below; the rest is noise that moves.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

os.environ.setdefault("SVT_LOG", "0")

import av
import numpy as np

BITS = 16
CODECS = {
    "h264": ("libx264", "mp4", {"preset": "veryfast"}),
    "hevc": ("libx265", "mp4", {"preset": "ultrafast", "x265-params": "log-level=none"}),
    "vp9": ("libvpx-vp9", "webm", {"deadline": "realtime", "cpu-used": "8"}),
    "av1": ("libsvtav1", "mp4", {"preset": "8"}),
}


def clip(
    frames: int = 30,
    codec: str = "h264",
    *,
    size: tuple[int, int] = (128, 96),
    fps: Fraction | int = 25,
    times: Sequence[int] | None = None,
    container: str | None = None,
    gop: int = 12,
    rotation: int = 0,
    mirrored: bool = False,
    pix_fmt: str = "yuv420p",
    colours: tuple[int, int] | None = None,
    options: dict[str, str] | None = None,
    sound: bool = False,
) -> bytes:
    """A file of `frames` pictures of upright `size` (width, height).

    `times`: when each is shown, in ticks of 1/1000 s, instead of at `fps`. `gop`: frames from keyframe to keyframe.
    `rotation`: degrees clockwise by which a player turns the stored pictures. `colours`: (swscale's matrix, range).
    """
    chosen = None if options is None else tuple(sorted(options.items()))
    when = None if times is None else tuple(times)
    return _clip(
        frames, codec, size, Fraction(fps), when, container, gop, rotation, mirrored, pix_fmt, colours, chosen, sound
    )  # fmt: skip


def number_of(picture: np.ndarray) -> int:
    """The number in an upright picture [h, w, 3]. Fails where the blocks and their negative disagree."""
    height, width = picture.shape[:2]
    side = min(width // 8, height // 6)
    cells = picture[: 4 * side, : 8 * side].reshape(4, side, 8, side, 3)
    bright = cells[:, side // 4 : -(side // 4), :, side // 4 : -(side // 4)].mean((1, 3, 4)) > 128
    bits, negative = bright[:2].reshape(-1), bright[2:].reshape(-1)
    assert (bits != negative).all(), "no number in this picture"
    return int((bits * 2 ** np.arange(BITS)).sum())


def numbers_of(pictures: np.ndarray) -> list[int]:
    return [number_of(picture) for picture in pictures]


def picture(number: int, size: tuple[int, int]) -> np.ndarray:
    """uint8 [h, w, 3]: the picture of that number before it is encoded."""
    width, height = size
    side = min(width // 8, height // 6)
    bits = number // 2 ** np.arange(BITS) % 2
    blocks = np.kron(np.concatenate([bits, 1 - bits]).reshape(4, 8), np.ones((side, side)))
    out = np.roll(_noise(width, height), 2 * number, axis=1)
    out[: 4 * side, : 8 * side] = (blocks * 255)[..., None]
    return out


def with_hidden_frames(count: int, **made: Any) -> bytes:
    """30 pictures, of which an edit list hides the first `count`; the file has 25 a second."""
    data = clip(**made)
    at = data.index(b"elst") + 16  # version, flags, count, duration; then where the media begin
    ticks = int.from_bytes(data[at : at + 4]) + count * 12800 // 25
    return data[:at] + ticks.to_bytes(4) + data[at + 4 :]


def earlier(milliseconds: int, container: str) -> bytes:
    """30 pictures in 1.2 seconds, the first shown so long before time 0."""
    file = io.BytesIO()
    keep = {"avoid_negative_ts": "disabled"}
    with (
        av.open(io.BytesIO(clip())) as source,
        av.open(file, "w", format=container, options=keep) as out,
    ):
        stream = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux():
            if packet.size:
                ticks = int(Fraction(milliseconds, 1000) / packet.time_base)
                packet.pts, packet.dts = packet.pts - ticks, packet.dts - ticks
                packet.stream = stream
                out.mux(packet)
    return file.getvalue()


def sound_only() -> bytes:
    """An MP4 file with a second of sound and no video."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        _add_sound(container)
    return file.getvalue()


@functools.cache
def _clip(
    frames: int,
    codec: str,
    size: tuple[int, int],
    fps: Fraction,
    times: tuple[int, ...] | None,
    container: str | None,
    gop: int,
    rotation: int,
    mirrored: bool,
    pix_fmt: str,
    colours: tuple[int, int] | None,
    options: tuple[tuple[str, str], ...] | None,
    sound: bool,
) -> bytes:
    encoder, usual, settings = CODECS.get(codec, (codec, container, {}))
    stored = size[:: -1 if rotation in (90, 270) else 1]
    file = io.BytesIO()
    with av.open(file, "w", format=container or usual) as out:
        stream = out.add_stream(
            encoder, rate=fps, options={**settings, "g": str(gop), **dict(options or ())}
        )
        stream.width, stream.height, stream.pix_fmt = *stored, pix_fmt
        stream.thread_count = 1  # the same bytes on every machine
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if rotation or mirrored:
            stream.set_display_rotation(-rotation, hflip=mirrored)
        keywords: dict[str, Any] = {}
        if colours is not None:
            keywords = {"dst_colorspace": colours[0], "dst_color_range": colours[1]}
            stream.codec_context.colorspace, stream.codec_context.color_range = colours
        if sound:
            _add_sound(out)
        for number in range(frames):
            upright = picture(number, size)
            pixels = np.ascontiguousarray(np.rot90(upright, rotation // 90))
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame = frame.reformat(format=pix_fmt, **keywords)
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return file.getvalue()


def _add_sound(container: Any) -> None:
    stream = container.add_stream("aac", rate=8000, layout="mono")
    for at in range(0, 8192, 1024):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate, frame.pts = 8000, at
        container.mux(stream.encode(frame))
    container.mux(stream.encode())


@functools.cache
def _noise(width: int, height: int) -> np.ndarray:
    """Smooth noise that goes round: uint8 [h, w, 3]."""
    rng = np.random.default_rng(0)
    spectrum = np.fft.rfft2(rng.standard_normal((3, height, width)))
    y, x = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    waves = np.fft.irfft2(spectrum * np.exp(-80 * (x**2 + y**2)), (height, width))
    scaled = (waves - waves.min()) / np.ptp(waves)
    return (255 * scaled.transpose(1, 2, 0)).astype(np.uint8)
