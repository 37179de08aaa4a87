"""One prompt id per medium to one id per vision token.

Where a medium lies in the text piece by piece (`Family.in_pieces`: frames of a video, tiles of a picture), it becomes a
run of placeholders for each, with the family's text between them (`frame_text`, `tiles_text`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmpack.errors import LayoutError
from mmpack.families import Family
from mmpack.layout.seconds import frame_seconds
from mmpack.schema.media import Medium

# What becomes of vision start and end around a video's placeholder, where each temporal patch gets its own:
# transformers before 5.10 replaced all three, since then only the placeholder: the two stay.
KEPT, REPLACED = "kept", "replaced"
_RUN = "\0"  # stands for a run in a medium's text; no family writes it
_BARE = "{run}"


def expanded_ids(
    ids: np.ndarray, media: Sequence[Medium], family: Family, tokenizer: Any, markers: str
) -> tuple[np.ndarray, np.ndarray]:
    """ids [L] with one prompt id per medium -> expanded ids, and int64 [L + 1]: where each of `ids` begins in them.

    What expanding writes around a medium is encoded separately from the text around it, as vLLM does; line breaks
    beside line breaks become one token. Raises: LayoutError, ArgumentError.
    """
    at = _placeholders(ids, media, family.prompt_ids)
    lengths = np.ones(len(ids), dtype=np.int64)
    texts: dict[int, list[str]] = {}  # around the runs of the medium that stands there
    for i, medium in zip(at, media, strict=True):
        texts[i] = medium_text(medium, family, _RUN).split(_RUN)
        _take_breaks(ids, i, texts, lengths, tokenizer)
        if markers == REPLACED and medium.modality == "video" and family.in_pieces("video"):
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
    if family.image_text == _BARE and not family.writes_markers and not family.in_pieces("video"):
        return text
    start, end = tokenizer.convert_ids_to_tokens([family.vision_start_id, family.vision_end_id])
    pads, kinds = {}, {}
    for modality, placeholder in family.placeholder_ids.items():
        written = [placeholder, family.prompt_ids[modality]]
        pads[modality], prompt = tokenizer.convert_ids_to_tokens(written)
        kinds[prompt] = modality
    parts = re.split(f"({'|'.join(map(re.escape, kinds))})", text)
    _refuse_others([kinds[prompt] for prompt in parts[1::2]], media)
    out = parts[0]
    for medium, after in zip(media, parts[2::2], strict=True):
        framed = medium.modality == "video" and family.in_pieces("video")
        run = pads[medium.modality]
        if framed and markers == REPLACED and out.endswith(start) and after.startswith(end):
            out, after = out.removesuffix(start), after.removeprefix(end)
        if framed or family.writes_markers:
            run = f"{start}{run}{end}"
        out += medium_text(medium, family, run) + after
    return out


def medium_text(medium: Medium, family: Family, run: str) -> str:
    """What a medium is written as, `run` for each of its runs of placeholders.

    Raises: as `frame_seconds` for a video whose times are unknown.
    """
    if medium.modality == "video":
        if not family.in_pieces("video"):
            return run
        frames = [
            family.frame_text.format(seconds=s, clock=_clock(s), run=run)
            for s in frame_seconds(medium, family)
        ]
        return family.frames_between.join(frames)
    tiles = [family.image_text.format(run=run)] * family.spans_of("image", medium.grid_thw)
    if len(tiles) == 1 or family.tiles_text is None:
        return tiles[0]
    return family.tiles_text.format(first=tiles[0], rest=" ".join(tiles[1:]))


def repeated(ids: np.ndarray, media: Sequence[Medium], family: Family) -> np.ndarray:
    """ids with one placeholder per run -> one per vision token. Raises: LayoutError."""
    runs = [m for m in media for _ in range(family.spans_of(m.modality, m.grid_thw))]
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[_placeholders(ids, runs, family.placeholder_ids)] = [
        m.num_tokens // family.spans_of(m.modality, m.grid_thw) for m in runs
    ]
    return np.repeat(ids, repeats)


def _placeholders(ids: np.ndarray, media: Sequence[Medium], known: dict[str, int]) -> list[int]:
    """Where the ids of `media` are, one each, in order; `known`: modality -> id."""
    kinds = {v: k for k, v in known.items()}
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
    run = [family.placeholder_ids[medium.modality]] * (medium.num_tokens // (len(texts) - 1))
    framed = medium.modality == "video" and family.in_pieces("video")
    if framed or family.writes_markers:
        run = [family.vision_start_id, *run, family.vision_end_id]
    out: list[int] = []
    for k, text in enumerate(texts):
        out += run if k else []
        out += tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
    return np.asarray(out, dtype=np.int64)


def _clock(seconds: float) -> str:
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


def _markers_around(ids: np.ndarray, i: int, family: Family) -> list[int]:
    """Indices of vision start and end, if they stand beside the placeholder at `i`."""
    both = 0 < i < len(ids) - 1 and (
        ids[i - 1] == family.vision_start_id and ids[i + 1] == family.vision_end_id
    )
    return [i - 1, i + 1] if both else []
