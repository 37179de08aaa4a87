"""Actions from token ids: their tokens, the tokens of their numbers, what is malformed, hostile texts."""

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.samples import make_sample

import mmpack as mp
from mmpack.schema.actions import Click, Swipe, Type, read_action
from mmpack.trajectory import (
    action_text,
    annotate_actions,
    check_actions,
    find_actions,
    loss_kinds,
)

CLICK = '<tool_call>{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [12, 34]}}</tool_call>'
WAIT = '<tool_call>{"name": "computer_use", "arguments": {"action": "wait", "time": 1}}</tool_call>'
BROKEN = '<tool_call>{"name": "computer_use", "arguments": {"action": "fly"}}</tool_call>'
OUTSIDE = CLICK.replace("[12, 34]", "[85, 1]")


class Bytes:
    """A tokenizer of pieces of text: ids count the pieces that it has cut."""

    def __init__(self):
        self.pieces = []

    def ids(self, text, size=1):
        raw = text.encode("utf-8", "replace")
        cut = [raw[k : k + size] for k in range(0, len(raw), size)]
        self.pieces += cut
        return list(range(len(self.pieces) - len(cut), len(self.pieces)))

    def __call__(self, token):
        return self.pieces[token]


def turns(*texts, size=1, picture=True, think_before="", **fields):
    """A sample of a picture of 84 × 56 and turns of these texts, observations between them; and its tokenizer."""
    tok = Bytes()
    parts = [("text", tok.ids("go"))]
    parts += [("image", (1, 4, 6), "shot")] if picture else []
    for k, text in enumerate(texts):
        parts.append(("observation", tok.ids("seen" + think_before), k, "environment"))
        parts.append(("response", tok.ids(text, size), k))
    sample = make_sample(parts, **fields)
    table = tok.pieces
    return sample, lambda i: table[i] if i < len(table) else b"?"


def pointing(sample):
    """The action that each region is of: the one whose tokens hold it."""
    spans = sample.action_spans
    return [
        next(i for i, s in enumerate(spans) if s.start <= r.start and r.stop <= s.stop)
        for r in sample.region_spans
    ]


def text_of(sample, tok, span):
    return b"".join(tok(int(i)) for i in sample.input_ids[span.start : span.stop]).decode(
        "utf-8", "replace"
    )


@pytest.mark.parametrize("size", [1, 3, 50])
def test_spans_hold_the_call_and_its_numbers(size):
    sample, tok = turns("深" + CLICK + " ok", WAIT, size=size, coordinate_system="absolute_pixels")
    found = find_actions(sample, tok)
    first, second = found.spans
    assert read_action(first.action) == Click((12, 34)) and (first.turn, second.turn) == (0, 1)
    assert CLICK in text_of(sample, tok, first) and WAIT in text_of(sample, tok, second)
    for span, text in ((first, CLICK), (second, WAIT)):  # no token less would do
        assert text not in text_of(sample, tok, mp.schema.ActionSpan(span.start + 1, span.stop, {}))
        assert text not in text_of(sample, tok, mp.schema.ActionSpan(span.start, span.stop - 1, {}))
    (region,) = found.regions
    assert (region.point, region.media_index) == ((12.0, 34.0), 0)
    assert region.metadata == {"field": "point"}
    assert "[12, 34]" in text_of(sample, tok, region)
    assert region.stop - region.start <= -(-len("[12, 34]") // size) + 1
    assert [s.value for s in found.scores] == [1.0, 1.0] and found.problems == []


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        ("<tool_call>{}", "MM211", "not closed"),
        ("<tool_call>{'a': 1}</tool_call>", "MM211", "not JSON"),
        ("<tool_call>{}</tool_call>", "MM208", "name is missing"),
        (BROKEN, "MM208", "'fly'"),
        (CLICK.replace("12", "NaN"), "MM211", "NaN"),
        (CLICK.replace('"action"', '"action": "wait", "action"'), "MM211", "twice"),
        (OUTSIDE, "MM209", "outside [0, 84] × [0, 56] of absolute_pixels"),
    ],
)
def test_malformed_actions_are_a_score_and_a_problem(text, code, why):
    sample, tok = turns("ok " + text, coordinate_system="absolute_pixels")
    found = find_actions(sample, tok, malformed=-1)
    (problem,), (score,) = found.problems, found.scores
    assert found.spans == found.regions == [] and problem.code == code
    assert why in problem.message and "Fix: " in str(problem) and "\n" not in str(problem)
    span = score.scope["span"]
    assert (score.name, score.value) == ("action_format", -1.0) and list(problem.span) == span
    assert text_of(sample, tok, mp.schema.ActionSpan(*span, {})) == text
    kinds = loss_kinds(sample, tok).loss_spans
    assert [(s.kind, s.start) for s in kinds] == [("response", span[0] - 3), ("action", span[0])]
    sample.rewards = found.scores
    assert mp.validate(sample) == []


