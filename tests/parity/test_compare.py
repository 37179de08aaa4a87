"""What `require` asks for, how samples are paired, that memory stays bounded, and that anything may come."""

import copy
import dataclasses
import gc
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planting.episodes import episode, other
from support.planting.said import check
from support.samples import make_sample, samples, traces

import mmpack as mp
from mmpack import compare
from mmpack.families import get_family
from mmpack.parity.fields import FIELDS
from mmpack.parity.fixes import FIXES


def numbered(count, **keywords):
    return [episode(sample_id=f"s{i}", **keywords) for i in range(count)]


def small(i, response=(5, 6)):
    return make_sample([("text", (1, 2, 3)), ("response", response)], sample_id=f"s{i}")


def test_require():
    left, right = numbered(3), numbered(3)
    report = compare(left, right, require=FIELDS[:-1])
    assert report.ok and report.compared == 3 and report.first is None
    for sample in right[:2]:
        sample.position_ids = None
    report = compare(left, right)
    assert report.ok
    assert report.not_compared["position_ids"] == "train has no position_ids (2 of 3 samples)"
    for names in (("position_ids",), "position_ids", iter(["position_ids"])):
        assert not compare(left, right, require=names).ok
    left[2].media[0].content_hash = None
    assert compare(left, right, require=("media", "processor", "attention_mask")).ok
    report = compare(left, right, require=("media.content_hash",))
    assert not report.ok and "rollout has no media.content_hash" in str(report.not_compared)
    text = "neither side has position_ids (1 of 1 samples)"
    assert compare([small(0)], [small(0)]).not_compared["position_ids"] == text
    assert "rewards" not in compare([small(0)], [small(0)]).not_compared
    report = compare([small(0)], [small(0)], require=("rewards",))
    assert not report.ok and report.not_compared["rewards"].startswith("neither side has rewards")
    nothing = compare([], [])
    assert not nothing.ok and nothing.not_compared["sample_id"] == "no sample is on both sides"


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ([], {"require": None}, "require is "),
        ([], {"require": ("pixels",)}, "require names 'pixels'"),
        ([], {"max_findings": -1}, "max_findings is "),
        ([], {"max_findings": "all"}, "max_findings is "),
        ([[{"sample_id": "s"}]], {}, "rollout.* Fix: pass samples"),
        ([[[episode()]]], {}, "rollout.* Fix: pass samples"),
        ([{"a": 1}], {}, "rollout.* Fix: pass samples"),
        ([None], {}, "rollout is NoneType, expected "),
        ([[], 3], {}, "train is int, expected "),
    ],
)
def test_wrong_arguments_are_one_line(given, options, words):
    rollout, train = [*given, *[numbered(1), numbered(1)][len(given) :]]
    with pytest.raises(mp.ArgumentError, match=rf"^compare: {words}") as error:
        compare(rollout, train, **options)
    assert "Fix: " in str(error.value) and "\n" not in str(error.value)


# ---- pairing -----------------------------------------------------------------------------------


def test_missing_samples_are_named():
    left, right = [small(i) for i in (0, 1, 2, 4)], [small(i) for i in (0, 2, 3, 4)]
    report = compare(left, right, max_findings=5)
    assert not report.ok and report.compared == 3
    assert report.missing == {"rollout": 1, "train": 1}
    named = {f.sample_id: (f.field, f.cause, f.evidence.split()[0]) for f in report.findings}
    expected = {"s1": "train", "s3": "rollout"}  # which has no sample of this id
    assert named == {k: ("sample_id", "unknown", side) for k, side in expected.items()}
    report = compare(
        [small(i) for i in range(200)], [small(i) for i in range(200, 400)], max_findings=150
    )  # that waited on disk
    assert report.compared == 0 and report.missing == {"rollout": 200, "train": 200}
    assert report.total_findings == 400 and len(report.findings) == 150
    assert report.causes == {"unknown": 400}


@pytest.mark.parametrize("count", [5, 300])
def test_any_order(count):
    """300 samples in reverse order: most wait on disk. Findings come in the order of the rollout."""
    left = [small(i) for i in range(count)]
    right = [small(i, response=(5, 7) if i in (1, 3) else (5, 6)) for i in range(count)]
    report = compare(left, right[::-1])
    assert report.compared == count and report.missing == {"rollout": 0, "train": 0}
    assert [f.sample_id for f in report.findings] == ["s1", "s3"]
    assert report.first == report.findings[0]
    shuffled = [left[i] for i in np.random.default_rng(0).permutation(count)]
    assert compare(iter(left), iter(shuffled)).ok
    odd = [other(s, sample_id=f"\ud800\n'{s.sample_id}\"") for s in left]
    assert compare(odd, odd[::-1]).ok


def test_duplicate_ids():
    with pytest.raises(mp.errors.TraceError, match=r"train.*'s0'.*MM007"):
        compare([small(0), small(1)], [small(0), small(0)])
    late = [small(i) for i in range(200)]
    with pytest.raises(
        mp.errors.TraceError, match=r"rollout.*MM007"
    ):  # the first one waits on disk
        compare([*late, small(150)], late[:100])


