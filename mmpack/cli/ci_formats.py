"""A parity report as machines of others read it: annotations of GitHub, SARIF 2.1.0, JUnit XML."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from mmpack._version import __version__
from mmpack.cli.output import json_text
from mmpack.errors import no_command, one_line
from mmpack.parity.fixes import FIXES
from mmpack.parity.report import Finding, ParityReport, by_cause, counted, evidence_of

ANNOTATIONS = 10  # errors that GitHub shows of one step
NOT_COMPARED = "not_compared"
SARIF_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)


def github(report: ParityReport, rollout: Path, train: Path) -> str:
    """One `::error` per cause, at its first sample, and the summary as the last line."""
    groups = by_cause(report.findings)
    told = groups if len(groups) <= ANNOTATIONS else groups[: ANNOTATIONS - 1]
    places = _lines_of(train, [group[0].sample_id for group in told])
    out = []
    for group in told:
        first = group[0]
        samples = len({finding.sample_id for finding in group})
        text = [f"{first.where}", *(f"evidence: {why}" for why in evidence_of(group))]
        text += [f"fix: {first.fix}"]
        at = {"file": train.as_posix(), "line": places.get(first.sample_id)}
        title = f"{first.cause} in {counted(samples, 'sample')}"
        out.append(_annotation({**at, "title": title}, "\n".join(map(one_line, text))))
    if len(told) < len(groups):
        left = sum(map(len, groups[len(told) :]))
        out.append(_annotation({"title": counted(left, "more finding")}, "see the report"))
    for name, why in _unmet(report):
        at = {"file": train.as_posix(), "title": f"{name} was not compared"}
        out.append(_annotation(at, one_line(why)))
    return "\n".join([*out, no_command(one_line(report.summary()))]) + "\n"


def sarif(report: ParityReport, rollout: Path, train: Path) -> str:
    """A SARIF 2.1.0 log of one run: a rule per cause, a result per finding."""
    places = _lines_of(train, [finding.sample_id for finding in report.findings])
    results = [_result(f, train, places.get(f.sample_id)) for f in report.findings]
    for name, why in _unmet(report):
        results.append(_told(NOT_COMPARED, f"{name} was not compared: {why}", train, None))
    rules = list(dict.fromkeys(result["ruleId"] for result in results))
    for result in results:
        result["ruleIndex"] = rules.index(result["ruleId"])
    driver = {"name": "mmpack parity", "semanticVersion": __version__}
    run = {
        "tool": {"driver": driver | {"rules": [_rule(cause) for cause in rules]}},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": True, "exitCode": 0 if report.ok else 1}],
        "artifacts": [{"location": {"uri": _uri(path)}} for path in (rollout, train)],
        "results": results,
        "properties": {"summary": one_line(report.summary()), "compared": report.compared},
    }
    return json_text({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}) + "\n"


def junit(report: ParityReport, rollout: Path, train: Path) -> str:
    """JUnit XML: a test of the whole comparison, and one per sample that differs."""
    by_sample: dict[str, list[Finding]] = {}
    for finding in report.findings:
        by_sample.setdefault(finding.sample_id, []).append(finding)
    cases = [_case("layouts", "" if report.ok else report.summary(), "parity", report.lines(0))]
    for sample_id, findings in by_sample.items():
        first = findings[0]
        cases.append(_case(f"sample {sample_id}", str(first), first.cause, map(str, findings)))
    failed = str(sum(len(case) for case in cases))
    numbers = {"tests": str(len(cases)), "failures": failed, "errors": "0", "skipped": "0"}
    suites = ElementTree.Element("testsuites", {"name": "mmpack parity", **numbers})
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "mmpack parity", **numbers})
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("rollout", rollout), ("train", train), ("compared", report.compared)):
        ElementTree.SubElement(properties, "property", {"name": name, "value": _xml(str(value))})
    suite.extend(cases)
    ElementTree.indent(suites)
    text = ElementTree.tostring(suites, encoding="unicode", xml_declaration=True)
    return text.replace("##", "&#35;#") + "\n"


FORMATS: dict[str, Callable[[ParityReport, Path, Path], str]] = {
    "github": github,
    "sarif": sarif,
    "junit": junit,
}


def _unmet(report: ParityReport) -> Iterator[tuple[str, str]]:
    """What keeps a report without findings from being ok."""
    for name, why in report.not_compared.items():
        if name in report.require:
            yield name, why
    if not report.compared and not report.findings:
        yield "anything", "no sample is in both traces"


def _annotation(properties: dict[str, Any], message: str) -> str:
    """A workflow command; `%`, line ends and what ends a property are escaped as GitHub reads them."""

    def data(text: str) -> str:
        return no_command(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    def value(text: str) -> str:
        return data(one_line(text)).replace(":", "%3A").replace(",", "%2C")

    given = ",".join(f"{k}={value(str(v))}" for k, v in properties.items() if v is not None)
    return f"::error {given}::{data(message)}"


def _rule(cause: str) -> dict[str, Any]:
    fix = FIXES.get(cause, "Record the field on both sides, or leave it out of --require.")
    words = cause.replace("_", " ")
    return {
        "id": cause,
        "shortDescription": {"text": f"{words[0].upper()}{words[1:]}"},
        "help": {"text": f"{fix} More: mmpack explain {cause}" if cause in FIXES else fix},
        "defaultConfiguration": {"level": "error"},
    }


def _result(finding: Finding, train: Path, line: int | None) -> dict[str, Any]:
    place = f"{finding.sample_id}/{finding.field}"
    identity = f"{place}/{finding.index}/{finding.cause}".encode("utf-8", "surrogatepass")
    text = f"{finding.where}: {finding.cause} ({finding.evidence}). Fix: {finding.fix}"
    out = _told(finding.cause, text, train, line)
    names = [{"fullyQualifiedName": one_line(place), "kind": "member"}]
    out["locations"][0]["logicalLocations"] = names
    return out | {"partialFingerprints": {"finding/v1": hashlib.sha256(identity).hexdigest()}}


def _told(cause: str, text: str, train: Path, line: int | None) -> dict[str, Any]:
    """A result of SARIF at a line of the trainer's trace."""
    region = {} if line is None else {"region": {"startLine": line}}
    place = {"artifactLocation": {"uri": _uri(train)}, **region}
    about = {"ruleId": cause, "level": "error", "message": {"text": one_line(text)}}
    return about | {"locations": [{"physicalLocation": place}]}


