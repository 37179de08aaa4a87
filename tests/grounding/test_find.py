"""Places from token ids: each number's tokens, only what the policy wrote, and samples that stay valid."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.process import run_python
from support.samples import make_sample

import mmpack as mp
from mmpack.grounding import annotate, find

BOX = "<|box_start|>({},{}),({},{})<|box_end|>"
ANSWER = f"The <|object_ref_start|>cat<|object_ref_end|>{BOX.format(12, 34, 560, 78)} 深."


def test_each_number_is_found_in_qwens_tokens(answered, qwen):
    sample = answered(ANSWER)
    (region,) = find(sample, qwen).regions
    assert (region.bbox, region.label, region.media_index) == ((12, 34, 560, 78), "cat", 0)
    ids = sample.input_ids
    assert qwen.decode(ids[region.start : region.stop]) == BOX.format(12, 34, 560, 78)
    for (start, stop), number in zip(region.metadata["numbers"], (12, 34, 560, 78), strict=True):
        assert qwen.decode(ids[start:stop]) == str(number)  # Qwen has one token per digit
    assert region.metadata["form"] == "markers"


def in_pieces(text, cuts):
    """A sample whose response is cut into tokens at byte `cuts`, and the function from its ids to bytes."""
    raw = text.encode()
    edges = [0, *sorted(set(cuts) & set(range(1, len(raw)))), len(raw)]
    pieces = [raw[a:b] for a, b in pairwise(edges)]
    sample = make_sample([("image", (1, 34, 46), "a"), ("response", np.arange(len(pieces)))])
    return sample, pieces.__getitem__


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_number_has_every_token_that_holds_a_digit_of_it(data):
    numbers = data.draw(st.lists(st.integers(0, 400), min_size=2, max_size=2))
    numbers += [v + data.draw(st.integers(1, 60)) for v in numbers]
    form = data.draw(
        st.sampled_from([BOX, '深{{"bbox_2d": [{}, {}, {}, {}]}}', "is [{},{},{},{}]🙂"])
    )
    text = form.format(*numbers)
    cuts = data.draw(st.lists(st.integers(0, 90), max_size=30))
    sample, bytes_of = in_pieces(text, cuts)
    (region,) = find(sample, bytes_of).regions
    assert region.bbox == tuple(numbers)
    # the oracle: bytes of each token, one by one
    first = sample.loss_spans[0].start
    pieces = [bytes_of(int(i)) for i in sample.input_ids[first:]]
    owner = [first + k for k, piece in enumerate(pieces) for _ in piece]
    raw, at = text.encode(), 0
    for number, span in zip(numbers, region.metadata["numbers"], strict=True):
        at = raw.index(str(number).encode(), at)
        holders = owner[at : at + len(str(number))]
        assert span == [holders[0], holders[-1] + 1]
        at += len(str(number))


def test_only_what_the_policy_wrote(answered, qwen):
    sample = answered("It is at (30, 40).")
    assert [r.point for r in find(sample, qwen).regions] == [(30.0, 40.0)]
    everything = find(sample, qwen, where="all").regions
    assert [r.point for r in everything] == [(1.0, 2.0), (30.0, 40.0)]
    # a place goes on where spans touch, and not over an observation
    one, two = qwen.encode("at (30"), qwen.encode(", 40).")
    parts = [("image", (1, 34, 46), "a"), ("response", one, 0, "reasoning"), ("response", two, 0)]
    assert [r.point for r in find(make_sample(parts), qwen).regions] == [(30.0, 40.0)]
    parts.insert(2, ("observation", qwen.encode("!"), 0))
    assert find(make_sample(parts), qwen).regions == []


def test_the_medium_is_the_last_one_before(qwen):
    said = qwen.encode("(3, 4)")
    parts = [
        ("image", (1, 4, 4), "a"),
        ("response", said),
        ("image", (1, 8, 8), "b"),
        ("response", said),
    ]
    sample = make_sample(parts)
    assert [r.media_index for r in find(sample, qwen).regions] == [0, 1]
    assert [r.media_index for r in find(sample, qwen, media_index=0).regions] == [0, 0]


@pytest.mark.parametrize(
    "text, code",
    [
        (BOX.format(12, 34, 5, 78), "MM310"),
        (BOX.format(12, 34, 12, 78), "MM314"),
        (BOX.format(12, 34, 645, 78), "MM311"),
        ("(12, -3)", "MM311"),
        ('{"bbox_2d": [1, 2, 3', "MM313"),
        ("<|box_start|>(1,2),(3,nan)<|box_end|>", "MM313"),
    ],
)
def test_what_can_t_be_used_is_a_problem_and_the_sample_stays_valid(answered, qwen, text, code):
    sample = answered(f"So {text}")
    found = find(sample, qwen)
    (region,), (problem,) = found.regions, found.problems
    assert problem.code == region.metadata["problem"] == code
    assert problem.span == (region.start, region.stop) and problem.fix
    assert qwen.decode(sample.input_ids[slice(*problem.span)]).strip() == text
    assert region.bbox is region.point is None
    assert mp.validate(annotate(sample, qwen)) == []


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 151_700), min_size=1, max_size=80))
def test_any_ids_leave_a_valid_sample(qwen, ids):
    ids = [i for i in ids if i not in (151655, 151656)] or [5]
    sample = make_sample([("image", (1, 34, 46), "a"), ("response", ids)])
    assert mp.validate(annotate(sample, qwen)) == []


def test_without_a_picture_a_place_is_only_a_problem(qwen):
    sample = make_sample([("text", [5]), ("response", qwen.encode("(3, 4)"))])
    found = find(sample, qwen)
    assert found.regions == [] and [p.code for p in found.problems] == ["MM106"]


def test_what_a_family_writes_is_converted_to_the_sample_s_system(answered, qwen):
    """Qwen3-VL writes thousandths; the targets are in pixels as the model saw them."""
    sample = answered(ANSWER, family="qwen3_vl", grid=(1, 30, 40))  # 640 × 480
    sample.coordinate_system = "absolute_pixels"
    sample.bbox_targets = [mp.schema.BboxTarget((64.0, 48.0, 320.0, 240.0), 0, "cat")]
    marked = annotate(sample, qwen)
    assert marked.coordinate_system == "absolute_pixels"
    assert marked.bbox_targets == sample.bbox_targets
    assert marked.region_spans[0].bbox == (7.68, 16.32, 358.4, 37.44)
    assert sample.region_spans is None and sample.coordinate_system == "absolute_pixels"
    assert annotate(marked, qwen) == marked  # nothing twice
    said = annotate(sample, qwen, system="absolute_pixels")
    assert said.region_spans[0].bbox == (12.0, 34.0, 560.0, 78.0)
    sample.coordinate_system = sample.bbox_targets = None
    assert annotate(sample, qwen).coordinate_system == "normalized_1000"


def test_a_size_that_is_not_known_is_named_with_its_sample(answered, qwen):
    """InternVL writes thousandths; how its tiles lie is not recorded."""
    sample = answered("(1, 2)", family="internvl", grid=(2, 32, 32))
    sample.coordinate_system = "absolute_pixels"
    with pytest.raises(
        mp.ArgumentError, match=r"point in media\[0\] of 's0'.* Fix: pass coordinate_sy"
    ):
        find(sample, qwen)
    sample.coordinate_system = None
    assert find(sample, qwen).regions[0].point == (1.0, 2.0)


def test_four_corners_are_converted_like_their_box(answered, qwen):
    quad = "<|quad_start|>(10,20),(500,20),(500,60),(10,60)<|quad_end|>"
    sample = answered(quad, family="qwen3_vl", grid=(1, 30, 40))  # 640 × 480
    sample.coordinate_system = "normalized_1"
    (region,) = annotate(sample, qwen).region_spans
    corners = [0.01, 0.02, 0.5, 0.02, 0.5, 0.06, 0.01, 0.06]
    assert region.metadata["quad"] == corners and region.bbox == (0.01, 0.02, 0.5, 0.06)
    sample.coordinate_system = None
    moved = mp.grounding.to_system(annotate(sample, qwen), "normalized_1")
    assert moved.region_spans == [region]


@pytest.mark.parametrize("call", [find, annotate])
def test_wrong_arguments(answered, qwen, call):
    for options in (
        *({"where": "prompt"}, {"forms": "json"}, {"forms": ["xml"]}, {"system": "pixels"}),
        *({"media_index": 1}, {"media_index": -1}, {"media_index": "a"}),
    ):
        with pytest.raises(mp.ArgumentError, match=rf": {next(iter(options))} is .* Fix: "):
            call(answered("(1, 2)"), qwen, **options)
    for sample, tokenizer in (([answered("x")], None), (answered("x"), None)):
        with pytest.raises(mp.ArgumentError, match=r"(sample|tokenizer) is .* Fix: "):
            call(sample, tokenizer)


def test_no_torch_in_data_loader_workers():
    code = "import sys, mmpack as mp; mp.grounding.find; print({'torch', 'transformers', 'scipy'} & set(sys.modules))"
    assert run_python(code).stdout.strip() == "set()"
