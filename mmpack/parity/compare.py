"""Compare what the rollout engine saw with what the trainer sees, sample by sample, in bounded memory.

Compared are layouts (token ids, placeholders, positions, masks, media, loss spans, settings) and records (groups,
scores, turns, targets), never logprobs.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

from mmpack.errors import ArgumentError, check_whole, kind_of
from mmpack.parity.across import Seen
from mmpack.parity.causes import (
    Decode,
    Hit,
    Pair,
    broken_rules,
    hits_of,
    rule_hits,
    structured_pair,
)
from mmpack.parity.causes.alike import MEDIA_FIELDS, VIDEO_FIELDS
from mmpack.parity.causes.replay import REPLAYED
from mmpack.parity.differences import Difference
from mmpack.parity.fields import (
    FIELDS,
    differences,
    lacking,
)
from mmpack.parity.fixes import RANK, UNKNOWN
from mmpack.parity.join import Missing, Source, paired
from mmpack.parity.records import RECORDS
from mmpack.parity.report import Finding, ParityReport
from mmpack.parity.sampling import sampling_hit
from mmpack.progress import progress
from mmpack.schema.sample import Sample
from mmpack.schema.trace import TraceReader

_REQUIRABLE = (
    *FIELDS,
    *REPLAYED,
    *RECORDS,
    *(f"media.{name}" for name in MEDIA_FIELDS + VIDEO_FIELDS),
)
_WHOLE = ("processor.", "sampling.")  # required as a whole: no part may be missing
_ORDER = {name: rank for rank, name in enumerate((*FIELDS, *REPLAYED, *RECORDS))}
_ENDINGS = ("truncated", "truncated_medium", "stop_token")  # what makes another finish_reason
# findings of fields that a sample has whatever its id is
_OF_SETTINGS = ("family", "processor", "processor_fingerprint", "sampling", "coordinate_system")
_DRAWN = 20  # samples whose two sides the report keeps
_NAMED = 256  # entries of `not_compared`; beyond that, parts of a field count as the whole field


def compare(
    rollout: Source,
    train: Source,
    require: Sequence[str] = ("input_ids", "media", "loss_spans"),
    decode: Decode | None = None,
    max_findings: int = 1000,
) -> ParityReport:
    """Compare two traces; samples are paired by sample_id, in any order.

    Args:
        rollout, train: samples, or the path of a trace.
        require: fields that must have been compared in every sample for the report to be ok
            (`media.content_hash` names a part of one).
        decode: ids -> text, to distinguish a response that was encoded again from another response; without it
            `metadata.response_text_sha256` of both sides is used, where it is of the ids that the side has.
        max_findings: how many findings the report keeps, and how many samples without a partner; all are counted.

    Returns: a ParityReport.
    Raises: TraceError for a file that is no trace and for a duplicate sample_id; ArgumentError.

    Example:
        >>> import mmpack as mp, numpy as np
        >>> def sample(length):
        ...     ids, response = np.arange(length), mp.LossSpan(2, length, "response")
        ...     return mp.Sample("s0", "g0", "qwen2_5_vl", ids, [], [], [response], finish_reason="length")
        >>> report = mp.compare([sample(5)], [sample(3)])
        >>> report.ok, report.first.cause, report.first.span
        (False, 'truncated', (3, 5))
    """
    check_whole("compare", "max_findings", max_findings, least=0)
    if isinstance(require, str):
        require = (require,)
    if not isinstance(require, Iterable):
        raise ArgumentError(
            f"compare: require is {kind_of(require)}, expected names of fields. "
            "Fix: pass names such as require=('input_ids', 'media'), or () for none"
        )
    require = tuple(require)
    for name in require:
        if name not in _REQUIRABLE:
            raise ArgumentError(
                f"compare: require names {name!r}. Fix: use fields of {', '.join(_REQUIRABLE)}"
            )
    tally = _Tally(max_findings)
    in_memory = not (_read(rollout) and _read(train))
    total = len(rollout) if isinstance(rollout, Sized) and not isinstance(rollout, str) else None
    rollout, train = _identified(rollout, "rollout"), _identified(train, "train")
    with progress("comparing", total) as done:
        for item in paired(rollout, train):
            if isinstance(item, Missing):
                tally.unpaired(item, in_memory)
            else:
                tally.pair(item.ordinal, item.left, item.right, decode, in_memory)
            done(1)
    return tally.report(require)


def _read(source: Source) -> bool:
    """Whether samples come from a file: reading has refused those of a wrong structure."""
    return isinstance(source, str | os.PathLike | TraceReader)


def _identified(source: Source, name: str) -> Source:
    """The samples of `source`; of those in memory, each must have a sample_id to be paired by."""
    if _read(source):
        return source
    samples: Any = [source] if isinstance(source, Sample) else source
    return _with_ids(samples, name) if isinstance(samples, Iterable) else samples


def _with_ids(samples: Iterable[Sample], name: str) -> Iterator[Sample]:
    for i, sample in enumerate(samples):
        if isinstance(sample, Sample) and not isinstance(sample.sample_id, str):
            kind = type(sample.sample_id).__name__
            raise ArgumentError(
                f"compare: {name}[{i}].sample_id is of type {kind}. Fix: pass a str, the same on both sides"
            )
        yield sample


def findings_of(left: Sample, right: Sample, decode: Decode | None = None) -> list[Finding]:
    """All findings of one pair of samples, root cause first; neither has a fault of structure."""
    fields = {} if left is right else differences(left, right)
    pair = Pair(left, right)
    broken = broken_rules(pair)
    if not fields and not any(broken):
        return []
    hits = hits_of(pair, decode)
    hits += rule_hits(pair, broken, hits)
    if "sampling" in fields:
        hits.append(sampling_hit(left.sampling, right.sampling))
    findings: list[Finding] = []
    named: set[tuple[str, Any]] = set()
    for field, first in fields.items():
        shown: Difference | Hit = first
        hit = _explain(shown, hits, same_ids="input_ids" not in fields)
        of_part = field in ("processor", "codec_ids")
        if hit and (of_part or (field == "media" and _of_another(hit, shown))):
            shown = hit  # the setting, the medium, or the id, that shows the cause
        fix = RECORDS.get(field, "") if hit is None else ""
        findings.append(_finding(left, shown, hit, fix))
        named |= _keys(findings[-1], hit)
    for hit in sorted(hits, key=_rank):
        if _key(hit) not in named:
            named |= _keys(hit, hit)
            findings.append(_finding(left, hit, hit))
    earliest = {f.cause: _place(f) for f in sorted(findings, key=_place, reverse=True)}
    return sorted(findings, key=lambda f: _order(f, earliest[f.cause]))


def _explain(shown: Difference | Hit, hits: list[Hit], same_ids: bool) -> Hit | None:
    """The hit that a field's first difference comes from; None if there is none."""
    own = [hit for hit in hits if hit.field == shown.field and hit.at is None]
    of_media = [hit for hit in hits if hit.field == "media"]
    start, stop = shown.span or (shown.index, shown.index)
    match shown.field:
        case "input_ids":
            return _nearest(shown.index, hits)
        case "modality_spans":
            return (
                _nearest(start, hits) or _nearest(stop, hits) or min(own, key=_rank, default=None)
            )
        case "media":  # the first one whose tokens differ, else the first that differs
            moving = [hit for hit in of_media if hit.at is not None]
            here = [hit for hit in of_media if hit.index == shown.index]
            first = min(moving, key=lambda hit: (hit.at or 0, _rank(hit)), default=None)
            return first or min(here or of_media, key=_rank, default=None)
        case "position_ids":
            return min(own, key=_rank, default=None) or _nearest(start, hits)
        case "loss_spans" if not own and not same_ids:
            return _nearest(stop, hits)
        case "finish_reason" if not own:
            return next((hit for hit in hits if hit.cause in _ENDINGS), None)
        case _:
            return min(own, key=_rank, default=None)


