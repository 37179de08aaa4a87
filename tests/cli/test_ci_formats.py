"""`mmpack parity --format`: what GitHub, SARIF's schema and a reader of JUnit make of pairs whose cause is known."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import numpy as np
import pytest
from support.process import call_mmpack
from support.samples import full_sample

import mmpack as mp

ROOT = Path(__file__).resolve().parents[2]
CAUSES = ROOT / "fixtures/causes"
PLANTED = ("max_pixels", "truncated")


def record(*required, open_ended=False, **properties):
    """The schema of an object with these properties, and no other unless it is open-ended."""
    found = {"type": "object", "required": list(required), "properties": properties}
    return found | {"additionalProperties": open_ended}


def array(of):
    return {"type": "array", "items": of}


# of sarif-schema-2.1.0.json: what these logs use, with what is required there
TEXT = record("text", text={"type": "string", "minLength": 1})
LEVEL = {"enum": ["none", "note", "warning", "error"]}
STRING, INTEGER = {"type": "string"}, {"type": "integer"}
URI = record(uri={"type": "string", "format": "uri-reference"})
PLACE = record(artifactLocation=URI, region=record(startLine={"type": "integer", "minimum": 1}))
DRIVER = record(
    "name",
    name=STRING,
    semanticVersion=STRING,
    rules=array(
        record(
            "id",
            id=STRING,
            shortDescription=TEXT,
            help=TEXT,
            defaultConfiguration=record(level=LEVEL),
        )
    )
    | {"uniqueItems": True},
)
RESULT = record(
    "message",
    ruleId=STRING,
    ruleIndex=INTEGER | {"minimum": -1},
    level=LEVEL,
    message=TEXT,
    locations=array(record(physicalLocation=PLACE, logicalLocations=array({"type": "object"}))),
    partialFingerprints={"type": "object", "additionalProperties": STRING},
)
RUN = record(
    "tool",
    "results",
    tool=record("driver", driver=DRIVER),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
    invocations=array(record("executionSuccessful", open_ended=True)),
    artifacts=array(record(location=URI)),
    results=array(RESULT),
    properties={"type": "object"},
)
SARIF = record(
    "version",
    "runs",
    version={"enum": ["2.1.0"]},
    runs=array(RUN) | {"minItems": 1},
    **{"$schema": {"type": "string", "format": "uri"}},
)


def pair(cause):
    return [CAUSES / cause / f"{side}.jsonl" for side in ("rollout", "train")]


def run(fmt, paths, code, *more):
    result = call_mmpack("parity", *paths, "--format", fmt, *more)
    assert (result.returncode, result.stderr) == (code, "")
    return result.stdout


def unescaped(text):
    """As the runner reads a command: github.com/actions/toolkit, command.ts."""
    for code, char in (("%0A", "\n"), ("%0D", "\r"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, char)
    return text


def annotations(out):
    found = []
    for line in out.splitlines():
        if match := re.fullmatch(r"::error ([^:]*)::(.*)", line):
            given = dict(part.split("=", 1) for part in match[1].split(","))
            found.append(({k: unescaped(v) for k, v in given.items()}, unescaped(match[2])))
    return found


def line_of(path, sample_id):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return 1 + [record["sample_id"] for record in records].index(sample_id)


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_in_every_format(cause):
    paths = pair(cause)
    report = mp.compare(*paths)
    assert report.first.cause == cause
    where = line_of(paths[1], report.first.sample_id)

    (about, message), *_ = annotations(run("github", paths, 1))
    assert about["title"].startswith(f"{cause} in ") and about["file"] == paths[1].as_posix()
    assert int(about["line"]) == where
    assert message.startswith(report.first.where) and f"fix: {report.first.fix}" in message

    log = json.loads(run("sarif", paths, 1))
    jsonschema.validate(log, SARIF)
    (of_run,) = log["runs"]
    rules = [rule["id"] for rule in of_run["tool"]["driver"]["rules"]]
    assert [r["ruleId"] for r in of_run["results"]] == [f.cause for f in report.findings]
    assert all(rules[r["ruleIndex"]] == r["ruleId"] for r in of_run["results"])
    place = of_run["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == paths[1].as_uri()
    assert place["region"]["startLine"] == where
    marks = [r["partialFingerprints"]["finding/v1"] for r in of_run["results"]]
    assert len(set(marks)) == len(marks)
    assert of_run["invocations"][0]["exitCode"] == 1

    suites = ElementTree.fromstring(run("junit", paths, 1))
    (suite,) = suites
    cases = suite.findall("testcase")
    failures = suite.findall("testcase/failure")
    assert int(suite.get("tests")) == len(cases) and int(suite.get("failures")) == len(failures)
    assert {c.get("name") for c in cases[1:]} == {f"sample {f.sample_id}" for f in report.findings}
    assert failures[1].get("type") == cause and report.first.fix in failures[1].text


@pytest.mark.parametrize("required", [False, True])
def test_equal_traces_have_nothing_to_annotate_but_what_was_not_compared(tmp_path, required):
    path, more = tmp_path / "a.jsonl", ("--require", "position_ids") if required else ()
    mp.write_trace(path, [replace(full_sample("s0"), position_ids=None)])
    out = run("github", (path, path), required, *more)
    titles = [about["title"] for about, _ in annotations(out)]
    assert titles == ["position_ids was not compared"] * required
    if not required:
        assert out == "parity ok: 1 sample compared, 0 findings\n"
        assert run("text", (path, path), 0).startswith("OK: 1 sample compared, 0 findings\n")
        as_json = run("json", (path, path), 0)
        assert as_json == call_mmpack("parity", path, path, "--json").stdout
    log = json.loads(run("sarif", (path, path), required, *more))
    jsonschema.validate(log, SARIF)
    assert [r["ruleId"] for r in log["runs"][0]["results"]] == ["not_compared"] * required
    (suite,) = ElementTree.fromstring(run("junit", (path, path), required, *more))
    assert (suite.get("tests"), suite.get("failures")) == ("1", str(int(required)))


def test_texts_of_a_trace_break_no_format(tmp_path):
    left, right = full_sample("a%0A::error::\x1b[31m,b:c\n<x>"), full_sample("other")
    paths = [tmp_path / f"{n} 1.jsonl" for n in "ab"]
    for path, sample in zip(paths, (left, right), strict=True):
        mp.write_trace(path, [sample])
    out = run("github", paths, 1)
    assert "\x1b" not in out and len(out.splitlines()) == len(annotations(out)) + 1
    assert any("a%0A" in message for _, message in annotations(out))
    names = [c.get("name") for c in ElementTree.fromstring(run("junit", paths, 1)).iter("testcase")]
    assert any("\\n<x>" in name for name in names) and len(names) == 3
    log = json.loads(run("sarif", paths, 1))
    jsonschema.validate(log, SARIF)
    assert "b%201.jsonl" in log["runs"][0]["artifacts"][1]["location"]["uri"]


def test_many_causes_are_at_most_ten_annotations():
    from mmpack.cli.ci_formats import github
    from mmpack.parity.fixes import FIXES
    from mmpack.parity.report import Finding, ParityReport

    found = [Finding(f"s{i}", "media", 0, None, "a", "b", c, "why") for i, c in enumerate(FIXES)]
    report = ParityReport(False, len(found), (), findings=found, total_findings=len(found))
    shown = annotations(github(report, Path("a.parquet"), Path("b.parquet")))
    assert len(shown) == 10
    assert shown[-1][0]["title"] == f"{len(found) - 9} more findings"


def test_out_stays_json(tmp_path):
    run("github", pair("truncated"), 1, "--out", tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["first"]["cause"] == "truncated"


@pytest.mark.parametrize("name", ["::error::boo", "a" * 110 + " ::add-mask::b " * 9 + "##vso[x]"])
def test_no_sample_id_is_a_command_to_a_runner(tmp_path, name):
    sample = full_sample(name)
    other = replace(sample, input_ids=sample.input_ids + (np.arange(len(sample)) == 0))
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, one in zip(paths, (sample, other), strict=True):
        mp.write_trace(path, [one])
    formats = ("text", "json", "sarif", "junit", "github")
    for args in (
        ("inspect", paths[0], "--sample", name),
        *(("parity", *paths, "--format", f) for f in formats),
    ):
        result = call_mmpack(*args)
        lines = (result.stdout + result.stderr).splitlines()
        found = [x for x in lines if x.lstrip().startswith("::") or re.search(r"##\w*\[", x)]
        assert len(found) == (args[-1] == "github"), found  # its own annotation
        if args[-1] == "json":
            assert json.loads(result.stdout)["first"]["sample_id"] == name
