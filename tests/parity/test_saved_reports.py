"""Reports out of their JSON: equal to those that were written, and one line for a file that is damaged."""

import json
import re

import numpy as np
import pytest
from support import drawn

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.parity.drift_traces import trace_drift
from mmpack.parity.saved import is_report, read_report, report_of


@pytest.fixture(scope="module")
def document():
    left, right = drawn.sides()
    report = mp.compare(left, right)
    drift, left_out = trace_drift(left, right)
    return report, drift, report.to_dict() | {"drift": drift.to_dict() | {"left_out": left_out}}


def test_what_was_written_is_read(document, tmp_path):
    report, drift, whole = document
    path = tmp_path / "report.json"
    path.write_text(json.dumps(whole))
    found, found_drift = read_report(path)
    assert found == report and found.to_json() == report.to_json() and found.pairs == []
    assert found_drift == drift and drift.tokens > 0
    path.write_text(report.to_json())
    assert read_report(path) == (report, None)


@pytest.mark.parametrize("cause", sorted(p.name for p in drawn.CAUSES.iterdir() if p.is_dir()))
def test_reports_of_every_planted_cause(cause):
    left, right = (
        list(mp.read_trace(drawn.CAUSES / cause / f"{name}.jsonl")) for name in ("rollout", "train")
    )
    report = mp.compare(left, right)
    found, _ = report_of(json.loads(report.to_json()), "here")
    assert found.to_json() == report.to_json() and found.lines() == report.lines()
    assert [str(f.frames) for f in found.findings] == [str(f.frames) for f in report.findings]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("ok",), "yes", "bool is str"),
        (("compared",), None, "int is NoneType"),
        (("findings",), {}, "is dict"),
        (("findings", 0), [], "Finding is list"),
        (("findings", 0, "cause"), 3, "str is int"),
        (("findings", 0, "span"), [1], "has 1 values"),
        (("causes",), {"max_pixels": "many"}, "int is str"),
        (("drift", "axes"), [], "is list"),
        (("drift", "tokens"), 1.5, "int is float"),
        (("first",), {}, "Finding has no sample_id"),
        (("drift", "k3"), 10**400, "too large"),
        (("drift", "causes"), {"boo": "why"}, "a cause that is unknown"),
    ],
)
def test_a_damaged_report_is_one_line(document, path, value, said):
    whole = json.loads(json.dumps(document[2]))
    place = whole
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ArgumentError, match=re.escape(said)) as caught:
        report_of(whole, "here")
    assert "\n" not in str(caught.value) and str(caught.value).startswith("here is damaged")


def test_other_files(tmp_path):
    path = tmp_path / "other.json"
    for text, said in (
        ("{", "is not JSON"),
        ("[1" + "0" * 400 + "]", "beyond 64 bits"),
        ("[1" + "0" * 5000 + "]", "beyond 64 bits"),
        ("[1e400]", "beyond 64 bits"),
        ("[NaN]", "it holds NaN"),
        ("[" * 10**6, "nested too deep"),
        ("[]", "holds no parity report"),
        ("{}", "holds no parity report"),
    ):
        path.write_text(text)
        with pytest.raises(ArgumentError, match=said):
            read_report(path)
    with pytest.raises(ArgumentError, match="can't be read"):
        read_report(tmp_path / "none.json")
    assert not is_report(None)


def test_numbers_that_json_lacks():
    """`mmpack parity --json` writes them as null."""
    left, right = drawn.sides()
    drift, _ = trace_drift(left, right)
    whole = mp.compare(left, right).to_dict() | {"drift": drift.to_dict() | {"k3": None}}
    assert np.isnan(report_of(whole, "here")[1].k3)
