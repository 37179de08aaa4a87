"""Take tokens [start, stop) out of a sample: ids, media, spans, scores and columns follow."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.families import FAMILIES
from mmpack.layout.mrope import sample_positions
from mmpack.layout.occurrences import medium_key, occurrences
from mmpack.schema.routes import rows_read
from mmpack.schema.sample import RESPONSE_TEXT_KEY, Sample
from mmpack.schema.spans import covered
from mmpack.schema.turns import span_turns, turns_without_loss
from mmpack.trajectory.trajectory import SCORES

# ---- what may not be cut ----------------------------------------------------------------------------

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
        >>> sample.observation_spans = [mp.schema.ObservationSpan(3, 4, "tool", 1)]
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
    """Return where the prompt ends: at the first response or observation."""
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
    """Return where media of `media_pieces` begin that have their seconds as text before each frame."""
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
    """Return whether two pieces share a token, or belong to one response or observation."""
    touching = a.stop == b.start and a.kind == b.kind and a.kind in ("response", "observation")
    return b.start < a.stop or (touching and a.turn == b.turn)


def _union(a: Piece, b: Piece) -> Piece:
    best = max(a, b, key=lambda p: _RANK.index(p.kind))
    turn = best.turn if best.turn is not None else (a.turn if b is best else b.turn)
    return Piece(a.start, int(np.maximum(a.stop, b.stop)), best.kind, turn)


_SPANS = ("loss_spans", "observation_spans", "action_spans")


def without(sample: Sample, start: int, stop: int, instead: np.ndarray) -> Sample:
    """Return `sample` with the ids `instead` (text) in place of [start, stop), which cuts through no span.

    Spans, regions and targets within go, and so do scores of turns, regions and spans that are gone. Positions are
    counted anew where they were recorded.
    """
    shift = len(instead) - (stop - start)
    out = copy.copy(sample)
    out.input_ids = np.concatenate([sample.input_ids[:start], instead, sample.input_ids[stop:]])
    out.modality_spans = _moved(sample.modality_spans, start, stop, shift)
    kept = list(dict.fromkeys(s.media_index for s in out.modality_spans))
    index = {old: new for new, old in enumerate(kept)}
    out.media = [sample.media[old] for old in kept]
    out.modality_spans = [
        dataclasses.replace(s, media_index=index[s.media_index]) for s in out.modality_spans
    ]
    silent = turns_without_loss(sample)
    gone = {turn for turn, (a, b) in silent.items() if start <= a and b <= stop}
    for name in _SPANS:
        spans = getattr(sample, name)
        if name == "loss_spans" and gone:
            pairs = zip(spans, span_turns(sample), strict=True)
            spans = [s for s, turn in pairs if turn not in gone]
        setattr(out, name, None if spans is None else _moved(spans, start, stop, shift))
    regions = _regions(sample, out, start, stop, shift, index)
    for name in ("bbox_targets", "point_targets"):
        targets = getattr(sample, name)
        setattr(out, name, None if targets is None else _reindexed(targets, index))
    if sample.policy_versions is not None:
        out.policy_versions = _clipped(sample.policy_versions, start, stop, shift)
    _cut_columns(sample, out, start, stop)
    turns = set(span_turns(out))
    for name in SCORES:
        scores = getattr(sample, name)
        if scores is not None:
            moved = [_score(s, start, stop, shift, turns, regions) for s in scores]
            setattr(out, name, [s for s in moved if s is not None])
    if out.num_loss_tokens != sample.num_loss_tokens:
        out.metadata = {k: v for k, v in sample.metadata.items() if k != RESPONSE_TEXT_KEY}
    return out


def media_after(sample: Sample, start: int, stop: int) -> list[Any]:
    """The medium of each occurrence outside [start, stop), in order."""
    return [
        sample.media[o.media_index]
        for o in occurrences(sample)
        if o.stop <= start or o.start >= stop
    ]


def gone_keys(sample: Sample, kept: list[Any]) -> list[str]:
    """Cache keys of the sample's media that are none of `kept`."""
    left = {medium_key(m) for m in kept}
    return [m.cache_key for m in sample.media if medium_key(m) not in left]


def _moved(spans: list[Any], start: int, stop: int, shift: int) -> list[Any]:
    """Spans outside [start, stop); those behind it moved. An empty one at its edge stays."""
    out = []
    for s in spans:
        if s.stop <= start:
            out.append(s)
        elif s.start >= stop:
            out.append(dataclasses.replace(s, start=s.start + shift, stop=s.stop + shift))
    return out