def _of_another(hit: Hit, shown: Difference | Hit) -> bool:
    return hit.field == "media" and (hit.cause != UNKNOWN or hit.index != shown.index)


def _nearest(token: int | None, hits: list[Hit]) -> Hit | None:
    """Return the last hit that moves ids and begins no later than `token`."""
    before = [h for h in hits if h.at is not None and (token is None or h.at <= token)]
    return max(before, key=lambda hit: (hit.at or 0, -_rank(hit)), default=None)


def _finding(sample: Sample, shown: Difference | Hit, hit: Hit | None, fix: str = "") -> Finding:
    place = sample.sample_id, shown.field, shown.index, shown.span, shown.left, shown.right
    if hit is None:
        return Finding(*place, UNKNOWN, "nothing recorded says why", fix)
    return Finding(*place, hit.cause, hit.evidence, hit.fix or fix, hit.frames)


def _key(item: Finding | Hit) -> tuple[str, Any]:
    """A known cause is reported once per sample and medium, after its fields; each unknown one by itself."""
    if item.cause == UNKNOWN:
        return item.cause, f"{item.field} {item.evidence}"
    return item.cause, item.index if item.field == "media" else None


def _keys(item: Finding | Hit, hit: Hit | None) -> set[tuple[str, Any]]:
    """Keys that a finding reports: its own difference, the hit that explains it, and the cause."""
    keys = {_key(item)} | ({_key(hit)} if hit else set())
    return keys | {(cause, None) for cause, _ in keys if cause != UNKNOWN}


