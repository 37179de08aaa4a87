"""One prompt id per medium to one id per vision token.

Where a medium lies in the text in pieces (`Family.in_pieces`: frames of a video, tiles or rows of an image), it becomes
a run of placeholders for each, with the family's ids and text between them, as transformers' processors write them.
A video's sound (an audio with `in_video`, behind its video) has no placeholder of its own: the video's becomes both, in
turns, between audio start and end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, LayoutError
from mmpack.families import Family
from mmpack.layout.runs import placeholder_runs
from mmpack.layout.seconds import frame_seconds, frame_text
from mmpack.layout.tmrope import interleaved
from mmpack.processors.views import pictures, text_of
from mmpack.schema.media import Medium
from mmpack.versions import REPLACED

_RUN = "\0"  # stands for a run of placeholders, in a text that is cut there


# what one prompt id stands for: a medium, or a video with its sound, or the views of a picture
Unit = list[Medium]


def expanded_ids(
    ids: np.ndarray,
    media: Sequence[Medium],
    family: Family,
    tokenizer: Any,
    markers: str,
    numbers: Mapping[str, int] | None = None,
    per_second: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """ids [L] with one prompt id per medium -> expanded ids, and int64 [L + 1]: where each of `ids` begins in them.

    Text that expanding writes is encoded separately from the text around it, as vLLM does; only line breaks beside line
    breaks become one token. `numbers`: see `with_runs`. `per_second`: positions of a video that has its sound.
    Raises: LayoutError, ArgumentError.
    """
    units = units_of(media, family)
    kinds = {v: k for k, v in family.prompt_ids.items()}
    at: list[int] = np.flatnonzero(np.isin(ids, list(kinds))).tolist()
    _refuse_others([kinds[int(ids[i])] for i in at], [unit[0] for unit in units])
    lengths = np.ones(len(ids), dtype=np.int64)
    texts: dict[int, list[str]] = {}  # around the runs of the unit that stands there
    for i, unit, number in zip(at, units, _numbers(units, numbers), strict=True):
        texts[i] = _texts(unit, family, number)
        _take_breaks(ids, i, texts, lengths, tokenizer)
        if markers == REPLACED and _in_frames(unit[0], family):
            lengths[_markers_around(ids, i, family)] = 0
    pieces = {}
    for i, unit in zip(at, units, strict=True):
        pieces[i] = repeated(_encoded(unit, texts[i], family, tokenizer), unit, family, per_second)
        lengths[i] = len(pieces[i])
    moved = np.concatenate([[0], np.cumsum(lengths)])
    out = np.repeat(ids, lengths)
    for i, piece in pieces.items():
        out[moved[i] : moved[i + 1]] = piece
    return out, moved


def with_runs(
    text: str,
    media: Sequence[Medium],
    family: Family,
    tokenizer: Any,
    markers: str,
    numbers: Mapping[str, int] | None = None,
) -> str:
    """`text` with one placeholder per run and what else expanding writes around it; `repeated` does the rest.

    `numbers`: of a family with views, pictures before the text by modality; None: their numbers are not written.
    """
    units = units_of(media, family)
    written = family.texts.markers or family.views is not None
    written |= any(map(family.in_pieces, family.placeholder_ids))
    if not (written or any(_has_sound(unit) for unit in units)):
        return text

    def spelled(ids: Sequence[int]) -> str:
        return "".join(tokenizer.convert_ids_to_tokens(list(ids)))

    kinds = {spelled([i]): modality for modality, i in family.prompt_ids.items()}
    parts = re.split(f"({'|'.join(map(re.escape, kinds))})", text)
    _refuse_others([kinds[prompt] for prompt in parts[1::2]], [unit[0] for unit in units])
    out = parts[0]
    for unit, number, after in zip(units, _numbers(units, numbers), parts[2::2], strict=True):
        if markers == REPLACED and _in_frames(unit[0], family) and not _has_sound(unit):
            start, end = spelled(family.starts), spelled(family.ends)
            if out.endswith(start) and after.startswith(end):
                out, after = out.removesuffix(start), after.removeprefix(end)
        out += _spelled(unit, _texts(unit, family, number), family, tokenizer) + after
    return out


def _numbers(units: Sequence[Unit], before: Mapping[str, int] | None) -> list[int | None]:
    """Numbers of pictures and of videos, counted apart; None each where they are not written."""
    if before is None:
        return [None] * len(units)
    counts = dict(before)
    out: list[int | None] = []
    for medium, *_ in units:
        out.append(counts.get(medium.modality, 0))
        counts[medium.modality] = counts.get(medium.modality, 0) + 1
    return out


def repeated(
    ids: np.ndarray, media: Sequence[Medium], family: Family, per_second: float | None = None
) -> np.ndarray:
    """ids with one placeholder per run -> one per vision or audio token. Raises: LayoutError, ArgumentError."""
    runs = [
        film
        for film in _films(media)
        for _ in range(family.spans_of(film[0].modality, film[0].grid_thw))
    ]
    found = placeholder_runs(ids, family)
    lengths = found.stops - found.starts
    _refuse_others(np.repeat(found.modalities, lengths).tolist(), [medium for medium, _ in runs])
    at = np.flatnonzero(np.isin(ids, list(family.placeholder_ids.values()))).tolist()
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[at] = [
        m.num_tokens // family.spans_of(m.modality, m.grid_thw) + (0 if s is None else s.num_tokens)
        for m, s in runs
    ]
    out = np.repeat(ids, repeats)
    starts = np.cumsum(repeats) - repeats
    for i, (medium, sound) in zip(at, runs, strict=True):
        if sound is not None:
            run = _run_of(medium, sound, family, per_second)
            out[starts[i] : starts[i] + len(run)] = run
    return out


def units_of(media: Sequence[Medium], family: Family) -> list[Unit]:
    """The media of each prompt id. Raises: LayoutError, ArgumentError for a video's sound alone."""
    if family.views is not None:
        return pictures(media)
    return [[medium] if sound is None else [medium, sound] for medium, sound in _films(media)]


