"""A parity report as a figure: verdict, causes with their fixes, and both sides of the samples that differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmpack.parity.causes.pair import Pair
from mmpack.parity.report import ParityReport, counted, evidence_of
from mmpack.view.parity.layout import KINDS, first_difference, kinds, pieces
from mmpack.view.parts import Heading, Key, Line, Part, Table
from mmpack.view.shapes import MOST, WIDE, Box, Drawing, Stroke, Word

if TYPE_CHECKING:
    from mmpack.parity.drift import LogprobDrift
    from mmpack.parity.report import Finding

SAMPLES = 8  # drawn
LEFT, HIGH, STEP = 100.0, 16.0, 22.0  # room for names; a strip, and it with its gap
SHOWN = 3  # findings of a sample


def report_parts(report: ParityReport, drift: LogprobDrift | None = None) -> list[Part]:
    """What a figure shows; samples where the report holds them."""
    what = (
        "Same layout"
        if report.ok
        else "Layouts differ"
        if report.total_findings
        else "Not compared"
    )
    parts: list[Part] = [Heading(what, 1, "good" if report.ok else "bad"), Line(report.summary())]
    fixes = {finding.cause: finding.fix for finding in reversed(report.findings)}
    causes = [(cause, count, fixes.get(cause, "")) for cause, count in report.causes.items()]
    if causes:
        parts += [Heading("Causes"), Table(("cause", "samples", "fix"), causes)]
    if report.not_compared:
        lacking = counted(len(report.not_compared), "field")
        names = ", ".join(report.not_compared)
        parts.append(Line(f"{lacking} not compared in every sample: {names}", soft=True))
    if drift is not None:
        parts += [Heading("Drift of logprobs"), *map(Line, drift.sentences)]
    pairs = [Pair(left, right) for left, right in report.pairs[:SAMPLES]]
    if pairs:
        parts += [Heading("Samples"), Key([(f"mm-{name}", name) for name in KINDS])]
    for pair in pairs:
        name = pair.left.sample.sample_id
        parts += _sample(pair, [f for f in report.findings if f.sample_id == name])
    more = len(report.pairs) - len(pairs)
    if more > 0:
        parts.append(Line(f"{counted(more, 'more sample')} not drawn", soft=True))
    if not pairs and report.findings:
        rows = [(f.sample_id, f.field, f.cause, f.left, f.right) for f in report.findings]
        head = ("sample", "field", "cause", "rollout", "train")
        parts += [Heading("Findings"), Table(head, rows)]
    return parts


def _sample(pair: Pair, findings: list[Finding]) -> list[Part]:
    """Both sides as strips to one scale, the first difference, what was found."""
    at, what = first_difference(pair)
    causes = ", ".join(dict.fromkeys(f.cause for f in findings))
    name = pair.left.sample.sample_id
    parts: list[Part] = [Heading(f"{name}: {causes}" if causes else name, 3), _strips(pair, at)]
    if at is not None:
        parts.append(Line(f"first difference: token {at} ({what})", soft=True))
    parts += [
        Line(f"{f.field}: rollout {f.left}; train {f.right}")
        for f in findings[:SHOWN]
    ]  # fmt: skip
    return parts + [Line(line, soft=True) for line in evidence_of(findings)[:1] if line]


def _strips(pair: Pair, at: int | None) -> Drawing:
    longest = max([1, *map(len, pair.sides)])
    scale = (WIDE - LEFT) / longest
    shapes: list[Box | Stroke | Word] = []
    for k, side in enumerate(pair.sides):
        y = k * STEP
        shapes.append(Word(0, y + 13, f"{side.name} {len(side):,}", "mm-soft"))
        shapes += [
            Box(LEFT + a * scale, y, max((b - a) * scale, 0.6), HIGH, f"mm-{KINDS[kind]}")
            for a, b, kind in pieces(kinds(side))[: MOST // 2]
        ]
    if at is not None:
        x = LEFT + min(at * scale, WIDE - LEFT - 1)
        shapes.append(Stroke(x, -3, x, 2 * STEP - 3, "mm-mean"))
    label = f"tokens of both sides of {pair.left.sample.sample_id}"
    return Drawing(shapes, 2 * STEP, label)
