"""What one run of a model leaves: values and gradients of each stage, by rows that every layout has.

A canonical row is a token of a sample, a patch or vision token of a medium, or a loss token; K of them. A run has n
values, each of one canonical row (a prefix that is cached leaves rows out), and R gradients, each of the rows that
share it: a shared prefix has one gradient, the sum over its samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Key = tuple[str, str]  # stage, place: a module's name


@dataclass
class Cells:
    """Values of one place.

    `values`: [n, D], of canonical rows `at` [n] int64. `gradient`: [R, D] or None; row `group[i]` of it is, or has in
    its sum, the gradient of `at[i]`. The loss is one value with gradients of its own rows, `apart`.
    """

    values: Tensor
    at: Tensor
    gradient: Tensor | None = None
    group: Tensor | None = None
    apart: Tensor | None = None

    @property
    def gradient_at(self) -> Tensor:
        """int64: the canonical rows that `group` speaks of."""
        return self.at if self.apart is None else self.apart

    def to(self, device: torch.device | str) -> Cells:
        """The same on another device."""
        moved: dict[str, Any] = {
            name: None if x is None else x.to(device) for name, x in vars(self).items()
        }
        return Cells(**moved)


@dataclass
class Record:
    """All of a run: `cells` by stage and place, in order of execution, and gradients of weights by name."""

    cells: dict[Key, Cells] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def joined(records: Sequence[Record]) -> Record:
    """The record of a step that ran in several batches; weights' gradients are the last one's, which has their sums."""
    out = Record(parameters=records[-1].parameters if records else {})
    for key in dict.fromkeys(key for record in records for key in record.cells):
        parts = [record.cells[key] for record in records if key in record.cells]
        out.cells[key] = _summed(parts) if key[0] == "loss" else _concatenated(parts)
    return out


def canonical(cells: Cells, rows: int) -> Tensor:
    """Gradients [rows, D], each canonical row's: those of several occurrences are added, in a wider dtype."""
    assert cells.gradient is not None and cells.group is not None
    gradient = cells.gradient[cells.group]
    wide = torch.float32 if gradient.element_size() == 2 else torch.float64
    at = cells.gradient_at
    once = len(at.unique()) == len(at)
    out = gradient.new_zeros(rows, gradient.shape[1], dtype=gradient.dtype if once else wide)
    return out.index_add(0, at, gradient.to(out.dtype))


def _concatenated(parts: list[Cells]) -> Cells:
    out = Cells(torch.cat([p.values for p in parts]), torch.cat([p.at for p in parts]))
    if all(p.gradient is not None for p in parts):
        gradients = [p.gradient for p in parts if p.gradient is not None]
        groups, start = [], 0
        for part, gradient in zip(parts, gradients, strict=True):
            assert part.group is not None
            groups.append(part.group + start)
            start += len(gradient)
        out.gradient, out.group = torch.cat(gradients), torch.cat(groups)
        if parts[0].apart is not None:
            out.apart = torch.cat([part.gradient_at for part in parts])
    return out


def _summed(parts: list[Cells]) -> Cells:
    """The loss is the sum of its batches' parts; its gradients are per loss token."""
    both = _concatenated(parts)
    values = torch.stack([p.values for p in parts]).sum(0)
    return Cells(values, parts[0].at, both.gradient, both.group, both.apart)
