"""One prompt id per medium to one id per vision token.

Where a medium lies in the text in pieces (`Family.in_pieces`: frames of a video, tiles or rows of an image), it becomes
a run of placeholders for each, with the family's ids and text between them, as transformers' processors write them.
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
_RUN = "\0"  # stands for a run of placeholders, in a text that is cut there


def expanded_ids(
    ids: np.ndarray, media: Sequence[Medium], family: Family, tokenizer: Any, markers: str
) -> tuple[np.ndarray, np.ndarray]:
    """ids [L] with one prompt id per medium -> expanded ids, and int64 [L + 1]: where each of `ids` begins in them.

    Text that expanding writes is encoded separately from the text around it, as vLLM does; only line breaks beside line
    breaks become one token. Raises: LayoutError, ArgumentError.
    """
    at = _placeholders(ids, media, family)
    lengths = np.ones(len(ids), dtype=np.int64)
    texts: dict[int, list[str]] = {}  # around the runs of the medium that stands there
    for i, medium in zip(at, media, strict=True):
        texts[i] = _texts(medium, family)
        _take_breaks(ids, i, texts, lengths, tokenizer)
        if markers == REPLACED and _in_frames(medium, family):
            lengths[_markers_around(ids, i, family)] = 0
    pieces = {
        i: _ids_of(medium, texts[i], family, tokenizer) for i, medium in zip(at, media, strict=True)
    }
    lengths[at] = [len(pieces[i]) for i in at]
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

    def spelled(ids: Sequence[int]) -> str:
        return "".join(tokenizer.convert_ids_to_tokens(list(ids)))

    kinds = {spelled([i]): modality for modality, i in family.prompt_ids.items()}
    parts = re.split(f"({'|'.join(map(re.escape, kinds))})", text)
    _refuse_others([kinds[prompt] for prompt in parts[1::2]], media)
    out = parts[0]
    for medium, after in zip(media, parts[2::2], strict=True):
        if markers == REPLACED and _in_frames(medium, family):
            start, end = spelled(_start(family)), spelled([family.vision_end_id])
            if out.endswith(start) and after.startswith(end):
                out, after = out.removesuffix(start), after.removeprefix(end)
        first, *rest = _texts(medium, family)
        out += first
        pad = family.placeholder_ids[medium.modality]
        for (opens, closes), behind in zip(_marks(medium, family), rest, strict=True):
            out += spelled([*opens, pad, *closes]) + behind
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


def _texts(medium: Medium, family: Family) -> list[str]:
    """What is written before the first of a medium's runs, between two, and after the last. Raises: LayoutError."""
    runs = family.spans_of(medium.modality, medium.grid_thw)
    if _in_frames(medium, family):
        whole = family.frames_between.join(
            family.frame_text.format(seconds=s, whole=int(s), clock=_clock(s), run=_RUN)
            for s in frame_seconds(medium, family)
        )
    elif medium.modality == "video" or family.row_end_id is not None:
        whole = _RUN * runs
    else:
        tiles = [family.image_text.format(run=_RUN)] * runs
        whole = tiles[0]
        if len(tiles) > 1 and family.tiles_text is not None:
            whole = family.tiles_text.format(first=tiles[0], rest=" ".join(tiles[1:]))
    return whole.split(_RUN)


def _marks(medium: Medium, family: Family) -> list[tuple[list[int], list[int]]]:
    """Ids right before and right after each of a medium's runs."""
    runs = family.spans_of(medium.modality, medium.grid_thw)
    start, end = _start(family), [family.vision_end_id]
    if medium.modality == "image" and family.row_end_id is not None:
        rows: list[tuple[list[int], list[int]]] = [([], [family.row_end_id])] * runs
        rows[0], rows[-1] = (start, rows[0][1]), (rows[-1][0], end)
        return rows if runs > 1 else [(start, end)]
    return [
        (start, end) if family.writes_markers or _in_frames(medium, family) else ([], [])
    ] * runs


def _start(family: Family) -> list[int]:
    return [] if family.vision_start_id is None else [family.vision_start_id]


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


def _ids_of(medium: Medium, texts: list[str], family: Family, tokenizer: Any) -> np.ndarray:
    """Ids of a medium: `texts` around its runs, each encoded by itself."""
    marks = _marks(medium, family)
    run = [family.placeholder_ids[medium.modality]] * (medium.num_tokens // len(marks))
    encoded = [
        tokenizer(text, add_special_tokens=False)["input_ids"] if text else [] for text in texts
    ]
    out = list(encoded[0])
    for (opens, closes), behind in zip(marks, encoded[1:], strict=True):
        out += [*opens, *run, *closes, *behind]
    return np.asarray(out, dtype=np.int64)


def _in_frames(medium: Medium, family: Family) -> bool:
    return medium.modality == "video" and family.in_pieces("video")


def _clock(seconds: float) -> str:
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


def _markers_around(ids: np.ndarray, i: int, family: Family) -> list[int]:
    """Indices of vision start and end, if they stand beside the placeholder at `i`."""
    both = 0 < i < len(ids) - 1 and (
        ids[i - 1] == family.vision_start_id and ids[i + 1] == family.vision_end_id
    )
    return [i - 1, i + 1] if both else []
