"""Finds the broken rules (MM1xx to MM3xx of `codes.RULES`) of samples; spans are token indices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmpack.errors import SchemaError, TraceError
from mmpack.families import Family
from mmpack.schema.codes import RULES, Rule
from mmpack.schema.error_text import named, shown
from mmpack.schema.media import Medium
from mmpack.schema.places import Found, places_of
from mmpack.schema.sample import Sample, vocabulary_size
from mmpack.schema.structure import structured

__all__ = ["RULES", "Problem", "Rule", "check", "problems_of", "validate"]


@dataclass(frozen=True)
class Problem:
    """A broken rule: its code, the sample, the field and, if there is one, the span of tokens."""

    code: str
    sample_id: str
    field: str
    message: str
    span: tuple[int, int] | None = None

    @property
    def fix(self) -> str:
        return RULES[self.code].fix

    def __str__(self) -> str:
        where = f"{named(self.sample_id)}.{self.field}" if self.field else named(self.sample_id)
        return f"{where} {self.message} ({self.code}). Fix: {self.fix}"


def validate(samples: Sample | Iterable[Sample]) -> list[Problem]:
    """All broken rules of `samples`, in order; an empty list if there are none.

    Never raises: what is no sample is a problem too (MM003, at `samples[k]`), and so is a trace that ends in an error.
    """
    if isinstance(samples, Sample):
        samples = [samples]
    found: list[Problem] = []
    at = 0
    try:
        for sample in samples:
            found += problems_of(sample, f"samples[{at}]")
            at += 1
    except Exception as error:  # of the iteration: `problems_of` raises none
        found.append(_unreadable(samples, error, f"samples[{at}]"))
    return found


def check(samples: Sample | Iterable[Sample], what: str = "check") -> None:
    """Raise SchemaError with every broken rule of `samples`."""
    problems = validate(samples)
    if problems:
        raise SchemaError(problems, what)


def problems_of(sample: Sample, place: str = "sample") -> Iterator[Problem]:
    """The broken rules of one sample. Never raises, and never allocates by what a record claims.

    Fields that are not what `read_trace` makes (possible only in samples built by hand) are named
    alone: the other rules can't be asked then. `place` names what has no `sample_id`.
    """
    if not isinstance(sample, Sample):
        yield Problem("MM003", place, "", f"is {shown(sample)}, expected a Sample")
        return
    sample, family, faults = structured(sample)
    known = sample.__dict__.get("sample_id")
    sample_id = known if isinstance(known, str) else place
    for fault in faults:
        yield Problem(fault.code or "MM003", sample_id, fault.where, fault.why)
    if faults:
        return
    for finder in FINDERS:
        for code, field, message, span in finder(sample, family):
            yield Problem(code, sample_id, field, message, span)


def _unreadable(samples: Any, error: Exception, place: str) -> Problem:
    if isinstance(error, TraceError) and error.code:
        return Problem(error.code, error.where or place, "", error.why)
    if not isinstance(samples, Iterable):
        return Problem("MM003", "samples", "", f"is {shown(samples)}, expected Samples")
    why = named(" ".join(str(error).split())[:80])
    return Problem("MM003", place, "", f"can't be had: {type(error).__name__}: {why}")


def _media(sample: Sample, family: Family) -> Found:
    merge = family.spatial_merge_size
    seen: dict[str, tuple[int, str | None, tuple[int, int, int]]] = {}
    used = {s.media_index for s in sample.modality_spans}
    for i, medium in enumerate(sample.media):
        field = f"media[{i}]"
        t, h, w = medium.grid_thw
        if min(t, h, w) == 0 or h % merge or w % merge:
            yield "MM102", field, f"has grid {[t, h, w]}, merge size is {merge}", None
        elif medium.num_tokens != family.vision_tokens(medium.grid_thw):
            expected = family.vision_tokens(medium.grid_thw)
            message = f"says num_tokens {medium.num_tokens}, its grid {[t, h, w]} gives {expected}"
            yield "MM108", field, message, None
        if i not in used:
            yield "MM107", field, f"({medium.media_id!r:.60}) has no span", None
        content = (i, medium.content_hash, medium.grid_thw)
        first = seen.setdefault(medium.cache_key, content)
        if first[2] != content[2] or (
            None not in (first[1], content[1]) and first[1] != content[1]
        ):
            yield "MM109", field, f"has the cache key of media[{first[0]}] but other content", None
        for name in ("fps", "second_per_grid_ts"):
            value = getattr(medium, name)
            if value is not None and not 0 <= value < np.inf:
                yield "MM112", field, f"has {name} {value:g}", None
        if medium.modality == "video":
            for code, message in _frames(medium, family):
                yield code, field, message, None


def _frames(medium: Medium, family: Family) -> Iterator[tuple[str, str]]:
    """Of a video: the last temporal patch may be padded, a frame may come twice."""
    t, h, w = medium.grid_thw
    indices, times = medium.frame_indices, medium.frame_timestamps
    counts = [len(listed) for listed in (indices, times) if listed is not None]
    patch = family.temporal_patch_size
    if len(counts) == 2 and counts[0] != counts[1]:
        yield "MM113", f"has {counts[0]} frame_indices and {counts[1]} frame_timestamps"
    if counts and -(-counts[0] // patch) != t:
        yield (
            "MM111",
            f"has {counts[0]} frames, its grid {[t, h, w]} holds {t} patches of {patch}",
        )
    for name, listed in (("frame_indices", indices), ("frame_timestamps", times)):
        values = np.asarray(() if listed is None else listed)
        back = np.flatnonzero(values[1:] < values[:-1])
        if len(back):
            at = int(back[0]) + 1
            yield "MM114", f"has {name}[{at}] {values[at]} after {values[at - 1]}"
    odd = [s for s in times or () if not 0 <= s < np.inf]
    if odd:
        yield "MM112", f"has frame_timestamps {odd[0]:g}"
    last = -1 if indices is None or not len(indices) else int(np.max(indices))
    if medium.total_frames is not None and last >= medium.total_frames:
        yield "MM115", f"has frame {last}, total_frames is {medium.total_frames}"


def _modality_spans(sample: Sample, family: Family) -> Found:
    ids, spans = sample.input_ids, sample.modality_spans
    covered = np.zeros(len(ids), dtype=bool)
    tokens_of: dict[int, int] = {}
    frames_of: dict[int, list[int | None]] = {}
    end, newest = 0, -1
    for i, s in enumerate(spans):
        field, at = f"modality_spans[{i}]", (s.start, s.stop)
        if not end <= s.start < s.stop <= len(ids):
            yield "MM103", field, f"[{s.start}, {s.stop}) after {end}, of {len(ids)} tokens", at
            continue
        end = s.stop
        covered[s.start : s.stop] = True
        pad = family.placeholder_ids.get(s.modality, -1)  # -1: the family has no such placeholders
        wrong = np.flatnonzero(ids[s.start : s.stop] != pad)
        if len(wrong):
            token = s.start + int(wrong[0])
            yield "MM105", field, f"has id {ids[token]} at token {token}", at
        if s.media_index >= len(sample.media):
            message = f"names media[{s.media_index}], there are {len(sample.media)}"
            yield "MM106", field, message, at
            continue
        medium = sample.media[s.media_index]
        if medium.modality != s.modality:
            message = f"is {s.modality}, media[{s.media_index}] is {medium.modality}"
            yield "MM106", field, message, at
        if s.media_index > newest + 1:
            yield "MM110", field, f"names media[{s.media_index}] before media[{newest + 1}]", at
        newest = max(newest, s.media_index)
        if family.video_layout == "frames" and s.modality == "video":
            frames_of.setdefault(s.media_index, []).append(s.frame)
            tokens_of[s.media_index] = tokens_of.get(s.media_index, 0) + s.stop - s.start
        elif s.stop - s.start != family.vision_tokens(medium.grid_thw):
            expected = family.vision_tokens(medium.grid_thw)
            message = (
                f"has {s.stop - s.start} tokens, media[{s.media_index}] of grid "
                f"{list(medium.grid_thw)} needs {expected} after merging"
            )
            yield "MM101", field, message, at
    for index, frames in frames_of.items():
        grid = sample.media[index].grid_thw
        patches = max(grid[0], 1)
        if len(frames) % patches or any(f != k % patches for k, f in enumerate(frames)):
            message = f"has frame spans {frames[:8]}, its grid has {grid[0]} temporal patches"
            yield "MM111", f"media[{index}]", message, None
        elif tokens_of[index] != family.vision_tokens(grid) * (len(frames) // patches):
            message = f"has {tokens_of[index]} tokens in frames, its grid {list(grid)} needs others"
            yield "MM101", f"media[{index}]", message, None
    stray = np.isin(ids, list(family.placeholder_ids.values())) & ~covered
    if stray.any():
        token = int(np.argmax(stray))
        message = f"has placeholder {ids[token]} at token {token} outside any modality span"
        yield "MM104", "input_ids", message, (token, token + 1)


def _loss_spans(sample: Sample, family: Family) -> Found:
    end = 0
    blocked = list(family.placeholder_ids.values())
    observed = _covered([(o.start, o.stop) for o in sample.observation_spans or ()], len(sample))
    for i, s in enumerate(sample.loss_spans):
        field, at = f"loss_spans[{i}]", (s.start, s.stop)
        if not end <= s.start <= s.stop <= len(sample):
            yield "MM201", field, f"[{s.start}, {s.stop}) after {end}, of {len(sample)} tokens", at
            continue
        end = s.stop
        if s.start == 0:
            yield "MM202", field, "starts at token 0", at
        hit = np.flatnonzero(np.isin(sample.input_ids[s.start : s.stop], blocked))
        if len(hit):
            token = s.start + int(hit[0])
            message = f"covers placeholder {sample.input_ids[token]} at token {token}"
            yield "MM203", field, message, at
        if observed[s.start : s.stop].any():
            token = s.start + int(np.argmax(observed[s.start : s.stop]))
            yield "MM204", field, f"covers token {token} of an observation", at


def _covered(spans: list[tuple[int, int]], length: int) -> np.ndarray:
    """bool [length]: tokens within any of [start, stop), however many there are."""
    edges = np.zeros(length + 1, np.int64)
    bounds = np.minimum(np.array(spans, np.int64).reshape(-1, 2), length)
    bounds = bounds[bounds[:, 0] < bounds[:, 1]]
    np.add.at(edges, bounds[:, 0], 1)
    np.subtract.at(edges, bounds[:, 1], 1)
    return np.cumsum(edges[:-1]) > 0


def _other_spans(sample: Sample, family: Family) -> Found:
    for name in ("observation_spans", "action_spans", "region_spans", "policy_versions"):
        end = 0
        for i, s in enumerate(getattr(sample, name) or ()):
            field, at = f"{name}[{i}]", (s.start, s.stop)
            if not s.start <= s.stop <= len(sample):
                yield "MM205", field, f"[{s.start}, {s.stop}) of {len(sample)} tokens", at
                continue
            ordered = {"observation_spans": "MM206", "policy_versions": "MM303"}
            if name in ordered and s.start < end:
                yield ordered[name], field, f"starts at {s.start}, before {end}", at
            end = s.stop
    for name in ("region_spans", "bbox_targets", "point_targets"):
        for i, item in enumerate(getattr(sample, name) or ()):
            if item.media_index is not None and item.media_index >= len(sample.media):
                message = f"names media[{item.media_index}], there are {len(sample.media)}"
                yield "MM106", f"{name}[{i}]", message, None
    placed = bool(sample.bbox_targets or sample.point_targets) or any(
        r.bbox or r.point for r in sample.region_spans or ()
    )
    if placed and sample.coordinate_system is None:
        yield "MM308", "coordinate_system", "is missing, there are boxes or points", None


def _columns(sample: Sample, family: Family) -> Found:
    size = vocabulary_size(sample.processor)
    beyond = np.flatnonzero(sample.input_ids >= (np.inf if size is None else size))
    if len(beyond):
        at = int(beyond[0])
        message = f"is {sample.input_ids[at]}, the vocabulary has {size}"
        yield "MM312", f"input_ids[{at}]", message, (at, at + 1)
    logprobs = sample.rollout_logprobs
    if logprobs is not None:
        if len(logprobs) != sample.num_loss_tokens:
            message = f"has {len(logprobs)} values for {sample.num_loss_tokens} loss tokens"
            yield "MM301", "rollout_logprobs", message, None
        above = np.flatnonzero(logprobs > 1e-4)
        if len(above):
            at = int(above[0])
            yield "MM302", f"rollout_logprobs[{at}]", f"is {logprobs[at]:.6g}", None
    if sample.attention_mask is not None and not sample.attention_mask.all():
        at = int(np.argmin(sample.attention_mask))
        yield "MM306", "attention_mask", f"is 0 at token {at}, inside the sample", (at, at + 1)
    if sample.position_ids is not None and (sample.position_ids < 0).any():
        at = int(np.argmax((sample.position_ids < 0).any(axis=0)))
        yield "MM307", "position_ids", f"is negative at token {at}", (at, at + 1)
    if (sample.prefix_cached_tokens or 0) > len(sample):
        message = f"is {sample.prefix_cached_tokens}, the sample has {len(sample)} tokens"
        yield "MM309", "prefix_cached_tokens", message, None


def _scores(sample: Sample, family: Family) -> Found:
    spans = [(s.start, s.stop) for s in sample.loss_spans]
    # loss tokens before each token: a scope reaches some if the count rises within it
    before = np.concatenate([[0], np.cumsum(_covered(spans, len(sample)))])
    written: dict[int | None, bool] = {}  # turn: whether it has a loss token
    for span in sample.loss_spans:
        written[span.turn] = written.get(span.turn, False) or span.start < span.stop
    for name in ("rewards", "costs"):
        for i, score in enumerate(getattr(sample, name) or ()):
            field, scope = f"{name}[{i}]", score.scope
            reaches = any(written.values())
            if isinstance(scope, dict) and "turn" in scope:
                if scope["turn"] not in written:
                    yield "MM304", field, f"is of turn {scope['turn']}, which has no span", None
                    continue
                reaches = written[scope["turn"]]
            elif isinstance(scope, dict):
                if "region" in scope:
                    regions = sample.region_spans or []
                    if scope["region"] >= len(regions):
                        message = f"is of region {scope['region']}, there are {len(regions)}"
                        yield "MM304", field, message, None
                        continue
                    start, stop = regions[scope["region"]].start, regions[scope["region"]].stop
                else:
                    start, stop = scope["span"]
                    if not start < stop <= len(sample):
                        message = f"is of span [{start}, {stop}) of {len(sample)} tokens"
                        yield "MM304", field, message, None
                        continue
                last = len(sample)
                reaches = bool(before[min(start, last)] < before[min(stop, last)])
            if score.value != 0 and not reaches:
                message = f"({score.name!r:.40}) is {score.value:g}, no loss token takes it"
                yield "MM305", field, message, None


FINDERS = (_media, _modality_spans, _loss_spans, _other_spans, places_of, _columns, _scores)
