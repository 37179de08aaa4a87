"""A contact sheet: the frames that each plan takes, with their numbers and times, as one picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpack.errors import require
from mmpack.video.frame_plan import FramePlan

if TYPE_CHECKING:
    from PIL.Image import Image

WIDTH, MARGIN, GAP, SHOWN = 1440, 32, 12, 64  # pixels; frames shown per plan
COLUMNS = 8
_DECODED_AT_ONCE = 16
_HEAD, _CAPTION = 84, 26  # heights of a band's head, and of the caption of a frame
_NARROWEST = 96  # a caption needs as much
_PAPER, _INK, _QUIET, _LINE, _STRIP, _MARK = (
    "#ffffff", "#16181d", "#6b7280", "#d8dce3", "#eef0f4", "#d9480f"
)  # fmt: skip


def contact_sheet(
    title: str,
    about: str,
    plans: Sequence[tuple[str, FramePlan]],
    frames_of: Callable[[list[int]], np.ndarray],
) -> Image:
    """RGB picture: one band per plan, frames in order; a frame that another plan does not take is marked.

    Args: `title`, `about`: lines at the top. `plans`: (label, plan). `frames_of`: frame numbers to uint8 [n, h, w, 3].
    Raises: MissingExtraError without Pillow.
    """
    image = require("PIL.Image", "view", "a contact sheet")
    draw = require("PIL.ImageDraw", "view", "a contact sheet")
    fonts = _fonts()
    bands = [(label, plan, _shown(plan)) for label, plan in plans]
    thumb = _thumb_size(plans[0][1].source_size)
    thumbs = _thumbs(sorted({i for _, _, some in bands for _, i in some}), frames_of, thumb)
    common = set.intersection(*(set(plan.indices) for _, plan in plans))
    row = thumb[1] + _CAPTION
    cell = max(thumb[0], _NARROWEST)
    columns = (WIDTH - 2 * MARGIN + GAP) // (cell + GAP)
    heights = [_HEAD + -(-len(some) // columns) * (row + GAP) + 16 for _, _, some in bands]
    sheet = image.new("RGB", (WIDTH, 104 + sum(heights) + MARGIN // 2), _PAPER)
    pen = draw.Draw(sheet)
    pen.text((MARGIN, 26), title, _INK, fonts["title"])
    pen.text((MARGIN, 62), _written(about), _QUIET, fonts["text"])
    if len(plans) > 1:
        _legend(pen, fonts)
    top = 104
    for (label, plan, some), height in zip(bands, heights, strict=True):
        _header(pen, fonts, top, label, plan, len(some))
        _timeline(pen, top + 62, plan, common)
        for n, (k, index) in enumerate(some):
            x = MARGIN + n % columns * (cell + GAP)
            y = top + _HEAD + n // columns * (row + GAP)
            unshared = index not in common
            slot = (x + (cell - thumb[0]) // 2, y)
            sheet.paste(thumbs[index], slot)
            _frame(pen, slot, thumb, unshared)
            _caption(pen, fonts, (x, y + thumb[1] + 6), cell, index, plan.timestamps[k], unshared)
        top += height
    return sheet


def _fonts() -> dict[str, Any]:
    font = require("PIL.ImageFont", "view", "a contact sheet")
    sizes = {"title": 26, "name": 20, "text": 16, "small": 14}
    return {name: font.load_default(size) for name, size in sizes.items()}


def _shown(plan: FramePlan) -> list[tuple[int, int]]:
    """(place in the plan, frame number) of at most SHOWN frames, spread over the plan."""
    places = range(plan.num_frames)
    if plan.num_frames > SHOWN:
        places = np.linspace(0, plan.num_frames - 1, SHOWN).round().astype(int).tolist()
    return [(k, plan.indices[k]) for k in places]


def _thumb_size(size: tuple[int, int]) -> tuple[int, int]:
    """COLUMNS fit beside each other; upright frames are as high as others are wide."""
    width, height = size
    most = (WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) // COLUMNS
    scale = most / max(size)
    return max(1, round(width * scale)), max(1, round(height * scale))


def _thumbs(
    indices: list[int], frames_of: Callable[[list[int]], np.ndarray], size: tuple[int, int]
) -> dict[int, Image]:
    image = require("PIL.Image", "view", "a contact sheet")
    out = {}
    for start in range(0, len(indices), _DECODED_AT_ONCE):
        some = indices[start : start + _DECODED_AT_ONCE]
        for index, frame in zip(some, frames_of(some), strict=True):
            out[index] = image.fromarray(frame).resize(size, image.Resampling.LANCZOS)
    return out


def _header(
    pen: Any, fonts: dict[str, Any], top: int, label: str, plan: FramePlan, shown: int
) -> None:
    pen.line([(MARGIN, top), (WIDTH - MARGIN, top)], _LINE, 1)
    pen.text((MARGIN, top + 12), label, _INK, fonts["name"])
    pen.text((MARGIN, top + 38), _written(_summary(plan, shown)), _QUIET, fonts["small"])


def _timeline(pen: Any, y: int, plan: FramePlan, common: set[int]) -> None:
    """The whole clip from left to right, one tick per frame."""
    pen.rectangle([MARGIN, y, WIDTH - MARGIN, y + 9], fill=_STRIP)
    span = max(1, plan.total_frames - 1)
    for index in plan.indices:
        x = MARGIN + round(index / span * (WIDTH - 2 * MARGIN - 3))
        pen.rectangle([x, y, x + 2, y + 9], fill=_QUIET if index in common else _MARK)


def _written(text: str) -> str:
    return text.replace("×", "x")  # Pillow's own font has none


def _summary(plan: FramePlan, shown: int) -> str:
    """One line of what a plan comes to."""
    frames = f"{plan.num_frames} frames" if plan.num_frames != 1 else "1 frame"
    if shown < plan.num_frames:
        frames += f", {shown} shown"
    t, h, w = plan.grid_thw
    parts = [
        frames,
        f"{plan.size[0]} × {plan.size[1]} px",
        f"grid {t} × {h} × {w}",
        f"{plan.num_tokens:,} tokens",
    ]
    if plan.second_per_grid_ts is not None:
        parts.append(f"{plan.second_per_grid_ts:.4g} s per temporal patch")
    if plan.fps_assumed:
        parts.append(f"{plan.fps:.4g} fps assumed")
    return "  ·  ".join(parts)


def _legend(pen: Any, fonts: dict[str, Any]) -> None:
    text = "frames that not every plan takes"
    width = pen.textlength(text, fonts["small"])
    x, y = WIDTH - MARGIN - width - 24, 64
    pen.rectangle([x, y + 1, x + 16, y + 13], outline=_MARK, width=2)
    pen.text((x + 24, y - 1), text, _QUIET, fonts["small"])


def _frame(pen: Any, at: tuple[int, int], size: tuple[int, int], unshared: bool) -> None:
    (x, y), (width, height) = at, size
    if unshared:
        pen.rectangle([x - 2, y - 2, x + width + 1, y + height + 1], outline=_MARK, width=2)
    else:
        pen.rectangle([x - 1, y - 1, x + width, y + height], outline=_LINE, width=1)


def _caption(
    pen: Any,
    fonts: dict[str, Any],
    at: tuple[int, int],
    width: int,
    index: int,
    seconds: float,
    unshared: bool,
) -> None:
    font, time = fonts["small"], f"{seconds:.2f} s"
    pen.text(at, f"{index}", _MARK if unshared else _INK, font)
    pen.text((at[0] + width - pen.textlength(time, font), at[1]), time, _QUIET, font)
