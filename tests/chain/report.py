"""ChainReport: the rows of all axes, as a table, a document and a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from chain.compare import COLUMNS, DIRECTIONS, FORWARD, Row
from chain.stages import STAGES


@dataclass
class ChainReport:
    """What `python -m chain` found. `setting`: model, size, dtype, device, versions, samples."""

    setting: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # axis and value: why
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every row is within the contract, and there are rows."""
        return bool(self.rows) and all(row.within for row in self.rows)

    @property
    def beyond(self) -> list[Row]:
        return [row for row in self.rows if not row.within]

    def first(self, axis: str, value: str) -> Row | None:
        """The first stage of a run beyond the contract: forward in order, then backward against it, then weights."""
        stages = list(STAGES)

        def order(row: Row) -> tuple[int, int]:
            place = stages.index(row.stage)
            return DIRECTIONS.index(row.direction), place if row.direction == FORWARD else -place

        found = [r for r in self.beyond if (r.axis, r.value) == (axis, value)]
        return min(found, key=order, default=None)

    def lines(self) -> Iterator[str]:
        """The verdict, what was left out, and where each axis is first beyond the contract."""
        measured = [row for row in self.rows if not row.not_run]
        equal = sum(bool(row.equal) for row in measured)
        verdict = "OK" if self.ok else "BEYOND" if self.rows else "NOTHING RUN"
        yield (
            f"{verdict}: {len(measured)} rows, {equal} equal, "
            f"{len(measured) - equal - len(self.beyond)} bounded, {len(self.beyond)} beyond the contract"
        )
        for axis, value in dict.fromkeys((r.axis, r.value) for r in self.beyond):
            row = self.first(axis, value)
            assert row is not None
            yield f"{axis} {value}: first beyond at {row.kind or row.stage}, {row.direction} ({row.place})"
        idle: dict[str, list[str]] = {}
        for row in self.rows:
            if row.not_run:
                idle.setdefault(f"{row.axis} {row.value}", []).append(
                    f"{row.stage} {row.direction}"
                )
        for name, stages in idle.items():
            yield f"{name}: not run: {', '.join(stages)}"
        for name, why in self.left_out.items():
            yield f"{name}: left out: {why}"

    def table(self, every_kind: bool = True) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """Columns and rows that have numbers; an axis and its value stand at their first row only.

        `every_kind`: kinds of weight within the contract too.
        """
        out, before = [], None
        for row in self.rows:
            if row.not_run or (row.kind and row.within and not every_kind):
                continue
            here = (row.axis, row.value)
            out.append(("", "", *row.cells[2:]) if here == before else row.cells)
            before = here
        return COLUMNS, out

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "setting": self.setting,
            "left_out": self.left_out,
            "seconds": round(self.seconds, 1),
            "rows": [row.to_dict() for row in self.rows],
        }