def _uri(path: Path) -> str:
    return path.as_uri() if path.is_absolute() else quote(path.as_posix())


def _lines_of(trace: Path, sample_ids: Iterable[str]) -> dict[str, int]:
    """The line of each sample in a .jsonl trace; other formats have none."""
    wanted = set(sample_ids)
    if trace.suffix != ".jsonl" or not wanted:
        return {}
    from mmpack.schema.jsonl import read_jsonl
    from mmpack.schema.trace import read_trace

    found: dict[str, int] = {}
    for number, record in read_jsonl(trace, read_trace(trace).max_record_bytes, zstd=False):
        name = record.get("sample_id")
        if name in wanted:
            found.setdefault(name, number)
            if len(found) == len(wanted):
                break
    return found


def _case(name: str, why: str, kind: str, text: Iterable[str]) -> ElementTree.Element:
    case = ElementTree.Element("testcase", {"classname": "mmpack.parity", "name": _xml(name)})
    if why:
        about = {"message": _xml(why), "type": kind}
        failure = ElementTree.SubElement(case, "failure", about)
        failure.text = "\n".join(map(_xml, text))
    return case


def _xml(text: str) -> str:
    """Without what XML 1.0 has no place for: control characters, surrogates."""
    return "".join(
        c if c.isprintable() and c not in "\ufffe\uffff" else ascii(c)[1:-1] for c in text
    )
