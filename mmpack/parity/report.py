"""Findings of parity (one line each) and the report that holds them. Token indices, half-open spans."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from mmpack.errors import one_line
from mmpack.notebook import Drawn, drawer
from mmpack.parity.fixes import FIXES, UNKNOWN
from mmpack.parity.frame_difference import FrameDifference

if TYPE_CHECKING:
    from mmpack.schema.sample import Sample

WIDTH = 120  # characters of a line
NAMES = 12  # fields named that were not compared for one reason
EVIDENCE = 3  # sentences shown per cause


@dataclass(frozen=True)
class Finding:
    """One difference of one sample.

    `field` is a name of the schema. `index` is the first token that differs, or for lists the first entry; `span` the
    tokens of the rollout's side. `cause` is one of `mmpack.parity.fixes`; `evidence` says what shows it.
    `frames`: of a video whose frames differ, the first that does.
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
    frames: FrameDifference | None = None

    def __post_init__(self) -> None:
        if not self.fix:
            object.__setattr__(self, "fix", FIXES[self.cause])

    def __str__(self) -> str:
        return one_line(f"{self.where}: {self.cause} ({self.evidence}). Fix: {self.fix}")

    @property
    def where(self) -> str:
        """Sample, field and tokens, and what each side has there."""
        place = "" if self.index is None else f" at {self.index}"
        place += "" if self.span is None else f", tokens [{self.span[0]}, {self.span[1]})"
        return f"sample {self.sample_id}: {self.field}{place}: rollout: {self.left}; train: {self.right}"


@dataclass
class ParityReport(Drawn):
    """The result of `compare`.

    `ok`: samples were compared, all of `require` in each of them, and all that was compared is equal.
    `compared` counts pairs of samples; `not_compared` maps a field to why; `first` is the first finding
    in sample order, root cause first; `findings` are those kept of `total_findings`; `causes` counts
    samples by cause; `missing` counts the samples that the rollout or the train side lacks. `pairs` holds
    the first samples of each side to draw: those that differ, then those with logprobs on both sides.
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
    pairs: list[tuple[Sample, Sample]] = field(default_factory=list, repr=False, compare=False)

    def to_html(self, *args: Any, **options: Any) -> str:
        """One self-contained page. Args: those of `mp.view.html` after the report."""
        return str(drawer("html")(self, *args, **options))

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, keys in a fixed order."""
        out = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "pairs"}
        return out | {
            "require": list(self.require),
            "first": self.first and asdict(self.first),
            "findings": [asdict(finding) for finding in self.findings],
        }

    def to_json(self) -> str:
        """The report as JSON text: equal reports give equal text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def summary(self) -> str:
        """One line: the verdict and its numbers.

        Example:
            >>> import mmpack as mp
            >>> mp.ParityReport(ok=True, compared=2, require=()).summary()
            'parity ok: 2 samples compared, 0 findings'
        """
        verdict = "parity ok" if self.ok else "parity NOT ok"
        counts = f"{counted(self.compared, 'sample')} compared, {counted(self.total_findings, 'finding')}"
        parts = [f"{verdict}: {counts}"]
        parts += [
            f"{counted(n, 'sample')} missing in {side}" for side, n in self.missing.items() if n
        ]
        if self.causes:
            parts.append(", ".join(f"{cause} in {n}" for cause, n in self.causes.items()))
        return "; ".join(parts)

    __str__ = summary

    def lines(self, limit: int = 20) -> list[str]:
        """The report as lines of at most 120 characters: the summary, what was not compared, `limit` findings by cause.

        A cause comes with its findings, then its evidence and fix, once.
        """
        out = wrapped(self.summary())
        for required in (True, False):
            title = "required, but not compared" if required else "not compared"
            lacks = {k: v for k, v in self.not_compared.items() if (k in self.require) == required}
            for why, names in _by_reason(lacks).items():
                out += wrapped(f"{title}: {_named(names)}: {why}")
        groups = by_cause(self.findings)
        shares = _shares([len(group) for group in groups], limit)
        for group, share in zip(groups, shares, strict=True):
            if share:
                out += self._cause_lines(group, share)
        if self.total_findings > sum(shares):
            out.append(f"and {counted(self.total_findings - sum(shares), 'more finding')}")
        return out

    def _cause_lines(self, group: list[Finding], share: int) -> list[str]:
        """One cause: how often, where, why, and what to do."""
        first = group[0]
        among = len({finding.sample_id for finding in group})
        if first.cause != UNKNOWN:
            among = self.causes.get(first.cause, among)
        out = wrapped(f"{first.cause} in {counted(among, 'sample')}:")
        for finding in _each_field_first(group)[:share]:
            out += wrapped(f"  {finding.where}", "    ")
        for evidence in evidence_of(group):
            out += wrapped(f"  evidence: {evidence}", "    ")
        return out + wrapped(f"  fix: {first.fix}", "    ")


def by_cause(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings of one cause together, in the order of their first; unknown ones only where the evidence is one."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for f in findings:
        key = (f.cause, f.fix, f.evidence) if f.cause == UNKNOWN else (f.cause, f.fix)
        groups.setdefault(key, []).append(f)
    return list(groups.values())


def evidence_of(group: Sequence[Finding]) -> list[str]:
    """The first EVIDENCE different sentences of findings of one cause, and how many more there are."""
    why = list(dict.fromkeys(finding.evidence for finding in group))
    more = [f"and {len(why) - EVIDENCE} more of this kind"] if len(why) > EVIDENCE else []
    return why[:EVIDENCE] + more


def counted(n: int, what: str) -> str:
    """`1 sample`, `2 samples`."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def wrapped(text: str, indent: str = "  ") -> list[str]:
    """`text` as printable lines of at most WIDTH characters; those after the first are indented."""
    return textwrap.wrap(
        one_line(text), WIDTH, subsequent_indent=indent, break_on_hyphens=False
    ) or [""]


def _each_field_first(group: list[Finding]) -> list[Finding]:
    """The first finding of each field, then the others."""
    first: dict[str, int] = {}
    for k, finding in enumerate(group):
        first.setdefault(finding.field, k)
    chosen = set(first.values())
    return [group[k] for k in first.values()] + [f for k, f in enumerate(group) if k not in chosen]


def _shares(sizes: list[int], limit: int) -> list[int]:
    """How many findings of each group are shown: one of each before two of any."""
    shares = [0] * len(sizes)
    while sum(shares) < limit and shares != sizes:
        for k, size in enumerate(sizes):
            shares[k] += shares[k] < size and sum(shares) < limit
    return shares


def _by_reason(not_compared: Mapping[str, str]) -> dict[str, list[str]]:
    """Reason to the fields that share it; the reason leaves their names out."""
    out: dict[str, list[str]] = {}
    for name, why in not_compared.items():
        for side in ("rollout", "train"):
            why = why.replace(f"{side} has no {name} ", f"not recorded in {side} ")
        why = why.replace(f"neither side has {name} ", "not recorded on either side ")
        out.setdefault(why, []).append(name)
    return out


def _named(names: list[str]) -> str:
    more = len(names) - NAMES
    return ", ".join(names[:NAMES]) + (f" and {more} more" if more > 0 else "")
