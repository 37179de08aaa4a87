"""A small set of questions about short clips, by a seeded script, their answers computed.

Squares of several colours appear one after another, and each is gone before the next one comes: the answer needs
several frames, and their order. Clips are H.264 files in memory; their rates and lengths all differ.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from mmpack.demo.datasets import Exercise
from mmpack.errors import check_whole, require

COLOURS = {
    "red": (210, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 70, 210),
    "yellow": (235, 205, 40),
    "purple": (150, 50, 170),
    "orange": (240, 130, 30),
}
_ORDER = ("first", "second", "third", "last")
_RATES = (Fraction(8), Fraction(12), Fraction(30_000, 1001), Fraction(25, 2))
_SIZES = ((112, 112), (160, 120), (96, 144))  # width, height in pixels
_PAUSE, _SHOWN = 0.25, (0.6, 1.0)  # seconds before each square, and how long it stays


@dataclass(frozen=True)
class DrawnClip:
    """What a clip shows: squares in order of time."""

    size: tuple[int, int]  # width, height in pixels
    fps: Fraction
    # colour, upper left corner, frames that it stays
    squares: tuple[tuple[str, tuple[int, int], int], ...]

    @property
    def colours(self) -> tuple[str, ...]:
        return tuple(colour for colour, _, _ in self.squares)


def clip_exercises(count: int = 3, seed: int = 0) -> list[Exercise]:
    """`count` problems with one clip each; equal seeds give equal clips. Raises: MissingExtraError without av."""
    check_whole("clip_exercises", "count", count, least=0)
    draw = random.Random(seed)
    return [_exercise(f"clip-{i}", drawn_clip(draw, i), draw) for i in range(1, count + 1)]


def drawn_clip(draw: random.Random, number: int) -> DrawnClip:
    """Four squares at places of their own, in random order."""
    size, fps = _SIZES[number % len(_SIZES)], _RATES[number % len(_RATES)]
    side = min(size) // 3
    squares = tuple(
        (
            colour,
            (draw.randrange(size[0] - side), draw.randrange(size[1] - side)),
            round(draw.uniform(*_SHOWN) * fps),
        )
        for colour in draw.sample(sorted(COLOURS), 4)
    )
    return DrawnClip(size, fps, squares)


def frames_of(clip: DrawnClip) -> Iterator[np.ndarray]:
    """uint8 [h, w, 3] of each frame: a pause, then a square, …"""
    width, height = clip.size
    empty = np.full((height, width, 3), 245, dtype=np.uint8)
    side = min(clip.size) // 3
    for colour, (left, top), shown in clip.squares:
        with_square = empty.copy()
        with_square[top : top + side, left : left + side] = COLOURS[colour]
        yield from [empty] * round(_PAUSE * clip.fps)
        yield from [with_square] * shown


def encoded(clip: DrawnClip) -> bytes:
    """An MP4 file, H.264, every frame of it. Raises: MissingExtraError without av."""
    av = require("av", "video", "clip_exercises")
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        # x264's macroblock tree reads memory that it has not written: its bytes follow what the process did before
        options = {"preset": "veryfast", "mbtree": "0"}
        stream = container.add_stream("libx264", rate=clip.fps, options=options)
        stream.width, stream.height = clip.size
        stream.pix_fmt = "yuv420p"
        stream.thread_count = 1  # the same bytes on every machine
        for pixels in frames_of(clip):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def _exercise(exercise_id: str, clip: DrawnClip, draw: random.Random) -> Exercise:
    ask, answer = _question(clip.colours, draw)
    choices = tuple(draw.sample(clip.colours, len(clip.colours)))
    return Exercise(
        exercise_id,
        ask,
        (),
        answer,
        choices,
        "ABCD"[choices.index(answer)],
        source="clips",
        video=encoded(clip),
    )


def _question(colours: tuple[str, ...], draw: random.Random) -> tuple[str, str]:
    """A question of the order in time, and its answer."""
    k = draw.randrange(len(colours))
    asks = [(f"Squares appear one after another. Which colour comes {_ORDER[k]}?", colours[k])]
    if k > 0:
        ask = f"Squares appear one after another. Which colour comes right before {colours[k]}?"
        asks.append((ask, colours[k - 1]))
    if k < len(colours) - 1:
        ask = f"Squares appear one after another. Which colour comes right after {colours[k]}?"
        asks.append((ask, colours[k + 1]))
    return draw.choice(asks)