def _clipped(spans: list[Any], start: int, stop: int, shift: int) -> list[Any]:
    """Spans less [start, stop), which may cut through them."""
    out = []
    for s in spans:
        before, after = (s.start, min(s.stop, start)), (max(s.start, stop) + shift, s.stop + shift)
        out += [dataclasses.replace(s, start=a, stop=b) for a, b in (before, after) if a < b]
    return out


def _regions(
    sample: Sample, out: Sample, start: int, stop: int, shift: int, index: dict[int, int]
) -> dict[int, int]:
    """Set the regions that stay; return their new numbers by their old ones."""
    numbers: dict[int, int] = {}
    kept: list[Any] = []
    for i, region in enumerate(sample.region_spans or ()):
        for moved in _reindexed(_moved([region], start, stop, shift), index):
            numbers[i] = len(kept)
            kept.append(_with_numbers(moved, moved.start - region.start))
    out.region_spans = None if sample.region_spans is None else kept
    return numbers


def _with_numbers(region: Any, shift: int) -> Any:
    """The region with the tokens of its numbers moved, which `mmpack.grounding` keeps in its metadata."""
    if not shift or not {"form", "numbers"} <= region.metadata.keys():
        return region
    moved = [[a + shift, b + shift] for a, b in region.metadata["numbers"]]
    return dataclasses.replace(region, metadata={**region.metadata, "numbers": moved})


def _reindexed(items: list[Any], index: dict[int, int]) -> list[Any]:
    """Items in media that stay, or in none."""
    return [
        i if i.media_index is None else dataclasses.replace(i, media_index=index[i.media_index])
        for i in items
        if i.media_index is None or i.media_index in index
    ]


def _cut_columns(sample: Sample, out: Sample, start: int, stop: int) -> None:
    scored = sample.loss_indices
    kept = (scored < start) | (scored >= stop)
    if sample.rollout_logprobs is not None:
        out.rollout_logprobs = sample.rollout_logprobs[kept]
    if sample.kept_ids is not None:
        out.kept_ids = sample.kept_ids[kept]
    if sample.teachers is not None:
        out.teachers = {name: lists[kept] for name, lists in sample.teachers.items()}
    if sample.routed_experts is not None:
        _cut_routes(sample, out, start, stop)
    if sample.attention_mask is not None:
        out.attention_mask = np.ones(len(out), dtype=np.int8)
    if sample.position_ids is not None:
        if stop == len(sample) and len(out) == start:
            out.position_ids = np.ascontiguousarray(sample.position_ids[:, :start])
        else:
            out.position_ids = sample_positions(out)[0]
    if sample.prefix_cached_tokens is not None:
        out.prefix_cached_tokens = min(sample.prefix_cached_tokens, start)


def _cut_routes(sample: Sample, out: Sample, start: int, stop: int) -> None:
    """Cut routes, which stay those of their tokens; ids that stand in for what was cut have none."""
    routes = sample.routed_experts
    assert routes is not None
    instead = len(out) - (len(sample) - (stop - start))
    if instead and start < rows_read(len(out), out.loss_indices):
        raise ArgumentError(
            f"truncate: {sample.sample_id!r:.60} has routed_experts, but ids that replace what is cut have none. "
            "Fix: leave instead_ids out, or set routed_experts to None"
        )
    middle = np.zeros((instead, *routes.shape[1:]), routes.dtype)
    out.routed_experts = np.concatenate([routes[:start], middle, routes[stop:]])


def _score(
    score: Any, start: int, stop: int, shift: int, turns: set[int | None], regions: dict[int, int]
) -> Any:
    scope = score.scope
    if scope == "sequence":
        return score
    if "turn" in scope:
        return score if scope["turn"] in turns else None
    if "region" in scope:
        at = regions.get(scope["region"])
        return None if at is None else dataclasses.replace(score, scope={"region": at})
    a, b = scope["span"]
    if b <= start:
        return score
    if a >= stop:
        return dataclasses.replace(score, scope={"span": [a + shift, b + shift]})
    return None


def loss_within(sample: Sample, start: int, stop: int) -> int:
    """Loss tokens in [start, stop)."""
    return int(covered(sample.loss_spans, len(sample))[start:stop].sum())
