"""The pairs that upstream code made (`fixtures/causes`): each cause is named, and never without its evidence."""

from pathlib import Path

import numpy as np
import pytest

import mmpack as mp
from mmpack.parity.fixes import FIXES, UNKNOWN

ROOT = Path(__file__).resolve().parent.parent.parent
TRACES = ROOT / "fixtures/causes"
CAUSES = [cause for cause in FIXES if cause != UNKNOWN and (TRACES / cause).is_dir()]
BRINGS = {"truncated_medium": {"truncated"}}  # a cut through a medium is a cut


def sides(cause):
    return [list(mp.read_trace(TRACES / cause / f"{n}.jsonl")) for n in ("rollout", "train")]


def pair(cause):
    return [samples[0] for samples in sides(cause)]


def causes(left, right, **keywords):
    return list(mp.compare([left], [right], **keywords).causes)


@pytest.mark.parametrize("cause", CAUSES)
def test_each_pair_has_its_cause_alone(cause):
    left, right = sides(cause)
    expected = {cause} | BRINGS.get(cause, set())
    assert set(mp.compare(left, right).causes) == set(mp.compare(right, left).causes) == expected
    for finding in mp.compare(left, right).findings:
        assert finding.evidence and finding.fix


@pytest.mark.parametrize("cause", CAUSES)
def test_a_side_against_itself_has_only_what_breaks_rules(cause):
    """No difference, no finding; some causes break a rule on each side by itself."""
    for sample, again in zip(pair(cause), pair(cause), strict=True):
        for finding in mp.compare([sample], [again]).findings:
            assert finding.cause == cause or finding.evidence.startswith("MM")
        if mp.validate([sample]) == []:
            assert mp.compare([sample], [again]).total_findings == 0


@pytest.mark.parametrize("cause", [*CAUSES, UNKNOWN])
def test_each_report_holds_what_parity_says_now(cause):
    said = (TRACES / cause / "report.txt").read_text(encoding="utf-8")
    report = mp.compare(*sides(cause))
    assert FIXES[cause] in said and report.lines()[1:]
    for line in report.lines()[1:]:
        assert line in said


def no_settings(sample):
    sample.processor = sample.processor_fingerprint = None


def no_template_hash(sample):
    sample.processor["chat_template"] = None


def no_text_hash(sample):
    sample.metadata = {}


def no_finish_reason(sample):
    sample.finish_reason = None


def lacking(*names):
    def change(sample):
        for medium in sample.media:
            for name in names:
                setattr(medium, name, None)

    return change


def renamed(sample):
    for medium in sample.media:
        medium.media_id, medium.source = f"image:{medium.content_hash[:16]}", None


def looks(sample):
    """No thumbnails, no formats."""
    for medium in sample.media:
        medium.metadata.pop("picture", None)


def renamed_looks(sample):
    renamed(sample)
    looks(sample)


def no_padding(sample):
    sample.metadata.pop("padding", None)


def doubled_positions(sample):
    """Positions that no rule gives."""
    sample.position_ids = sample.position_ids * 2


@pytest.mark.parametrize(
    ("cause", "lose"),
    [
        ("max_pixels", no_settings),
        ("chat_template", no_template_hash),
        ("retokenized_response", no_text_hash),
        ("stop_token", no_finish_reason),
        ("exif_rotation", lacking("exif_orientation")),
        ("alpha", looks),
        ("jpeg_reencode", looks),
        ("video_budget", no_settings),
        ("resize_twice", renamed_looks),
        ("padding_positions", no_padding),
    ],
)
def test_without_its_evidence_a_cause_is_only_possible(cause, lose):
    left, right = pair(cause)
    for sample in (left, right):
        lose(sample)
    report = mp.compare([left], [right])
    assert list(report.causes) == [UNKNOWN]
    possible = [f.evidence for f in report.findings if "possible: " in f.evidence]
    assert any(cause in evidence.partition("possible: ")[2] for evidence in possible)


@pytest.mark.parametrize("cause", ["alpha", "jpeg_reencode", "exif_rotation"])
def test_a_picture_that_no_name_knows_is_known_by_its_look(cause):
    left, right = pair(cause)
    for sample in (left, right):
        renamed(sample)
    assert causes(left, right) == [cause]


def test_a_difference_that_fits_no_cause_is_unknown_with_what_was_seen():
    left, right = pair("position_rule")
    doubled_positions(right)
    (finding,) = mp.compare([left], [right]).findings
    assert finding.cause == UNKNOWN
    assert finding.evidence == "positions fit no known rule in train"


def test_which_rule_each_side_follows_and_from_where():
    left, right = pair("position_rule")
    report = mp.compare([left], [right])
    unlike = np.flatnonzero((left.position_ids != right.position_ids).any(axis=0))
    sentence = (
        f"positions differ from token {unlike[0]} on: rollout follows `max`, train follows `grid`"
    )
    assert report.first.index == unlike[0]
    assert report.first.evidence == sentence
    assert sentence in "\n".join(report.lines())
    assert sentence in report.to_json()
    assert sentence in report.to_html()


def test_a_tokenizer_tells_what_no_hash_does():
    left, right = pair("retokenized_response")
    for sample in (left, right):
        no_text_hash(sample)
    whole = {id(s): s.input_ids[s.loss_indices].tolist() for s in (left, right)}
    same, other = (lambda ids: "one text"), (lambda ids: str(list(ids)))
    assert len({tuple(ids) for ids in whole.values()}) == 2
    assert causes(left, right, decode=same) == ["retokenized_response"]
    assert causes(left, right, decode=other) == [UNKNOWN]
