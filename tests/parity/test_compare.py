"""What is compared, what is listed as not compared, how samples are paired, and that memory stays bounded."""

import copy
import dataclasses
import gc
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planting.episodes import episode, other
from support.samples import make_sample, samples, traces

import mmpack as mp
from mmpack import compare
from mmpack.layout.fingerprint import fingerprint
from mmpack.parity.fields import FIELDS
from mmpack.parity.fixes import FIXES


def numbered(count, **keywords):
    return [episode(sample_id=f"s{i}", **keywords) for i in range(count)]


def small(i, response=(5, 6)):
    return make_sample([("text", (1, 2, 3)), ("response", response)], sample_id=f"s{i}")


def test_equal_samples_are_ok():
    report = compare(numbered(3), numbered(3), require=FIELDS[:-1])
    assert report.ok and report.compared == 3
    assert report.first is None and report.findings == [] and report.total_findings == 0


def test_mp_compare_is_this_one():
    assert mp.compare is compare


def test_require():
    left, right = numbered(3), numbered(3)
    for sample in right[:2]:
        sample.position_ids = None
    report = compare(left, right)
    assert report.ok
    assert report.not_compared["position_ids"] == "train has no position_ids (2 of 3 samples)"
    assert not compare(left, right, require=("position_ids",)).ok
    assert not compare(left, right, require="position_ids").ok
    assert compare(left, right, require=("processor", "attention_mask")).ok
    left[2].media[0].content_hash = None
    assert compare(left, right, require=("media",)).ok
    report = compare(left, right, require=("media.content_hash",))
    assert not report.ok and "rollout has no media.content_hash" in str(report.not_compared)


def test_neither_side_has_it():
    report = compare([small(0)], [small(0)])
    assert report.ok
    text = "neither side has position_ids (1 of 1 samples)"
    assert report.not_compared["position_ids"] == text


def test_unknown_requirement():
    with pytest.raises(mp.ArgumentError, match="require names 'pixels'"):
        compare([], [], require=("pixels",))


@pytest.mark.parametrize(
    "wrong", [{"require": None}, {"require": 5}, {"max_findings": -1}, {"max_findings": "all"}]
)
def test_wrong_options_are_named(wrong):
    with pytest.raises(mp.ArgumentError, match=f"compare: {next(iter(wrong))} is "):
        compare(numbered(1), numbered(1), **wrong)


def test_names_of_fields_in_any_iterable():
    left, right = numbered(1), numbered(1)
    right[0].position_ids = None
    assert not compare(left, right, require=iter(["position_ids"])).ok


def test_nothing_compared_is_not_ok():
    report = compare([], [])
    assert not report.ok and report.not_compared["sample_id"] == "no sample is on both sides"


def test_logprob_values_are_never_said_to_be_equal():
    logprobs = np.full(2, -1.0, dtype=np.float32)
    left = other(small(0), rollout_logprobs=logprobs, sampling={"logprobs": "raw"})
    right = other(left, rollout_logprobs=logprobs - 1)
    assert "not compared" in compare([left], [right]).not_compared["rollout_logprobs"]
    assert compare([left], [right], require=("sampling",)).ok
    unknown_kind = other(left, sampling=None)
    assert "sampling" in compare([left], [unknown_kind]).not_compared


def scored(**sampling):
    logprobs = np.full(2, -1.0, dtype=np.float32)
    return other(small(0), rollout_logprobs=logprobs, sampling=sampling or None)


def test_sampling_that_was_not_compared():
    raw, processed = ({"logprobs": kind} for kind in ("raw", "processed"))
    texts = {
        "neither side has sampling": (small(0), small(0)),
        "train has no sampling": (scored(**raw), scored()),
        "rollout has no sampling": (scored(), scored(**raw)),
        "the logprobs that it describes are not on both sides": (
            other(small(0), sampling=raw),
            scored(**processed),
        ),
    }
    for text, (left, right) in texts.items():
        report = compare([left], [right])
        assert report.ok and report.not_compared["sampling"] == f"{text} (1 of 1 samples)"
        assert not compare([left], [right], require=("sampling",)).ok
    assert "sampling" not in compare([scored(**raw)], [scored(**raw)]).not_compared


@pytest.mark.parametrize(
    "name", ["temperature", "top_k", "repetition_penalty", "frequency_penalty", "presence_penalty"]
)
def test_settings_of_processed_logprobs(name):
    left, right = (scored(**{"logprobs": "processed", name: value}) for value in (0.5, 1.5))
    first = compare([left], [right]).first
    assert (first.field, first.cause) == ("sampling", "sampling") and name in first.evidence
    assert compare([left], [left], require=("sampling",)).ok
    raw = [scored(**{"logprobs": "raw", name: value}) for value in (0.5, 1.5)]
    assert compare(raw[:1], raw[1:], require=("sampling",)).ok  # they don't depend on it