def test_paths(tmp_path):
    mp.write_trace(tmp_path / "a.jsonl", numbered(3))
    mp.write_trace(tmp_path / "b.parquet", numbered(3)[::-1])
    assert compare(tmp_path / "a.jsonl", str(tmp_path / "b.parquet"), require=FIELDS[:-1]).ok
    assert compare(tmp_path / "a.jsonl", numbered(3)).ok
    with pytest.raises(mp.errors.TraceError):
        compare(tmp_path / "none.jsonl", numbered(3))


def peak_of(count):
    """Peak bytes while two streams of `count` samples are compared, one in a hundred of which differs."""
    same, unlike = small(0), small(0, response=(5, 7))

    def stream(odd):
        for i in range(count):
            yield dataclasses.replace(same if i % 100 else odd, sample_id=f"s{i}")

    gc.collect()
    tracemalloc.start()
    report = compare(stream(same), stream(unlike))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.compared == count and report.total_findings == count // 100
    return peak


@pytest.mark.slow
def test_memory_is_bounded():
    few, many = peak_of(1000), peak_of(20_000)
    assert many - few < 19_000 * 200  # a hash of 16 bytes each, and its place in a set


# ---- anything may come -------------------------------------------------------------------------


def _mutations(sample):
    """Every way to change one field of a sample, with the field that must be found."""

    def ids(s):
        s.input_ids[0] += 1

    def positions(s):
        s.position_ids[-1, -1] += 1

    def mask(s):
        s.attention_mask[0] = 0

    def loss_kind(s):
        s.loss_spans[0].kind = "action" if s.loss_spans[0].kind != "action" else "response"

    def loss_stop(s):
        s.loss_spans[-1].stop -= 1

    def media_index(s):
        s.modality_spans[0].media_index += 1

    def grid(s):
        t, h, w = s.media[0].grid_thw
        s.media[0].grid_thw = (t, h, w + 2)

    def content(s):
        s.media[-1].content_hash = "0" * 64

    def key(s):
        s.media[-1].cache_key = "0" * 64

    out = [(ids, "input_ids")]
    out += [(positions, "position_ids")] if sample.position_ids is not None else []
    is_padding = list(sample.input_ids[:1]) == [get_family(sample.family).pad_token_id]
    if sample.attention_mask is not None and not is_padding:  # that would be cut off
        out += [(mask, "attention_mask")]
    if any(s.start < s.stop for s in sample.loss_spans[:1]):
        out.append((loss_kind, "loss_spans"))
    if sample.loss_spans and sample.loss_spans[-1].start < sample.loss_spans[-1].stop:
        out.append((loss_stop, "loss_spans"))
    if sample.media:
        out += [(change, "media") for change in (grid, content, key)]
        out.append((media_index, "modality_spans"))
    return out


@given(samples(), st.data())
@settings(max_examples=60)
def test_any_change_of_one_field_is_found(sample, data):
    change, field = data.draw(st.sampled_from(_mutations(sample)))
    right = copy.deepcopy(sample)
    change(right)
    for report in (compare([sample], [right]), compare([right], [sample])):
        assert not report.ok and field in {f.field for f in report.findings}
        assert all(f.cause in FIXES for f in report.findings)


UNRECORDED = ("position_ids", "attention_mask", "rollout_logprobs", "sampling", "finish_reason")
OF_MEDIA = ("content_hash", "size", "decoded_size", "mode", "fps", "frame_indices")
OF_MEDIA += ("frame_timestamps", "second_per_grid_ts", "total_frames")


@settings(max_examples=40)
@given(
    traces(), st.sets(st.sampled_from(UNRECORDED)), st.sets(st.sampled_from(OF_MEDIA)), st.data()
)
def test_what_one_side_did_not_record_order_names_and_notes_are_no_difference(
    trace, names, of_media, data
):
    train = copy.deepcopy(trace)
    data.draw(st.randoms(use_true_random=False)).shuffle(train)
    for sample in train:
        for name in names:
            setattr(sample, name, None)
        sample.metadata = {"note": 1}
        for medium in sample.media:
            for name in of_media:
                setattr(medium, name, None)
            medium.source, medium.metadata = "elsewhere.png", {"note": 1}
    for left, right in ((trace, train), (train, trace), (trace, copy.deepcopy(trace))):
        report = compare(left, right, require=())
        assert report.total_findings == 0 and report.ok == bool(trace), report.lines()


BIG = st.sampled_from([0, 1, 2, 3, 5, 8, 13, 40, 2**31 - 1])


