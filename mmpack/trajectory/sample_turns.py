"""`from_samples`: samples that bear a trajectory_id, per turn or long, as the trajectories that they come of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.layout.mrope import sample_positions
from mmpack.layout.occurrences import medium_key, occurring_media
from mmpack.schema.fields import same
from mmpack.schema.sample import RESPONSE_TEXT_KEY, Sample, as_samples
from mmpack.schema.spans import LossSpan
from mmpack.schema.turns import span_turns
from mmpack.trajectory.replay import of_turn
from mmpack.trajectory.samples import OF_EPISODE
from mmpack.trajectory.trajectory import SCORES, Trajectory, Turn

_SAME = ("group_id", "family", "processor", "sampling", "coordinate_system", "screen_size")


def from_samples(samples: Sequence[Sample]) -> list[Trajectory]:
    """One trajectory per `trajectory_id`, in order of first appearance; samples without one are one each.

    A sample's turns are its runs of loss spans of one `turn`. They are in the order of these numbers where each has its
    own, else by the sample's `turn`, then as they stand. Metadata that all samples of a trajectory have is the
    trajectory's, the rest is that of their last turns. A score of a whole sample is the trajectory's if the trajectory
    has one sample, else that of its only turn.

    Raises: ArgumentError for samples without loss spans, scores that belong to no single turn, positions that are not
    by the family's rule, and samples of one trajectory that differ in task, family or settings.

    Example: the same samples again, merged.
        >>> from mmpack.trajectory import Trajectory, Turn, from_samples, to_samples
        >>> turns = [Turn([1, 2], [3]), Turn([1, 2, 3, 4], [5])]
        >>> per_turn = to_samples(Trajectory("e", "task", "qwen2_5_vl", turns), merge=False)
        >>> [s.input_ids.tolist() for t in from_samples(per_turn) for s in to_samples(t)]
        [[1, 2, 3, 4, 5]]
    """
    episodes: dict[tuple[str, str], list[Sample]] = {}
    for sample in as_samples(samples, "from_samples"):
        own = sample.trajectory_id is None
        key = ("sample", sample.sample_id) if own else ("trajectory", str(sample.trajectory_id))
        episodes.setdefault(key, []).append(sample)
    return [_trajectory(name, members) for (_, name), members in episodes.items()]


def _trajectory(name: str, members: list[Sample]) -> Trajectory:
    members = sorted(members, key=lambda s: -1 if s.turn is None else s.turn)
    first = members[0]
    for sample in members:
        differs = [f for f in _SAME if getattr(sample, f) != getattr(first, f)]
        if differs:
            raise ArgumentError(
                f"from_samples: samples of trajectory {name!r:.60} differ in {differs[0]}. "
                "Fix: give each episode its own trajectory_id"
            )
    noted = [
        {k: v for k, v in s.metadata.items() if k not in ("turns", RESPONSE_TEXT_KEY)}
        for s in members
    ]
    metadata = {
        k: v
        for k, v in noted[0].items()
        if all(k in other and same(v, other[k]) for other in noted)
    }
    turns: list[Turn] = []
    numbers: list[int | None] = []
    episode: dict[str, list[Any]] = {field: [] for field in SCORES}
    for sample, own in zip(members, noted, strict=True):
        made = _turns(sample)
        made[-1].metadata = {k: v for k, v in own.items() if k not in metadata} | made[-1].metadata
        for field in SCORES:
            episode[field] += _share_out(sample, made, field, alone=len(members) == 1)
        turns += made
        numbers += [run[0].turn for run in _runs(sample.loss_spans)]
    known = [n for n in numbers if n is not None]
    if len(set(known)) == len(turns):  # a branch lies between others
        turns = [turns[k] for k in np.argsort(known)]
    common: dict[str, Any] = {field: getattr(first, field) for field in _SAME}
    scores: dict[str, Any] = {field: given or None for field, given in episode.items()}
    return Trajectory(name, turns=turns, metadata=metadata, **scores, **common)


def _turns(sample: Sample) -> list[Turn]:
    """A turn per run of loss spans, with what lies before its end and after the turn before it."""
    runs = _runs(sample.loss_spans)
    if not runs:
        raise ArgumentError(
            f"from_samples: {sample.sample_id!r:.60} has no loss spans, so it holds no turn. Fix: leave it out"
        )
    _check_positions(sample)
    starts = np.cumsum([0] + [s.stop - s.start for s in sample.loss_spans]).tolist()
    kept = sample.metadata.get("turns")
    out, end, done = [], 0, 0
    for place, run in enumerate(runs):
        start, stop = run[0].start, run[-1].stop
        last = place == len(runs) - 1

        def own(
            spans: Any, end: int = end, stop: int = stop, last: bool = last
        ) -> list[Any] | None:
            return [s for s in spans or () if s.start >= end and (last or s.start < stop)] or None

        response = sample.input_ids[start:stop]
        logprobs = None
        loss = slice(starts[done], starts[done + len(run)])
        at = np.concatenate([np.arange(s.start, s.stop) for s in run]) - start
        if sample.rollout_logprobs is not None and len(at):
            logprobs = np.zeros(len(response), np.float32)  # tokens without loss have none: 0
            logprobs[at] = sample.rollout_logprobs[loss]
        noted = kept.get(str(run[0].turn)) if isinstance(kept, dict) else None
        tail = sample.input_ids[stop:] if last and stop < len(sample) else None
        media = occurring_media(sample, start)
        everything = occurring_media(sample)
        whole = len(run) == 1 and run[0].kind == "response" and not run[0].metadata
        spans = [] if start < stop and not len(at) else list(run)
        out.append(
            Turn(
                sample.input_ids[:start],
                response,
                media,
                logprobs,
                observation_ids=tail,
                observation_media=everything[len(media) :] if tail is not None else [],
                observation_spans=_within(own(sample.observation_spans), start),
                loss_spans=None if whole else spans,
                action_spans=_within(own(sample.action_spans), stop),
                region_spans=_within(own(sample.region_spans), stop),
                bbox_targets=_of_turn(sample, "bbox_targets", media, end, last),
                point_targets=_of_turn(sample, "point_targets", media, end, last),
                finish_reason=sample.finish_reason if last else None,
                policy_versions=_within(own(sample.policy_versions), stop),
                prefix_cached_tokens=None if place else sample.prefix_cached_tokens,
                **of_turn(sample, start, stop, loss, at),
                metadata=dict(noted or {}),
            )
        )
        end, done = stop, done + len(run)
    return out


def _runs(spans: list[LossSpan]) -> list[list[LossSpan]]:
    """Loss spans of one turn together; without a number, those that touch."""
    out: list[list[LossSpan]] = []
    for span in spans:
        if out and out[-1][-1].turn == span.turn:
            together = span.turn is not None or out[-1][-1].stop == span.start
        else:
            together = False
        if together:
            out[-1].append(span)
        else:
            out.append([span])
    return out


def _within(items: list[Any] | None, stop: int) -> list[Any] | None:
    """Return `items` that end by `stop`; one that begins before it is cut there."""
    kept = [
        i if i.stop <= stop else dataclasses.replace(i, stop=stop)
        for i in items or ()
        if i.start < stop
    ]
    return kept or None


def _of_turn(
    sample: Sample, field: str, media: list[Any], end: int, last: bool
) -> list[Any] | None:
    """Targets in media that come first in this turn; those in none are the last turn's."""
    seen = len({medium_key(m) for m in media})
    before = len({medium_key(m) for m in occurring_media(sample, end)})
    return [
        t
        for t in getattr(sample, field) or ()
        if (last if t.media_index is None else before <= t.media_index < seen)
    ] or None


