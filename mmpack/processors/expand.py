"""One placeholder per medium to one id per vision token.

Where a video is frames in text (`video_layout` "frames"), its placeholder becomes, for each temporal patch, its seconds
as text and its placeholders between vision start and end (`frame_text`), as transformers' processors write them. Where
an image is rows (`row_end_id`), each row of merged patches is followed by that id, the last by vision end.
A video's sound (an audio with `in_video`, behind its video) has no placeholder of its own: the video's becomes both, in
turns, between audio start and end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, LayoutError
from mmpack.families import Family
from mmpack.layout.runs import placeholder_runs
from mmpack.layout.seconds import frame_seconds
from mmpack.layout.tmrope import interleaved
from mmpack.schema.media import Medium

# What becomes of vision start and end around a video's placeholder, where each temporal patch gets its own:
# transformers before 5.10 replaced all three, since then only the placeholder: the two stay.
KEPT, REPLACED = "kept", "replaced"
_RUN = "\0"  # stands for a patch's vision tokens, in a text that is cut there


# a medium, and a video's sound
Unit = tuple[Medium, Medium | None]


def expanded_ids(
    ids: np.ndarray,
    media: Sequence[Medium],
    family: Family,
    tokenizer: Any,
    markers: str,
    per_second: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """ids [L] with one placeholder per medium -> expanded ids, and int64 [L + 1]: where each of `ids` begins in them.

    Seconds are encoded separately from the text around them, as vLLM does. `per_second`: positions of a video that has
    its sound. Raises: LayoutError, ArgumentError.
    """
    units = units_of(media)
    at = _placeholders(ids, [medium for medium, _ in units], family)
    lengths = np.ones(len(ids), dtype=np.int64)
    pieces: dict[int, np.ndarray] = {}
    for i, (medium, sound) in zip(at, units, strict=True):
        if sound is not None:
            assert family.audio is not None
            ends = family.audio.start_id, family.audio.end_id
            run = _run_of(medium, sound, family, per_second)
            pieces[i] = np.concatenate([ends[:1], run, ends[1:]])
        else:
            pieces[i] = _ids_of(medium, family, tokenizer)
        if markers == REPLACED and _in_frames(medium, family):
            lengths[_markers_around(ids, i, family)] = 0
        lengths[i] = len(pieces[i])
    moved = np.concatenate([[0], np.cumsum(lengths)])
    out = np.repeat(ids, lengths)
    for i, piece in pieces.items():
        out[moved[i] : moved[i + 1]] = piece
    return out, moved


def with_runs(
    text: str, media: Sequence[Medium], family: Family, tokenizer: Any, markers: str
) -> str:
    """`text` with one placeholder per run and what else expanding writes around it; `repeated` does the rest."""
    units = units_of(media)
    written = family.writes_markers or any(map(family.in_pieces, family.placeholder_ids))
    if not (written or any(sound is not None for _, sound in units)):
        return text
    spelled = {
        i: tokenizer.convert_ids_to_tokens(i)
        for i in {*family.prompt_ids.values(), *family.placeholder_ids.values()}
    }
    pads = {modality: spelled[i] for modality, i in family.placeholder_ids.items()}
    start, row_end, end = (
        "" if i is None else tokenizer.convert_ids_to_tokens(i)
        for i in (family.vision_start_id, family.row_end_id, family.vision_end_id)
    )
    kinds = {spelled[i]: modality for modality, i in family.prompt_ids.items()}
    parts = re.split(f"({'|'.join(map(re.escape, kinds))})", text)
    _refuse_others([kinds[prompt] for prompt in parts[1::2]], [medium for medium, _ in units])
    out = parts[0]
    for (medium, sound), after in zip(units, parts[2::2], strict=True):
        pad = pads[medium.modality]
        if sound is not None:
            assert family.audio is not None
            ends = [family.audio.start_id, family.audio.end_id]
            out += pad.join(tokenizer.convert_ids_to_tokens(ends))
        elif _in_frames(medium, family):
            if markers == REPLACED and out.endswith(start) and after.startswith(end):
                out, after = out.removesuffix(start), after.removeprefix(end)
            for seconds in frame_seconds(medium, family):
                out += _written(seconds, family, f"{start}{pad}{end}")
        elif family.in_pieces(medium.modality):
            rows = family.spans_of(medium.modality, medium.grid_thw)
            out += f"{pad}{row_end}" * (rows - 1) + f"{pad}{end}"
        else:
            out += f"{start}{pad}{end}" if family.writes_markers else pad
        out += after
    return out


def repeated(
    ids: np.ndarray, media: Sequence[Medium], family: Family, per_second: float | None = None
) -> np.ndarray:
    """ids with one placeholder per run -> one per vision or audio token. Raises: LayoutError, ArgumentError."""
    runs = [
        u for u in units_of(media) for _ in range(family.spans_of(u[0].modality, u[0].grid_thw))
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


def units_of(media: Sequence[Medium]) -> list[Unit]:
    """Each medium that has a placeholder of its own, with a video's sound. Raises: ArgumentError for a sound alone."""
    out: list[Unit] = []
    for medium in media:
        if not medium.in_video:
            out.append((medium, None))
            continue
        if not out or out[-1][0].modality != "video" or out[-1][1] is not None:
            raise ArgumentError(
                f"processor: {medium.media_id!r:.60} is a video's sound, and no video stands before it. "
                "Fix: the video, then its sound"
            )
        out[-1] = (out[-1][0], medium)
    return out


