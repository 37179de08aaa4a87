"""Timestamps in the text of a video that lies there frame by frame: what they say, and why two of them differ."""

from __future__ import annotations

import re

import numpy as np

from mmpack.parity.causes.frame_choice import OTHER_CLOCK
from mmpack.parity.causes.pair import STAMP, Decode, Pair, Side, possible, stamp_of
from mmpack.parity.fixes import UNKNOWN
from mmpack.schema.media import Medium

_PRINTABLE = 94  # the vocabularies of these families begin with the printable characters, "!" is 0
_ROUNDING = 1e-3  # of recorded seconds
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\D*$")


def unlike_stamps(
    pair: Pair, i: int, j: int, decode: Decode | None, same: bool
) -> tuple[str, str] | None:
    """Cause and evidence where the timestamps of the rollout's media[i] and train's media[j] differ.

    `same`: nothing that was recorded of the two differs. None: no difference, or one that follows from the media.
    """
    ids = [_stamps(side, k) for side, k in zip(pair.sides, (i, j), strict=True)]
    written = [[_seconds(stamp, decode) for stamp in stamps] for stamps in ids]
    shown = list(zip(*written, strict=False))
    unlike = [
        k
        for k, stamps in enumerate(zip(*ids, strict=False))
        if shown[k][0] != shown[k][1] or (k and not np.array_equal(*stamps))
    ]
    if not unlike:
        return None
    rounded = all(shown[k][0] != shown[k][1] for k in unlike)
    if rounded and _one_clock(pair, i, j, written):
        k = unlike[0]
        return "timestamp_rounding", (
            f"equal frames and seconds; temporal patch {k} of media[{i}] is written as {shown[k][0]} s in rollout, "
            f"{shown[k][1]} s in train; {len(unlike)} of {len(shown)} patches differ"
        )
    if not same:
        return None
    causes = possible("timestamp_rounding", "fps_missing", "frame_sampling")
    return UNKNOWN, f"timestamps in the text of media[{i}] differ; {causes}"


def _one_clock(pair: Pair, i: int, j: int, written: list[list[str | None]]) -> bool:
    """Whether both sides recorded the same seconds of frames, and each timestamp lies within its patch's."""
    left, right = _times(pair.left.sample.media[i]), _times(pair.right.sample.media[j])
    if left is None or right is None or not len(left) or left.shape != right.shape:
        return False
    size = pair.left.family.temporal_patch_size
    first = left[::size]
    last = left[np.minimum(np.arange(1, len(first) + 1) * size, len(left)) - 1]
    if np.abs(left - right).max() > _ROUNDING or not len(written[0]) == len(written[1]) == len(
        first
    ):
        return False
    for stamps in written:
        if None in stamps:
            return False
        seconds = np.array([float(s) for s in stamps if s])
        if (seconds < first - OTHER_CLOCK).any() or (seconds > last + OTHER_CLOCK).any():
            return False
    return True


def _times(medium: Medium) -> np.ndarray | None:
    """Recorded seconds of the frames, as expanding takes them."""
    if medium.frame_indices is not None and medium.fps:
        return np.asarray(medium.frame_indices) / medium.fps
    return None if medium.frame_timestamps is None else np.asarray(medium.frame_timestamps)


def _stamps(side: Side, media_index: int) -> list[np.ndarray]:
    """The ids before each temporal patch of a video: its timestamp, before the first one maybe other text as well.

    Of families that write a patch's time behind it, the ids there.
    """
    start, stop = side.videos_in_text[media_index]
    runs = side.placeholder[start:stop]
    edges = np.diff(runs.astype(np.int8), prepend=0, append=0)
    opens, ends = np.flatnonzero(edges == 1) + start, np.flatnonzero(edges == -1) + start
    if side.family.texts.frame.startswith("{run}"):
        behind = [*opens[1:].tolist(), stop][: len(ends)]  # no run: a side without the video's ids
        return [side.ids[a:b] for a, b in zip(ends.tolist(), behind, strict=True)]
    begins = [stamp_of(start), *ends[:-1].tolist()]
    return [side.ids[a:b] for a, b in zip(begins, opens.tolist(), strict=False)]


def _seconds(ids: np.ndarray, decode: Decode | None) -> str | None:
    """The number with which they end."""
    last: list[int] = ids[-STAMP:].tolist()
    found = _NUMBER.search(decode(last) if decode else _printable(last))
    return found[1] if found else None


def _printable(ids: list[int]) -> str:
    """Text of ids without a tokenizer: single printable characters, blanks for all other ids."""
    return "".join(chr(ord("!") + i) if 0 <= i < _PRINTABLE else " " for i in ids)
