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
PLANTED = ("retokenized_response", "max_pixels", "dropped_image", "truncated")
TEXT = {
    "type": "object",
    "required": ["text"],
    "properties": {"text": {"type": "string", "minLength": 1}},
}
# of sarif-schema-2.1.0.json: what these logs use, with what is required there
SARIF = {
    "type": "object",
    "required": ["version", "runs"],
    "properties": {
        "version": {"enum": ["2.1.0"]},
        "$schema": {"type": "string", "format": "uri"},
        "runs": {"type": "array", "minItems": 1, "items": {"$ref": "#/definitions/run"}},
    },
    "additionalProperties": False,
    "definitions": {
        "run": {
            "type": "object",
            "required": ["tool", "results"],
            "properties": {
                "tool": {
                    "required": ["driver"],
                    "properties": {"driver": {"$ref": "#/definitions/driver"}},
                },
                "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                "invocations": {"items": {"required": ["executionSuccessful"]}},
                "artifacts": {
                    "items": {"properties": {"location": {"$ref": "#/definitions/artifact"}}}
                },
                "results": {"type": "array", "items": {"$ref": "#/definitions/result"}},
                "properties": {"type": "object"},
            },
            "additionalProperties": False,
        },
        "driver": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "semanticVersion": {"type": "string"},
                "rules": {
                    "type": "array",
                    "uniqueItems": True,
                    "items": {"$ref": "#/definitions/rule"},
                },
            },
            "additionalProperties": False,
        },
        "rule": {
            "type": "object",
            "required": ["id"],
            "properties": {
                "id": {"type": "string"},
                "shortDescription": TEXT,
                "help": TEXT,
                "defaultConfiguration": {
                    "properties": {"level": {"enum": ["none", "note", "warning", "error"]}}
                },
            },
            "additionalProperties": False,
        },
        "result": {
            "type": "object",
            "required": ["message"],
            "properties": {
                "ruleId": {"type": "string"},
                "ruleIndex": {"type": "integer", "minimum": -1},
                "level": {"enum": ["none", "note", "warning", "error"]},
                "message": TEXT,
                "locations": {"type": "array", "items": {"$ref": "#/definitions/location"}},
                "partialFingerprints": {
                    "type": "object",
                    "additionalProperties": {"type": "string"},
                },
            },
            "additionalProperties": False,
        },
        "location": {
            "type": "object",
            "properties": {
                "physicalLocation": {
                    "properties": {
                        "artifactLocation": {"$ref": "#/definitions/artifact"},
                        "region": {"properties": {"startLine": {"type": "integer", "minimum": 1}}},
                    }
                },
                "logicalLocations": {"type": "array", "items": {"type": "object"}},
            },
            "additionalProperties": False,
        },
        "artifact": {
            "type": "object",
            "properties": {"uri": {"type": "string", "format": "uri-reference"}},
            "additionalProperties": False,
        },
    },
}


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


def test_equal_traces_have_nothing_to_annotate(tmp_path):
    path = tmp_path / "a.jsonl"
    mp.write_trace(path, [full_sample("s0")])
    assert run("github", (path, path), 0) == "parity ok: 1 sample compared, 0 findings\n"
    log = json.loads(run("sarif", (path, path), 0))
    jsonschema.validate(log, SARIF)
    assert log["runs"][0]["results"] == []
    (suite,) = ElementTree.fromstring(run("junit", (path, path), 0))
    assert (suite.get("tests"), suite.get("failures")) == ("1", "0")
    assert run("text", (path, path), 0) == call_mmpack("parity", path, path).stdout
    assert run("json", (path, path), 0) == call_mmpack("parity", path, path, "--json").stdout


def test_what_was_required_and_not_compared_is_said(tmp_path):
    path = tmp_path / "a.jsonl"
    sample = full_sample("s0")
    sample.position_ids = None
    mp.write_trace(path, [sample])
    more = ("--require", "position_ids")
    ((about, _),) = annotations(run("github", (path, path), 1, *more))
    assert about["title"] == "position_ids was not compared"
    log = json.loads(run("sarif", (path, path), 1, *more))
    jsonschema.validate(log, SARIF)
    assert [r["ruleId"] for r in log["runs"][0]["results"]] == ["not_compared"]
    (suite,) = ElementTree.fromstring(run("junit", (path, path), 1, *more))
    assert suite.get("failures") == "1"


def test_texts_of_a_trace_break_no_format(tmp_path):
    left, right = full_sample("a%0A::error::\x1b[31m,b:c\n<x>"), full_sample("other")
    paths = [tmp_path / f"{n} 1.jsonl" for n in "ab"]
    for path, sample in zip(paths, (left, right), strict=True):
        mp.write_trace(path, [sample])
    out = run("github", paths, 1)
    assert "\x1b" not in out and len(out.splitlines()) == len(annotations(out)) + 1
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


def test_two_formats_are_refused_and_out_stays_json(tmp_path):
    paths = pair("truncated")
    result = call_mmpack("parity", *paths, "--json", "--format", "sarif")
    assert result.returncode == 2 and "pass one" in result.stderr
    assert call_mmpack("parity", *paths, "--format", "xml").returncode == 2
    run("github", paths, 1, "--out", tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["first"]["cause"] == "truncated"


@pytest.mark.parametrize(
    "name", ["::error::boo", "##[error]boo", "a" * 110 + " ::add-mask::b " * 9 + "##vso[x]"]
)
@pytest.mark.parametrize(
    "options", [(), ("--json",), *(("--format", f) for f in ("sarif", "junit", "github"))]
)
def test_no_sample_id_is_a_command_to_a_runner(tmp_path, name, options):
    sample = full_sample(name)
    other = replace(sample, input_ids=sample.input_ids + (np.arange(len(sample)) == 0))
    for at, one in (("a", sample), ("b", other)):
        mp.write_trace(tmp_path / f"{at}.jsonl", [one])
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    wanted = 1 if "github" in options else 0  # its own annotation
    for args in (("parity", *paths, *options), ("inspect", paths[0], "--sample", name)):
        result = call_mmpack(*args)
        lines = (result.stdout + result.stderr).splitlines()
        found = [x for x in lines if x.lstrip().startswith("::") or re.search(r"##\w*\[", x)]
        assert len(found) == (wanted if args[0] == "parity" else 0), found
    if options == ("--json",):
        assert (
            json.loads(call_mmpack("parity", *paths, *options).stdout)["first"]["sample_id"] == name
        )