def _films(media: Sequence[Medium]) -> list[tuple[Medium, Medium | None]]:
    """Each medium that has placeholders of its own, with a video's sound. Raises: ArgumentError for a sound alone."""
    out: list[tuple[Medium, Medium | None]] = []
    for medium in media:
        if not medium.in_video:
            out.append((medium, None))
            continue
        if not out or out[-1][0].modality != "video" or out[-1][1] is not None:
            raise ArgumentError(
                f"processor: {medium.media_id!r:.60} is a video's sound, but no video comes before it. "
                "Fix: pass the video, then its sound"
            )
        out[-1] = (out[-1][0], medium)
    return out


def _has_sound(unit: Unit) -> bool:
    return unit[-1].in_video


def _run_of(video: Medium, sound: Medium, family: Family, per_second: float | None) -> np.ndarray:
    """Placeholders of a video and its sound, in turns."""
    if video.second_per_grid_ts is None or family.audio is None:
        raise ArgumentError(
            f"processor: {video.media_id!r:.60} has no times, which place its sound among its patches. "
            "Fix: set second_per_grid_ts"
        )
    mine = interleaved(
        family.audio,
        video.grid_thw,
        family.spatial_merge_size,
        video.second_per_grid_ts,
        per_second or family.tokens_per_second or 1.0,
        sound.num_tokens,
    )
    ids = family.placeholder_ids
    return np.where(mine, ids["video"], ids["audio"]).astype(np.int64)


def _refuse_others(found: list[str], media: Sequence[Medium]) -> None:
    wanted = [m.modality for m in media]
    if found != wanted:
        raise LayoutError(
            f"processor: the ids have placeholders for {found}, but the media are {wanted}. "
            "Fix: pass one placeholder per medium, in order, outside the loss spans (expanded ids: expanded=True)",
            "MM107" if len(found) < len(wanted) else "MM104",
        )