def _rank(hit: Hit) -> int:
    return RANK[hit.cause]


def _order(finding: Finding, earliest: tuple[int, float]) -> tuple[Any, ...]:
    """Causes in the order in which they begin, then what is unknown; but the first token that differs goes first."""
    if finding.cause != UNKNOWN:
        return False, earliest, RANK[finding.cause], _place(finding)
    return finding.field != "input_ids", _place(finding), RANK[UNKNOWN], _place(finding)


def _place(finding: Finding) -> tuple[int, float]:
    """In the order of fields, then of tokens."""
    rank = _ORDER.get(finding.field, len(_ORDER))
    return rank, math.inf if finding.index is None else finding.index


class _Tally:
    """Counts everything, keeps a bounded part of it."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.compared = 0
        self.total = 0
        self.findings: list[tuple[int, Finding]] = []
        self.unmatched: list[tuple[int, Finding]] = []
        self.first: tuple[int, Finding] | None = None
        self.causes: Counter[str] = Counter()
        self.lacking: Counter[tuple[str, str]] = Counter()
        self.missing = {"rollout": 0, "train": 0}
        self.seen = Seen()
        # of each sample of `seen`: number of findings, their causes, and those that settings show
        self.alone: dict[str, tuple[int, tuple[str, ...], tuple[Finding, ...]]] = {}
        self.unlike: list[tuple[Sample, Sample]] = []  # to draw
        self.scored: list[tuple[Sample, Sample]] = []

    def _named(self, lacks: set[tuple[str, str]]) -> set[tuple[str, str]]:
        """Each once: parts that `not_compared` has an entry for, and the fields of all others."""
        if lacks <= self.lacking.keys():
            return lacks
        out: set[tuple[str, str]] = set()
        for name, who in sorted(lacks):
            if (name, who) not in self.lacking and len(self.lacking) + len(out) >= _NAMED:
                name = name.partition(".")[0]
            out.add((name, who))
        return out

    def pair(
        self, ordinal: int, left: Sample, right: Sample, decode: Decode | None, in_memory: bool
    ) -> None:
        if in_memory:
            left, right, malformed = structured_pair(left, right)
            if malformed:
                self.compared += 1
                self._count(ordinal, [_finding(left, hit, hit) for hit in malformed])
                return
        self.compared += 1
        self.lacking.update(self._named(set(lacking(left, right))))
        findings = findings_of(left, right, decode)
        if findings:
            self._count(ordinal, findings)
            self._see(left.sample_id, findings, left, right)
            if len(self.unlike) < _DRAWN:
                self.unlike.append((left, right))
        elif len(self.scored) < _DRAWN and left.rollout_logprobs is not None:
            self.scored.append((left, right))

    def _count(self, ordinal: int, findings: list[Finding]) -> None:
        self.causes.update({finding.cause for finding in findings})
        self._keep(self.findings, ordinal, findings)

    def unpaired(self, item: Missing, in_memory: bool) -> None:
        self.missing[item.side] += 1
        there = {"rollout": ("no such sample", "a sample"), "train": ("a sample", "no such sample")}
        evidence = f"{item.side} has no sample of this id"
        fix = "Compare traces of the same samples, under the same sample_id on both sides."
        place = item.sample_id, "sample_id", None, None, *there[item.side]
        finding = Finding(*place, UNKNOWN, evidence, fix)
        self.causes[UNKNOWN] += 1
        self._keep(self.unmatched, item.ordinal, [finding])
        sample = item.sample
        if in_memory and sample is not None:
            sample, _, malformed = structured_pair(sample, sample)
            sample = None if malformed else sample
        sides = (None, sample) if item.side == "rollout" else (sample, None)
        self._see(item.sample_id, [finding], *sides)

    def _see(
        self, sample_id: str, findings: list[Finding], left: Sample | None, right: Sample | None
    ) -> None:
        if self.seen.add(sample_id, left, right):
            of_settings = tuple(f for f in findings if f.field in _OF_SETTINGS)
            causes = tuple({f.cause for f in findings})
            self.alone[sample_id] = len(findings), causes, of_settings

    def _across(self) -> None:
        """Put what several samples show in place of what was found in each of them alone."""
        instead: dict[str, list[Finding]] = {}
        for sample_id, across in self.seen.found().items():
            count, causes, of_settings = self.alone[sample_id]
            shown = (across.left, across.right, across.cause, across.evidence)
            instead[sample_id] = [
                Finding(sample_id, "sample_id", None, None, *shown),
                *of_settings,
            ]
            self.total += len(instead[sample_id]) - count
            self.causes.subtract(causes)
            self.causes.update({f.cause for f in instead[sample_id]})
        self.causes = +self.causes
        for kept in (self.findings, self.unmatched):
            before = {f.sample_id: ordinal for ordinal, f in reversed(kept)}
            kept[:] = [(n, f) for n, f in kept if f.sample_id not in instead] + [
                (before[sample_id], f)
                for sample_id, found in instead.items()
                for f in found
                if sample_id in before
            ]
        if self.first and self.first[1].sample_id in instead:
            self.first = self.first[0], instead[self.first[1].sample_id][0]

    def _keep(self, kept: list[tuple[int, Finding]], ordinal: int, found: list[Finding]) -> None:
        self.total += len(found)
        kept.extend((ordinal, finding) for finding in found[: self.kept - len(kept)])
        if self.first is None or ordinal < self.first[0]:
            self.first = (ordinal, found[0])

    def report(self, require: tuple[str, ...]) -> ParityReport:
        self._across()
        lacks = self._not_compared(require)
        lacking = {
            name for name, who in self.lacking if who not in ("no_effect", "note", "rendered")
        }
        lacking |= {name.partition(".")[0] for name in lacking if name.startswith(_WHOLE)}
        unmet = not self.compared or [name for name in require if name in lacking]
        kept = sorted(self.findings + self.unmatched, key=lambda item: item[0])
        return ParityReport(
            ok=self.compared > 0 and not self.total and not unmet,
            compared=self.compared,
            require=require,
            not_compared=lacks,
            first=self.first and self.first[1],
            findings=[finding for _, finding in kept],
            total_findings=self.total,
            causes=dict(sorted(self.causes.items(), key=lambda item: (-item[1], RANK[item[0]]))),
            missing=self.missing,
            pairs=(self.unlike + self.scored)[:_DRAWN],
        )

    def _not_compared(self, require: tuple[str, ...]) -> dict[str, str]:
        why: dict[str, list[str]] = {}
        if not self.compared:
            why["sample_id"] = ["no sample is on both sides"]
        for (name, who), count in sorted(self.lacking.items()):
            if who == "both" and name in (*RECORDS, *REPLAYED) and name not in require:
                continue
            no = "" if who == "both" else "no "
            text = _WHY.get(who) or f"{_LACKS.get(who, who)} has {no}{name}"
            why.setdefault(name, []).append(f"{text} ({count} of {self.compared} samples)")
        return {name: "; ".join(texts) for name, texts in why.items()}


NEVER = "its values are not compared, only what they mean"
_LACKS = {"both": "neither side"}
_WHY = {
    "never": NEVER,
    "unscored": "the logprobs that it describes are not on both sides",
    "no_effect": "differs; raw logprobs do not depend on it",
    "unread": "differs; its effect on logprobs is not known",
    "moved": "not compared where ids differ",
    "note": "differs; carried along, not compared",
    "rendered": "its hash differs; what it rendered is compared, as text of input_ids",
}
