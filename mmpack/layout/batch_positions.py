"""Positions of many samples side by side, [rows, sum of L]: those of one family and one rule in one go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmpack.families import Family
from mmpack.layout.grids import intervals, match_grids
from mmpack.layout.lines import placed_runs, positions_of_lines
from mmpack.layout.mrope import sample_positions
from mmpack.layout.occurrences import occurring_media
from mmpack.layout.runs import placeholder_runs
from mmpack.schema.sample import Sample


def positions_of(sample: Sample, family: Family | None = None) -> np.ndarray:
    """int64 [rows, L]: as the producer used them, or by the family's rule where it recorded none.

    `family`: the sample's, if it is known already.
    """
    if sample.position_ids is not None:
        return sample.position_ids
    return sample_positions(sample, family=family)[0]


def batch_positions(
    samples: Sequence[Sample],
    family: Family,
    input_ids: np.ndarray | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """int64 [rows, sum of L]: `positions_of` each of `samples`, which are of `family`, one after the other.

    Args: `input_ids`: int64 [sum of L], those of the samples, if they are known already. `out`: where to write them.
    Raises: LayoutError as `mrope_positions`, of the first sample whose ids and media contradict each other.
    """
    if not samples:
        return np.zeros((family.position_rows, 0), np.int64)
    together = None
    if not any(s.position_ids is not None for s in samples):
        ids = np.concatenate([s.input_ids for s in samples]) if input_ids is None else input_ids
        together = _together(samples, family, ids, out)
    if together is None:  # one of them tells what is wrong, or they have nothing to share
        return np.concatenate([positions_of(s, family) for s in samples], axis=1, out=out)
    return together


def position_rule(sample: Sample) -> tuple[str | None, float | None]:
    """The rule and the positions per second that the sample's `processor` names; None: the family's own."""
    settings = sample.processor or {}
    return settings.get("position_rule"), settings.get("tokens_per_second")


def _together(
    samples: Sequence[Sample], family: Family, ids: np.ndarray, out: np.ndarray | None
) -> np.ndarray | None:
    """None where samples follow two rules, or one that goes medium by medium, or where something is wrong."""
    settings = position_rule(samples[0])
    rule = family.position_rules[0] if settings[0] is None else settings[0]
    if rule in ("seconds", "count") or rule not in family.position_rules:
        return None
    if any(position_rule(s) != settings for s in samples):
        return None
    offsets = np.cumsum([0, *map(len, samples)])
    grids: dict[str, list[tuple[int, ...]]] = {"image": [], "video": []}
    seconds = []
    for b, sample in enumerate(samples):
        for medium in occurring_media(sample):
            if medium.modality not in grids:
                return None
            grids[medium.modality].append((*medium.grid_thw, b))
            if medium.modality == "video":
                step = medium.second_per_grid_ts
                seconds.append(1.0 if step is None else step)
    runs = placeholder_runs(ids, family, offsets)
    sample_of = np.searchsorted(offsets, runs.starts, "right") - 1
    images, videos = (np.array(x, np.int64).reshape(-1, 4) for x in grids.values())
    found, fault = match_grids(runs, images, videos, family)
    if fault is not None or (found[:, 3] != sample_of).any():
        return None
    interval = intervals(runs, seconds or None, None, settings[1], family, rule)
    placed = placed_runs(runs, sample_of, found[:, :3], interval, rule)
    return positions_of_lines(offsets, placed, out)
