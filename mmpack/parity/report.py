"""What parity found: findings (one line each) and the report that holds them. Token indices, half-open spans."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from mmpack.parity.fixes import FIXES


@dataclass(frozen=True)
class Finding:
    """One difference of one sample.

    `field` is a name of the schema. `index` is the first token that differs, or for lists the first entry; `span` the
    tokens of the rollout's side. `cause` is one of `mmpack.parity.fixes`; `evidence` says what it was told from.
    """

    sample_id: str
    field: str
    index: int | None
    span: tuple[int, int] | None
    left: str
    right: str
    cause: str
    evidence: str
    fix: str = ""

    def __post_init__(self) -> None:
        if not self.fix:
            object.__setattr__(self, "fix", FIXES[self.cause])

    def __str__(self) -> str:
        place = "" if self.index is None else f" at {self.index}"
        place += "" if self.span is None else f" [{self.span[0]}, {self.span[1]})"
        return one_line(
            f"sample {self.sample_id}: {self.field}{place}: rollout has {self.left}, "
            f"train has {self.right}: {self.cause} ({self.evidence}). Fix: {self.fix}"
        )


@dataclass
class ParityReport:
    """The result of `compare`.

    `ok`: samples were compared, all of `require` in each of them, and all that was compared is equal.
    `compared` counts pairs of samples; `not_compared` maps a field to why; `first` is the first finding
    in sample order, root cause first; `findings` are those kept of `total_findings`; `causes` counts
    samples by cause; `missing` counts the samples that the rollout or the train side lacks.
    """

    ok: bool
    compared: int
    require: tuple[str, ...]
    not_compared: dict[str, str] = field(default_factory=dict)
    first: Finding | None = None
    findings: list[Finding] = field(default_factory=list)
    total_findings: int = 0
    causes: dict[str, int] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=lambda: {"rollout": 0, "train": 0})

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, keys in a fixed order."""
        return asdict(self)

    def to_json(self) -> str:
        """The report as JSON text: equal reports give equal text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def summary(self) -> str:
        """One line: the verdict and its numbers."""
        verdict = "parity ok" if self.ok else "parity NOT ok"
        parts = [f"{verdict}: {self.compared} samples compared, {self.total_findings} findings"]
        parts += [f"{n} samples missing in {side}" for side, n in self.missing.items() if n]
        if self.causes:
            parts.append(", ".join(f"{cause} in {n}" for cause, n in self.causes.items()))
        return "; ".join(parts)

    def lines(self, limit: int = 20) -> list[str]:
        """The report as lines of text: the summary, what was not compared, the first `limit` findings."""
        out = [self.summary()]
        out += [one_line(f"not compared: {name}: {why}") for name, why in self.not_compared.items()]
        out += [str(finding) for finding in self.findings[:limit]]
        if self.total_findings > limit:
            out.append(f"and {self.total_findings - limit} findings more")
        return out

    def to_html(self) -> str:
        """The report as one self-contained page; everything that came from a trace is escaped."""
        color = "#0a7d33" if self.ok else "#b3261e"
        lacking = _table(("field", "not compared because"), list(self.not_compared.items()))
        columns = ("sample", "field", "index", "span", "rollout", "train", "cause", "evidence")
        rows = [
            (f.sample_id, f.field, f.index, f.span and list(f.span), f.left, f.right)
            + (f.cause, f.evidence, f.fix)
            for f in self.findings
        ]
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>mmpack parity</title>'
            "<style>body{font:14px/1.5 sans-serif;margin:2em;color:#222}table{border-collapse:"
            "collapse;margin:1em 0}td,th{border:1px solid #ccc;padding:.3em .6em;text-align:left;"
            f"vertical-align:top;overflow-wrap:anywhere}}h1{{color:{color}}}</style></head><body>"
            f"<h1>{'Same layout' if self.ok else 'Layouts differ, or were not compared'}</h1>"
            f"<p>{_cell(self.summary())}</p>"
            + (f"<h2>Not compared</h2>{lacking}" if self.not_compared else "")
            + (f"<h2>Findings</h2>{_table((*columns, 'fix'), rows)}" if rows else "")
            + (
                f"<p>{self.total_findings - len(rows)} findings more are not shown.</p>"
                if self.total_findings > len(rows)
                else ""
            )
            + "</body></html>\n"
        )


def one_line(text: str) -> str:
    """`text` with every control or unprintable character escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    top = "".join(f"<th>{_cell(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(v)}</td>' for v in row)}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _cell(value: Any) -> str:
    return "" if value is None else escape(one_line(str(value)))