def _encoded(unit: Unit, texts: Sequence[str], family: Family, tokenizer: Any) -> np.ndarray:
    """The ids of `_spelled`. The tokenizer may lack the family's ids, but where views have marks of their own."""

    def ids_of(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    if family.views is not None:
        return np.array(ids_of(_spelled(unit, texts, family, tokenizer)), dtype=np.int64)
    pad = family.placeholder_ids[unit[0].modality]
    out = ids_of(texts[0])
    for (opens, closes), behind in zip(
        _marks(unit, len(texts) - 1, family), texts[1:], strict=True
    ):
        out = [*out, *opens, pad, *closes, *ids_of(behind)]
    return np.array(out, dtype=np.int64)


def _spelled(unit: Unit, texts: Sequence[str], family: Family, tokenizer: Any) -> str:
    """A unit's text, one placeholder per run, between its marks; `texts`: around the runs."""
    marks = _marks(unit, len(texts) - 1, family)
    pad = family.placeholder_ids[unit[0].modality]
    out = texts[0]
    for (opens, closes), behind in zip(marks, texts[1:], strict=True):
        out += "".join(tokenizer.convert_ids_to_tokens([*opens, pad, *closes])) + behind
    return out


def _texts(unit: Unit, family: Family, number: int | None) -> list[str]:
    """What is written before the first of a unit's runs, between two, and after the last. Raises: LayoutError."""
    medium = unit[0]
    runs = family.spans_of(medium.modality, medium.grid_thw)
    if family.views is not None:
        whole = text_of(unit, _RUN, family, number)
    elif _in_frames(medium, family):
        seconds = frame_seconds(medium, family)
        whole = family.texts.between.join(frame_text(family, s, _RUN) for s in seconds)
    elif medium.modality == "video" or family.row_end_id is not None:
        whole = _RUN * runs
    else:
        tiles = [family.texts.image.format(run=_RUN)] * runs
        whole = tiles[0]
        if len(tiles) > 1 and family.texts.tiles is not None:
            whole = family.texts.tiles.format(first=tiles[0], rest=" ".join(tiles[1:]))
    return whole.split(_RUN)


def _marks(unit: Unit, runs: int, family: Family) -> list[tuple[list[int], list[int]]]:
    """Ids right before and right after each of a unit's runs."""
    medium, start, end = unit[0], family.starts, family.ends
    if _has_sound(unit) and family.audio is not None:
        return [([family.audio.start_id], [family.audio.end_id])]
    if _in_frames(medium, family) and family.texts.frame_start_id is not None:
        start = [family.texts.frame_start_id]
    if medium.modality == "image" and family.row_end_id is not None:
        rows: list[tuple[list[int], list[int]]] = [([], [family.row_end_id])] * runs
        rows[0], rows[-1] = (start, rows[0][1]), (rows[-1][0], end)
        return rows if runs > 1 else [(start, end)]
    marked = family.texts.markers or _in_frames(medium, family)
    return [(start, end) if marked and family.views is None else ([], [])] * runs


def _take_breaks(
    ids: np.ndarray, i: int, texts: dict[int, list[str]], lengths: np.ndarray, tokenizer: Any
) -> None:
    """Draw line breaks beside the medium at `i` into its text, where that begins or ends with some.

    They were ids of their own; in a text they are one token with those beside them. Between two media the first
    has them all.
    """
    mine = texts[i]
    if mine[0].startswith("\n"):
        j = i - 1
        while j >= 0 and j not in texts and (not lengths[j] or _breaks(ids[j], tokenizer)):
            mine[0] = _breaks(ids[j], tokenizer) * int(lengths[j]) + mine[0]
            lengths[j] = 0
            j -= 1
        if j in texts and texts[j][-1].endswith("\n"):
            texts[j][-1] += mine[0]
            mine[0] = ""
    k = i + 1
    while mine[-1].endswith("\n") and k < len(ids) and _breaks(ids[k], tokenizer):
        mine[-1] += _breaks(ids[k], tokenizer)
        lengths[k] = 0
        k += 1


def _breaks(token: int, tokenizer: Any) -> str:
    """The line breaks that an id stands for; empty where it stands for anything else."""
    text: str = tokenizer.decode([int(token)])
    return "" if text.strip("\n") else text


def _in_frames(medium: Medium, family: Family) -> bool:
    return medium.modality == "video" and family.in_pieces("video")


def _markers_around(ids: np.ndarray, i: int, family: Family) -> list[int]:
    """Indices of vision start and end, if they stand beside the placeholder at `i`."""
    both = 0 < i < len(ids) - 1 and (
        ids[i - 1] == family.vision_start_id and ids[i + 1] == family.vision_end_id
    )
    return [i - 1, i + 1] if both else []
