"""Causes by which a video differs: rotated, misread, sampled or resized by another rule, its seconds rounded.

Grids are (t, h, w) in patches; sizes are (width, height) in pixels.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmpack.layout.seconds import DTYPES, seconds_in
from mmpack.parity.causes import sizes
from mmpack.parity.causes.alike import (
    Cause,
    both,
    differ,
    differently_named,
    differing,
    known_as_one,
    one_file,
    other_keys,
)
from mmpack.parity.causes.frame_choice import (
    misread,
    other_policies,
    other_readers,
    rotated,
    same_frames_other_pixels,
)
from mmpack.parity.causes.pair import Pair, possible
from mmpack.parity.causes.settings import settings_of
from mmpack.parity.fixes import UNKNOWN
from mmpack.parity.frame_difference import FrameDifference
from mmpack.schema.media import Medium
from mmpack.video.policies.base import ASSUMED_FPS

LONGEST = 1e9  # seconds; what is more is no time


def video_causes(
    pair: Pair, a: Medium, b: Medium, frames: FrameDifference | None
) -> Iterator[Cause]:
    """Yield the causes by which a video differs; as possible ones if it may be another file."""
    causes = list(_causes(pair, a, b, frames))
    names = () if one_file(a, b) else ("total_frames", "decoded_size", "file_hash")
    unlike = differing(a, b, *names)
    if rotated(a, b) and "decoded_size" in unlike:
        unlike.remove("decoded_size")
    if not known_as_one(a, b) and differently_named(a, b):
        unlike += ["media_id", *(["source"] if differ(a.source, b.source) else [])]
    named = [cause for cause, _ in causes if cause not in (UNKNOWN, "max_pixels")]
    if not unlike or not named:
        yield from causes
        return
    evidence = "; ".join(both(a, b, name) for name in unlike)
    yield UNKNOWN, f"another video, or another file of it: {evidence}; {possible(*named)}"
    yield from (cause for cause in causes if cause[0] == "max_pixels")


def _causes(pair: Pair, a: Medium, b: Medium, frames: FrameDifference | None) -> Iterator[Cause]:
    (ta, *plane_a), (tb, *plane_b) = a.grid_thw, b.grid_thw
    seen = False
    first = f"; {frames}" if frames and frames.place is not None else ""
    turned = rotated(a, b)
    if turned:
        yield "video_rotation", turned
        seen = True
    read = other_readers(pair, a, b)
    assumed = None if read else _assumed_fps(pair, a, b)
    if assumed:
        yield "fps_missing", assumed + first
        seen = True
    if read:
        yield "video_reader", read[0] + first
        seen = True
    elif figures := misread(a, b, rates=not assumed):
        yield "video_metadata", figures + first
        seen = True
    if differ(a.frame_indices, b.frame_indices) and not (read and read[1]):
        yield "frame_sampling", _frames(a, b) + first
        seen = True
    elif ta != tb and not seen:
        causes = possible("frame_sampling", "fps_missing")
        counts = f"{ta} against {tb} temporal patches, no frame_indices on both sides"
        yield UNKNOWN, f"{counts}{first}; {causes}"
        seen = True
    if not turned and same_frames_other_pixels(a, b):
        evidence = f"same frames and size, {both(a, b, 'content_hash')}"
        yield "frame_pixels", f"{evidence}: another decoder, other colours, or rotated by 180°"
        seen = True
    limits, policies = settings_of(pair, "video", "max_pixels"), other_policies(pair, a, b)
    resized = None if turned or policies else _resized(a, b, bool(limits))
    if resized:
        proved, evidence = resized
        yield (
            ("resize_twice", evidence)
            if proved
            else (UNKNOWN, f"{evidence}; {possible('resize_twice')}")
        )
        seen = True
    if plane_a != plane_b and plane_a == plane_b[::-1]:
        if not turned and not resized:
            grid = f"h, w of the grid swap: {plane_a} against {plane_b}"
            yield UNKNOWN, f"{grid}, {both(a, b, 'size')}; {possible('video_rotation')}"
        seen = True
    elif plane_a != plane_b and (limits or not resized):
        grid = f"h, w of the grid: {plane_a} against {plane_b}"
        if limits:
            yield "max_pixels", limits
        elif policies:
            yield "video_budget", f"{grid}, each by its own rule; {policies}"
        elif limits is None:
            yield UNKNOWN, f"{grid}; no settings; {possible('video_budget', 'max_pixels')}"
        elif None in (a.size, b.size):
            causes = possible("video_budget", "resize_twice")
            yield UNKNOWN, f"{grid}, under equal pixel limits; no size on both sides; {causes}"
        else:
            yield "video_budget", f"{grid}, under equal pixel limits, {both(a, b, 'size')}"
        seen = True
    if not seen and differ(a.second_per_grid_ts, b.second_per_grid_ts):
        yield "second_per_grid_ts", both(a, b, "second_per_grid_ts") + _cast(pair, a, b)
        seen = True
    if not seen:
        names = ("fps", "frame_timestamps", "total_frames", "size", "content_hash", "num_tokens")
        if unlike := differing(a, b, *names):
            yield UNKNOWN, "; ".join(both(a, b, name) for name in unlike) + first
        else:
            yield other_keys(pair, a, b)


def _resized(a: Medium, b: Medium, limited: bool) -> tuple[bool, str] | None:
    """Whether frames were resized before a processor, by one side or otherwise by both; (proved, evidence).

    Frames of one file and shape whose sizes differ by more than a crop to a multiple were. `limited`: the sides' pixel
    limits differ, by which a loader may have resized them.
    """
    if not differ(a.size, b.size):
        return None
    assert a.size is not None and b.size is not None
    if limited and not any(m.size == m.decoded_size for m in (a, b)):
        return None
    evidence = f"{both(a, b, 'size')}, handed to the processor"
    if a.decoded_size:
        evidence += f"; {both(a, b, 'decoded_size')}"
    if sizes.rescaled(a.size, b.size) and not limited:
        return True, f"{evidence}: one shape"
    return False, f"{evidence}: resized, cropped or padded"


def _cast(pair: Pair, a: Medium, b: Medium) -> str:
    """Whose seconds are the other side's, cast to the dtype of an engine."""
    for side, mine, other in ((pair.left, a, b), (pair.right, b, a)):
        small, exact = mine.second_per_grid_ts, other.second_per_grid_ts
        assert small is not None and exact is not None
        if not (0 < small < LONGEST and 0 < exact < LONGEST):
            continue
        fits = [dtype for dtype in DTYPES if seconds_in(exact, dtype) == small]
        engine = side.sample.metadata.get("engine")
        dtype = engine.get("dtype") if isinstance(engine, dict) else None
        if dtype in fits:
            return f": {side.name}'s engine casts it to {dtype}"
        if dtype is None and fits and small != 1.0:  # what is assumed where nothing was passed on
            return f": maybe {side.name}'s was cast to {' or '.join(fits)}"
    return ""


