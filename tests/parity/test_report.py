"""The report as lines, JSON and out of it again, with ids and settings that try to break out of them."""

import json
import re

import numpy as np
import pytest
from support import drawn
from support.planting.episodes import episode, other, settings

import mmpack as mp
from mmpack import compare
from mmpack.errors import ArgumentError
from mmpack.parity.drift_traces import trace_drift
from mmpack.parity.saved import is_report, read_report, report_of

EVIL = "<script>alert(1)</script>\n\x1b[31m\u202e"


def test_a_finding_is_one_line_that_says_where_what_why_and_how():
    left = other(episode(), sample_id=EVIL, processor=settings(chat_template=EVIL))
    report = compare([left], [other(episode(grid=(1, 4, 4)), sample_id=EVIL)])
    for line in [*report.lines(), *map(str, report.findings)]:
        assert line.isprintable()
    parsed = json.loads(report.to_json())
    assert parsed["first"] == parsed["findings"][0] and parsed["ok"] is False
    right = episode(grid=(1, 4, 4), processor=settings(image={"max_pixels": 50176}))
    text = str(compare([episode()], [right]).first)
    assert text.startswith("sample s0: input_ids at 8, tokens [4, 16): rollout: 12 placeholders")
    assert "max_pixels (processor.image.max_pixels: rollout 1003520, train 50176)" in text
    assert text.endswith("Fix: Set the same min_pixels and max_pixels on both sides.")


def test_summary():
    assert compare([episode()], [episode()]).summary() == "parity ok: 1 sample compared, 0 findings"
    report = compare([episode()], [other(episode(), sample_id="s1")])
    assert "1 sample missing in rollout; 1 sample missing in train" in report.summary()
    assert str(report) == report.summary() and "pairs" not in report.to_dict()


def planted(count):
    """Traces of several causes: limits, template, another group, a rule that one side breaks, an unknown one."""
    left = [episode(sample_id=f"s{i}") for i in range(count)]
    right = [other(sample) for sample in left]
    for i, sample in enumerate(right):
        if i % 5 == 0:
            limits = settings(image={"max_pixels": 50176})
            right[i] = episode(sample_id=f"s{i}", grid=(1, 4, 4), processor=limits)
        if i % 5 == 1:
            template = settings(chat_template="sha256:" + "2" * 64)
            right[i] = episode(sample_id=f"s{i}", system=(9, 9), processor=template)
        if i % 5 == 2:
            sample.group_id = "another"
        if i % 5 == 3:
            sample.media[0].num_tokens += 1
        if i % 5 == 4:
            sample.position_ids = sample.position_ids[:, ::-1].copy()
    return left, right


@pytest.mark.parametrize("count", [1, 3, 100])
def test_each_cause_is_shown_once_in_lines_of_120(count):
    report = compare(*planted(count))
    lines = report.lines()
    assert max(map(len, lines)) <= 120
    fixes = {f.fix for f in report.findings if f.cause != "unknown"}
    joined = " ".join(" ".join(line.split()) for line in lines)
    assert all(joined.count(fix) == 1 for fix in fixes)
    heads = [line for line in lines if line.endswith(("sample:", "samples:"))]
    for cause, among in report.causes.items():
        if cause != "unknown":
            what = "sample" if among == 1 else "samples"
            assert heads.count(f"{cause} in {among} {what}:") == 1
    evidence = [line for line in lines if line.startswith("  evidence: ")]
    assert len(evidence) == len(set(evidence)) == len(heads)
    shown = sum(line.startswith("  sample s") for line in lines)
    assert shown == min(20, report.total_findings)
    if report.total_findings > 20:
        assert lines[-1] == f"and {report.total_findings - 20} more findings"
        group = lines[lines.index("max_pixels in 20 samples:") + 1 :][:7]
        group = [line for line in group if line.startswith("  sample ")]
        assert len(group) > 1 and all(line.startswith("  sample s0: ") for line in group)
    if count == 3:  # once in the page's list of causes, once at its sample
        html = report.to_html()
        assert all(html.count(f.evidence) == 1 for f in report.findings)


def test_what_lines_say_of_fields():
    left, right = planted(4)
    (first,) = [f for f in compare(left, right).findings if f.sample_id == "s3" and f.index == 0]
    assert first.left.endswith("num_tokens 12") and first.right.endswith("num_tokens 13")
    right = [other(left[0], position_ids=None, attention_mask=None)]
    said = "not compared: attention_mask, position_ids: not recorded in train (1 of 1 samples)"
    assert said in compare(left[:1], right).lines()
    wanted = "required, but not compared: position_ids: not recorded in train (1 of 1 samples)"
    assert wanted in compare(left[:1], right, require=("position_ids",)).lines()
    left[0].processor = {"image": {f"a{i}": i for i in range(500)}}
    lines = compare(left[:1], right).lines()
    assert len(lines) < 20 and max(map(len, lines)) <= 120
    limits = [settings(image={"max_pixels": 50176 + k}) for k in (0, 1)]  # one cause, two evidences
    right = [episode(grid=(1, 4, 4), sample_id=f"s{k}", processor=limits[k]) for k in (0, 1)]
    assert compare(planted(2)[0], right).lines().count("max_pixels in 2 samples:") == 1


# ---- out of JSON -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def document():
    left, right = drawn.sides()
    report = compare(left, right)
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
    # `mmpack parity --json` writes what JSON lacks as null
    missing = whole | {"drift": drift.to_dict() | {"k3": None}}
    assert np.isnan(report_of(missing, "here")[1].k3)
    for cause in sorted(p.parent.name for p in drawn.CAUSES.glob("*/rollout.jsonl")):
        sides = (mp.read_trace(drawn.CAUSES / cause / f"{n}.jsonl") for n in ("rollout", "train"))
        report = compare(*map(list, sides))
        found, _ = report_of(json.loads(report.to_json()), "here")
        assert found.to_json() == report.to_json() and found.lines() == report.lines()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("ok",), "yes", "bool is str"),
        (("findings",), {}, "is dict"),
        (("findings", 0), [], "Finding is list"),
        (("findings", 0, "span"), [1], "has 1 values"),
        (("causes",), {"max_pixels": "many"}, "int is str"),
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
        ("[1" + "0" * 5000 + "]", "beyond 64 bits"),
        ("[NaN]", "it holds NaN"),
        ("[" * 10**6, "nested too deep"),
        ("{}", "holds no parity report"),
    ):
        path.write_text(text)
        with pytest.raises(ArgumentError, match=said):
            read_report(path)
    with pytest.raises(ArgumentError, match="can't be read"):
        read_report(tmp_path / "none.json")
    assert not is_report(None)
