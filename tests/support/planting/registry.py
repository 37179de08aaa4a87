"""A planted difference: two samples, the causes that it is, and what parity says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from support.planting.world import pictures, side, tokenizer

import mmpack as mp
from mmpack.parity.fixes import UNKNOWN

Made = tuple[mp.Sample, mp.Sample]


@dataclass(frozen=True)
class Plant:
    make: Callable[[], Made]
    truth: frozenset[str]
    harmless: bool = False
    medium: int | None = None  # at whose tokens the first difference is
    decoded: bool = False  # compared with the tokenizer's decode
    honest: bool = False  # what is recorded excludes no rivals: `unknown`, with what is possible


PLANTS: dict[str, Plant] = {}


def plant(name: str, *truth: str, **options: Any) -> Callable[[Any], Any]:
    def add(make: Any) -> Any:
        PLANTS[name] = Plant(make, frozenset(truth), **options)
        return make

    return add


def at(k: int, image: Any) -> list[Any]:
    return pictures(**{f"p{k}": image})


def two(left: Any, right: Any, k: int, **keywords: Any) -> Made:
    """The k-th picture handed to the two sides in two ways."""
    return side(at(k, left), **keywords), side(at(k, right), **keywords)


def verdicts(one: Plant) -> list[tuple[str, mp.ParityReport]]:
    """Of both directions: `right`, `honest`, `wrong`, `silent`, `false alarm` or `fine`, and the report."""
    left, right = one.make()
    return [_verdict(one, *sides) for sides in ((left, right), (right, left))]


def _verdict(one: Plant, left: mp.Sample, right: mp.Sample) -> tuple[str, mp.ParityReport]:
    decode = (lambda ids: tokenizer().decode(list(ids))) if one.decoded else None
    report = mp.compare([left], [right], decode=decode)
    named = set(report.causes) - {UNKNOWN}
    possible = " ".join(f.evidence.partition("possible: ")[2] for f in report.findings)
    if one.harmless:
        said = "false alarm" if report.total_findings else "fine"
    elif not report.total_findings:
        said = "silent"
    elif named - one.truth or not _points_at(one, left, right, report):
        said = "wrong"
    elif named == one.truth and named and UNKNOWN not in report.causes:
        said = "right"
    elif UNKNOWN in report.causes and all(cause in possible for cause in one.truth - named):
        said = "honest"
    else:
        said = "wrong"
    return said, report


def _points_at(one: Plant, left: mp.Sample, right: mp.Sample, report: mp.ParityReport) -> bool:
    """Whether `first` is the first token that differs, and the medium is the one that was changed."""
    assert report.first is not None
    a, b = left.input_ids, right.input_ids
    if np.array_equal(a, b):
        named = [f for f in report.findings if f.field == "media" and f.cause in one.truth]
        return one.medium is None or not named or any(f.index == one.medium for f in named)
    shorter = min(len(a), len(b))
    unlike = np.flatnonzero(np.append(a[:shorter] != b[:shorter], True))
    return report.first.field == "family" or report.first.index == unlike[0]


def count(plants: dict[str, Plant], loud: bool) -> None:
    counts: Counter[str] = Counter()
    for name, one in plants.items():
        for said, report in verdicts(one):
            counts[said] += 1
            if loud or said in ("wrong", "silent", "false alarm"):
                print(f"{said}: {name}: {dict(report.causes)}, truth {sorted(one.truth)}")
                for finding in report.findings[: 6 if said == "wrong" else 1]:
                    print(f"    {str(finding)[:300]}")
    print(dict(counts))