def turns(*spans):
    """Six loss tokens [3, 9)."""
    sample = small(0, response=range(5, 11))
    sample.loss_spans = [mp.LossSpan(start, stop, turn=turn) for start, stop, turn in spans]
    return sample


@pytest.mark.parametrize(
    ("left", "right", "span"),
    [
        ([(3, 5, 0), (5, 9, 1)], [(3, 9, 0)], (5, 9)),
        ([(3, 5, 0), (5, 9, 1)], [(3, 6, 0), (6, 9, 1)], (5, 6)),
        ([(3, 5, None), (5, 9, 1)], [(3, 7, 1), (7, 9, 2)], (7, 9)),
        ([(3, 9, 0)], [(3, 9, 1)], (3, 9)),
        ([(3, 5, 0), (5, 9, 0)], [(3, 9, 0)], None),
        ([(3, 5, 0), (5, 9, None)], [(3, 9, 0)], None),
        ([(3, 5, 0), (5, 5, 7), (5, 9, 1)], [(3, 5, 0), (5, 9, 1)], None),
        ([(3, 5, 0), (5, 9, 1)], [(3, 9, None)], None),
    ],
)
def test_turns_of_tokens(left, right, span):
    for pair in ((left, right), (right, left)):
        report = compare([turns(*pair[0])], [turns(*pair[1])])
        assert report.ok == (span is None)
        if span is not None:
            assert (report.first.field, report.first.span) == ("loss_spans", span)


def test_unlike_fingerprints():
    settings = {"image": {"max_pixels": 100}}
    made = [
        other(small(0), processor=settings, processor_fingerprint=fingerprint(settings)),
        other(small(0), processor=dict(settings), processor_fingerprint="sha256:" + "0" * 64),
    ]
    for left, right in (made, made[::-1]):
        report = compare([left], [right])
        assert [(f.field, f.cause) for f in report.findings] == [
            ("processor_fingerprint", "unknown")
        ]
    unmarked = other(made[1], processor_fingerprint=None)
    assert compare([made[0]], [unmarked]).ok
    for like in ({"image": {"max_pixels": 100.0}}, settings | {"position_rule": "max"}):
        right = other(made[0], processor=like, processor_fingerprint=fingerprint(like))
        assert right.processor_fingerprint != made[0].processor_fingerprint
        assert compare([made[0]], [right]).ok  # the settings tell why


# ---- pairing -----------------------------------------------------------------------------------


def test_missing_samples_are_named():
    report = compare(
        [small(i) for i in (0, 1, 2, 4)], [small(i) for i in (0, 2, 3, 4)], max_findings=5
    )
    assert not report.ok and report.compared == 3
    assert report.missing == {"rollout": 1, "train": 1}
    named = {f.sample_id: f.evidence for f in report.findings}
    assert named == {
        "s1": "train has no sample of this id",
        "s3": "rollout has no sample of this id",
    }
    assert all(f.field == "sample_id" and f.cause == "unknown" for f in report.findings)


@pytest.mark.parametrize("count", [5, 300])
def test_any_order(count):
    """300 samples in reverse order: most wait on disk."""
    left = [small(i) for i in range(count)]
    right = [small(i, response=(5, 7) if i == 3 else (5, 6)) for i in range(count)]
    report = compare(left, right[::-1])
    assert report.compared == count
    assert [f.sample_id for f in report.findings] == ["s3"]
    assert report.missing == {"rollout": 0, "train": 0}
    assert compare(left, left[::-1]).ok
    shuffled = [left[i] for i in np.random.default_rng(0).permutation(count)]
    assert compare(iter(left), iter(shuffled)).ok


def test_findings_come_in_the_order_of_the_rollout():
    left = [small(i) for i in range(6)]
    right = [small(i, response=(5, 7)) for i in (5, 4, 3, 2, 1, 0)]
    report = compare(left, right)
    assert [f.sample_id for f in report.findings] == [f"s{i}" for i in range(6)]
    assert report.first == report.findings[0]


def test_missing_samples_that_waited_on_disk():
    left = [small(i) for i in range(200)]
    right = [small(i) for i in range(200, 400)]
    report = compare(left, right, max_findings=150)
    assert report.compared == 0 and report.missing == {"rollout": 200, "train": 200}
    assert report.total_findings == 400 and len(report.findings) == 150


