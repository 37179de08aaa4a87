"""A contact sheet: the frames that each plan takes, with their numbers and times, as parts of a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mmpack.errors import require
from mmpack.video.frame_plan import FramePlan
from mmpack.view import parts as draw

SHOWN, ACROSS = 64, 8  # frames shown per plan, and of a line
STRIP = 10.0  # height of a timeline
DECODED_AT_ONCE = 16
LONGEST = 240  # pixels of a thumbnail's longer side: upright ones are as high as others are wide
MARK = "mm-down"  # of frames that not every plan takes


def contact_sheet(
    title: str,
    about: str,
    plans: Sequence[tuple[str, FramePlan]],
    frames_of: Callable[[list[int]], np.ndarray],
) -> list[draw.Part]:
    """One band per plan, frames in order; a frame that another plan does not take is marked.

    Args: `title`, `about`: lines at the top. `plans`: (label, plan). `frames_of`: frame numbers to uint8 [n, h, w, 3].
    Raises: MissingExtraError without Pillow.
    """
    thumbs = _thumbs(sorted({i for _, plan in plans for _, i in _shown(plan)}), frames_of)
    common = set.intersection(*(set(plan.indices) for _, plan in plans))
    parts: list[draw.Part] = [draw.Heading(title, 1), draw.Line(about, soft=True)]
    if len(plans) > 1:
        parts.append(draw.Key([(MARK, "frames that not every plan takes")]))
    for label, plan in plans:
        shown = _shown(plan)
        frames = [
            _frame(thumbs[i], i, plan.timestamps[k], "" if i in common else MARK) for k, i in shown
        ]
        summary = draw.Line(_summary(plan, len(shown)), soft=True)
        grid = draw.Grid(frames, across=ACROSS)
        parts += [draw.Heading(label, 2), summary, _timeline(plan, common), grid]
    return parts


def _shown(plan: FramePlan) -> list[tuple[int, int]]:
    """(place in the plan, frame number) of at most SHOWN frames, spread over the plan."""
    places = range(plan.num_frames)
    if plan.num_frames > SHOWN:
        places = np.linspace(0, plan.num_frames - 1, SHOWN).round().astype(int).tolist()
    return [(k, plan.indices[k]) for k in places]


def _thumbs(
    indices: list[int], frames_of: Callable[[list[int]], np.ndarray]
) -> dict[int, np.ndarray]:
    image = require("PIL.Image", "view", "a contact sheet")
    out = {}
    for start in range(0, len(indices), DECODED_AT_ONCE):
        some = indices[start : start + DECODED_AT_ONCE]
        for index, frame in zip(some, frames_of(some), strict=True):
            small = image.fromarray(frame)
            small.thumbnail((LONGEST, LONGEST), image.Resampling.LANCZOS)
            out[index] = np.asarray(small)
    return out


def _frame(pixels: np.ndarray, index: int, seconds: float, mark: str) -> draw.Figure:
    """The frame in the middle of its place, with a bar above it where it is marked."""
    height, width = pixels.shape[:2]
    place = max(height, width)
    left, bar = (place - width) / 2, place / 30
    shapes: list[draw.Shape] = [draw.Picture(pixels, LONGEST, left, bar, width, height)]
    if mark:
        shapes.append(draw.Box(left, 0, width, bar, mark))
    drawing = draw.Drawing(shapes, height + bar, f"frame {index}", place)
    return draw.Figure(str(index), drawing, f"{seconds:.2f} s")


def _timeline(plan: FramePlan, common: set[int]) -> draw.Drawing:
    """The whole clip from left to right, one tick per frame."""
    span = max(1, plan.total_frames - 1)
    shapes: list[draw.Shape] = [draw.Box(0, 0, draw.WIDE, STRIP, "mm-room")]
    for index in plan.indices:
        style = "mm-image" if index in common else MARK
        shapes.append(draw.Box(index / span * (draw.WIDE - 3), 0, 3, STRIP, style))
    return draw.Drawing(shapes, STRIP, f"{plan.num_frames} frames of {plan.total_frames}")


def _summary(plan: FramePlan, shown: int) -> str:
    """One line of what a plan comes to."""
    frames = f"{plan.num_frames} frames" if plan.num_frames != 1 else "1 frame"
    if shown < plan.num_frames:
        frames += f", {shown} shown"
    t, h, w = plan.grid_thw
    size = f"{plan.size[0]} × {plan.size[1]} px"
    parts = [frames, size, f"grid {t} × {h} × {w}", f"{plan.num_tokens:,} tokens"]
    if plan.second_per_grid_ts is not None:
        parts.append(f"{plan.second_per_grid_ts:.4g} s per temporal patch")
    if plan.fps_assumed:
        parts.append(f"{plan.fps:.4g} fps assumed")
    return "  ·  ".join(parts)
