"""One file of which two libraries read another frame rate or count: what their settings and figures show."""

from __future__ import annotations

import numpy as np

from mmpack.parity.causes.alike import both, differ, known_as_one
from mmpack.parity.causes.frame_choice import FPS_ROUNDING
from mmpack.parity.causes.pair import Pair, show
from mmpack.parity.frame_difference import sampling_of
from mmpack.schema.media import Medium

_FIGURES = ("fps", "total_frames")


def other_readers(pair: Pair, a: Medium, b: Medium) -> tuple[str, bool] | None:
    """Evidence that two readers' figures of one video differ, and whether the policies are equal but for the reader.

    None where a reader wasn't recorded, both are one, or their figures are equal.
    """
    one, two = (
        sampling_of(side.sample.processor, m) for side, m in zip(pair.sides, (a, b), strict=True)
    )
    readers = [one.get("reader"), two.get("reader")]
    unlike = [name for name in _FIGURES if differ(getattr(a, name), getattr(b, name))]
    if None in readers or readers[0] == readers[1] or not unlike or not known_as_one(a, b):
        return None
    only_reader = one | {"reader": None} == two | {"reader": None}
    if (
        not only_reader
        and unlike == ["fps"]
        and np.isclose(a.fps or 0, b.fps or 0, rtol=FPS_ROUNDING)
    ):
        return None  # other policies take other frames, whatever the last digits of fps are
    evidence = [f"reader: rollout {show(readers[0])}, train {show(readers[1])}"]
    evidence += [both(a, b, name) for name in unlike]
    return "; ".join(evidence), only_reader