def test_ids_of_any_text_wait_on_disk():
    left = [other(small(0), sample_id=f"\ud800\n'{i}\"") for i in range(100)]
    assert compare(left, left[::-1]).ok


def test_duplicate_ids():
    with pytest.raises(mp.TraceError, match=r"train.*'s0'.*MM007"):
        compare([small(0), small(1)], [small(0), small(0)])
    late = [small(i) for i in range(200)]
    with pytest.raises(mp.TraceError, match=r"rollout.*MM007"):  # the first one waits on disk
        compare([*late, small(150)], late[:100])


def test_not_samples():
    with pytest.raises(mp.ArgumentError, match="train\\[0\\] is a dict"):
        compare([small(0)], [{}])


@pytest.mark.parametrize(("given", "name"), [((None, []), "rollout"), (([], 3), "train")])
def test_not_even_a_list(given, name):
    with pytest.raises(
        mp.ArgumentError, match=rf"compare: {name} is (NoneType|int), expected .*\. Fix: "
    ):
        compare(*given)


def test_paths(tmp_path):
    mp.write_trace(tmp_path / "a.jsonl", numbered(3))
    mp.write_trace(tmp_path / "b.parquet", numbered(3)[::-1])
    assert compare(tmp_path / "a.jsonl", str(tmp_path / "b.parquet"), require=FIELDS[:-1]).ok
    assert compare(tmp_path / "a.jsonl", numbered(3)).ok
    with pytest.raises(mp.TraceError):
        compare(tmp_path / "none.jsonl", numbered(3))


def test_findings_are_bounded_and_counted():
    left = [small(i) for i in range(50)]
    report = compare(left, [small(i, response=(7, 8)) for i in range(50)], max_findings=7)
    assert len(report.findings) == 7 and report.total_findings == 50
    assert report.causes == {"unknown": 50}


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
    assert report.compared == count
    assert report.total_findings == count // 100
    return peak


@pytest.mark.slow
def test_memory_is_bounded():
    few, many = peak_of(1000), peak_of(20_000)
    assert many - few < 19_000 * 200  # a hash of 16 bytes each, and its place in a set


@pytest.mark.slow
def test_memory_of_100_000_samples():
    assert peak_of(100_000) < 32 * 2**20


# ---- anything may come -------------------------------------------------------------------------


@settings(max_examples=40)
@given(traces())
def test_a_trace_equals_itself(trace):
    report = compare(trace, copy.deepcopy(trace))
    assert report.ok == bool(trace), report.lines()


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

    def setting(s):
        s.processor["added"] = 1
        s.processor_fingerprint = "sha256:" + "0" * 64

    out = [(ids, "input_ids")]
    out += [(positions, "position_ids")] if sample.position_ids is not None else []
    out += [(mask, "attention_mask")] if sample.attention_mask is not None else []
    if any(s.start < s.stop for s in sample.loss_spans[:1]):
        out.append((loss_kind, "loss_spans"))
    if sample.loss_spans and sample.loss_spans[-1].start < sample.loss_spans[-1].stop:
        out.append((loss_stop, "loss_spans"))
    if sample.media:
        out += [
            (grid, "media"),
            (content, "media"),
            (key, "media"),
            (media_index, "modality_spans"),
        ]
    return out


@given(samples(), st.data())
def test_any_change_of_one_field_is_found(sample, data):
    change, field = data.draw(st.sampled_from(_mutations(sample)))
    right = copy.deepcopy(sample)
    change(right)
    for report in (compare([sample], [right]), compare([right], [sample])):
        assert not report.ok
        assert field in {f.field for f in report.findings}
        assert all(f.cause in FIXES for f in report.findings)


BIG = st.sampled_from([0, 1, 2, 3, 5, 8, 13, 40, 2**31 - 1])


@st.composite
def broken(draw):
    """A sample whose spans, grids and columns say anything that the schema's types allow."""
    sample = draw(samples(sample_id="s"))
    length = len(sample)
    ids = st.lists(st.sampled_from([1, 2, 151652, 151653, 151655, 151656]), max_size=20)
    if draw(st.booleans()):
        sample.input_ids = np.asarray(draw(ids), dtype=np.int64)
        length = len(sample)
        sample.attention_mask = None
        sample.position_ids = draw(
            st.sampled_from([None, np.zeros((3, length), dtype=np.int64) - 2**40])
        )
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


