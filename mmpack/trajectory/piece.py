"""What of a sample may not be cut: pictures, responses with their actions, observations, regions; and text between."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mmpack.families import FAMILIES
from mmpack.layout.occurrences import occurrences
from mmpack.schema.sample import Sample
from mmpack.schema.turns import turns_without_loss

_RANK = ("text", "medium", "observation", "response")


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) that stay together. `kind`: text, medium, observation or response."""

    start: int
    stop: int
    kind: str
    turn: int | None = None


def pieces(sample: Sample) -> list[Piece]:
    """The pieces of a sample, in order, without gaps. A picture includes the markers around its placeholders.

    A video that is laid out frame by frame takes the text before it along: its first seconds are written there.

    Example:
        >>> import numpy as np, mmpack as mp
        >>> ids = np.array([9, 8, 7, 6, 5])
        >>> spans = [mp.LossSpan(1, 3, turn=0), mp.LossSpan(4, 5, turn=1)]
        >>> sample = mp.Sample("a", "p", "qwen2_5_vl", ids, [], [], spans)
        >>> sample.observation_spans = [mp.ObservationSpan(3, 4, "tool", 1)]
        >>> [(p.start, p.stop, p.kind, p.turn) for p in mp.trajectory.pieces(sample)]
        [(0, 1, 'text', None), (1, 3, 'response', 0), (3, 4, 'observation', 1), (4, 5, 'response', 1)]
    """
    found = sorted(_atoms(sample), key=lambda p: (p.start, -p.stop))
    timed = timed_media(sample)
    out: list[Piece] = []
    end = 0
    for piece in found:
        if piece.start >= piece.stop:
            continue
        if out and _together(out[-1], piece):
            out[-1] = _union(out[-1], piece)
        else:
            if end < piece.start and piece.start in timed:
                piece = replace(piece, start=end)
            elif end < piece.start:
                out.append(Piece(end, piece.start, "text"))
            out.append(piece)
        end = out[-1].stop
    if end < len(sample):
        out.append(Piece(end, len(sample), "text"))
    return out


def prompt_stop(parts: list[Piece]) -> int:
    """Where the prompt ends: at the first response or observation."""
    later = (p.start for p in parts if p.kind in ("response", "observation"))
    return next(later, parts[-1].stop if parts else 0)


def media_pieces(sample: Sample) -> list[tuple[int, int]]:
    """[start, stop) of each occurrence of a medium, with the markers right around it."""
    family, ids = FAMILIES[sample.family], sample.input_ids
    out = []
    for start, stop, index in occurrences(sample):
        before = start > 0 and ids[start - 1] == family.vision_start_id
        after = stop < len(ids) and ids[stop] == family.vision_end_id
        before, after = before and after, after and (before or family.vision_start_id is None)
        start, stop = start - int(before), stop + int(after)
        if family.video_bounds is not None and sample.media[index].modality == "video":
            begin, end = family.video_bounds
            ends = np.flatnonzero(ids[stop:] == end)
            if (
                start > 0 and ids[start - 1] == begin and len(ends)
            ):  # the last time is before its end
                start, stop = start - 1, stop + int(ends[0]) + 1
        out.append((start, stop))
    return out


def timed_media(sample: Sample) -> set[int]:
    """Where media of `media_pieces` begin that have their seconds as text before each frame."""
    if FAMILIES[sample.family].texts.frame.startswith("{run}"):  # behind each frame
        return set()
    starts = [s.start for s in sample.modality_spans if s.frame == 0 and s.modality == "video"]
    return {a for a, b in media_pieces(sample) if any(a <= start < b for start in starts)}


def _atoms(sample: Sample) -> list[Piece]:
    atoms = [Piece(s.start, s.stop, "response", s.turn) for s in sample.loss_spans]
    atoms += [Piece(a, b, "response", turn) for turn, (a, b) in turns_without_loss(sample).items()]
    atoms += [Piece(s.start, s.stop, "response", s.turn) for s in sample.action_spans or ()]
    atoms += [Piece(s.start, s.stop, "text") for s in sample.region_spans or ()]
    atoms += [Piece(s.start, s.stop, "observation", s.turn) for s in sample.observation_spans or ()]
    atoms += [Piece(start, stop, "medium") for start, stop in media_pieces(sample)]
    return atoms


def _together(a: Piece, b: Piece) -> bool:
    """Whether two pieces share a token, or are parts of one response or of what came before it."""
    touching = a.stop == b.start and a.kind == b.kind and a.kind in ("response", "observation")
    return b.start < a.stop or (touching and a.turn == b.turn)


def _union(a: Piece, b: Piece) -> Piece:
    best = max(a, b, key=lambda p: _RANK.index(p.kind))
    turn = best.turn if best.turn is not None else (a.turn if b is best else b.turn)
    return Piece(a.start, int(np.maximum(a.stop, b.stop)), best.kind, turn)
