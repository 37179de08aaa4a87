"""Places in pictures: coordinate systems; boxes and points, read from token ids and scored against targets (numpy)"""

from __future__ import annotations

from mmpack.grounding.coordinates import (
    SYSTEMS,
    Sizes,
    as_floats,
    as_written,
    convert,
    convert_array,
    rounding_error,
    sizes_of,
)
from mmpack.grounding.find import Found, annotate, find
from mmpack.grounding.match import match
from mmpack.grounding.overlap import centre_distance, giou, iou, point_in_box
from mmpack.grounding.samples import system_of, to_system
from mmpack.grounding.scores import KINDS, scores, set_score
from mmpack.grounding.text import FORMS

__all__ = [
    "FORMS",
    "KINDS",
    "SYSTEMS",
    "Found",
    "Sizes",
    "annotate",
    "as_floats",
    "as_written",
    "centre_distance",
    "convert",
    "convert_array",
    "find",
    "giou",
    "iou",
    "match",
    "point_in_box",
    "rounding_error",
    "scores",
    "set_score",
    "sizes_of",
    "system_of",
    "to_system",
]