def _assumed_fps(pair: Pair, a: Medium, b: Medium) -> str | None:
    """One side's seconds are its frames over 24, the other side knows another fps.

    By the timestamps, or by `second_per_grid_ts`: frames of a temporal patch over the assumed 24.
    """
    for m, other in ((a, b), (b, a)):
        if m.fps not in (None, ASSUMED_FPS) or other.fps in (None, ASSUMED_FPS):
            continue
        if m.second_per_grid_ts is not None and other.second_per_grid_ts is not None:
            step = pair.left.family.temporal_patch_size / ASSUMED_FPS
            steps = (step, seconds_in(step, "bfloat16"))
            assumed = any(np.isclose(m.second_per_grid_ts, s, rtol=1e-3) for s in steps)
            if assumed and not np.isclose(other.second_per_grid_ts, step, rtol=1e-3):
                seconds = both(a, b, "second_per_grid_ts")
                return f"{both(a, b, 'fps')}; {seconds}: one side's are its frames over 24"
        if m.frame_indices is None or m.frame_timestamps is None:
            continue
        counted = np.asarray(m.frame_indices) / ASSUMED_FPS
        stamps = np.asarray(m.frame_timestamps)
        if len(stamps) and len(stamps) == len(counted) and np.allclose(stamps, counted, atol=1e-3):
            return f"{both(a, b, 'fps')}; one side's timestamps are its frames over 24"
    return None


def _frames(a: Medium, b: Medium) -> str:
    one, two = (len(np.asarray(m.frame_indices)) for m in (a, b))
    return f"{one} frames against {two}"
