"""`decode`: the frames of a plan as pixels. Every library that it may choose gives the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, BackendError, VideoError, installed_version
from mmpack.video.backends import decord, pyav, torchcodec
from mmpack.video.cache import FrameCache, frames_key
from mmpack.video.files.container import Opened, Source, content_key, name_of_source, opened
from mmpack.video.files.packets import Packets, read_packets
from mmpack.video.files.readers import read_as
from mmpack.video.frame_plan import FramePlan
from mmpack.video.limits import Limits
from mmpack.video.policies.registry import policy_of
from mmpack.video.values import read_numbers

# in the order in which "auto" asks them
BACKENDS = {"pyav": pyav, "torchcodec": torchcodec, "decord": decord}
MAX_THREADS = 64


def decode(
    source: Source,
    frames: FramePlan | Sequence[int] | np.ndarray,
    *,
    backend: str = "auto",
    threads: int = 2,
    cache: FrameCache | None = None,
    limits: Limits | None = None,
) -> np.ndarray:
    """uint8 [n, h, w, 3]: upright RGB pictures in the size of the stream.

    Args:
        source: a file's bytes, or its path.
        frames: a plan, or frame numbers in presentation order, from 0; repeated ones are decoded once.
        backend: `auto`, `pyav`, `torchcodec` or `decord`; those that read a stream give the same bytes.
        threads: of the decoder. HEVC, VP8, MPEG-2 and files with hidden pictures are decoded by one: with more, a
            damaged file gives other pixels.
        cache: frames decoded before, by this process or another.
        limits: what a file may cost.

    A cut between two packets of a file whose format doesn't mark the end (MPEG-TS, FLV, IVF, or one that was streamed)
    can't be known: it reads as a shorter video.

    Raises: ArgumentError (frames that the stream doesn't have, a plan of another video), VideoError (no video, cut,
    empty, broken, over `limits`), BackendError (the named backend can't read this stream), MissingExtraError.
    """
    limits = Limits() if limits is None else limits
    if backend != "auto" and backend not in tuple(BACKENDS):
        raise ArgumentError(
            f"decode: backend is {backend!r:.40}. Fix: use auto, {', '.join(BACKENDS)}"
        )
    check_threads(threads, "decode: threads")
    for name, given, kind in (("cache", cache, FrameCache), ("limits", limits, Limits)):
        if not isinstance(given, kind | None):
            raise ArgumentError(
                f"decode: {name} is {type(given).__name__}. Fix: pass mp.video.{kind.__name__}(…)"
            )
    indices = _indices(frames)

    def decoded() -> np.ndarray:
        return _decoded(source, frames, indices, backend, threads, limits)

    if cache is None:
        pixels = decoded()
    else:
        key = frames_key(content_key(source), indices, _decoder(backend))
        pixels = cache.frames(key, decoded)
    size = (pixels.shape[2], pixels.shape[1])
    if isinstance(frames, FramePlan) and size != tuple(frames.source_size):
        raise ArgumentError(
            f"{name_of_source(source)} has frames of {size[0]}×{size[1]}, but the plan is for one with "
            f"{frames.source_size[0]}×{frames.source_size[1]}. Fix: make the plan of this file"
        )
    return pixels


def check_threads(threads: Any, what: str) -> None:
    """Raises: ArgumentError; each thread of a decoder holds frames of its own."""
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise ArgumentError(f"{what}: {threads!r:.40}. Fix: pass 1 to {MAX_THREADS}")


def _indices(frames: FramePlan | Sequence[int] | np.ndarray) -> np.ndarray:
    """int64 [n]."""
    given = frames.indices if isinstance(frames, FramePlan) else frames
    indices = read_numbers(
        "decode: frames", given, "pass a FramePlan, or a sequence of whole numbers"
    )
    if indices.size == 0:
        raise ArgumentError("decode: frames is empty. Fix: pass at least one index")
    return indices


def _decoded(
    source: Source,
    frames: FramePlan | Sequence[int] | np.ndarray,
    indices: np.ndarray,
    backend: str,
    threads: int,
    limits: Limits,
) -> np.ndarray:
    with opened(source, limits, threads) as video:
        packets = read_packets(video, limits)
        _check(frames, indices, video, packets, limits)
        chosen = BACKENDS[_backend(backend, video, packets)]
        distinct, places = np.unique(indices, return_inverse=True)
        context = video.stream.codec_context
        if not packets.shown.all():
            # FFmpeg drops hidden pictures and reports no damage in them: more threads would give other pixels
            context.thread_count = 1
        used = context.thread_count
        try:
            pixels = chosen.decode(source, video, packets, distinct, used)
        except BackendError:
            # raises VideoError where the file is at fault
            pyav.decode(source, video, packets, distinct, used)
            raise
    return pixels if np.array_equal(distinct, indices) else pixels[places]


def _check(
    frames: FramePlan | Sequence[int] | np.ndarray,
    indices: np.ndarray,
    video: Opened,
    packets: Packets,
    limits: Limits,
) -> None:
    """Are the frames of this stream, and do they cost no more than the limits?"""
    total = len(packets.frames)
    if isinstance(frames, FramePlan):
        counted = _counted(frames, video, packets)
        if counted != frames.total_frames:
            raise ArgumentError(
                f"{video.where} has {counted} frames, but the plan is for one with {frames.total_frames}. "
                "Fix: make the plan of this file"
            )
    if indices.min() < 0 or indices.max() >= total:
        bad = indices.min() if indices.min() < 0 else indices.max()
        raise ArgumentError(
            f"{video.where} has {total} frames, so there is no frame {bad}. Fix: pass 0 to {total - 1}"
        )
    context = video.stream.codec_context
    pixels = context.width * context.height
    if 3 * pixels * len(indices) > limits.max_bytes:
        raise VideoError(
            f"{video.where}: {len(indices)} frames of {context.width}×{context.height} take more than "
            f"{limits.max_bytes} bytes. Fix: use fewer frames, or Limits(max_bytes=…)"
        )
    runs = packets.runs(indices)
    decoded = sum(stop - start for start, stop in runs)
    if decoded * pixels > limits.max_decoded_pixels:
        raise VideoError(
            f"{video.where}: {decoded} frames of {context.width}×{context.height} would have to be decoded, more "
            f"than {limits.max_decoded_pixels} pixels. Fix: use more keyframes, or Limits(max_decoded_pixels=…)"
        )


def _counted(plan: FramePlan, video: Opened, packets: Packets) -> int:
    """How many frames the plan's reader counts in this stream."""
    reading = read_as(plan.reader, video, packets)
    return reading.counted(policy_of(plan.policy).engine)[0]


def _decoder(backend: str) -> str:
    """The library that decodes, and its version."""
    name = next(iter(BACKENDS)) if backend == "auto" else backend
    package = {"pyav": "av"}.get(name, name)
    version = installed_version(package)
    return package if version is None else f"{package} {version}"


def _backend(asked: str, video: Opened, packets: Packets) -> str:
    """The backend asked for, or the first that reads this stream."""
    refusals = {}
    for name in BACKENDS if asked == "auto" else [asked]:
        why = BACKENDS[name].refusal(video, packets)
        if why is None:
            return name
        refusals[name] = why
    reasons = "; ".join(f"{name} {why}" for name, why in refusals.items())
    raise BackendError(f"{video.where}: {reasons}. Fix: pass backend='auto'")
