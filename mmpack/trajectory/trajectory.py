"""A trajectory: its turns, each with what the policy really saw, what it wrote, and what came back.

Ids are expanded (one per vision token). Spans of a turn count its tokens: the context [C], then the response [R].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, check_name, check_whole, kind_of
from mmpack.families import FAMILIES
from mmpack.layout.occurrences import medium_key
from mmpack.schema.media import Medium
from mmpack.schema.ragged import Ragged
from mmpack.schema.sample import COORDINATE_SYSTEMS, FINISH_REASONS
from mmpack.schema.spans import (
    OBSERVATION_SOURCES,
    ActionSpan,
    BboxTarget,
    Cost,
    LossSpan,
    ObservationSpan,
    PointTarget,
    PolicyVersion,
    RegionSpan,
    Score,
)
from mmpack.trajectory.replay import check_replay

SCORES = ("rewards", "costs", "verifiers")


@dataclass(eq=False)
class Turn:
    """One call of the policy: the context that the engine was given, and what it answered.

    Raises: ArgumentError for ids that are no integers from 0 on, logprobs that are not finite or not one per response
    id, spans outside the turn, kept ids, teachers and routes of another length.

    Example:
        >>> from mmpack.trajectory import Turn
        >>> turn = Turn([5, 6, 7], [8, 9], logprobs=[-0.5, -1.0])
        >>> turn
        Turn(context=3, response=2, media=0)
    """

    context_ids: np.ndarray  # int64 [C]
    response_ids: np.ndarray  # int64 [R], as sampled
    media: list[Medium] = field(default_factory=list)  # of the context, one per occurrence
    logprobs: np.ndarray | None = None  # float32 [R]
    # what came back, where no later context shows it: int64 [O], and its media
    observation_ids: np.ndarray | None = None
    observation_media: list[Medium] = field(default_factory=list)
    # who wrote what this context adds to the turn that it goes on from, where observation_spans don't say
    source: str = "environment"
    observation_spans: list[ObservationSpan] | None = None
    loss_spans: list[LossSpan] | None = None  # in the response; None: all of it
    action_spans: list[ActionSpan] | None = None
    region_spans: list[RegionSpan] | None = None  # media_index counts the distinct media
    bbox_targets: list[BboxTarget] | None = None
    point_targets: list[PointTarget] | None = None
    finish_reason: str | None = None
    policy_versions: list[PolicyVersion] | None = None
    prefix_cached_tokens: int | None = None
    # what the engine did, to be replayed: R lists; R lists per teacher; uint8 or uint16 [C + R, layers, k]
    kept_ids: Ragged | None = None
    teachers: dict[str, Ragged] | None = None
    routed_experts: np.ndarray | None = None
    # of this turn: scope "sequence" is the turn, {"span": …} and {"region": …} are its own
    rewards: list[Score] | None = None
    costs: list[Cost] | None = None
    verifiers: list[Score] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.context_ids = ids_of("Turn", "context_ids", self.context_ids)
        self.response_ids = ids_of("Turn", "response_ids", self.response_ids)
        if not len(self.context_ids):
            raise ArgumentError("Turn: context_ids is empty. Fix: pass the prompt's ids")
        self.media = _list_of(Medium, self.media, "media") or []
        self.observation_media = _list_of(Medium, self.observation_media, "observation_media") or []
        if self.observation_ids is not None:
            self.observation_ids = ids_of("Turn", "observation_ids", self.observation_ids)
        elif self.observation_media:
            raise ArgumentError(
                "Turn: observation_media is given without observation_ids. Fix: pass the ids with their placeholders"
            )
        self.logprobs = _logprobs(self.logprobs, len(self.response_ids))
        check_replay(self)
        check_name("Turn", "source", self.source, OBSERVATION_SOURCES)
        if self.finish_reason is not None:
            check_name("Turn", "finish_reason", self.finish_reason, FINISH_REASONS)
        if self.prefix_cached_tokens is not None:
            check_whole("Turn", "prefix_cached_tokens", self.prefix_cached_tokens, least=0)
        start, stop = len(self.context_ids), len(self)
        self._check_spans("observation_spans", ObservationSpan, 0, start)
        self._check_spans("loss_spans", LossSpan, start, stop)
        self._check_spans("action_spans", ActionSpan, 0, stop)
        self._check_spans("region_spans", RegionSpan, 0, stop)
        self._check_spans("policy_versions", PolicyVersion, 0, stop)
        self.bbox_targets = _list_of(BboxTarget, self.bbox_targets, "bbox_targets")
        self.point_targets = _list_of(PointTarget, self.point_targets, "point_targets")
        for name in SCORES:
            setattr(self, name, _scores(getattr(self, name), name))

    def __len__(self) -> int:
        """C + R."""
        return len(self.context_ids) + len(self.response_ids)

    @property
    def input_ids(self) -> np.ndarray:
        """int64 [C + R]: context and response."""
        return np.concatenate([self.context_ids, self.response_ids])

    def __repr__(self) -> str:
        sizes = f"context={len(self.context_ids)}, response={len(self.response_ids)}"
        return f"Turn({sizes}, media={len(self.media)})"

    def _check_spans(self, name: str, kind: type, start: int, stop: int) -> None:
        spans = _list_of(kind, getattr(self, name), name)
        setattr(self, name, spans)
        end = start
        for i, span in enumerate(spans or ()):
            if not start <= span.start <= span.stop <= stop:
                raise ArgumentError(
                    f"Turn: {name}[{i}] is [{span.start}, {span.stop}), expected within [{start}, {stop}). "
                    "Fix: count the turn's tokens, context first"
                )
            if name == "loss_spans" and span.start < end:
                raise ArgumentError(
                    f"Turn: loss_spans[{i}] starts at {span.start}, before {end}. Fix: sort them, without overlap"
                )
            end = span.stop


@dataclass(eq=False)
class Trajectory:
    """The turns of one episode in the order in which they were sampled, branches and retries included.

    `rewards`, `costs`, `verifiers`: of the whole episode (scope "sequence"), or of a turn ({"turn": k}).
    Raises: ArgumentError.
    """

    trajectory_id: str
    group_id: str  # the task's id: episodes of one task are compared
    family: str
    turns: list[Turn]
    rewards: list[Score] | None = None
    costs: list[Cost] | None = None
    verifiers: list[Score] | None = None
    processor: dict[str, Any] | None = None  # as Sample.processor
    sampling: dict[str, Any] | None = None
    coordinate_system: str | None = None
    screen_size: tuple[int, int] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("trajectory_id", "group_id"):
            if not isinstance(getattr(self, name), str):
                what = kind_of(getattr(self, name))
                raise ArgumentError(
                    f"Trajectory: {name} is {what}, expected a str. Fix: pass its name"
                )
        check_name("Trajectory", "family", self.family, FAMILIES)
        self.turns = _list_of(Turn, self.turns, "turns", "Trajectory") or []
        if self.coordinate_system is not None:
            check_name(
                "Trajectory", "coordinate_system", self.coordinate_system, COORDINATE_SYSTEMS
            )
        for name in ("metadata", "sampling", "processor"):
            value = getattr(self, name)
            if not isinstance(value, dict) and (value is not None or name == "metadata"):
                raise ArgumentError(
                    f"Trajectory: {name} is {kind_of(value)}, expected a dict. Fix: pass a dict of names to values"
                )
        for name in SCORES:
            setattr(self, name, _scores(getattr(self, name), name, "Trajectory"))

    def __len__(self) -> int:
        """Turns."""
        return len(self.turns)

    def __repr__(self) -> str:
        return (
            f"Trajectory({self.trajectory_id!r}, group_id={self.group_id!r}, family={self.family!r}, "
            f"turns={len(self.turns)})"
        )


# fields of a Trajectory that those who make one from something else can set
SETTABLE = tuple(
    f.name
    for f in fields(Trajectory)
    if f.name not in ("trajectory_id", "group_id", "family", "turns", "processor")
)


def keys_of(turn: Turn) -> list[tuple[str, float | None]]:
    """Return the keys of the context's media, one per occurrence."""
    return [medium_key(m) for m in turn.media]


