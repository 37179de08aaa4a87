"""Half-open spans `[start, stop)` of token indices of one sample: expanded ids, never padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmpack.families import Family
from mmpack.schema.error_text import trace_error
from mmpack.schema.fields import Record, column
from mmpack.schema.specs import COUNT_MAX, Float, Floats, Int, Json, Spec, Str

MODALITIES = ("image", "video", "audio")
LOSS_KINDS = ("response", "action", "reasoning")
OBSERVATION_SOURCES = ("tool", "environment", "screenshot", "user")


def _extra() -> Any:
    return column(Json(), "unknown fields, carried through", factory=dict)


@dataclass(eq=False)
class ModalitySpan(Record):
    """Placeholders of one medium, of one temporal patch of a video, or of one piece of a video that has its sound."""

    start: int = column(Int(), "first token")
    stop: int = column(Int(), "one past the last token")
    modality: str = column(Str(MODALITIES), "what the placeholders stand for")
    media_index: int = column(Int(), "index into `media`")
    frame: int | None = column(
        Int(), "temporal patch of a video, or row of an image, where each has a span", None
    )
    chunk: int | None = column(
        Int(), "which piece of the medium, where a video and its sound lie in turns", None
    )
    metadata: dict[str, Any] = _extra()


@dataclass(eq=False)
class LossSpan(Record):
    """Tokens that the policy wrote and that the loss reads."""

    start: int = column(Int(), "first token; at least 1, its logprob needs a row before it")
    stop: int = column(Int(), "one past the last token")
    kind: str = column(Str(LOSS_KINDS), "what the tokens are", "response")
    turn: int | None = column(Int(), "turn of a multi-turn episode", None)
    metadata: dict[str, Any] = _extra()


@dataclass(eq=False)
class ObservationSpan(Record):
    """Context that no policy wrote."""

    start: int = column(Int(), "first token")
    stop: int = column(Int(), "one past the last token")
    source: str = column(Str(OBSERVATION_SOURCES), "who wrote it")
    turn: int | None = column(Int(), "turn it belongs to", None)
    metadata: dict[str, Any] = _extra()


@dataclass(eq=False)
class ActionSpan(Record):
    """Tokens that decode to an action."""

    start: int = column(Int(), "first token")
    stop: int = column(Int(), "one past the last token")
    action: dict[str, Any] = column(Json(), "the action that the tokens decode to")
    turn: int | None = column(Int(), "turn it belongs to", None)
    metadata: dict[str, Any] = _extra()


@dataclass(eq=False)
class RegionSpan(Record):
    """Text tokens that refer to a place in a medium."""

    start: int = column(Int(), "first token")
    stop: int = column(Int(), "one past the last token")
    media_index: int = column(Int(), "index into `media`")
    bbox: tuple[float, ...] | None = column(Floats(4), "x0, y0, x1, y1", None)
    point: tuple[float, ...] | None = column(Floats(2), "x, y", None)
    label: str | None = column(Str(), "what is there", None)
    metadata: dict[str, Any] = _extra()


@dataclass(eq=False)
class BboxTarget(Record):
    """A reference box, in the sample's coordinate system."""

    bbox: tuple[float, ...] = column(Floats(4), "x0, y0, x1, y1")
    media_index: int | None = column(Int(), "index into `media`", None)
    label: str | None = column(Str(), "what is there", None)
    metadata: dict[str, Any] = _extra()


@dataclass(eq=False)
class PointTarget(Record):
    """A reference point, in the sample's coordinate system."""

    point: tuple[float, ...] = column(Floats(2), "x, y")
    media_index: int | None = column(Int(), "index into `media`", None)
    label: str | None = column(Str(), "what is there", None)
    metadata: dict[str, Any] = _extra()


@dataclass(eq=False)
class PolicyVersion(Record):
    """Which weights produced which tokens."""

    start: int = column(Int(), "first token")
    stop: int = column(Int(), "one past the last token")
    version: str = column(Str(), "name of the weights")
    metadata: dict[str, Any] = _extra()


@dataclass(frozen=True)
class ScopeSpec(Spec):
    """`"sequence"`, `{"turn": k}`, `{"region": k}` or `{"span": [start, stop]}`."""

    def holds(self, value: Any) -> bool:
        return type(value) is str and value == "sequence"

    def read(self, value: Any, where: str) -> str | dict[str, Any]:
        if isinstance(value, str) and value == "sequence":
            return "sequence"
        if isinstance(value, dict) and len(value) == 1:
            key, inner = next(iter(value.items()))
            if key in ("turn", "region"):
                return {key: Int().read(inner, f"{where}.{key}")}
            if key == "span" and isinstance(inner, (list, tuple)) and len(inner) == 2:
                return {key: [Int().read(v, f"{where}.{key}[{i}]") for i, v in enumerate(inner)]}
        raise trace_error(
            where, 'expected "sequence", {"turn": k}, {"region": k} or {"span": [start, stop]}'
        )

    def schema(self) -> dict[str, Any]:
        index = {"type": "integer", "minimum": 0, "maximum": COUNT_MAX}
        span = {"type": "array", "items": index, "minItems": 2, "maxItems": 2}
        one = [("turn", index), ("region", index), ("span", span)]
        return {
            "oneOf": [{"const": "sequence"}]
            + [
                {
                    "type": "object",
                    "properties": {name: inner},
                    "required": [name],
                    "additionalProperties": False,
                }
                for name, inner in one
            ]
        }


@dataclass(eq=False)
class Score(Record):
    """A reward or a verifier's verdict, with what it scores. A cost is a `Cost`, which is no Score."""

    name: str = column(Str(), "who gave it")
    value: float = column(Float(), "the score")
    scope: str | dict[str, Any] = column(ScopeSpec(), "what it scores", "sequence")
    metadata: dict[str, Any] = _extra()


@dataclass(eq=False)
class Cost(Record):
    """A charge to the policy. It has a Score's fields but its own type, so that no cost is paid as a reward."""

    name: str = column(Str(), "who charges it")
    value: float = column(Float(), "the cost; above 0 is bad")
    scope: str | dict[str, Any] = column(ScopeSpec(), "what it is charged for", "sequence")
    metadata: dict[str, Any] = _extra()


def covered(spans: Sequence[Any], length: int) -> np.ndarray:
    """bool [length]: the tokens that any of `spans` covers.

    Args: `spans`: objects with `start` (0 or more) and `stop`, in any order; they are cut at `length`, and a span that
    runs backwards covers nothing.
    """
    edges = np.zeros(length + 1, dtype=np.int64)
    if spans:
        bounds = np.array([(s.start, max(s.start, s.stop)) for s in spans], dtype=np.int64)
        np.minimum(bounds, length, out=bounds)
        np.add.at(edges, bounds[:, 0], 1)
        np.add.at(edges, bounds[:, 1], -1)
    return np.cumsum(edges)[:length] > 0


def is_placeholder(ids: np.ndarray, family: Family) -> np.ndarray:
    """bool [L]: the ids, int [L], that stand for a medium in this family."""
    out = np.zeros(len(ids), dtype=bool)
    for token in set(family.placeholder_ids.values()):
        out |= ids == token
    return out