@st.composite
def broken(draw):
    """A sample whose spans, grids and columns say anything that the schema's types allow."""
    sample = draw(samples(sample_id="s"))
    ids = st.lists(st.sampled_from([1, 2, 151652, 151653, 151655, 151656]), max_size=20)
    if draw(st.booleans()):
        sample.input_ids = np.asarray(draw(ids), dtype=np.int64)
        sample.attention_mask = None
        far = np.zeros((3, len(sample)), dtype=np.int64) - 2**40
        sample.position_ids = draw(st.sampled_from([None, far]))
    for span in [*sample.modality_spans, *sample.loss_spans, *(sample.region_spans or [])]:
        if draw(st.booleans()):
            span.start, span.stop = draw(BIG), draw(BIG)
    for span in sample.modality_spans:
        if draw(st.booleans()):
            span.media_index = draw(BIG)
            span.modality = draw(st.sampled_from(["image", "video"]))
    for medium in sample.media:
        if draw(st.booleans()):
            medium.grid_thw, medium.num_tokens = draw(st.tuples(BIG, BIG, BIG)), draw(BIG)
            medium.frame_indices = np.asarray(draw(st.lists(BIG, max_size=3)), dtype=np.int64)
            medium.frame_timestamps = tuple(draw(st.lists(st.floats(-1e9, 1e9), max_size=3)))
            medium.second_per_grid_ts = draw(st.sampled_from([None, 0.0, -1.0, 1e300]))
            medium.cache_key = draw(st.sampled_from(["", "k"]))
    sample.metadata = draw(st.sampled_from([{}, {"padding": 3}, {"padding": ["a"]}]))
    return sample


@given(broken(), broken())
@settings(max_examples=60)
def test_broken_samples_are_read(left, right):
    report = compare([left], [right])
    assert report.compared == 1
    assert all("\n" not in line for line in report.lines())
    if mp.validate([left, right]):
        assert not report.ok
    assert report.to_json() and report.to_html()


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("rewards", [mp.Score("x", 1.0, {"turn": 9})], "MM304"),
        ("rollout_logprobs", np.full(7, 0.5, dtype=np.float32), "MM302"),
        ("prefix_cached_tokens", 10**6, "MM309"),
        ("bbox_targets", [mp.schema.BboxTarget((0.0, 0.0, 1.0, 1.0))], "MM308"),
        ("loss_spans", [{"start": 3, "stop": "x", "kind": "response"}], "MM003 in train"),
    ],
)
def test_a_rule_that_only_one_side_breaks(name, value, code):
    right = other(episode(), **{name: value})
    report = compare([episode()], [right])
    assert not report.ok and code in report.first.evidence
    both = compare([right], [other(right)])
    assert not both.ok and "in both sides" in both.first.evidence


def test_a_side_without_ids():
    film = make_sample([("text", [1]), ("video", (1, 2, 2)), ("response", [2])], family="glm4v")
    text = make_sample([("response", [0, 0])])
    for sample in (film, text):
        gone = other(sample, input_ids=sample.input_ids[:0])
        gone.loss_spans = [] if sample is text else gone.loss_spans
        for pair in ((sample, gone), (gone, sample)):
            report = compare([pair[0]], [pair[1]])
            assert not report.ok and report.first.field == "input_ids"


MALFORMED = (None, 3, "x", [None], [{}], object(), np.zeros((2, 2)), np.array(["a"]))


@pytest.mark.parametrize("name", [*mp.Sample.columns(), "media.grid_thw", "loss_spans.start"])
def test_malformed_samples_in_memory_are_findings_of_one_line(name):
    """Whatever a caller put into a field: a report, or one line with a fix."""
    for value in MALFORMED:
        left, right = episode(), episode()
        owner, _, part = name.partition(".")
        setattr(getattr(right, owner)[0] if part else right, part or owner, value)
        for sides in ((left, right), (right, left)):
            try:
                report = compare([sides[0]], [sides[1]])
            except mp.ArgumentError as error:
                assert name == "sample_id" and str(error).startswith("compare: ")
                assert "\n" not in str(error) and "Fix: " in str(error)
                continue
            assert all("\n" not in line for line in report.lines())
            assert report.to_json() and report._repr_html_()


# ---- one value, written in another way: test_same_values.py ------------------------------------------


@pytest.mark.adapter
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_templates_of_another_text_that_render_the_same(family):
    """TRL's released template against its training template, and a comment at the end of one."""
    from importlib.util import find_spec
    from pathlib import Path

    from mmpack.demo.qwen_processor import qwen_vl_processor

    folder = Path(find_spec("trl").origin).parent / "chat_templates"
    released, training = (
        (folder / f"{family}{end}.jinja").read_text() for end in ("", "_training")
    )
    hf = qwen_vl_processor(family)
    picture = np.zeros((64, 64, 3), np.uint8)
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": "Find x."}]

    def side(template):
        processor = mp.wrap_processor(hf, chat_template=template)
        asked = [{"role": "user", "content": parts}]
        return processor(asked, response_ids=[785, 151645], sample_id="s0")

    for template in (training, released + "{# of ours #}"):
        left, right = side(released), side(template)
        assert left.processor["chat_template"] != right.processor["chat_template"]
        report = check(left, right, require=("input_ids", "processor"))
        assert "what it rendered is compared" in report.not_compared["processor.chat_template"]