def test_a_rule_that_only_one_side_breaks():
    left = episode()
    for name, value, code in (
        ("rewards", [mp.Score("x", 1.0, {"turn": 9})], "MM304"),
        ("rollout_logprobs", np.full(7, 0.5, dtype=np.float32), "MM302"),
        ("prefix_cached_tokens", 10**6, "MM309"),
        ("bbox_targets", [mp.BboxTarget((0.0, 0.0, 1.0, 1.0))], "MM308"),
    ):
        right = other(left, **{name: value})
        for report in (compare([left], [right]), compare([right], [left])):
            assert not report.ok and code in report.first.evidence
    alone = other(left, media=copy.deepcopy(left.media))
    for medium in alone.media:
        medium.content_hash, medium.cache_key = None, "k"
    hashed = copy.deepcopy(alone)
    for i, medium in enumerate(hashed.media):
        medium.grid_thw, medium.content_hash = alone.media[i].grid_thw, str(i) * 64
    assert compare([alone], [hashed]).first.cause == "cache_key"


def test_columns_that_are_no_arrays():
    left = episode()
    codes = ("MM003", "MM008")
    for wrong in ({"input_ids": left.input_ids.tolist()}, {"position_ids": left.position_ids[:1]}):
        for pair in ([left, other(left, **wrong)], [other(left, **wrong), left]):
            report = compare([pair[0]], [pair[1]])
            # equal values in a list are an equal layout; anything else is named
            assert report.ok if not report.first else report.first.evidence[:5] in codes


@given(broken(), broken())
def test_broken_samples_are_read(left, right):
    report = compare([left], [right])
    assert report.compared == 1
    assert all("\n" not in line for line in report.lines())
    if mp.validate([left, right]):
        assert not report.ok
    assert report.to_json() and report.to_html()


def test_a_film_whose_ids_are_gone():
    film = make_sample([("text", [1]), ("video", (1, 2, 2)), ("response", [2])], family="glm4v")
    gone = other(film, input_ids=film.input_ids[:0])
    for pair in ((film, gone), (gone, film)):
        report = compare([pair[0]], [pair[1]])
        assert not report.ok and report.first.field == "input_ids"


def test_a_sample_without_tokens_beside_one_with_a_response():
    def made(ids):
        spans = [{"start": 0, "stop": len(ids), "kind": "response"}] if ids else []
        return mp.Sample.from_dict(
            {
                "schema_version": "1",
                "sample_id": "s",
                "group_id": "",
                "family": "qwen2_vl",
                "media": [],
            }
            | {"input_ids": ids, "modality_spans": [], "loss_spans": spans}
        )

    for left, right in (([], [0, 0]), ([0, 0], [])):
        report = compare([made(left)], [made(right)])
        assert not report.ok and report.first.field == "input_ids"


MALFORMED = (None, 3, "x", [None], [{}], object(), np.zeros((2, 2)), np.array(["a"]))


@pytest.mark.parametrize("name", [*mp.Sample.columns(), "media.grid_thw", "loss_spans.start"])
def test_malformed_samples_in_memory_are_findings_of_one_line(name):
    """Whatever a caller put into a field: a report, or one line with a fix."""
    for value in MALFORMED:
        left, right = episode(), episode()
        owner, _, part = name.partition(".")
        setattr(getattr(right, owner)[0] if part else right, part or owner, value)
        for sides in ((left, right), (right, left), (right, right)):
            try:
                report = compare([sides[0]], [sides[1]])
            except mp.ArgumentError as error:
                assert name == "sample_id" and str(error).startswith("compare: ")
                assert "\n" not in str(error) and "Fix: " in str(error)
                continue
            assert all("\n" not in line for line in report.lines())
            assert report.to_json() and report._repr_html_()


def test_a_malformed_sample_says_what_is_wrong_and_is_never_equal():
    left, right = episode(), episode()
    right.loss_spans = [{"start": 3, "stop": "x", "kind": "response"}]
    report = compare([left], [right])
    assert not report.ok and report.compared == 1
    assert report.first.field == "loss_spans" and report.first.cause == "unknown"
    assert "MM003 in train: loss_spans" in report.first.evidence
    same = compare([right], [right])
    assert not same.ok and "MM003 in both sides" in same.first.evidence


@pytest.mark.parametrize("records", [[{"sample_id": "s"}], [None], [[episode()]], 3, {"a": 1}])
def test_records_that_are_no_samples_are_refused_in_one_line(records):
    with pytest.raises(mp.ArgumentError, match=r"^compare: rollout.* Fix: pass samples"):
        compare(records, [episode()])


@pytest.mark.parametrize("wrong", [{"require": None}, {"max_findings": "all"}])
def test_wrong_options_are_one_line(wrong):
    with pytest.raises(mp.ArgumentError, match=r"^compare: (require|max_findings) is .* Fix: "):
        compare([small(0)], [small(0)], **wrong)