def begins_with(ids: np.ndarray, media: Sequence[Medium], turn: Turn) -> bool:
    """Return whether `ids` and the media in them begin with the turn's context and response."""
    stop, start = len(turn), len(turn.context_ids)
    return (
        stop <= len(ids)
        and np.array_equal(ids[start:stop], turn.response_ids)
        and np.array_equal(ids[:start], turn.context_ids)
        and [medium_key(m) for m in media[: len(turn.media)]] == keys_of(turn)
    )


def same_context(one: Turn, two: Turn) -> bool:
    """Return whether two turns saw equal ids and media."""
    return np.array_equal(one.context_ids, two.context_ids) and keys_of(one) == keys_of(two)


def array_of(given: Any, dtype: Any = None) -> np.ndarray | None:
    """Return `given` as an array; None for text and for what numpy makes no array of."""
    if isinstance(given, str | bytes | dict | set) or given is None:
        return None
    try:
        return np.asarray(given, dtype)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def made_with(
    processor: Any, trajectory_id: str, group_id: str, turns: list[Turn], fields: dict[str, Any]
) -> Trajectory:
    """Return the trajectory of turns that a processor laid out."""
    family, settings = processor.family.name, processor.settings
    return Trajectory(trajectory_id, group_id, family, turns, processor=settings, **fields)