def test_required_actions():
    sample, tok = turns("nothing", WAIT)
    assert find_actions(sample, tok).scores[0].value == 1.0
    found = find_actions(sample, tok, required=True)
    assert (found.scores[0].value, found.scores[0].scope) == (0.0, {"turn": 0})
    assert [p.code for p in found.problems] == ["MM211"]
    for span in sample.loss_spans:
        span.turn = None
    scope = find_actions(sample, tok, required=True).scores[0].scope
    assert scope == {"span": [sample.loss_spans[0].start, sample.loss_spans[0].stop]}


@pytest.mark.parametrize(
    ("text", "before", "expected"),
    [
        (f"<think>a {WAIT}</think>b{WAIT}", "", "rba"),
        (f"a {WAIT}</think>b{WAIT}", "<think>\n", "rba"),  # opened by the prompt
        ("<think>cut off", "", "r"),
        (action_text(Type("<think> </think>"), "computer_use") + "b", "", "ab"),
        (f"{WAIT}<think>a</think>{WAIT}{WAIT}", "", "araa"),
        (f"{WAIT}</think>", "", "ab"),
    ],
)
def test_thoughts_and_calls(text, before, expected):
    sample, tok = turns(text, think_before=before)
    names = {"reasoning": "r", "action": "a", "response": "b"}
    spans = [s for s in loss_kinds(sample, tok).loss_spans if s.start < s.stop]
    merged = expected.replace("aa", "a")
    assert "".join(names[s.kind] for s in spans) == merged
    assert len(find_actions(sample, tok).spans) == expected.count("a")
    if before == "" and "think" in text:
        assert all(s.kind != "reasoning" for s in loss_kinds(sample, tok, think=None).loss_spans)


