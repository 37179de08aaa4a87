"""Places in pictures: coordinate systems; boxes and points, read from token ids and scored against targets (numpy)"""

from __future__ import annotations

from mmpack.grounding.coordinates import Sizes, convert, sizes_of
from mmpack.grounding.find import annotate, find
from mmpack.grounding.overlap import iou
from mmpack.grounding.samples import system_of, to_system
from mmpack.grounding.scores import scores, set_score

__all__ = [
    "Sizes",
    "annotate",
    "convert",
    "find",
    "iou",
    "scores",
    "set_score",
    "sizes_of",
    "system_of",
    "to_system",
]