def ids_of(what: str, name: str, given: Any) -> np.ndarray:
    """int64 [n], 0 or more. Raises ArgumentError, in the name of `what`."""
    array = _array(what, name, given)
    whole = array.ndim == 1 and (not array.size or array.dtype.kind in "iu")
    if not whole or (array.size and int(array.min()) < 0):
        shown = f"of shape {list(array.shape)} and dtype {array.dtype}"
        if whole:
            shown = f"below 0 at {int(np.argmax(array < 0))}"
        raise ArgumentError(f"{what}: {name} is {shown}, expected ids [n]. Fix: pass token ids")
    return array.astype(np.int64, copy=False)


def _logprobs(given: Any, count: int) -> np.ndarray | None:
    if given is None:
        return None
    array = _array("Turn", "logprobs", given)
    numbers = not array.size or array.dtype.kind in "fiu"
    if array.shape != (count,) or not numbers:
        raise ArgumentError(
            f"Turn: logprobs has shape {list(array.shape)} and dtype {array.dtype}, expected numbers [{count}]. "
            "Fix: pass one value per response id"
        )
    values = array.astype(np.float32)
    if not np.isfinite(values).all():
        at = int(np.argmin(np.isfinite(values)))
        raise ArgumentError(f"Turn: logprobs[{at}] is {values[at]}. Fix: pass finite numbers")
    return values


def _array(what: str, name: str, given: Any) -> np.ndarray:
    array = array_of(given)
    if array is None:
        raise ArgumentError(
            f"{what}: {name} is {kind_of(given)}, not an array of numbers [n]. Fix: pass a list or an array"
        )
    return array


def _list_of(kind: type, given: Any, name: str, what: str = "Turn") -> list[Any] | None:
    if given is None:
        return None
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ArgumentError(
            f"{what}: {name} is {kind_of(given)}, expected a list. Fix: pass a list of {kind.__name__}"
        )
    for i, item in enumerate(given):
        if not isinstance(item, kind):
            raise ArgumentError(
                f"{what}: {name}[{i}] is {kind_of(item)}, expected {kind.__name__}. Fix: pass one"
            )
    return list(given)


def _scores(given: Any, name: str, what: str = "Turn") -> list[Any] | None:
    """Scores, or costs, with a scope that the owner has."""
    scores = _list_of(Cost if name == "costs" else Score, given, name, what)
    allowed = ("turn",) if what == "Trajectory" else ("span", "region")
    for i, score in enumerate(scores or ()):
        scope = score.scope
        own = isinstance(scope, dict) and len(scope) == 1 and next(iter(scope)) in allowed
        if scope != "sequence" and not own:
            raise ArgumentError(
                f'{what}: {name}[{i}] has scope {scope!r:.60}, expected "sequence" or {" or ".join(allowed)}. '
                "Fix: keep a turn's scores in the Turn, the episode's in the Trajectory"
            )
    return scores
