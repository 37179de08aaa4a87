"""MM106, MM205, MM206, MM303, MM308: observations, actions, regions, targets and versions over tokens and media."""

from __future__ import annotations

import numpy as np

from mmpack.families import Family
from mmpack.schema.columns.table import Table
from mmpack.schema.rules.topic import Found, Topic, before
from mmpack.schema.sample import Sample

SPANS = ("observation_spans", "action_spans", "region_spans", "policy_versions")
ORDERED = {"observation_spans": "MM206", "policy_versions": "MM303"}  # disjoint, by start
PLACED = ("region_spans", "bbox_targets", "point_targets")


def problems(sample: Sample, family: Family) -> Found:
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


# ---- by columns ----------------------------------------------------------------------------------


def valid(table: Table) -> np.ndarray:
    ok = np.ones(table.rows, bool)
    for name in SPANS:
        spans = table.items(name)
        row, start, stop = spans.row, spans.numbers("start"), spans.numbers("stop")
        ok[row[(start > stop) | (stop > table.ids.lengths[row])]] = False
        if name in ORDERED:
            ok[row[start < before(row, stop)]] = False
    placed = np.zeros(table.rows, bool)
    counts = table.items("media").counts
    for name in PLACED:
        places = table.items(name)
        ok[places.row[places.numbers("media_index") >= counts[places.row]]] = False
        for field in ("bbox", "point"):
            placed[places.row[places.has(field)]] = True
    return ok & (~placed | table.present("coordinate_system"))


CONTEXT = Topic(
    codes=("MM106", "MM205", "MM206", "MM303", "MM308"),
    fields=("input_ids", "media", *SPANS, "bbox_targets", "point_targets", "coordinate_system"),
    problems=problems,
    valid=valid,
)
