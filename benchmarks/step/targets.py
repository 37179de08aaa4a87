"""What the step is to reach, and whether rows of a report do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.step.figures import BARS

HEADLINE = ("qwen2.5-vl-7b", "geo")
OVER_IDEAL = 1.1  # shared to plain, time beside ideal time
OVER_PADDED = 3.5
OF_IDEAL = 0.85
FIRST = 2.0  # seconds that a first step may cost more
_PAIRS = (("plain", "shared"), ("plain-compiled", "shared-compiled"))
_SHARED = ("shared", "shared-compiled")  # as much checkpointing as the padded peers


@dataclass(frozen=True)
class Target:
    """`what`, of which rows; `found` beside `bound`, and whether it is reached."""

    what: str
    where: str
    found: float
    bound: float
    met: bool

    def __str__(self) -> str:
        return f"{'met' if self.met else 'missed'}: {self.where}: {self.what} {self.found:.3g}, target {self.bound:g}"


def targets(rows: list[dict[str, Any]]) -> list[Target]:
    """The targets of all rows of whole models that have what they compare."""
    cases: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if "seconds" in row and not {"layers", "tiny"} & set(row["options"]):
            options = tuple(sorted(row["options"].items()))
            case = (row["device"], row["model"], row["workload"], row["ranks"], options)
            cases.setdefault(case, {})[row["peer"]] = row
    return [target for case, peers in cases.items() for target in _of_case(case, peers)]


def _of_case(case: tuple[Any, ...], peers: dict[str, dict[str, Any]]) -> Iterator[Target]:
    where = f"{case[1]} {case[2]}" + (f" {case[3]} ranks" if case[3] > 1 else "")
    # a first step that compiled is none on a machine that has run it before
    if "shared" in peers and not peers["shared"].get("compiled_in_first"):
        more = peers["shared"]["first_seconds"] - peers["shared"]["seconds"]
        yield _most("seconds that the first step of shared takes more", where, more, FIRST)
    for plain, shared in _PAIRS:
        if plain in peers and shared in peers:
            time, ideal = (peers[shared][n] / peers[plain][n] for n in ("seconds", "ideal_seconds"))
            yield _most(f"{shared} to {plain}", where, time, 1.0)
            yield _most(
                f"{shared} to {plain} over their ideals' ratio of {ideal:.3g}:",
                where,
                time / ideal,
                OVER_IDEAL,
            )
    best = min((peers[n] for n in _SHARED if n in peers), key=_seconds, default=None)
    padded = min((peers[n] for n in BARS["padded, best"] if n in peers), key=_seconds, default=None)
    if best is not None and (case[1], case[2]) == HEADLINE:
        yield _least(f"{best['peer']} of its ideal", where, best["of_ideal"], OF_IDEAL)
        if padded is not None:
            times = padded["seconds"] / best["seconds"]
            yield _least(
                f"{best['peer']} as many times as fast as {padded['peer']}",
                where,
                times,
                OVER_PADDED,
            )


def _seconds(row: dict[str, Any]) -> float:
    return float(row["seconds"])


def _most(what: str, where: str, found: float, bound: float) -> Target:
    return Target(what, where, found, bound, found <= bound)


def _least(what: str, where: str, found: float, bound: float) -> Target:
    return Target(what, where, found, bound, found >= bound)