def test_annotated_samples_keep_what_they_have():
    sample, tok = turns("a" + CLICK, BROKEN + WAIT)
    sample.verifiers = [mp.Score("mine", 1.0)]
    done = annotate_actions(sample, tok, system="normalized_1000")
    assert [s.action["kind"] for s in done.action_spans] == ["click", "wait"]
    assert [s.value for s in done.verifiers] == [1.0, 1.0, 0.0, 1.0]
    assert done.verifiers[2].metadata["code"] == "MM208"
    assert (
        done.region_spans[0].point == (12.0, 34.0) and done.coordinate_system == "normalized_1000"
    )
    assert sample.action_spans is sample.region_spans is sample.coordinate_system is None
    again = annotate_actions(done, tok, system="normalized_1000")
    assert again == done and mp.validate(done) == []
    assert check_actions(done, tok, system="normalized_1000") == []
    first = annotate_actions(sample, tok, system="normalized_1000", scores=None)
    assert len(first.verifiers) == 1
    paid = annotate_actions(sample, tok, system="absolute_pixels", scores="rewards", malformed=-1)
    assert [s.value for s in paid.rewards] == [1.0, -1.0, 1.0] and mp.validate(paid) == []
    back = mp.Sample.from_dict(json.loads(json.dumps(done.to_dict())))
    assert back == done


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("system", ["absolute_pixels", "normalized_1000", "normalized_1"])
def test_points_are_converted_to_the_systems_of_the_sample(family, system):
    """What the family writes, by default, whatever the sample's targets are in."""
    sample, tok = turns(CLICK, family=family, coordinate_system=system)
    done = annotate_actions(sample, tok)
    patch = {"qwen2_5_vl": 14, "qwen3_vl": 16}[family]
    width, height = 6 * patch, 4 * patch
    x, y = (12 / width, 34 / height) if family == "qwen2_5_vl" else (12 / 1000, 34 / 1000)
    sides = {"absolute_pixels": (width, height), "normalized_1000": (1000, 1000)}.get(
        system, (1, 1)
    )
    expected = pytest.approx((x * sides[0], y * sides[1]), rel=1e-14)
    assert done.coordinate_system == system and mp.validate(done) == []
    assert done.region_spans[0].point == expected
    assert tuple(done.action_spans[0].action["point"]) == expected
    assert annotate_actions(done, tok) == done and check_actions(done, tok) == []
    for there in ("absolute_pixels", "normalized_1", "normalized_1000"):
        moved = mp.grounding.to_system(done, there)
        assert moved.action_spans[0].action["point"] == list(moved.region_spans[0].point)
        assert check_actions(moved, tok) == [] == mp.validate(moved)
        moved.action_spans[0].action["point"][0] += 1e-3
        assert [p.code for p in check_actions(moved, tok)] == ["MM210"]
    said = annotate_actions(sample, tok, system=system)
    assert said.region_spans[0].point == (12.0, 34.0) if system != "normalized_1" else True


def test_turns_that_touch_are_read_apart():
    """A call that one turn begins and another ends is none; loss spans of one turn that touch are one text."""
    sample, tok = turns(CLICK, coordinate_system="absolute_pixels")
    (span,) = sample.loss_spans
    half = span.start + 30
    first, second = mp.LossSpan(span.start, half, turn=0), mp.LossSpan(half, span.stop, turn=0)
    sample.loss_spans = [first, second]
    assert len(find_actions(sample, tok).spans) == 1
    second.turn = 1
    found = find_actions(sample, tok)
    assert found.spans == [] and [p.span for p in found.problems] == [(span.start, half)]


def test_which_screenshot():
    tok = Bytes()
    parts = [("text", [10**5]), ("response", tok.ids(CLICK), 0), ("image", (1, 4, 6), "a")]
    parts += [
        ("response", tok.ids(CLICK), 1),
        ("image", (1, 8, 8), "b"),
        ("response", tok.ids(CLICK), 2),
    ]
    sample = make_sample(parts)
    bytes_of = lambda i: tok(i) if i < len(tok.pieces) else b"?"  # noqa: E731
    found = find_actions(sample, bytes_of)
    assert [r.media_index for r in found.regions] == [0, 1] and len(found.spans) == 3
    assert pointing(annotate_actions(sample, bytes_of)) == [1, 2]
    sample.coordinate_system = "normalized_1"  # the first click is on no picture
    found = find_actions(sample, bytes_of)
    assert [(p.code, p.span[0]) for p in found.problems] == [("MM209", sample.loss_spans[0].start)]
    assert [r.point for r in found.regions] == [(12 / 84, 34 / 56), (12 / 112, 34 / 112)]


def test_swipes_have_two_places():
    text = action_text(Swipe((1, 2), (30, 40)), "mobile_use")
    sample, tok = turns(text, coordinate_system="absolute_pixels")
    regions = find_actions(sample, tok, "mobile_use").regions
    assert [text_of(sample, tok, r) for r in regions] == ["[1, 2]", "[30, 40]"]
    assert [r.metadata["field"] for r in regions] == ["point", "to"]
    sample, tok = turns(
        'x {"kind": "drag", "to": [3, 4], "point": [1, 2]} y', coordinate_system="absolute_pixels"
    )
    regions = find_actions(sample, tok, "json").regions
    assert [text_of(sample, tok, r) for r in regions] == ["[3, 4]", "[1, 2]"]


