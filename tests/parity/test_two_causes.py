"""Two causes in one sample: both are named, for every pair of causes; or it is written here why one hides the other."""

from itertools import combinations
from pathlib import Path

import pytest
from support.planting.episodes import decode
from support.planting.mechanisms import HEARD, HIDES, MECHANISMS, broken_by, hear

import mmpack as mp
from mmpack.parity.fixes import FIXES, UNKNOWN

CAUSES = Path(__file__).resolve().parents[2] / "fixtures/causes"
BRINGS = {"truncated_medium": {"truncated"}}
# what one difference can't distinguish is listed as possible
EITHER = {
    ("retokenized_response", "rewritten_response"): "possible: retokenized_response",
    ("retokenized_response", "stop_token"): "possible: retokenized_response",
    # the recorded hash is of the whole responses' ids
    ("retokenized_response", "truncated"): "possible: retokenized_response",
    ("retokenized_response", "truncated_medium"): "possible: retokenized_response",
    ("retokenized_response", "loss_mask_shift"): "possible: retokenized_response",
    ("retokenized_response", "turn_without_loss"): "retokenized_response, rewritten",
    ("rewritten_response", "turn_without_loss"): "loss_mask_shift, turn_without_loss",
}
EITHER = {frozenset(pair): said for pair, said in EITHER.items()}


def test_every_cause_is_planted():
    """In pairs that upstream code made (test_cause_pairs.py), by a mechanism, or both."""
    pairs = {path.parent.name for path in CAUSES.glob("*/rollout.jsonl")}
    assert pairs | MECHANISMS.keys() | HEARD.keys() >= set(FIXES) >= MECHANISMS.keys()
    assert mp.compare(*([s] for s in broken_by())).ok and mp.compare([hear()], [hear()]).ok


def both(left, right):
    """Causes, the same in both directions, and what is said of them."""
    report = mp.compare([left], [right])
    assert mp.compare([right], [left]).causes.keys() == report.causes.keys()
    return set(report.causes), " | ".join(f.evidence for f in report.findings)


@pytest.mark.parametrize("cause", MECHANISMS)
def test_one(cause):
    assert both(*broken_by(cause))[0] == {cause} | BRINGS.get(cause, set())


@pytest.mark.few(120)
@pytest.mark.parametrize(("one", "two"), list(combinations(MECHANISMS, 2)))
def test_two(one, two):
    found, said = both(*broken_by(one, two))
    if (pair := frozenset({one, two})) in EITHER:
        assert UNKNOWN in found and EITHER[pair] in said
        return
    hidden = {b for a, b in HIDES if {a, b} == {one, two}}
    brought = BRINGS.get(one, set()) | BRINGS.get(two, set())
    assert found == ({one, two} - hidden) | brought


def test_a_tokenizer_distinguishes_turns():
    left, right = broken_by("retokenized_response", "stop_token")
    report = mp.compare([left], [right], decode=decode)
    assert set(report.causes) == {"retokenized_response", "stop_token"}


def test_two_causes_of_an_audio():
    for pair in [(name,) for name in HEARD] + list(combinations(HEARD, 2)):
        changes = {k: v for name in pair for k, v in HEARD[name].items()}
        assert both(hear(), hear(**changes))[0] == set(pair)