def _share_out(sample: Sample, turns: list[Turn], field: str, alone: bool) -> list[Any]:
    """Give each turn of a sample its scores; return those of the whole trajectory."""
    of_span = {s.start: turn for s, turn in zip(sample.loss_spans, span_turns(sample), strict=True)}
    numbers = [of_span[run[0].start] for run in _runs(sample.loss_spans)]
    out: list[Any] = []
    for i, score in enumerate(getattr(sample, field) or ()):
        scope, at = score.scope, None
        if scope == "sequence":
            of_episode = score.metadata.get("of") == OF_EPISODE["of"]
            if alone or of_episode:
                rest = {k: v for k, v in score.metadata.items() if k != "of" or not of_episode}
                out.append(dataclasses.replace(score, metadata=rest))
                continue
            at = 0 if len(turns) == 1 else None
        elif "turn" in scope:
            at = numbers.index(scope["turn"]) if scope["turn"] in numbers else None
            score = dataclasses.replace(score, scope="sequence")
        elif "span" in scope:
            at = _turn_at(turns, scope["span"][0])
        else:
            regions = sample.region_spans or []
            if scope["region"] < len(regions):
                at = _turn_at(turns, regions[scope["region"]].start)
                before = sum(len(t.region_spans or ()) for t in turns[:at])
                score = dataclasses.replace(score, scope={"region": scope["region"] - before})
        if at is None:
            raise ArgumentError(
                f"from_samples: {field}[{i}] of {sample.sample_id!r:.60} belongs to more than one turn. "
                "Fix: give it the scope of one turn"
            )
        held = getattr(turns[at], field) or []
        setattr(turns[at], field, [*held, score])
    return out


def _turn_at(turns: list[Turn], token: int) -> int:
    """The first turn that ends after `token`, or the last one."""
    return next((k for k, turn in enumerate(turns) if token < len(turn)), len(turns) - 1)


def _check_positions(sample: Sample) -> None:
    if sample.position_ids is None:
        return
    own, _ = sample_positions(sample)
    if not np.array_equal(own, sample.position_ids):
        at = int(np.argmax((own != sample.position_ids).any(axis=0)))
        raise ArgumentError(
            f"from_samples: position_ids of {sample.sample_id!r:.60} don't follow its family's rule (token {at}). "
            "Fix: record the rule in Sample.processor, or drop position_ids"
        )