def test_the_place_is_the_arguments_and_not_its_copy_in_a_string():
    call = {"x": '"coordinate": [9, 9]', "action": "left_click", "coordinate": [1, 2], "y": [9, 9]}
    text = f"<tool_call>{json.dumps({'name': 'computer_use', 'arguments': call})}</tool_call>"
    sample, tok = turns(text, coordinate_system="absolute_pixels")
    (region,) = find_actions(sample, tok).regions
    assert (
        text_of(sample, tok, region) == "[1, 2]" and region.start > sample.loss_spans[0].start + 90
    )


def test_actions_that_do_not_decode_to_what_they_say():
    sample, tok = turns(CLICK + WAIT, "words")
    sample = annotate_actions(sample, tok, system="absolute_pixels")
    click, wait = sample.action_spans
    for change, why in (
        ({"action": {"kind": "click", "point": [12, 35]}}, "says click, with other"),
        ({"action": {"kind": "wait", "seconds": 1}}, "decodes to click, says wait"),
        ({"stop": wait.stop}, "decodes to 2 actions"),
        ({"stop": click.stop - 1}, "decodes to no action: action is not closed"),
        ({"action": {"kind": "fly"}}, "decodes to no action: action.kind 'fly'"),
    ):
        span = mp.schema.ActionSpan.from_dict(click.to_dict() | change)
        sample.action_spans = [span, wait]
        (problem,) = check_actions([sample], tok)
        assert problem.code == "MM210" and why in problem.message
        assert problem.field == "action_spans[0]"
    sample.action_spans = [mp.schema.ActionSpan(click.start, click.stop, {"mine": 1}), wait]
    assert check_actions(sample, tok) == []


HOSTILE = {
    "deep": "<tool_call>" + "[" * 100_000 + "]" * 100_000 + "</tool_call>",
    "deep objects": "<tool_call>" + '{"a":' * 100_000 + "</tool_call>",
    "a long string": '<tool_call>{"name": "' + "x" * 10**6 + '", "arguments": {}}</tool_call>',
    "members": "<tool_call>{"
    + ",".join(f'"n{k // 2}": 1' for k in range(3 * 10**4))
    + "}</tool_call>",
    "openings": "<tool_call>" * 10_000,
    "thoughts and calls": "<think></think><tool_call>" * 5_000,
    "quotes": '<tool_call>"' * 5_000 + "</tool_call>",
    "kinds": '{"kind":' * 10_000,
    "backslashes": "<tool_call>{" + "\\" * 200_000 + "}</tool_call>",
    "digits": "<tool_call>" + "9" * 200_000 + "</tool_call>",
    "many": "<tool_call>{}</tool_call>" * 2_000,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("form", ["computer_use", "json"])
def test_hostile_texts(name, form):
    sample, tok = turns(HOSTILE[name], size=100, picture=False)
    began = time.process_time()
    found = find_actions(sample, tok, form, required=True)
    done = annotate_actions(sample, tok, form)
    assert time.process_time() - began < 3
    assert len(found.problems) == sum(s.value == 0 for s in found.scores)
    if name == "a long string" and form == "computer_use":
        assert len(found.spans) == 1  # a call of a tool with a long name
    else:
        assert found.problems and found.spans == []
    assert mp.validate(done) == []


@given(raw=st.binary(max_size=60), form=st.sampled_from(["computer_use", "mobile_use", "json"]))
def test_bytes_that_are_no_text(raw, form):
    pieces = [raw[k : k + 1] for k in range(len(raw))]
    words = [
        b"go",
        b"<tool_call>",
        *pieces,
        b"</tool_call>",
        b'{"kind": "',
        *pieces,
        b'"}',
        *pieces,
    ]
    spans = [mp.LossSpan(1, len(words), turn=0)]
    sample = mp.Sample("a", "p", "qwen2_5_vl", np.arange(len(words)), [], [], spans)
    found = find_actions(sample, words.__getitem__, form)
    assert len(found.scores) == len(found.spans) + len(found.problems) >= 1
    assert mp.validate(annotate_actions(sample, words.__getitem__, form)) == []
