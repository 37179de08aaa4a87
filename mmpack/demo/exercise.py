"""One problem of a data set: pictures or a clip, question, answer.

datasets.py reads them, clips.py draws some.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, eq=False)
class Exercise:
    """A prompt goes to the model as all `images` in order, the video, then `prompt`, which holds no media tokens."""

    exercise_id: str  # unique in its data set
    prompt: str
    images: tuple[Image.Image, ...]  # decoded, in the mode of the file (Geometry3K's are RGBA)
    answer: str  # the value to be matched; of multiple choice, the right choice's text
    choices: tuple[str, ...] = ()
    answer_letter: str | None = None  # "A" is choices[0]
    source: str = ""
    video: bytes | None = field(default=None, repr=False)  # an encoded file
