"""Positions (rows time, height, width) of families that hear: a second is so many positions, of videos and of sound.

A video's temporal patch k starts `k · seconds · tokens_per_second` after its first (float32, in this order), an audio
token is one further than the last, and text goes on behind the last placeholder's largest position. A video and its
sound start together: their placeholders lie in turns, as `interleaved` says, and each counts for itself. If the one
that ends last in the ids ends first in time, text goes on in the midst of the other, as in transformers.
"""

from __future__ import annotations

import numpy as np

from mmpack.errors import ArgumentError, LayoutError
from mmpack.families import Audio, Family
from mmpack.layout.runs import Runs

Pieces = list[tuple[int, int]]


def positions_by_seconds(
    length: int,
    runs: Runs,
    grids: dict[str, np.ndarray],
    seconds: np.ndarray,
    per_second: float,
    family: Family,
) -> tuple[np.ndarray, int]:
    """int64 [3, length], and max + 1 - length.

    Args:
        grids: modality -> int64 [n, 3], of media in order; of audio (feature frames, 1, 1).
        seconds: float32 [videos], between temporal patches.
        per_second: positions per second.

    Raises: LayoutError (MM101, MM102, MM104, MM107) where runs and grids contradict each other; ArgumentError for a
    patch that starts between two positions, of a family that does not cut it to a whole one.
    """
    audio = family.audio
    assert audio is not None
    found = runs.media()
    _check_counts(found, grids)
    positions = np.empty((3, length), dtype=np.int64)
    seen = dict.fromkeys(grids, 0)
    at, following = 0, 0  # the next token, and the position of a text token there
    k = 0
    while k < len(found):
        together = k + 1 < len(found) and found[k][1][0][1] == found[k + 1][1][0][0]
        block = found[k : k + 2] if together else found[k : k + 1]
        start, stop = block[0][1][0][0], max(pieces[-1][1] for _, pieces in block)
        joint = together and audio.joint_markers
        following = _text(positions, at, start, following)
        if joint:  # audio start stands where vision start does
            positions[:, max(start - 1, at) : start] -= 1
            following -= start > at
        for modality, pieces in block:
            grid = grids[modality][seen[modality]]
            step = seconds[seen["video"]] if modality == "video" else np.float32(1)
            places = _places(modality, grid, step, per_second, family, pieces)
            seen[modality] += 1
            for row, place in enumerate(places):
                _spread(positions[row], pieces, place + following)
        at, following = stop, int(positions[:, stop - 1].max()) + 1
        if joint and at < length:  # the two ends have one position, too
            positions[:, at] = following
            at += 1
        k += len(block)
    _text(positions, at, length, following)
    return positions, (int(positions.max()) + 1 - length) if length else 0


def interleaved(
    audio: Audio,
    grid: tuple[int, int, int],
    merge: int,
    seconds: float,
    per_second: float,
    sound: int,
) -> np.ndarray:
    """bool [tokens]: which placeholders of a video with its sound are the video's, in order.

    As transformers' processors lay them out, in float64. Args: `grid`: the video's patches. `sound`: audio tokens.
    """
    t, h, w = grid
    times = np.repeat(np.arange(t) * seconds * per_second, (h // merge) * (w // merge))
    heard = np.arange(sound)
    if audio.interleaving == "time":  # each patch before the audio tokens from its start on
        order = np.argsort(np.concatenate([times, heard]), kind="stable")
        return order < len(times)
    size = int(per_second * audio.seconds_per_chunk)
    parts = []
    pair = [np.split(x, _cuts(x, size)) for x in (times, heard)]
    for j in range(max(map(len, pair))):
        for is_video, chunks in zip((True, False), pair, strict=True):
            parts.append(np.full(len(chunks[j]) if j < len(chunks) else 0, is_video))
    return np.concatenate(parts)


def _cuts(values: np.ndarray, size: int) -> list[int]:
    """Where upstream's `get_chunked_index` cuts ascending values: at most one cut a token."""
    out: list[int] = []
    at = -1
    while True:
        bound = (len(out) + 1) * size
        at = max(at + 1, int(np.searchsorted(values, bound, "left")))
        if at >= len(values):
            return out
        out.append(at)


def _text(positions: np.ndarray, start: int, stop: int, first: int) -> int:
    """Text counts on; the position behind it."""
    positions[:, start:stop] = np.arange(first, first + stop - start)
    return first + stop - start


def _places(
    modality: str,
    grid: np.ndarray,
    seconds: np.float32,
    per_second: float,
    family: Family,
    pieces: Pieces,
) -> np.ndarray:
    """int64 [3, tokens], from 0 on."""
    tokens = sum(stop - start for start, stop in pieces)
    t, h, w = (int(n) for n in grid)
    merge = 1 if modality == "audio" else family.spatial_merge_size
    if min(t, h, w) < 1 or h % merge or w % merge:
        raise LayoutError(
            f"mrope_positions: grid {[t, h, w]} of the run at token {pieces[0][0]} is empty or not a multiple "
            f"of the merge size {merge}. Fix: pass patches before merging",
            "MM102",
            pieces[0],
        )
    expected = family.tokens_of(modality, (t, h, w))
    if tokens != expected:
        raise LayoutError(
            f"mrope_positions: the {modality} at token {pieces[0][0]} has {tokens} tokens, but its grid "
            f"{[t, h, w]} gives "
            f"{expected}. Fix: expand each placeholder to one token per merged patch, or per audio token",
            "MM101",
            (pieces[0][0], pieces[-1][1]),
        )
    if modality == "audio":
        return np.broadcast_to(np.arange(tokens), (3, tokens))
    h, w = h // merge, w // merge
    times = np.arange(t).astype(np.float32) * seconds * np.float32(per_second)
    assert family.audio is not None
    if modality == "video" and not family.audio.cuts_times and (times != np.trunc(times)).any():
        raise ArgumentError(
            f"mrope_positions: a video with {float(seconds):g} seconds between temporal patches has patches between "
            f"two whole positions at {per_second:g} per second, which integer position_ids can't hold. "
            "Fix: sample it so that "
            "seconds × positions is whole (fps 1 or 2)"
        )
    cell = np.tile(np.arange(h * w), t)
    return np.stack([np.repeat(times.astype(np.int64), h * w), cell // w, cell % w])


def _spread(row: np.ndarray, pieces: Pieces, values: np.ndarray) -> None:
    done = 0
    for start, stop in pieces:
        row[start:stop] = values[done : done + stop - start]
        done += stop - start


def _check_counts(found: list[tuple[str, Pieces]], grids: dict[str, np.ndarray]) -> None:
    for modality, given in grids.items():
        own = [pieces for m, pieces in found if m == modality]
        if len(own) != len(given):
            span = own[len(given)][0] if len(own) > len(given) else None
            where = "" if span is None else f", the first without one is [{span[0]}, {span[1]})"
            raise LayoutError(
                f"mrope_positions: {len(own)} runs of {modality} tokens, {len(given)} grids{where}. "
                f"Fix: pass the grid of each {modality} in the ids, and no other",
                "MM104" if span else "MM107",
                span,
            )
