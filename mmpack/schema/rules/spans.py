"""MM106, MM201 to MM206, MM303 to MM305, MM308: spans of the loss and of context, targets, scores."""

from __future__ import annotations

import numpy as np

from mmpack.families import Family
from mmpack.schema.codes import Found
from mmpack.schema.sample import Sample
from mmpack.schema.spans import covered, is_placeholder
from mmpack.schema.turns import span_turns, turn_without_loss, turns_without_loss

SPANS = ("observation_spans", "action_spans", "region_spans", "policy_versions")
ORDERED = {"observation_spans": "MM206", "policy_versions": "MM303"}  # disjoint, by start
PLACED = ("region_spans", "bbox_targets", "point_targets")
PAID = ("rewards", "costs")


def loss_problems(sample: Sample, family: Family) -> Found:
    """MM201 to MM204: loss spans, which cover neither placeholders nor observations."""
    end = 0
    observations = sample.observation_spans
    observed = covered(observations, len(sample)) if observations else np.zeros(0, bool)
    for i, s in enumerate(sample.loss_spans):
        field, at = f"loss_spans[{i}]", (s.start, s.stop)
        if not end <= s.start <= s.stop <= len(sample):
            yield "MM201", field, f"[{s.start}, {s.stop}) after {end}, of {len(sample)} tokens", at
            continue
        end = s.stop
        if s.start == 0:
            yield "MM202", field, "starts at token 0", at
        hit = is_placeholder(sample.input_ids[s.start : s.stop], family)
        if hit.any():
            token = s.start + int(hit.argmax())
            message = f"covers placeholder {sample.input_ids[token]} at token {token}"
            yield "MM203", field, message, at
        if observed[s.start : s.stop].any():
            token = s.start + int(np.argmax(observed[s.start : s.stop]))
            yield "MM204", field, f"covers token {token} of an observation", at


def context_problems(sample: Sample, family: Family) -> Found:
    """MM106, MM205, MM206, MM303, MM308: observations, actions, regions, targets and versions."""
    for name in SPANS:
        end = 0
        for i, s in enumerate(getattr(sample, name) or ()):
            field, at = f"{name}[{i}]", (s.start, s.stop)
            if not s.start <= s.stop <= len(sample):
                yield "MM205", field, f"[{s.start}, {s.stop}) of {len(sample)} tokens", at
                continue
            if name in ORDERED and s.start < end:
                yield ORDERED[name], field, f"starts at {s.start}, before {end}", at
            end = s.stop
    for name in PLACED:
        for i, item in enumerate(getattr(sample, name) or ()):
            if item.media_index is not None and item.media_index >= len(sample.media):
                message = f"names media[{item.media_index}], there are {len(sample.media)}"
                yield "MM106", f"{name}[{i}]", message, None
    placed = bool(sample.bbox_targets or sample.point_targets) or any(
        r.bbox or r.point for r in sample.region_spans or ()
    )
    if placed and sample.coordinate_system is None:
        yield "MM308", "coordinate_system", "is missing, there are boxes or points", None


def score_problems(sample: Sample, family: Family) -> Found:
    """MM304 and MM305: rewards and costs, which reach a loss token or are of a turn without loss."""
    if not (sample.rewards or sample.costs):
        return
    # loss tokens before each token: a scope reaches some if the count rises within it
    before = np.concatenate([[0], np.cumsum(covered(sample.loss_spans, len(sample)))])
    written: dict[int | None, bool] = {}  # turn: whether it has a loss token
    for span, turn in zip(sample.loss_spans, span_turns(sample), strict=True):
        written[turn] = written.get(turn, False) or span.start < span.stop
    silent = turns_without_loss(sample)
    for name in PAID:
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
            reaches = reaches or turn_without_loss(sample, scope, silent) is not None
            if score.value != 0 and not reaches:
                message = f"({score.name!r:.40}) is {score.value:g}, no loss token takes it"
                yield "MM305", field, message, None
