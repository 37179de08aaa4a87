"""How many ids of an audio codec differ between two encodings of one piece of audio, by level of the codebook.

A residual quantizer takes the nearest entry at each level. Where two are nearly as near, another order of summation (in
another batch) takes the other one; all deeper levels of that frame then code another residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, kind_of


@dataclass(frozen=True, eq=False)
class CodecFlips:
    """Where ids of two encodings [levels, frames] differ."""

    frames: int
    flipped: np.ndarray  # int64 [levels]: frames whose id differs at the level
    first: np.ndarray  # int64 [levels]: those whose levels above are equal, so that it began here
    place: (
        tuple[int, int] | None
    )  # level and frame of the first frame that differs, at its first level

    @property
    def rate(self) -> np.ndarray:
        """float64 [levels]: share of frames whose id differs at the level."""
        return self.flipped / max(self.frames, 1)

    @property
    def first_rate(self) -> np.ndarray:
        """float64 [levels]: of frames whose levels above are equal, the share that differs here; 0 of none."""
        equal_above = self.frames - (np.cumsum(self.first) - self.first)
        return self.first / np.maximum(equal_above, 1)

    @property
    def frames_flipped(self) -> int:
        """Frames that differ at any level."""
        return int(self.first.sum())


def codec_flips(left: Any, right: Any) -> CodecFlips:
    """Compare two encodings of one piece of audio.

    Args: integers [levels, frames], of one shape; level 0 is the coarsest.
    Raises ArgumentError for what are no such arrays.

    Example:
        >>> from mmpack.parity.codec import codec_flips
        >>> flips = codec_flips([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 6]])
        >>> flips.frames_flipped, flips.flipped.tolist(), flips.place
        (1, [0, 1], (1, 1))
    """
    arrays = [_ids(name, ids) for name, ids in (("left", left), ("right", right))]
    a, b = arrays
    if a.shape != b.shape:
        raise ArgumentError(
            f"codec_flips: left has shape {list(a.shape)}, right {list(b.shape)}. "
            "Fix: compare encodings of the same samples by one codec; a different length is not a flip"
        )
    unlike = a != b
    if not len(a):  # which MM322 refuses in a trace
        return CodecFlips(a.shape[1], np.zeros(0, np.int64), np.zeros(0, np.int64), None)
    flipped = unlike.sum(axis=1)
    any_flip = unlike.any(axis=0)
    level = unlike.argmax(axis=0)
    first = np.bincount(level[any_flip], minlength=len(a))
    frame = int(any_flip.argmax()) if any_flip.any() else None
    place = None if frame is None else (int(level[frame]), frame)
    return CodecFlips(a.shape[1], flipped.astype(np.int64), first.astype(np.int64), place)


def _ids(name: str, ids: Any) -> np.ndarray:
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError, OverflowError, RuntimeError):
        array = None
    if array is None or array.ndim != 2 or array.dtype.kind not in "iu":
        found = kind_of(ids) if array is None else f"{list(array.shape)} of {array.dtype}"
        raise ArgumentError(
            f"codec_flips: {name} is {found}, expected integers [levels, frames]. Fix: pass one row per codebook"
        )
    return array
