"""The fields that parity compares, in order: what is equal at once, the first mismatched span of what isn't.

A field that a side did not record is neither equal nor different: it is `lacking`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import numpy as np

from mmpack.families import get_family
from mmpack.layout.fingerprint import fingerprint
from mmpack.layout.runs import placeholder_runs
from mmpack.parity.causes.alike import differ, fields_of, same_medium
from mmpack.parity.causes.pair import common_prefix, show, show_ids
from mmpack.parity.causes.replay import lacking_replay, replay_differences
from mmpack.parity.causes.settings import compare_settings
from mmpack.parity.differences import Difference, named, of_list, of_spans
from mmpack.parity.records import lacking_records, notes, record_differences
from mmpack.parity.sampling import lacking_sampling, sampling_hit, unlike_sampling, who_lacks
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample

FIELDS = (
    "family",
    "input_ids",
    "modality_spans",
    "position_ids",
    "attention_mask",
    "media",
    "loss_spans",
    "processor",
    "sampling",
)
MODALITY_SPAN = (
    "start",
    "stop",
    "modality",
    "media_index",
    "frame",
    "chunk",
)  # by which spans are one


def differences(left: Sample, right: Sample) -> dict[str, Difference]:
    """The first difference of each field that both sides recorded and that differs. Cheap where they are equal."""
    found = [first(left, right) for first in (_family, _ids, _spans, _positions, _mask, _media)]
    found.append(of_spans("loss_spans", left.loss_spans, right.loss_spans, "kind"))
    found += record_differences(left, right)
    found += [first(left, right) for first in (_settings, _fingerprint, _sampling)]
    found += replay_differences(left, right)
    return {d.field: d for d in found if d is not None}


def lacking(left: Sample, right: Sample) -> Iterator[tuple[str, str]]:
    """(field, who) of everything that was not compared.

    who: the side that lacks it (rollout, train, both), or why it was not: never (its values never are), unscored (no
    logprobs that it describes), no_effect (raw logprobs don't depend on it), unread (what it does is not known), note
    (carried along), rendered (compared by what it made), moved (spans of other ids).
    """
    for name in ("position_ids", "attention_mask", "rollout_logprobs"):
        a, b = getattr(left, name), getattr(right, name)
        if a is None or b is None:
            yield name, who_lacks(a, b)
    scored = left.rollout_logprobs is not None and right.rollout_logprobs is not None
    if scored:
        yield "rollout_logprobs", "never"
    yield from lacking_sampling(left.sampling, right.sampling, scored)
    if left.processor is None or right.processor is None:
        a, b = left.processor_fingerprint, right.processor_fingerprint
        if a is None or b is None:
            yield "processor", who_lacks(left.processor or a, right.processor or b)
    elif left.processor is not right.processor and left.processor != right.processor:
        for path, who in compare_settings(left.processor, right.processor)[1].items():
            yield f"processor.{path}", who
    for medium, other in zip(left.media, right.media, strict=False):
        for name in fields_of(medium):
            a, b = getattr(medium, name), getattr(other, name)
            if a is None or b is None:
                yield f"media.{name}", who_lacks(a, b)
    yield from lacking_records(left, right)
    yield from lacking_replay(left, right)
    yield from notes(left, right)


def _family(left: Sample, right: Sample) -> Difference | None:
    same = left.family == right.family
    return None if same else Difference("family", left.family, right.family)


def _ids(left: Sample, right: Sample) -> Difference | None:
    a, b = left.input_ids, right.input_ids
    if np.array_equal(a, b):
        return None
    at = common_prefix(a, b)
    runs = [_run_at(sample, at) for sample in (left, right)]
    if any(runs):
        shown = [
            f"{run[1] - run[0]} placeholders [{run[0]}, {run[1]})" if run else show_ids(ids[at:])
            for run, ids in zip(runs, (a, b), strict=True)
        ]
        return Difference("input_ids", shown[0], shown[1], at, runs[0] or (at, at))
    if len(a) == len(b):
        alike = np.flatnonzero(a[at:] == b[at:])
        stops = [at + (int(alike[0]) if len(alike) else len(a) - at)] * 2
    else:
        rest = min(len(a), len(b)) - at
        suffix = common_prefix(a[len(a) - rest :][::-1], b[len(b) - rest :][::-1])
        stops = [len(a) - suffix, len(b) - suffix]
    shown = [show_ids(ids[at:stop]) for ids, stop in zip((a, b), stops, strict=True)]
    return Difference("input_ids", shown[0], shown[1], at, (at, stops[0]))


def _run_at(sample: Sample, at: int) -> tuple[int, int] | None:
    """The run of placeholders that holds token `at` or ends there."""
    runs = placeholder_runs(sample.input_ids, get_family(sample.family))
    k = int(np.searchsorted(runs.starts, at, side="right")) - 1
    if k < 0 or runs.stops[k] < at:
        return None
    return int(runs.starts[k]), int(runs.stops[k])


def _spans(left: Sample, right: Sample) -> Difference | None:
    a, b = ([_span_key(span) for span in s.modality_spans] for s in (left, right))
    if a == b:
        return None
    whole = all(span.chunk is None for s in (left, right) for span in s.modality_spans)
    # `chunk` only where there is one
    shown = MODALITY_SPAN[:-1] if whole else MODALITY_SPAN
    one, two = ([key[: len(shown)] for key in of] for of in (a, b))
    return of_list("modality_spans", one, two, operator.eq, named(*shown))


_span_key = operator.attrgetter(*MODALITY_SPAN)


def _positions(left: Sample, right: Sample) -> Difference | None:
    a, b = left.position_ids, right.position_ids
    if a is None or b is None or np.array_equal(a, b):
        return None
    if a.shape[0] != b.shape[0]:
        shown = [f"{len(x)} rows" for x in (a, b)]
        return Difference("position_ids", shown[0], shown[1])
    shorter = min(a.shape[1], b.shape[1])
    unlike = np.append((a[:, :shorter] != b[:, :shorter]).any(axis=0), a.shape[1] != b.shape[1])
    start = int(np.argmax(unlike))
    alike = np.flatnonzero(~unlike[start:])
    stop = min(start + int(alike[0]), a.shape[1]) if len(alike) else a.shape[1]
    shown = [_position(x[:, start]) if start < x.shape[1] else "no token" for x in (a, b)]
    return Difference("position_ids", shown[0], shown[1], start, (start, stop))


def _position(rows: np.ndarray) -> str:
    if len(rows) != 3:
        return f"position {', '.join(map(str, rows))}"
    return f"position t {rows[0]}, h {rows[1]}, w {rows[2]}"


def _mask(left: Sample, right: Sample) -> Difference | None:
    """Masks without holes are equal: their length is that of the ids."""
    a, b = left.attention_mask, right.attention_mask
    if a is None or b is None or np.array_equal(a, b) or (np.all(a) and np.all(b)):
        return None
    at = common_prefix(a, b)
    shown = [f"{x[at]}" if at < len(x) else f"{len(x)} values" for x in (a, b)]
    return Difference("attention_mask", shown[0], shown[1], at, (at, at + 1))


def _media(left: Sample, right: Sample) -> Difference | None:
    a, b = left.media, right.media
    both = enumerate(zip(a, b, strict=False))
    at = next((i for i, (x, y) in both if not same_medium(x, y)), min(len(a), len(b)))
    if at == len(a) == len(b):
        return None
    if at == min(len(a), len(b)):
        shown = [f"{len(x)} media" if at == len(x) else _medium(x[at]) for x in (a, b)]
        return Difference("media", shown[0], shown[1], at)
    x, y = a[at], b[at]
    shown = [_medium(x), _medium(y)]
    if shown[0] == shown[1]:
        parts = ("num_tokens", *fields_of(x), "cache_key")
        name = next(name for name in parts if differ(getattr(x, name), getattr(y, name)))
        shown = [f"{_medium(m)}, {name} {show(getattr(m, name))}" for m in (x, y)]
    return Difference("media", shown[0], shown[1], at)


def _medium(medium: Medium) -> str:
    return f"{medium.modality} grid {list(medium.grid_thw)}, key {medium.cache_key[:12]}"


def _settings(left: Sample, right: Sample) -> Difference | None:
    """By fingerprint where a side recorded nothing else."""
    a, b = left.processor, right.processor
    if a is None or b is None:
        marks = (left.processor_fingerprint, right.processor_fingerprint)
        same = None in marks or marks[0] == marks[1]
        return None if same else Difference("processor", show(marks[0]), show(marks[1]))
    unlike = {} if a is b or a == b else compare_settings(a, b)[0]
    for path, (x, y) in unlike.items():
        return Difference("processor", f"{path} {show(x)}", f"{path} {show(y)}")
    return None


def _fingerprint(left: Sample, right: Sample) -> Difference | None:
    """Other fingerprints of one and the same settings: at least one of the two is of something else."""
    a, b = left.processor, right.processor
    marks = (left.processor_fingerprint, right.processor_fingerprint)
    if a is None or b is None or None in marks or marks[0] == marks[1]:
        return None
    # 1 and 1.0 are equal, and written differently
    same = a is b or (a == b and fingerprint(a) == fingerprint(b))
    one, two = map(show, marks)
    return Difference("processor_fingerprint", one, two) if same else None


def _sampling(left: Sample, right: Sample) -> Difference | None:
    """Logprobs of unlike kinds: processed against raw, or processed under other settings."""
    if left.rollout_logprobs is None or right.rollout_logprobs is None:
        return None
    if not unlike_sampling(left.sampling, right.sampling):
        return None
    hit = sampling_hit(left.sampling, right.sampling)
    return Difference("sampling", hit.left, hit.right)
