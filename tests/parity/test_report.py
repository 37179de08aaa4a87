"""The report as lines, JSON and HTML, with ids and settings that try to break out of them."""

import json
from html.parser import HTMLParser

import pytest
from support.planting.episodes import episode, other, settings

import mmpack as mp
from mmpack import compare

EVIL = "<script>alert(1)</script>\n\x1b[31m\u202e"


def evil_report():
    left = other(episode(), sample_id=EVIL)
    right = other(episode(grid=(1, 4, 4)), sample_id=EVIL)
    left.processor = settings(chat_template=EVIL)
    return compare([left], [right])


def test_a_finding_is_one_line():
    report = evil_report()
    for line in [*report.lines(), *map(str, report.findings)]:
        assert line.isprintable()
    assert max(map(len, report.lines())) <= 120


def test_a_finding_says_where_what_why_and_how():
    right = episode(grid=(1, 4, 4), processor=settings(image={"max_pixels": 50176}))
    text = str(compare([episode()], [right]).first)
    assert text.startswith("sample s0: input_ids at 8, tokens [4, 16): rollout: 12 placeholders")
    assert "max_pixels (processor.image.max_pixels: rollout 1003520, train 50176)" in text
    assert text.endswith("Fix: Set the same min_pixels and max_pixels on both sides.")


def test_json():
    report = evil_report()
    parsed = json.loads(report.to_json())
    assert parsed == json.loads(json.dumps(report.to_dict()))
    assert parsed["ok"] is False and parsed["compared"] == 1
    assert parsed["first"] == parsed["findings"][0]
    assert set(parsed["first"]) == {
        "sample_id",
        "field",
        "index",
        "span",
        "left",
        "right",
        "cause",
        "evidence",
        "fix",
        "frames",
    }
    assert report.to_json() == evil_report().to_json()


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def test_html_is_self_contained_and_escaped():
    report = evil_report()
    page = Page()
    page.feed(report.to_html())
    names = {tag for tag, _ in page.tags}
    assert "table" in names and not names & {"script", "img", "link", "iframe"}
    assert not any("src" in attrs or "href" in attrs for _, attrs in page.tags)
    text = " ".join(page.text)
    assert "<script>alert(1)</script>" in text
    assert report.first.evidence.split(":")[0] in text


def test_summary():
    assert compare([episode()], [episode()]).summary() == "parity ok: 1 sample compared, 0 findings"
    report = compare([episode()], [other(episode(), sample_id="s1")])
    assert "1 sample missing in rollout; 1 sample missing in train" in report.summary()
    assert str(report) == report.summary()
    assert isinstance(report, mp.ParityReport)


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


@pytest.mark.parametrize("count", [1, 3, 200])
def test_each_cause_is_shown_once_in_lines_of_120(count):
    report = compare(*planted(count))
    lines = report.lines()
    assert max(map(len, lines)) <= 120
    text = "\n".join(lines)
    for odd in ("has has", "see evidence", "1 samples", " 1 findings", "none is"):
        assert odd not in text.replace("of 1 samples", "")
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


def test_every_field_of_a_cause_before_a_second_sample():
    lines = compare(*planted(200)).lines()
    start = lines.index("max_pixels in 40 samples:")
    group = [line for line in lines[start + 1 : start + 8] if line.startswith("  sample ")]
    assert all(line.startswith("  sample s0: ") for line in group) and len(group) > 1


def test_the_page_tells_a_cause_once_too():
    report = compare(*planted(3))
    page = Page()
    page.feed(report.to_html())
    text = " ".join(page.text)
    assert "see evidence" not in text and "has has" not in text
    for finding in report.findings:
        # once in the list of causes, once at its sample
        assert text.count(finding.fix) <= 2 * len({f.sample_id for f in report.findings})
        assert text.count(finding.evidence) == 1


def test_media_that_look_alike_show_what_differs():
    left, right = planted(4)
    (first,) = [f for f in compare(left, right).findings if f.sample_id == "s3" and f.index == 0]
    assert first.left.endswith("num_tokens 12") and first.right.endswith("num_tokens 13")


def test_fields_that_lack_for_one_reason_are_one_line():
    left, right = planted(1)
    right = [other(left[0], position_ids=None, attention_mask=None)]
    lines = compare(left, right).lines()
    assert (
        "not compared: attention_mask, position_ids: not recorded in train (1 of 1 samples)"
        in lines
    )
    wanted = "required, but not compared: position_ids: not recorded in train (1 of 1 samples)"
    assert wanted in compare(left, right, require=("position_ids",)).lines()
    left[0].processor = {"image": {f"a{i}": i for i in range(500)}}
    lines = compare(left, right).lines()
    assert len(lines) < 20 and max(map(len, lines)) <= 120


def test_more_findings_than_lines():
    left = [other(episode(), sample_id=f"s{i}") for i in range(9)]
    right = [other(episode(system=(9,)), sample_id=f"s{i}") for i in range(9)]
    lines = compare(left, right).lines(limit=2)
    assert lines[-1].endswith("more findings")
