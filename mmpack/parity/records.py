"""Groups, scores, turns, targets and versions of samples, compared where both sides recorded them.

Notes (names, provenance, free metadata) are never compared; where they differ, the report says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mmpack.parity.causes.pair import show
from mmpack.parity.differences import Difference, of_list, of_shared, of_spans, overlaps
from mmpack.parity.sampling import who_lacks
from mmpack.parity.values import DECIMALS, DIGITS, same_value
from mmpack.schema.fields import Record
from mmpack.schema.media import Medium
from mmpack.schema.ragged import Ragged
from mmpack.schema.sample import Sample
from mmpack.schema.spans import covered

_SCORES = "Score each response once, and hand the scores on with it."
_TARGETS = "Hand reference answers and their coordinate system on unchanged."
_EPISODE = "Hand it on unchanged: it ties the turns of an episode together."
# field to fix
RECORDS: dict[str, str] = {
    "group_id": "Hand the rollout's group_id on: advantages are taken over groups.",
    "trajectory_id": _EPISODE,
    "turn": _EPISODE,
    "finish_reason": "Hand the engine's finish_reason on: truncated responses are masked by it.",
    "observation_spans": "Take observation_spans from the engine's turns; no policy wrote their tokens.",
    "action_spans": "Hand the actions that the engine's tokens decode to on, with their tokens.",
    "region_spans": "Hand region_spans on unchanged: scores of regions are paid to their tokens.",
    "bbox_targets": _TARGETS,
    "point_targets": _TARGETS,
    "coordinate_system": _TARGETS,
    "screen_size": _TARGETS,
    "rewards": _SCORES,
    "costs": _SCORES,
    "verifiers": _SCORES,
    "codec_ids": "Encode the same audio with the same codec, or hand the engine's ids on.",
    "teachers": "Score each response by each teacher once, and hand its lists on.",
    "policy_versions": "Hand the engine's policy_versions on: importance ratios need the weights that sampled.",
}
OF_TOKENS = ("observation_spans", "action_spans", "region_spans", "policy_versions", "teachers")
# of media, what differs without a difference in what is trained on
MEDIA_NOTES = ("media_id", "source", "decoded_size", "mode", "exif_orientation", "file_hash")
_UNORDERED = ("rewards", "costs", "verifiers")


def recorded(sample: Sample, field: str) -> Any:
    """The value of a field; None where nothing was recorded, an empty group_id included."""
    value = getattr(sample, field)
    return None if field == "group_id" and value == "" else value


def record_differences(left: Sample, right: Sample) -> Iterator[Difference]:
    """The first difference of each field of RECORDS that both sides recorded; of tokens only where ids are equal."""
    same_ids = np.array_equal(left.input_ids, right.input_ids)
    yield from (d for d in _differences(left, right) if same_ids or not _of_tokens(d.field, left))


def _differences(left: Sample, right: Sample) -> Iterator[Difference]:
    for name in RECORDS:
        a, b = recorded(left, name), recorded(right, name)
        if a is not None and b is not None and (found := _first(name, a, b)):
            yield found


def _of_tokens(field: str, sample: Sample) -> bool:
    """Whether a field speaks of token indices."""
    if field in _UNORDERED:
        return any("span" in score.scope for score in getattr(sample, field))
    return field in OF_TOKENS


def lacking_records(left: Sample, right: Sample) -> Iterator[tuple[str, str]]:
    """(field, who) of RECORDS, as `fields.lacking` gives them."""
    if left is not right and not np.array_equal(left.input_ids, right.input_ids):
        for found in _differences(left, right):
            if _of_tokens(found.field, left):
                yield found.field, "moved"
    for name in RECORDS:
        a, b = recorded(left, name), recorded(right, name)
        if a is None or b is None:
            yield name, who_lacks(a, b)
        elif name == "policy_versions":
            yield from _uncovered(left, right)
        elif isinstance(a, list):
            yield from _lacking_parts(name, a, b)
    for i, j in overlaps(left.loss_spans, right.loss_spans):
        turns = left.loss_spans[i].turn, right.loss_spans[j].turn
        if (turns[0] is None) != (turns[1] is None):
            yield "loss_spans.turn", who_lacks(*turns)


def notes(left: Sample, right: Sample) -> Iterator[tuple[str, str]]:
    """(field, "note") of what differs and is never compared."""
    if left is right:
        return
    for name in ("prefix_cached_tokens", "metadata"):
        if not same_value(getattr(left, name) or None, getattr(right, name) or None):
            yield name, "note"
    for a, b in zip(left.media, right.media, strict=False):
        yield from _media_notes(a, b)
    for name in ("modality_spans", "loss_spans"):
        if _other_notes(getattr(left, name), getattr(right, name)):
            yield f"{name}.metadata", "note"


def _first(field: str, a: Any, b: Any) -> Difference | None:
    """The first difference of two values of a field; None if they are equal."""
    if field == "policy_versions":
        return of_shared(field, a, b, "version")
    if field == "observation_spans":
        return of_spans(field, a, b, "source")
    if field == "teachers":
        same = a.keys() == b.keys() and all(_same_lists(a[name], b[name]) for name in a)
        return None if same else Difference(field, _taught(a, b), _taught(b, a))
    if not isinstance(a, list):
        return None if same_value(a, b) else Difference(field, show(a), show(b))
    a, b = _ordered(field, a), _ordered(field, b)
    same = len(a) == len(b) and all(map(_same, a, b))
    return None if same else of_list(field, a, b, _same, _shown)


def _same_lists(a: Ragged, b: Ragged) -> bool:
    if not np.array_equal(a.offsets, b.offsets) or not np.array_equal(a.ids, b.ids):
        return False
    return np.allclose(a.logprobs, b.logprobs, rtol=DIGITS, atol=DECIMALS)  # type: ignore[arg-type]


def _taught(lists: dict[str, Ragged], other: dict[str, Ragged]) -> str:
    """The teachers of a side that the other lacks or has otherwise."""
    odd = [n for n in lists if n not in other or not _same_lists(lists[n], other[n])]
    shown = (f"{name!r:.40} with {len(lists[name].ids)} logprobs" for name in odd[:2])
    return ", ".join(shown) or "no such teacher"


def _same(a: Record, b: Record) -> bool:
    """Equal in every required field and every field that both sides recorded."""
    return all(
        same_value(x, y) or (not declared.required and None in (_none(x), _none(y)))
        for name, declared, x, y in _parts(a, b)
        if name != "metadata"
    )


def _parts(a: Record, b: Record) -> Iterator[tuple[str, Any, Any, Any]]:
    for name, declared in type(a).columns().items():
        yield name, declared, getattr(a, name), getattr(b, name)


def _lacking_parts(field: str, a: list[Any], b: list[Any]) -> Iterator[tuple[str, str]]:
    """Fields of a list's entries that only one side recorded."""
    if field == "observation_spans":
        pairs = [(a[i], b[j]) for i, j in overlaps(a, b)]
    else:
        pairs = list(zip(_ordered(field, a), _ordered(field, b), strict=False))
    for pair in pairs:
        for name, _, x, y in _parts(*pair):
            if name == "metadata":
                if not same_value(x, y):
                    yield f"{field}.metadata", "note"
            elif (x is None) != (y is None):
                yield f"{field}.{name}", who_lacks(x, y)


