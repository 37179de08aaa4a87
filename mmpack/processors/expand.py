"""One placeholder per medium to one id per vision token.

Where a video is frames in text (`video_layout` "frames"), its placeholder becomes, for each temporal patch, its seconds
as text and its placeholders between vision start and end (`frame_text`), as transformers' processors write them. Where
an image is rows (`row_end_id`), each row of merged patches is followed by that id, the last by vision end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmpack.errors import LayoutError
from mmpack.families import Family
from mmpack.layout.runs import placeholder_runs
from mmpack.layout.seconds import frame_seconds
from mmpack.schema.media import Medium

# What becomes of vision start and end around a video's placeholder, where each temporal patch gets its own:
# transformers before 5.10 replaced all three, since then only the placeholder: the two stay.
KEPT, REPLACED = "kept", "replaced"
_RUN = "\0"  # stands for a patch's vision tokens, in a text that is cut there


def expanded_ids(
    ids: np.ndarray, media: Sequence[Medium], family: Family, tokenizer: Any, markers: str
) -> tuple[np.ndarray, np.ndarray]:
    """ids [L] with one placeholder per medium -> expanded ids, and int64 [L + 1]: where each of `ids` begins in them.

    Seconds are encoded separately from the text around them, as vLLM does. Raises: LayoutError, ArgumentError.
    """
    at = _placeholders(ids, media, family)
    lengths = np.ones(len(ids), dtype=np.int64)
    pieces: dict[int, np.ndarray] = {}
    for i, medium in zip(at, media, strict=True):
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
    written = family.writes_markers or any(map(family.in_pieces, family.placeholder_ids))
    if not written:
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
    _refuse_others([kinds[prompt] for prompt in parts[1::2]], media)
    out = parts[0]
    for medium, after in zip(media, parts[2::2], strict=True):
        pad = pads[medium.modality]
        if _in_frames(medium, family):
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


def repeated(ids: np.ndarray, media: Sequence[Medium], family: Family) -> np.ndarray:
    """ids with one placeholder per run -> one per vision token. Raises: LayoutError."""
    runs = [m for m in media for _ in range(family.spans_of(m.modality, m.grid_thw))]
    found = placeholder_runs(ids, family)
    lengths = found.stops - found.starts
    _refuse_others(np.repeat(found.modalities, lengths).tolist(), runs)
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[np.isin(ids, list(family.placeholder_ids.values()))] = [
        m.num_tokens // family.spans_of(m.modality, m.grid_thw) for m in runs
    ]
    return np.repeat(ids, repeats)


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
