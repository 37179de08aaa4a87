"""What a text says of places: every form, every way to get it wrong, and texts made to be slow."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpack.grounding.text import FORMS, Malformed, read_places

BOX, REF = "<|box_start|>{}<|box_end|>", "<|object_ref_start|>{}<|object_ref_end|>"
QUAD = "<|quad_start|>{}<|quad_end|>"


def seen(text, forms=FORMS):
    """What each place is, short: bbox or point, label; None for a fault."""
    return [
        None if isinstance(x, Malformed) else (x.bbox or x.point, x.label)
        for x in read_places(text, forms)
    ]


@pytest.mark.parametrize(
    "text, expected",
    [
        (BOX.format("(1,2),(30,40)"), [((1, 2, 30, 40), None)]),
        (BOX.format(" ( 1, 2 ) ,\n(30 ,40) "), [((1, 2, 30, 40), None)]),
        (BOX.format("(1.5,2),(30,4e1)"), [((1.5, 2, 30, 40), None)]),
        (BOX.format("[1, 2, 30, 40]"), [((1, 2, 30, 40), None)]),
        (REF.format(" a cat ") + BOX.format("(1,2),(30,40)"), [((1, 2, 30, 40), "a cat")]),
        (
            f"{REF.format('cats')}{BOX.format('(1,2),(3,4)')}{BOX.format('(5,6),(7,8)')} and "
            f"{REF.format('狗')} {BOX.format('(1,1),(2,2)')}",
            [((1, 2, 3, 4), "cats"), ((5, 6, 7, 8), "cats"), ((1, 1, 2, 2), "狗")],
        ),
        (QUAD.format("(1,2),(9,1),(8,7),(2,6)"), [((1, 1, 9, 7), None)]),
        ("<ref>a</ref><box>[[1, 2, 3, 4]]</box>", [((1, 2, 3, 4), "a")]),
        ("<box>[[1, 2, 3, 4], [5, 6, 7, 8]]</box>", [((1, 2, 3, 4), None), ((5, 6, 7, 8), None)]),
        ("<point>(500, 300)</point>", [((500, 300), None)]),
        ("<point>[[5, 3], [1, 2]]</point>", [((5, 3), None), ((1, 2), None)]),
        ('[{"bbox_2d":[1,2,3,4],"label":"a \\"cat\\""}]', [((1, 2, 3, 4), 'a "cat"')]),
        ('{"label": "dog", "point_2d": [1, 2.5]}', [((1, 2.5), "dog")]),
        ('{"bbox_2d": [1, 2, 3, 4], "text_content": "Σ"}', [((1, 2, 3, 4), "Σ")]),
        (
            'Here:\n```json\n[\n\t{"bbox_2d": [1, 2, 3, 4], "label": "a"},\n\t{"bbox_2d": [5, 6, 7, 8]}\n]\n```',
            [((1, 2, 3, 4), "a"), ((5, 6, 7, 8), None)],
        ),
        ('{"objects": {"a": [{"bbox_2d": [1, 2, 3, 4]}]}}', [((1, 2, 3, 4), None)]),
        ('{a set} [see {"bbox_2d": [1, 2, 3, 4]}', [((1, 2, 3, 4), None)]),
        ("click (12, 34).", [((12, 34), None)]),
        ("[ -1 , .5 ]", [((-1, 0.5), None)]),
        ("at [1, 2, 3, 4]", [((1, 2, 3, 4), None)]),
        ("f(1, 2, 3) g(x, 2) (1 2) (1, 2] [1; 2] (1,, 2) 1, 2", []),
    ],
)
def test_forms(text, expected):
    assert seen(text) == expected


@pytest.mark.parametrize(
    "text, why",
    [
        ("<|box_start|>(1,2),(3,4)", "never closed"),
        ("<|box_start|>(1,2),(3,4)<|quad_end|>", "closes nothing"),
        ("<|box_start|>(1,2),(3,4)</box>", "closes nothing"),
        (BOX.format("(1,2),(3,4"), "holds"),
        (BOX.format("(1,2),(3)"), "holds"),
        (BOX.format("(1,2),(3,4),(5,6)"), "holds"),
        (BOX.format("(1.2.3,4),(5,6)"), "holds"),
        (BOX.format("(1,2),(1e999,4)"), "infinite"),
        (BOX.format("(1,2),(nan,4)"), "nan"),
        (BOX.format("(-inf,2),(3,4)"), "infinite"),
        (QUAD.format("(1,2),(3,4)"), "holds"),
        ("<point>1</point>", "holds"),
        ('{"bbox_2d": [1, 2, 3', "ends in the middle"),
        ('{"bbox_2d": [1, 2, 3]}', "not a list of 4"),
        ('{"bbox_2d": [[1, 2], [3, 4]]}', "not a list of 4"),
        ('{"point_2d": [1, 2, 3]}', "not a list of 2"),
        ('{"bbox_2d": [1, 2, 3, -1e999]}', "infinite"),
        ('{"bbox_2d": [1, 2, 3, 012]}', "not JSON"),
        ('{"bbox_2d": (1, 2, 3, 4)}', "not JSON"),
        ("{'bbox_2d': [1, 2, 3, 4]}", "single quotes"),
        ('{"bbox_2d": [1, 2, 3, 4], "bbox_2d": [1, 2, 3, 5]}', "twice"),
        ('{"bbox_2d": [1, 2, 3, 4], "label": "\\q"}', "escape"),
        ("(1e999, 2)", "infinite"),
    ],
)
def test_faults(text, why):
    (found,) = read_places(text)
    assert isinstance(found, Malformed) and why in found.why
    assert 0 <= found.start < found.stop <= len(text)


coordinate = st.integers(0, 10**6) | st.floats(-1e6, 1e6).map(lambda v: round(v, 3))
label = st.none() | st.text(max_size=12)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.lists(coordinate, min_size=4, max_size=4), label), max_size=5), st.data()
)
def test_json_is_read_as_pythons_json_reads_it(boxes, data):
    written = [{"label": lab, "bbox_2d": box} for box, lab in boxes]
    ascii_only, indent = data.draw(st.booleans()), data.draw(st.sampled_from([None, 0, 2]))
    text = f"Sure.\n```json\n{json.dumps(written, ensure_ascii=ascii_only, indent=indent)}\n```"
    found = read_places(text, ("json",))
    assert [(list(x.bbox), x.label) for x in found] == [
        ([float(v) for v in b], lab) for b, lab in boxes
    ]
    for place in found:
        assert json.loads(text[place.start : place.stop])["bbox_2d"] == [
            json.loads(text[a:b]) for a, b in place.numbers
        ]


HOSTILE = {
        "brackets": "(",
        "lists": "[",
        "objects": "{",
        "nested": '{"a":',
        "boxes in boxes": '[{"bbox_2d":',
        "quotes": '"',
        "escapes": '{"\\"',
        "opened": "<|box_start|>",
        "digits": "1",
        "open numbers": "(1,",
        "key and comma": '{"bbox_2d":1,',
        "lists of one": "[ ",
        "backslashes": "\\",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_twice_the_text_takes_about_twice_the_time(name):
    """30,000 characters: what is not linear takes more than fifty times as long."""
    for before, after in [("", ""), ("<box>", "</box>"), ('{"bbox_2d": ["', "")]:
        text = before + (HOSTILE[name] * 30_000)[:30_000] + after
        started = time.process_time()
        last = (-1, -1)
        for found in read_places(text):
            assert last <= (found.start, found.stop) and found.start < found.stop <= len(text)
            last = (found.start, found.stop)
        assert time.process_time() - started < 3


def test_deep_nesting_does_not_recurse():
    deep = 3_000
    inner = '{"bbox_2d": [1, 2, 3, 4]}'
    assert seen('{"a":' * deep + inner + "}" * deep) == [((1, 2, 3, 4), None)]
    assert seen("[" * deep + inner + "]" * deep) == [((1, 2, 3, 4), None)]


def test_a_form_that_is_not_asked_for_is_not_read():
    text = BOX.format("(1,2),(3,4)") + '{"bbox_2d": [5, 6, 7, 8]} (9, 9)'
    assert seen(text, ("markers",)) == [((1, 2, 3, 4), None)]
    assert seen(text, ("json",)) == [((5, 6, 7, 8), None)]
    assert seen(text, ("json", "plain"))[-1] == ((9, 9), None)
    assert len(seen(text)) == 3