def _uncovered(left: Sample, right: Sample) -> Iterator[tuple[str, str]]:
    """Loss tokens whose version only one side knows."""
    length = min(len(left), len(right))
    loss = covered(left.loss_spans, length) & covered(right.loss_spans, length)
    known = [covered(s.policy_versions or [], length)[loss] for s in (left, right)]
    for who, lacks in (("rollout", ~known[0] & known[1]), ("train", known[0] & ~known[1])):
        if np.any(lacks):
            yield "policy_versions", who


def _media_notes(a: Medium, b: Medium) -> Iterator[tuple[str, str]]:
    for name in MEDIA_NOTES:
        if not same_value(getattr(a, name), getattr(b, name)):
            yield f"media.{name}", "note"
    if not same_value(a.metadata, b.metadata):
        yield "media.metadata", "note"


def _other_notes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return any(not same_value(x.metadata, y.metadata) for x, y in zip(a, b, strict=False))


def _ordered(field: str, values: list[Any]) -> list[Any]:
    """Scores by name and scope: their order says nothing."""
    if field not in _UNORDERED:
        return values
    return sorted(values, key=lambda s: (s.name, repr(s.scope)))


def _shown(record: Record) -> dict[str, Any]:
    """Recorded fields by name."""
    values = {name: getattr(record, name) for name in type(record).columns() if name != "metadata"}
    return {
        name: f"of shape {list(v.shape)}" if isinstance(v, np.ndarray) else v
        for name, v in values.items()
    }


def _none(value: Any) -> Any:
    """None for None, else something that is not: arrays don't compare to one truth value."""
    return None if value is None else True
