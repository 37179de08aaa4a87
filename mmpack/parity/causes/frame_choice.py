"""The first differing frame of two videos, and causes shown by frames, sizes and the container's figures."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from mmpack.parity.causes.alike import both, differing, known_as_one
from mmpack.parity.causes.pair import STAMP, Decode, Pair, Side, possible, show, stamp_of
from mmpack.parity.fixes import UNKNOWN
from mmpack.parity.frame_difference import Frame, FrameDifference, clock, known, sampling_of
from mmpack.parity.values import same_value
from mmpack.schema.media import Medium

BY = ("frame_indices", "frame_timestamps")
FPS_ROUNDING = 5e-4  # relative: 23.98 and 24000/1001 are one rate, 29.97 and 30 are not
OTHER_CLOCK = 0.1  # seconds; nobody writes times more coarsely
_FIGURES = ("fps", "total_frames")
# what makes two sides take other frames or seconds of a video
OF_SECONDS = ("fps_missing", "video_reader", "video_metadata", "frame_sampling")


def first_frame_difference(pair: Pair, i: int, j: int) -> FrameDifference | None:
    """First frame by which rollout's media[i] and train's media[j] differ; None if recorded frames are equal."""
    a, b = pair.left.sample.media[i], pair.right.sample.media[j]
    for name in BY:
        lists = [getattr(m, name) for m in (a, b)]
        if None in [None if x is None else 0 for x in lists]:
            continue
        one, two = (np.asarray(x) for x in lists)
        shorter = min(len(one), len(two))
        unlike = np.flatnonzero(one[:shorter] != two[:shorter])
        unlike = unlike[[not same_value(one[k], two[k]) for k in unlike]]
        if len(unlike) or len(one) != len(two):
            place = int(unlike[0]) if len(unlike) else shorter
            differing = len(unlike) + max(len(one), len(two)) - shorter
            return _difference(pair, (i, j), name, place, differing)
    if a.content_hash and b.content_hash and a.content_hash != b.content_hash:
        return _difference(pair, (i, j), "content_hash", None, None)
    return None


def other_policies(pair: Pair, a: Medium, b: Medium) -> str | None:
    """Both policies as text, where both were recorded and they are two."""
    names = [
        sampling_of(side.sample.processor, m).get("policy")
        for side, m in zip(pair.sides, (a, b), strict=True)
    ]
    if None in names or names[0] == names[1]:
        return None
    return f"policy: rollout {show(names[0])}, train {show(names[1])}"


def other_readers(pair: Pair, a: Medium, b: Medium) -> tuple[str, bool] | None:
    """Evidence that two readers' figures of one video differ, and whether the policies are equal but for the reader.

    None where a reader wasn't recorded, both are one, or their figures are equal.
    """
    one, two = (
        sampling_of(side.sample.processor, m) for side, m in zip(pair.sides, (a, b), strict=True)
    )
    readers = [one.get("reader"), two.get("reader")]
    unlike = differing(a, b, *_FIGURES)
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


def rotated(a: Medium, b: Medium) -> str | None:
    """Evidence that one side rotated the frames: a size, and with it the grid, whose width and height swap."""
    for name in ("decoded_size", "size"):
        one, two = getattr(a, name), getattr(b, name)
        if one and two and tuple(one) == tuple(two)[::-1] and one[0] != one[1]:
            return f"width and height swap, {name}: rollout {list(one)}, train {list(two)}"
    return None


def misread(a: Medium, b: Medium, rates: bool) -> str | None:
    """Figures that two sides read differently from one file: frame count, rate (if `rates`), or frames' times.

    Of the times, whether one side's are its frames over `fps` and the other's, of the same frames, are not.
    """
    if a.file_hash is None or a.file_hash != b.file_hash:
        return None
    unlike = []
    if None not in (a.total_frames, b.total_frames) and a.total_frames != b.total_frames:
        unlike.append(f"total_frames: rollout {a.total_frames}, train {b.total_frames}")
    if rates and a.fps and b.fps and abs(a.fps - b.fps) > FPS_ROUNDING * max(a.fps, b.fps):
        unlike.append(f"fps: rollout {a.fps:g}, train {b.fps:g}")
    if unlike:
        figures = "; ".join(unlike)
        return f"{figures} of one file: one side misread it, or its frame rate varies"
    return _own_times(a, b)


def same_frames_other_pixels(a: Medium, b: Medium) -> bool:
    """Whether frames of equal indices and size, all recorded on both sides, have other pixels."""
    if None in (a.content_hash, b.content_hash, a.size, b.size):
        return False
    if a.frame_indices is None or b.frame_indices is None:
        return False
    alike = np.array_equal(a.frame_indices, b.frame_indices) and a.size == b.size
    return alike and a.content_hash != b.content_hash


def _own_times(a: Medium, b: Medium) -> str | None:
    if None in (a.frame_timestamps, b.frame_timestamps):
        return None
    if a.frame_indices is None or b.frame_indices is None:
        return None
    stamps = [np.asarray(m.frame_timestamps) for m in (a, b)]
    if not np.array_equal(a.frame_indices, b.frame_indices) or stamps[0].shape != stamps[1].shape:
        return None
    if not stamps[0].size or np.abs(stamps[0] - stamps[1]).max() <= OTHER_CLOCK:
        return None
    if not a.fps or a.fps != b.fps or len(stamps[0]) != len(a.frame_indices):
        return None
    counted = np.asarray(a.frame_indices) / a.fps
    even = [bool(np.abs(s - counted).max() <= OTHER_CLOCK) for s in stamps]
    if even[0] == even[1]:
        return None
    one, other = ("rollout", "train") if even[0] else ("train", "rollout")
    return f"times of one file: {one}'s are frame_indices / fps, {other}'s are not: its frame rate varies"


def _difference(
    pair: Pair, places: tuple[int, int], by: str, place: int | None, differing: int | None
) -> FrameDifference:
    sampling = [
        sampling_of(side.sample.processor, side.sample.media[at])
        for side, at in zip(pair.sides, places, strict=True)
    ]
    frames = [frame_of(side, at, place) for side, at in zip(pair.sides, places, strict=True)]
    return FrameDifference(by, place, differing, frames[0], frames[1], _unlike(*sampling))


def frame_of(side: Side, media_index: int, place: int | None) -> Frame:
    """Return what a side recorded of the frame at `place` of a video."""
    medium = side.sample.media[media_index]
    indices, stamps = medium.frame_indices, medium.frame_timestamps
    listed = next((x for x in (indices, stamps) if x is not None), None)
    index = stamp = None
    if place is not None:
        index = int(indices[place]) if indices is not None and place < len(indices) else None
        stamp = stamps[place] if stamps is not None and place < len(stamps) else None
    if stamp is None and index is not None and medium.fps:
        stamp = index / medium.fps
    stamp = known(stamp)
    policy = sampling_of(side.sample.processor, medium).get("policy")
    return Frame(
        media_index=media_index,
        frames=None if listed is None else len(listed),
        index=index,
        timestamp=stamp,
        time=None if stamp is None else clock(stamp),
        policy=policy if isinstance(policy, str) else None,
    )


def _unlike(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings of two policies that differ; what is null is no setting."""
    if not a or not b:
        return {}
    names = [name for name in dict.fromkeys([*a, *b]) if name != "policy"]
    return {n: (_plain(a.get(n)), _plain(b.get(n))) for n in names if a.get(n) != b.get(n)}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else str(value)


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
