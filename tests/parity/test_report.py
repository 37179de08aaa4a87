"""The report as lines, JSON and HTML, with ids and settings that try to break out of them."""

import json
from html.parser import HTMLParser

from drift import episode, other, settings

import mmpack as mp
from mmpack.parity.compare import compare

EVIL = "<script>alert(1)</script>\n\x1b[31m\u202e"


def evil_report():
    left = other(episode(), sample_id=EVIL)
    right = other(episode(grid=(1, 4, 4)), sample_id=EVIL)
    left.processor = settings(chat_template=EVIL)
    return compare([left], [right])


def test_a_finding_is_one_line():
    for line in evil_report().lines():
        assert line.isprintable()


def test_a_finding_says_where_what_why_and_how():
    right = episode(grid=(1, 4, 4), processor=settings(image={"max_pixels": 50176}))
    text = str(compare([episode()], [right]).first)
    assert text.startswith("sample s0: input_ids at 8 [4, 16): rollout: 12 placeholders")
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
    assert isinstance(report, mp.ParityReport)


def test_more_findings_than_lines():
    left = [other(episode(), sample_id=f"s{i}") for i in range(9)]
    right = [other(episode(system=(9,)), sample_id=f"s{i}") for i in range(9)]
    lines = compare(left, right).lines(limit=2)
    assert lines[-1].endswith("findings more")
