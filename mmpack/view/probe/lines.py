"""What page and figure draw: points of modules × log10 error, on one scale for all reports."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mmpack.probe.report import ProbeReport

LAYER = re.compile(r"\.(layers|blocks|layer)\.(\d+)(?=\.|$)")
LEAST = 1e-9  # errors of 0 stand on the lowest line


@dataclass
class Scale:
    """Names of the stages of all reports, in order, and the decades that hold every error."""

    stages: list[str]
    low: int
    high: int

    def x(self, name: str) -> float:
        """0 to 1."""
        return self.stages.index(name) / max(len(self.stages) - 1, 1)

    def y(self, error: float) -> float:
        """0 (lowest) to 1."""
        if not math.isfinite(error):
            return 1.0
        value = math.log10(max(error, LEAST))
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def layers(self) -> list[tuple[float, str]]:
        """Where each layer begins, and its short name."""
        out, seen = [], set()
        for k, stage in enumerate(self.stages):
            found = LAYER.search(stage)
            if found is None:
                continue
            short = f"{'' if found[1] == 'layers' else 'v'}{found[2]}"
            if short not in seen:
                seen.add(short)
                out.append((k / max(len(self.stages) - 1, 1), short))
        return out


def scale_of(reports: Sequence[ProbeReport]) -> Scale:
    stages: list[str] = []
    values = [LEAST * 10]
    for report in reports:
        at = 0
        for row in report.modules:
            if row.name in stages:
                at = stages.index(row.name) + 1
            else:
                stages.insert(at, row.name)
                at += 1
            values += [v for v in (row.max_error, row.bound) if v > 0 and math.isfinite(v)]
    low = max(math.floor(math.log10(min(values))), math.floor(math.log10(LEAST)))
    high = max(math.ceil(math.log10(max(values))), low + 1)
    return Scale(stages, low, high)


def points(
    report: ProbeReport, scale: Scale
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(x, y) from 0 to 1 of errors, and of what is allowed; from left to right, whatever order its modules ran in."""
    rows = sorted(report.modules, key=lambda row: scale.x(row.name))
    errors = [(scale.x(r.name), scale.y(r.max_error)) for r in rows]
    bounds = [(scale.x(r.name), scale.y(r.bound)) for r in rows]
    return errors, bounds
