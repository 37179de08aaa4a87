"""Seconds of a video's temporal patches: as they are written into a prompt, and as an engine rounds their step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmpack.errors import ArgumentError, LayoutError
from mmpack.families import Family
from mmpack.schema.media import Medium

DTYPES = ("float32", "float16", "bfloat16")


def time_of_day(seconds: float) -> str:
    """Hours of a day, minutes, seconds, and thousandths that are cut off: 00:01:02.500."""
    whole = int(seconds)
    parts = whole // 3600 % 24, whole // 60 % 60, whole % 60
    return ":".join(f"{part:02d}" for part in parts) + f".{int(seconds % 1 * 1000):03d}"


def clock(seconds: float) -> str:
    """Minutes and seconds that are cut off: 01:02."""
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


def frame_text(family: Family, seconds: float, run: str) -> str:
    """What the family writes for one run of a video: its time, and `run` in the place of its placeholders."""
    times = {"clock": clock(seconds), "time": time_of_day(seconds)}
    return family.texts.frame.format(seconds=seconds, whole=int(seconds), run=run, **times)


def frame_seconds(medium: Medium, family: Family) -> list[float]:
    """Seconds of each run of a video: halfway between its first and last frame, or the first's, as the family has it.

    The last frame fills the last patch.

    Raises: ArgumentError where neither `frame_indices` and `fps` nor `frame_timestamps` are known; LayoutError (MM111)
    where there are more or fewer than the grid holds.
    """
    if medium.frame_indices is not None and medium.fps:
        seconds = [int(i) / medium.fps for i in medium.frame_indices]
    elif medium.frame_timestamps is not None:
        seconds = list(medium.frame_timestamps)
    else:
        raise ArgumentError(
            f"processor: {medium.media_id!r:.60} has no times, which {family.name} writes into the prompt. "
            "Fix: set frame_indices and fps, or frame_timestamps"
        )
    size, patches = family.temporal_patch_size, medium.grid_thw[0]
    if -(-len(seconds) // size) != patches:
        raise LayoutError(
            f"processor: {medium.media_id!r:.60} has {len(seconds)} frames, its grid {list(medium.grid_thw)} "
            f"holds {patches} patches of {size}. Fix: pass the times of the sampled frames",
            "MM111",
        )
    return patch_seconds(seconds, size * family.pooled_frames, family)


def patch_seconds(seconds: Sequence[float], size: int, family: Family) -> list[float]:
    """Seconds that the family writes into the prompt for each `size` frames, by the times of all."""
    padded = [*seconds, *[seconds[-1]] * (-len(seconds) % size)]
    last = 0 if family.texts.frame_time == "first" else size - 1
    return [(padded[k] + padded[k + last]) / 2 for k in range(0, len(padded), size)]


def seconds_in(seconds: float, dtype: str) -> float:
    """`second_per_grid_ts` (finite) once a float32 tensor of it was cast to `dtype`: in bfloat16 three digits are left.

    transformers' BatchFeature.to(dtype) does so, and vLLM with all that a processor returns.
    """
    with np.errstate(over="ignore"):
        single = np.float32(seconds)
        if dtype != "bfloat16":
            return float(single.astype(dtype))
    # numpy has no bfloat16: the upper 16, to the nearest, ties to even
    bits = int(single.view(np.uint32))
    upper = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(np.uint32(upper).view(np.float32))
