"""The page: verdict, what was not compared, a card for each sample that differs, and the findings left over."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpack.parity.causes.pair import Pair
from mmpack.parity.drift_traces import trace_drift
from mmpack.parity.report import by_cause, counted, evidence_of
from mmpack.view.bars import histogram
from mmpack.view.document import document
from mmpack.view.media import Find, finder
from mmpack.view.parity.drift_bars import drift_section
from mmpack.view.parity.frame_viewer import FrameViewer
from mmpack.view.parity.layout import KINDS, first_difference
from mmpack.view.parity.logprobs import Drift, by_modality, by_token, drift_of
from mmpack.view.parity.pictures import pictures
from mmpack.view.parity.strips import around, overview, zoom
from mmpack.view.parity.style import STYLE
from mmpack.view.parts import Figure, Grid, written
from mmpack.view.tags import Markup, joined, table, tag

if TYPE_CHECKING:
    from mmpack.parity.drift import LogprobDrift
    from mmpack.parity.report import Finding, ParityReport
    from mmpack.schema.sample import Sample

CARDS = 20  # samples drawn
ROWS = 200  # findings listed of samples that are not drawn
LINES = 12  # findings listed of one sample

Decode = Callable[[Sequence[int]], str]
Options = dict[str, Any]


def page(report: ParityReport, **options: Any) -> str:
    """The report as one self-contained page that runs no script and loads nothing. Options: see `fragment`."""
    return document("mmpack parity", STYLE, _body(report, **options), pictures=True)


def fragment(report: ParityReport, **options: Any) -> str:
    """The same for a notebook.

    Options: `media_root`: folder below which media are opened. `known`: content_hash to pixels, uint8 [h, w, 3], of a
    video its sampled frames, [n, h, w, 3].
    `decode`: ids to text. `train_logprobs`: sample_id to the trainer's logprobs [n], where its trace doesn't hold them.
    `drift`: of all samples, where it is known; else that of the samples drawn is told apart.
    `samples`: how many to draw. `note`: a line below the verdict.
    """
    body = _body(report, **options)
    return str(tag("div", Markup(f"<style>{STYLE}</style>"), body, class_="mmpack"))


def _body(
    report: ParityReport,
    media_root: str | os.PathLike[str] | None = None,
    known: Mapping[str, np.ndarray] | None = None,
    decode: Decode | None = None,
    train_logprobs: Mapping[str, np.ndarray] | None = None,
    drift: LogprobDrift | None = None,
    samples: int = CARDS,
    note: str = "",
) -> Markup:
    find, viewer = finder(media_root, known), FrameViewer(media_root, known)
    of: dict[str, list[Finding]] = {}
    for finding in report.findings:
        of.setdefault(finding.sample_id, []).append(finding)
    pairs = [Pair(left, right) for left, right in report.pairs[:samples]]
    drifts = [
        drift_of(pair, (train_logprobs or {}).get(pair.left.sample.sample_id)) for pair in pairs
    ]
    cards = [
        _card(pair, of.get(pair.left.sample.sample_id, []), own, find, viewer, decode)
        for pair, own in zip(pairs, drifts, strict=True)
    ]
    drawn = {pair.left.sample.sample_id for pair in pairs}
    rest = [f for f in report.findings if f.sample_id not in drawn]
    return joined(
        [
            _head(report),
            tag("p", note, class_="mm-note") if note else "",
            _causes(report),
            _lacking(report),
            _drift([d for d in drifts if isinstance(d, Drift)]),
            _told_apart(drift, report.pairs[:samples], train_logprobs),
            tag("h2", "Samples") if cards else "",
            _key() if cards else "",
            *cards,
            _rest(report, rest),
        ]
    )


def _head(report: ParityReport) -> Markup:
    if report.ok:
        verdict = tag("h1", "Same layout", class_="good")
    else:
        what = "Layouts differ" if report.total_findings else "Not compared"
        verdict = tag("h1", what, class_="bad")
    return joined([verdict, tag("p", report.summary())])


def _causes(report: ParityReport) -> Markup:
    if not report.causes:
        return Markup("")
    fixes = {finding.cause: finding.fix for finding in reversed(report.findings)}
    rows = [
        (tag("span", cause, class_="mm-cause"), count, fixes.get(cause))
        for cause, count in report.causes.items()
    ]
    return joined([tag("h2", "Causes"), table(("cause", "samples", "fix"), rows, "mm-rows")])


def _lacking(report: ParityReport) -> Markup:
    if not report.not_compared:
        return Markup("")
    lacking = table(("field", "why"), list(report.not_compared.items()), "mm-rows")
    title = tag(
        "summary", f"{counted(len(report.not_compared), 'field')} not compared in every sample"
    )
    unmet = set(report.require) & report.not_compared.keys()
    return tag("details", title, lacking, open="" if unmet else None)


def _told_apart(
    drift: LogprobDrift | None,
    pairs: list[tuple[Sample, Sample]],
    train_logprobs: Mapping[str, np.ndarray] | None,
) -> Markup:
    note = "all samples whose logprobs can be compared"
    if drift is None and pairs:
        rollout, train = zip(*pairs, strict=True)
        drift, _ = trace_drift(rollout, train, train_logprobs)
        note = "the samples drawn below"
    return Markup("") if drift is None else drift_section(drift, note)


def _drift(drifts: list[Drift]) -> Markup:
    if not drifts:
        return Markup("")
    count = f"of the {len(drifts)} samples drawn below that have logprobs of the same tokens"
    return joined(
        [
            tag("h2", "Logprobs, by what a token comes after"),
            by_modality(drifts),
            written([Grid(_histograms(np.concatenate([d.values for d in drifts])))]),
            tag("p", count, class_="mm-note"),
        ]
    )


def _histograms(values: np.ndarray) -> list[Figure]:
    """Of train − rollout, float [n], and of the ratios that they are logs of."""
    with np.errstate(over="ignore"):
        ratios = np.exp(values)
    return [
        histogram(values, "train − rollout logprob"),
        histogram(ratios, "ratio exp(train − rollout)"),
    ]


def _key() -> Markup:
    swatch = [
        tag(
            "span",
            tag("svg", tag("rect", width=10, height=10, class_=f"mm-{k}"), view_box="0 0 10 10"),
            "unclaimed placeholder" if k == "placeholder" else k,
        )
        for k in KINDS
    ]
    return tag("div", *swatch, class_="mm-key")


def _card(
    pair: Pair,
    findings: list[Finding],
    drift: Drift | str | None,
    find: Find,
    viewer: FrameViewer,
    decode: Decode | None,
) -> Markup:
    at, what = first_difference(pair)
    names = dict.fromkeys(finding.cause for finding in findings)
    parts = [
        tag(
            "h3",
            f"sample {pair.left.sample.sample_id}",
            *(tag("span", name, class_="mm-cause") for name in names),
        ),
        overview(pair, at),
    ]
    if at is not None:
        parts.append(tag("p", f"first difference: token {at} ({what})", class_="mm-note"))
        parts += [zoom(pair, at, what, decode), around(pair, at, decode)]
    parts += [pictures(pair, find), viewer.draw(pair, findings), _findings(findings)]
    if isinstance(drift, Drift):
        parts.append(by_token(drift))
    elif drift:
        parts.append(tag("p", drift, class_="mm-note"))
    return tag("section", *parts, class_="mm-card")


def _findings(findings: list[Finding]) -> Markup:
    if not findings:
        return Markup("")
    more = len(findings) - LINES
    return joined(
        [
            *_by_cause(findings[:LINES], ("field", "at", "rollout", "train"), _row),
            tag("p", f"and {counted(more, 'more finding')} of this sample", class_="mm-note")
            if more > 0
            else "",
        ]
    )


def _by_cause(
    findings: list[Finding], head: tuple[str, ...], row: Callable[[Finding], tuple[Any, ...]]
) -> Iterator[Markup]:
    """Each cause: its evidence, its findings as a table, its fix."""
    for group in by_cause(findings):
        cause = tag("span", group[0].cause, class_="mm-cause")
        yield tag("p", cause, Markup(" "), "; ".join(evidence_of(group)))
        yield table(head, [row(finding) for finding in group], "mm-rows")
        yield tag("p", tag("b", "Fix: "), group[0].fix)


def _row(finding: Finding) -> tuple[Any, ...]:
    place = "" if finding.index is None else str(finding.index)
    if finding.span is not None:
        place += f" [{finding.span[0]}, {finding.span[1]})"
    return (finding.field, place, finding.left, finding.right)


def _rest(report: ParityReport, rest: list[Finding]) -> Markup:
    """Findings of samples that are not drawn, and how many are not listed at all."""
    left_out = report.total_findings - len(report.findings) + max(len(rest) - ROWS, 0)
    parts: list[Markup] = []
    if rest:
        head = ("sample", "field", "at", "rollout", "train")
        parts.append(tag("h2", "Further findings"))
        parts += _by_cause(rest[:ROWS], head, lambda f: (f.sample_id, *_row(f)))
    if left_out:
        parts.append(tag("p", f"{left_out} more findings are not shown.", class_="mm-note"))
    return joined(parts)