def media_of_units(units: Sequence[Unit]) -> list[Medium]:
    """The media of units, each sound behind its video."""
    return [medium for unit in units for medium in unit if medium is not None]


def _run_of(video: Medium, sound: Medium, family: Family, per_second: float | None) -> np.ndarray:
    """Placeholders of a video and its sound, in turns."""
    if video.second_per_grid_ts is None or family.audio is None:
        raise ArgumentError(
            f"processor: {video.media_id!r:.60} has no times, its sound lies among its patches by them. "
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


def _placeholders(ids: np.ndarray, media: Sequence[Medium], family: Family) -> list[int]:
    """Where `media` stand in ids that are not expanded, one id each, in order."""
    kinds = {v: k for k, v in family.prompt_ids.items()}
    at: list[int] = np.flatnonzero(np.isin(ids, list(kinds))).tolist()
    _refuse_others([kinds[int(ids[i])] for i in at], media)
    return at


def _refuse_others(found: list[str], media: Sequence[Medium]) -> None:
    wanted = [m.modality for m in media]
    if found != wanted:
        raise LayoutError(
            f"processor: the ids have placeholders {found}, the media are {wanted}. "
            "Fix: one placeholder per medium, in order (expanded ids: expanded=True)",
            "MM107" if len(found) < len(wanted) else "MM104",
        )


def _ids_of(medium: Medium, family: Family, tokenizer: Any) -> np.ndarray:
    pad, count = family.placeholder_ids[medium.modality], medium.num_tokens
    start = [] if family.vision_start_id is None else [family.vision_start_id]
    out: list[int] = []
    if _in_frames(medium, family):
        run = [pad] * (count // medium.grid_thw[0])
        for seconds in frame_seconds(medium, family):
            before, after = (
                tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
                for text in _written(seconds, family, _RUN).split(_RUN)
            )
            out += [*before, *start, *run, family.vision_end_id, *after]
    elif family.in_pieces(medium.modality):
        rows = family.spans_of(medium.modality, medium.grid_thw)
        row = [*[pad] * (count // rows), family.row_end_id]
        out = [*start, *row * rows]
        out[-1] = family.vision_end_id
    else:
        out = [pad] * count
        if family.writes_markers:
            out = [*start, *out, family.vision_end_id]
    return np.asarray(out, dtype=np.int64)


def _in_frames(medium: Medium, family: Family) -> bool:
    return medium.modality == "video" and family.video_layout == "frames"


def _written(seconds: float, family: Family, run: str) -> str:
    return family.frame_text.format(seconds=seconds, whole=int(seconds), run=run)


def _markers_around(ids: np.ndarray, i: int, family: Family) -> list[int]:
    """Indices of vision start and end, if they stand beside the placeholder at `i`."""
    both = 0 < i < len(ids) - 1 and (
        ids[i - 1] == family.vision_start_id and ids[i + 1] == family.vision_end_id
    )
    return [i - 1, i + 1] if both else []
