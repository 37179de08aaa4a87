"""Media over runs of placeholders: from runs to modality spans, and from spans back to occurrences.

An occurrence is one place where a medium stands in the ids: one run of placeholders, or, where a family lays it out in
pieces (a video frame by frame, an image row by row), all its runs with the text between them. A video with
its sound is two occurrences, whose runs lie in turns. Token indices, half-open.

One place for each of these:
- ids -> spans: `spans_from_runs` (media in order), or `match_runs` and `spans_of` (media per modality, known ranges);
- spans -> occurrences: `occurrences`, `occurring_media`;
- which media are one: `medium_key`; placeholders that stand for no medium: `context_ids`.
Runs of placeholders and of True in a mask: `layout/runs.py`. Covered tokens: `schema/spans.py`. `<group>/<k>` and the
names of sampling settings: `layout/names.py`. Pixels that are missing (MM404): `held_pixels` of `packing/media.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from mmpack.errors import LayoutError
from mmpack.families import Family
from mmpack.layout.runs import Runs
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import ModalitySpan

# a medium and the runs [start, stop) of one of its occurrences
Placed = tuple[Medium, Sequence[tuple[int, int]]]


class Occurrence(NamedTuple):
    """Tokens [start, stop) of one occurrence of `sample.media[media_index]`."""

    start: int
    stop: int
    media_index: int


def spans_from_runs(
    runs: Runs, media: Sequence[Medium], family: Family, what: str
) -> tuple[list[Medium], list[ModalitySpan]]:
    """The distinct media of a sample in order of first use, and one span per run.

    Args: `runs`: of the sample's ids. `media`: in order of appearance, one per occurrence. `what`: begins the error.
    Raises: LayoutError (MM106) where runs and media contradict each other.
    """
    return spans_of(match_runs(runs, media, family, what), family)


def match_runs(runs: Runs, media: Sequence[Medium], family: Family, what: str) -> list[Placed]:
    """Each of `media`, one per occurrence and in order, with its runs. Arguments and errors of `spans_from_runs`."""
    counts = [family.spans_of(m.modality, m.grid_thw) for m in media]
    wanted = [m.modality for m, n in zip(media, counts, strict=True) for _ in range(n)]
    found = runs.media()
    if [modality for modality, _ in found] != wanted:
        raise LayoutError(
            f"{what}: the ids have runs of {runs.modalities}, but the media are {[m.modality for m in media]}. "
            "Fix: pass media in the order of their placeholders",
            "MM106",
        )
    rest = (pieces for _, pieces in found)
    return [
        (m, [run for _ in range(n) for run in next(rest)])
        for m, n in zip(media, counts, strict=True)
    ]


def spans_of(placed: Iterable[Placed], family: Family) -> tuple[list[Medium], list[ModalitySpan]]:
    """The distinct media of `placed` (in order of appearance), and one span per run.

    `frame` counts the runs of a medium that the family lays out in pieces (frames, rows), `chunk` those of a video with
    its sound, and of the sound; else they are None. Spans are in order of their tokens.
    """
    placed = list(placed)
    index: dict[tuple[str, float | None], int] = {}
    distinct: list[Medium] = []
    spans = []
    for k, (medium, runs) in enumerate(placed):
        in_turns = _touch(placed[k : k + 2]) or (k > 0 and _touch(placed[k - 1 : k + 1]))
        if not runs:
            continue
        at = index.setdefault(medium_key(medium), len(distinct))
        if at == len(distinct):
            distinct.append(medium)
        in_pieces = family.in_pieces(medium.modality)
        for piece, (start, stop) in enumerate(runs):
            frame, chunk = piece if in_pieces else None, piece if in_turns else None
            spans.append(ModalitySpan(start, stop, medium.modality, at, frame, chunk))
    return distinct, sorted(spans, key=lambda span: span.start)


def medium_key(medium: Medium) -> tuple[str, float | None]:
    """Media of one sample with equal keys are one: equal embeddings, and equal seconds, which move positions."""
    return medium.cache_key, medium.second_per_grid_ts


def context_ids(input_ids: np.ndarray, sampled: np.ndarray, family: Family) -> np.ndarray:
    """`input_ids` [L] with the pad id where `sampled` (bool [L]): its placeholders are those that stand for media.

    A placeholder that the policy sampled stands for no medium: to the engine it was a text token.
    """
    return np.where(sampled, family.pad_token_id, input_ids)


def occurrences(sample: Sample) -> list[Occurrence]:
    """The occurrences of a sample's media, by their first token: the frames of one video are one occurrence.

    Those of a video and of its sound overlap: each is from its first to its last placeholder.
    """
    out: list[Occurrence] = []
    for s in sample.modality_spans:
        if not (s.frame or s.chunk):
            out.append(Occurrence(s.start, s.stop, s.media_index))
            continue
        at = len(out) - 1
        if s.chunk:  # behind the other's pieces
            at = next(
                (k for k in (at, at - 1) if k >= 0 and out[k].media_index == s.media_index), -1
            )
        if at >= 0 and out[at].media_index == s.media_index:
            out[at] = Occurrence(out[at].start, s.stop, s.media_index)
        else:
            out.append(Occurrence(s.start, s.stop, s.media_index))
    return out


def joined(found: Sequence[Occurrence]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Occurrences as disjoint (start, stop, media indices): a video and its sound are one."""
    out: list[tuple[int, int, tuple[int, ...]]] = []
    for start, stop, index in found:
        if out and start < out[-1][1]:
            first, end, indices = out.pop()
            out.append((first, max(end, stop), (*indices, index)))
        else:
            out.append((start, stop, (index,)))
    return out


def occurring_media(sample: Sample, stop: int | None = None) -> list[Medium]:
    """The medium of each occurrence, in order; only those that end at or before token `stop`, if it is given."""
    if stop is None and not any(s.frame or s.chunk for s in sample.modality_spans):
        return [sample.media[s.media_index] for s in sample.modality_spans]  # one span each
    return [
        sample.media[o.media_index] for o in occurrences(sample) if stop is None or o.stop <= stop
    ]


def _touch(pair: Sequence[Placed]) -> bool:
    """Whether two media are a video and its sound: their runs lie in turns, without text between."""
    if len(pair) < 2 or [m.modality for m, _ in pair] != ["video", "audio"]:
        return False
    (_, first), (_, second) = pair
    return bool(first and second) and first[0][1] == second[0][0]
