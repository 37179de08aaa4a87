"""`to_samples`: one long sample where the context only grew, several where it was rewritten; each loss token once.

Turn j's response lies at [C_j, C_j + R_j) in every turn that goes on from it: its ids are a prefix of theirs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from mmpack.errors import ArgumentError, check_flag, kind_of
from mmpack.families import FAMILIES, Family
from mmpack.layout.fingerprint import fingerprint
from mmpack.layout.occurrences import context_ids, match_runs, medium_key, spans_of
from mmpack.layout.runs import placeholder_runs
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, ObservationSpan
from mmpack.trajectory.replay import first_other_route, joined_lists, routes_with_tail
from mmpack.trajectory.trajectory import SCORES, Trajectory, Turn, begins_with

OF_EPISODE = {"of": "trajectory"}  # metadata of a score that is the whole episode's
Key = tuple[str, float | None]


class Node(NamedTuple):
    """A turn among those that it goes on from."""

    path: tuple[int, ...]  # turns, oldest first; the last one is this turn
    sampled: np.ndarray  # bool [C + R]: what the policy wrote


def to_samples(
    trajectory: Trajectory, *, merge: bool = True, keep_last_observation: bool = False
) -> list[Sample]:
    """The samples of a trajectory, `<trajectory_id>/<first turn>`, in the order of their first turns.

    A turn goes on from an earlier one if its context begins with that turn's context and response, ids, media and
    routes equal; what is new in it is an observation. `merge=True` makes one sample of turns that go on from each
    other. A window, a summary, a rewritten context, a branch or a retry begins a sample of its own. `merge=False` makes
    one per turn. Either way each turn's response is loss in exactly one sample, and context everywhere else.

    A turn without loss keeps its number and its scores, by empty loss spans at both ends of its response.

    Scores of a turn get the scope {"turn": k}, k counting the trajectory's turns; those of the whole trajectory are in
    the sample that holds its last turn with a loss token, once. `rollout_logprobs` are kept if each turn of the sample
    has them; each of its turns has `kept_ids`, or none. Positions are the family's rule: pack computes them.
    `keep_last_observation`: keep what came back after a turn that nothing goes on from; no loss token reads it.

    Raises: ArgumentError; LayoutError (MM106) where a context's placeholders and its media contradict each other.

    Example: the third turn's context was rewritten.
        >>> from mmpack.trajectory import Trajectory, Turn, to_samples
        >>> turns = [Turn([1, 2], [3]), Turn([1, 2, 3, 4], [5]), Turn([1, 9], [6])]
        >>> episode = Trajectory("e", "task", "qwen2_5_vl", turns)
        >>> [(s.sample_id, s.input_ids.tolist(), s.loss_indices.tolist()) for s in to_samples(episode)]
        [('e/0', [1, 2, 3, 4, 5], [2, 4]), ('e/2', [1, 9, 6], [2])]
        >>> [s.loss_indices.tolist() for s in to_samples(episode, merge=False)]
        [[2], [4], [2]]
    """
    if not isinstance(trajectory, Trajectory):
        raise ArgumentError(
            f"to_samples: trajectory is {kind_of(trajectory)}, expected Trajectory. Fix: pass one at a time"
        )
    check_flag("to_samples", "merge", merge)
    check_flag("to_samples", "keep_last_observation", keep_last_observation)
    nodes = linked(trajectory.turns)
    owners = _owners(nodes) if merge else [[k] for k in range(len(nodes))]
    held = _held(trajectory)
    samples = [
        _sample(trajectory, nodes, owned, held, bool(keep_last_observation)) for owned in owners
    ]
    _give_episode_scores(trajectory, samples, owners)
    return samples


def linked(turns: list[Turn]) -> list[Node]:
    """Return a node per turn: it goes on from the longest such turn, the latest of several."""
    nodes: list[Node] = []
    for k, turn in enumerate(turns):
        sampled = np.zeros(len(turn), dtype=bool)
        sampled[len(turn.context_ids) :] = True
        parent = _parent(k, turns)
        path: tuple[int, ...] = (k,)
        if parent is not None:
            path = (*nodes[parent].path, k)
            sampled[: len(turns[parent])] = nodes[parent].sampled
        nodes.append(Node(path, sampled))
    return nodes


def _parent(k: int, turns: list[Turn]) -> int | None:
    turn = turns[k]
    for j in sorted(range(k), key=lambda j: (len(turns[j]), j), reverse=True):
        goes_on = begins_with(turn.context_ids, turn.media, turns[j])
        if goes_on and first_other_route(turns[j], turn) is None:
            return j
    return None


def _owners(nodes: list[Node]) -> list[list[int]]:
    """The turns whose loss each sample holds: a turn joins the one that it goes on from, unless another did."""
    last: dict[int, list[int]] = {}  # a turn that ends a sample -> its turns
    out: list[list[int]] = []
    for k, node in enumerate(nodes):
        own = last.pop(node.path[-2], None) if len(node.path) > 1 else None
        if own is None:
            own = []
            out.append(own)
        own.append(k)
        last[k] = own
    return out


def _held(trajectory: Trajectory) -> dict[Key, Medium]:
    """Each distinct medium once, with pixels if any of its like has them."""
    held: dict[Key, Medium] = {}
    for turn in trajectory.turns:
        for medium in (*turn.media, *turn.observation_media):
            known = held.setdefault(medium_key(medium), medium)
            if known.pixel_values is None and medium.pixel_values is not None:
                held[medium_key(medium)] = medium
    return held


def _sample(
    trajectory: Trajectory,
    nodes: list[Node],
    owned: list[int],
    held: dict[Key, Medium],
    keep_last: bool,
) -> Sample:
    turns, family = trajectory.turns, FAMILIES[trajectory.family]
    end = owned[-1]
    last, node = turns[end], nodes[end]
    ids, media, sampled = last.input_ids, list(last.media), node.sampled
    observed = _observations(turns, node.path)
    if keep_last and last.observation_ids is not None and not _goes_on(nodes, end):
        observed.append(
            ObservationSpan(len(ids), len(ids) + len(last.observation_ids), last.source, end + 1)
        )
        ids = np.concatenate([ids, last.observation_ids])
        sampled = np.concatenate([sampled, np.zeros(len(last.observation_ids), dtype=bool)])
        media += last.observation_media
    where = f"to_samples: {trajectory.trajectory_id!r:.60} turn {end}"
    placed = match_runs(
        placeholder_runs(context_ids(ids, sampled, family), family),
        [held[medium_key(m)] for m in media],
        family,
        where,
    )
    distinct, spans = spans_of(placed, family)
    own = [turns[k] for k in owned]
    sample = Sample(
        sample_id=f"{trajectory.trajectory_id}/{owned[0]}",
        group_id=trajectory.group_id,
        family=trajectory.family,
        input_ids=ids,
        media=distinct,
        modality_spans=spans,
        loss_spans=[span for k in owned for span in _loss(turns[k], k)],
        observation_spans=observed or None,
        rollout_logprobs=_logprobs(own),
        finish_reason=last.finish_reason,
        policy_versions=_versions(turns, node.path) or None,
        prefix_cached_tokens=own[0].prefix_cached_tokens,
        **joined_lists(own, [_loss(turns[k], k) for k in owned]),
        routed_experts=routes_with_tail(last.routed_experts, len(ids)),
        trajectory_id=trajectory.trajectory_id,
        turn=owned[0],
        processor=trajectory.processor,
        processor_fingerprint=None
        if trajectory.processor is None
        else fingerprint(trajectory.processor),
        sampling=trajectory.sampling,
        coordinate_system=trajectory.coordinate_system,
        screen_size=trajectory.screen_size,
        metadata=_metadata(trajectory, owned),
    )
    _annotate(sample, turns, owned, family, where)
    return sample


def _goes_on(nodes: list[Node], k: int) -> bool:
    return any(k in node.path[:-1] for node in nodes)


def _observations(turns: list[Turn], path: tuple[int, ...]) -> list[ObservationSpan]:
    """Return what each turn of the path adds to the one before it."""
    out: list[ObservationSpan] = []
    end = 0
    for place, k in enumerate(path):
        turn, start = turns[k], len(turns[k].context_ids)
        if turn.observation_spans is not None:
            new = [s for s in turn.observation_spans if s.start >= end]
            out += [dataclasses.replace(s, turn=k) for s in new]
        elif place and end < start:
            out.append(ObservationSpan(end, start, turn.source, k))
        end = len(turn)
    return out


def _loss(turn: Turn, k: int) -> list[LossSpan]:
    start, stop = len(turn.context_ids), len(turn)
    if turn.loss_spans is None:
        return [LossSpan(start, stop, turn=k)]
    if not turn.loss_spans:  # they keep the turn's place
        return [LossSpan(at, at, turn=k) for at in sorted({start, stop})]
    return [dataclasses.replace(s, turn=k) for s in turn.loss_spans]


def _logprobs(own: list[Turn]) -> np.ndarray | None:
    """float32 [n], of the loss tokens; None if a turn has none."""
    out: list[np.ndarray] = []
    for turn in own:
        loss = _loss(turn, 0)
        if turn.logprobs is None and any(span.start < span.stop for span in loss):
            return None
        values = np.zeros(0, np.float32) if turn.logprobs is None else turn.logprobs
        start = len(turn.context_ids)
        out += [values[s.start - start : s.stop - start] for s in loss]
    if not any(turn.logprobs is not None for turn in own):
        return None
    return np.concatenate(out) if out else np.zeros(0, np.float32)


def _versions(turns: list[Turn], path: tuple[int, ...]) -> list[Any]:
    """The weights of every response that is known, also of those that are context here."""
    out: list[Any] = []
    for k in path:
        end = out[-1].stop if out else 0
        out += [v for v in turns[k].policy_versions or () if v.start >= end]
    return out


def _annotate(
    sample: Sample, turns: list[Turn], owned: list[int], family: Family, where: str
) -> None:
    """Actions, regions, targets and scores of the owned turns."""
    index = {medium_key(m): i for i, m in enumerate(sample.media)}
    lists: dict[str, list[Any]] = {
        name: []
        for name in ("action_spans", "region_spans", "bbox_targets", "point_targets", *SCORES)
    }
    for k in owned:
        turn = turns[k]
        seen = list(dict.fromkeys(medium_key(m) for m in turn.media))
        lists["action_spans"] += [dataclasses.replace(a, turn=k) for a in turn.action_spans or ()]
        first = len(lists["region_spans"])
        for name in ("region_spans", "bbox_targets", "point_targets"):
            for i, item in enumerate(getattr(turn, name) or ()):
                at = item.media_index
                if at is not None and at >= len(seen):
                    raise ArgumentError(
                        f"{where}: {name}[{i}] names media[{at}], but the turn has {len(seen)} media. "
                        "Fix: correct media_index"
                    )
                lists[name].append(
                    item if at is None else dataclasses.replace(item, media_index=index[seen[at]])
                )
        for name in SCORES:
            lists[name] += [_scored(s, k, first) for s in getattr(turn, name) or ()]
    for name, items in lists.items():
        setattr(sample, name, items or None)


def _scored(score: Any, turn: int, first_region: int) -> Any:
    """A turn's score as the sample's."""
    if score.scope == "sequence":
        return dataclasses.replace(score, scope={"turn": turn})
    if "region" in score.scope:
        return dataclasses.replace(score, scope={"region": first_region + score.scope["region"]})
    return score


def _give_episode_scores(
    trajectory: Trajectory, samples: list[Sample], owners: list[list[int]]
) -> None:
    """Put the trajectory's scores where their turn is: the whole's where the last turn is that has a loss token."""
    count = len(trajectory.turns)
    spans = [_loss(turn, k) for k, turn in enumerate(trajectory.turns)]
    wrote = [k for k, own in enumerate(spans) if any(span.start < span.stop for span in own)]
    last = wrote[-1] if wrote else count - 1
    holder = {k: sample for sample, owned in zip(samples, owners, strict=True) for k in owned}
    for name in SCORES:
        for i, score in enumerate(getattr(trajectory, name) or ()):
            whole = score.scope == "sequence"
            turn = last if whole else score.scope["turn"]
            if turn not in holder:
                raise ArgumentError(
                    f"to_samples: {name}[{i}] of {trajectory.trajectory_id!r:.60} belongs to turn "
                    f"{max(turn, 0)}, but there are {count} turns. Fix: drop the score, or record the turn"
                )
            sample = holder[turn]
            if whole and len(samples) > 1:
                score = dataclasses.replace(score, metadata={**score.metadata, **OF_EPISODE})
            setattr(sample, name, [*(getattr(sample, name) or ()), score])


def _metadata(trajectory: Trajectory, owned: list[int]) -> dict[str, Any]:
    kept = {str(k): trajectory.turns[k].metadata for k in owned if trajectory.turns[k].metadata}
    return {**trajectory.metadata, **({"turns": kept} if kept else {})}
