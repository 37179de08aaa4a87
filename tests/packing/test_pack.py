"""pack: rows, targets and media of every sample against a loop over its tokens; what is refused, by code."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batch_tensors import tensors
from support.batches import batches
from support.models import PATCH_DIM, with_pixels
from support.samples import full_sample, make_sample

import mmpack as mp
from mmpack.families import FAMILIES, get_family
from mmpack.layout.forest import positions_of
from mmpack.schema.rules import RULES


def row_lists(batch, given_samples):
    return [r.tolist() for r in batch.unpack_tokens(torch.arange(len(batch.input_ids)))]


def turn_of(sample, span):
    """The span's; the sample's where it has none, or where all spans bear one number below it; -1: nobody has one."""
    if sample.turn is None:
        return -1 if span.turn is None else span.turn
    from_0 = span.turn is not None and {s.turn for s in sample.loss_spans} == {span.turn}
    if span.turn is None or (from_0 and span.turn < sample.turn):
        return sample.turn
    return span.turn


def check_loss_index(batch, given_samples, rows):
    """Every loss field from a loop over tokens."""
    expected, regions, cu = [], [], [0]
    for b, (sample, where) in enumerate(zip(given_samples, rows, strict=True)):
        axis = []
        for span in sample.loss_spans:
            for t in range(span.start, span.stop):
                turn = turn_of(sample, span)
                expected.append((where[t - 1], int(sample.input_ids[t]), turn, t))
                axis.append(t)
        for region in sample.region_spans or ():
            before = sum(t < region.start for t in axis)
            inside = sum(region.start <= t < region.stop for t in axis)
            regions.append([b, cu[-1] + before, cu[-1] + before + inside])
        cu.append(cu[-1] + len(axis))
    found = zip(
        batch.loss_rows.tolist(),
        batch.loss_targets.tolist(),
        batch.loss_turn.tolist(),
        batch.loss_token_index.tolist(),
        strict=True,
    )
    assert list(found) == expected
    assert batch.cu_loss.tolist() == cu
    assert batch.region_rows.tolist() == regions and batch.region_rows.shape[1:] == (3,)
    assert batch.loss_rows_unique.tolist() == sorted({e[0] for e in expected})
    back = batch.loss_rows_unique[batch.loss_row_inverse.long()]
    assert torch.equal(back, batch.loss_rows)


@settings(max_examples=20)
@given(batches(), st.booleans(), st.none() | st.integers(1, 9))
def test_rows_are_those_of_the_samples(batch_samples, share, multiple):
    batch = mp.pack(batch_samples, share_prefix=share, pad_to_multiple_of=multiple)
    for ids, places, sample in zip(
        batch.unpack_tokens(batch.input_ids),
        batch.unpack_tokens(batch.position_ids.T),
        batch_samples,
        strict=True,
    ):
        np.testing.assert_array_equal(ids, sample.input_ids)
        np.testing.assert_array_equal(places[:, 0], np.arange(len(sample)))
        if places.shape[1] > 1:
            np.testing.assert_array_equal(places[:, 1:].T, positions_of(sample))
    rows = row_lists(batch, batch_samples)
    check_loss_index(batch, batch_samples, rows)

    used = {r for of_sample in rows for r in of_sample}
    assert used == set(range(batch.num_tokens))
    shared = len(used) < sum(map(len, rows))
    assert (batch.cu_seqlens is None) == (batch.max_seqlen is None) == shared
    if not share:
        assert not shared
    # placeholder runs: each row of one is in one span, of the medium that the sample says
    medium_of = {}
    for b, sample in enumerate(batch_samples):
        for span in sample.modality_spans:
            key = sample.media[span.media_index].cache_key
            medium_of |= {rows[b][t]: key for t in range(span.start, span.stop)}
    found = {}
    for span, at in zip(batch.modality_spans, batch.media_occurrence.tolist(), strict=True):
        assert span.media_index == at and batch.media[at].modality == span.modality
        pad = get_family(batch.family).placeholder_ids[span.modality]
        inside = [r for r in range(span.start, span.stop) if batch.input_ids[r] == pad]
        assert len(inside) == batch.media[at].num_tokens  # between frames there is text
        found |= dict.fromkeys(inside, batch.media_cache_keys[at])
    assert found == medium_of
    assert len(set(batch.media_cache_keys)) == len(batch.media)
    first_use = list(dict.fromkeys(batch.media_occurrence.tolist()))
    assert first_use == list(range(len(batch.media)))
    assert np.diff(batch.vision_token_offsets).tolist() == [m.num_tokens for m in batch.media]
    patches = [0 if m.modality == "audio" else int(np.prod(m.grid_thw)) for m in batch.media]
    assert np.diff(batch.patch_offsets).tolist() == patches
    for b, spans in enumerate(batch.loss_spans):
        in_rows = [(r, s.kind, s.turn) for s in spans for r in range(s.start, s.stop)]
        assert in_rows == [
            (rows[b][t], s.kind, s.turn)
            for s in batch_samples[b].loss_spans
            for t in range(s.start, s.stop)
        ]


@settings(max_examples=20)
@given(batches(), st.booleans(), st.integers(1, 9))
def test_padding_rows(batch_samples, share, multiple):
    plain = mp.pack(batch_samples, share_prefix=share)
    batch = mp.pack(batch_samples, share_prefix=share, pad_to_multiple_of=multiple)
    total, size = plain.num_tokens, len(batch.input_ids)
    assert len(plain.input_ids) == total == batch.num_tokens
    assert size % multiple == 0 and 0 <= size - total < multiple
    family = get_family(batch.family)
    assert (batch.input_ids[total:] == family.pad_token_id).all()
    assert family.pad_token_id not in family.placeholder_ids.values()
    assert (batch.position_ids[:, total:] == 0).all()
    assert batch.visible_until[total:].tolist() == list(range(total + 1, size + 1))
    assert (batch.visible_until[:total] <= total).all()
    assert (batch.loss_rows < total).all()
    assert batch.stats["tokens"] == total and batch.stats["tokens_padded"] == size
    if batch.cu_seqlens is not None:
        ends = np.cumsum([0] + [len(s) for s in batch_samples]).tolist()
        assert batch.cu_seqlens.tolist() == ends + ([size] if size > total else [])
        assert batch.max_seqlen == max(np.diff(batch.cu_seqlens))
    for name in ("input_ids", "position_ids", "visible_until"):
        assert torch.equal(getattr(batch, name)[..., :total], getattr(plain, name))
    assert torch.equal(batch.loss_rows, plain.loss_rows)


@settings(max_examples=20)
@given(batches(), st.booleans(), st.none() | st.integers(1, 9))
def test_vision_rows_name_the_feature_of_each_row(batch_samples, share, multiple):
    batch = mp.pack(batch_samples, share_prefix=share, pad_to_multiple_of=multiple)
    source = [-1] * len(batch.input_ids)
    for sample, rows in zip(batch_samples, row_lists(batch, batch_samples), strict=True):
        spans = sample.modality_spans
        for i, span in enumerate(spans):
            # features of a frame, or of a piece among its sound, come after those of the ones before it
            piece = span.frame or span.chunk or 0
            pieces = [s for s in spans[:i] if s.media_index == span.media_index][-piece:]
            before = sum(s.stop - s.start for s in pieces) if piece else 0
            at = batch.media_cache_keys.index(sample.media[span.media_index].cache_key)
            first = int(batch.vision_token_offsets[at]) + before
            for k, token in enumerate(range(span.start, span.stop)):
                source[rows[token]] = first + k
    vision = batch.vision_rows
    assert all(part.dtype == torch.int32 for part in vision)
    assert vision.source.tolist() == source
    assert vision.rows.tolist() == [r for r, s in enumerate(source) if s >= 0]
    assert vision.features.tolist() == [s for s in source if s >= 0]
    ends = vision.offsets.tolist()
    assert len(ends) == int(batch.vision_token_offsets[-1]) + 1
    for p, (start, stop) in enumerate(itertools.pairwise(ends)):
        found = vision.order[start:stop].tolist()
        assert found == [v for v, s in enumerate(vision.features.tolist()) if s == p]


@pytest.mark.parametrize("make", [mp.pack, mp.pad])
def test_to_moves_every_tensor_and_keeps_the_rest(make):
    sample = with_pixels([full_sample()])[0]
    batch = make([sample], token_columns={"x": [np.zeros(len(sample))]})
    moved = batch.to("meta")
    assert type(moved) is type(batch) and moved.device.type == "meta"
    old, new = dict(tensors(batch)), dict(tensors(moved))
    assert old.keys() == new.keys() and len(old) > 20
    for name, x in new.items():
        held = "media[" in name  # pixels of single media are views of what is moved
        assert x.is_meta != held and (x.shape, x.dtype) == (old[name].shape, old[name].dtype), name
    assert moved.sample_ids is batch.sample_ids and moved.media is batch.media
    if make is mp.pack:
        moved.attention_plan.check(moved.visible_until)


class Late(torch.Tensor):
    """Its copies have not arrived yet."""

    def to(self, *args, **kwargs):
        return torch.zeros_like(self).as_subclass(torch.Tensor)


def test_a_move_that_does_not_block_reads_nothing_that_has_not_arrived():
    batch = mp.pack([full_sample()])
    until = batch.visible_until.clone()
    batch.visible_until = batch.visible_until.as_subclass(Late)
    moved = batch.to("cpu", non_blocking=True)
    moved.visible_until.copy_(until)
    moved.attention_plan.check(moved.visible_until)


def test_what_describes_the_samples():
    a, b = full_sample("a", replay=False), full_sample("b", seed=1, replay=False)
    c = make_sample([("text", [1])], "c", "g1")
    batch = mp.pack([a, c, b])
    assert batch.sample_ids == ["a", "c", "b"] and batch.group_index.tolist() == [0, 1, 0]
    assert batch.rewards == [a.rewards, [], b.rewards]
    assert batch.costs == [a.costs, [], b.costs]
    assert batch.media_ids == ["plan", "clip"] and batch.loss_counts == [11, 0, 11]
    assert batch.stats["media"] == 2 and batch.stats["media_occurrences"] == 6
    assert batch.stats["patches"] == 24 + 32
    assert batch.stats["tokens_unshared"] == len(a) + len(b) + 1
    apart = make_sample([("text", [1]), ("response", [2]), ("text", [3]), ("response", [4])])
    assert mp.pack([apart]).loss_token_index.tolist() == [1, 3]


@settings(max_examples=20)
@given(batches(), st.booleans())
def test_samples_stay_as_they_were(batch_samples, share):
    before = [s.to_dict() for s in batch_samples]
    mp.pack(batch_samples, share_prefix=share)
    assert [s.to_dict() for s in batch_samples] == before


@pytest.mark.parametrize("share", [False, True])
def test_an_empty_sample_has_no_rows(share):
    empty, other = make_sample([], "empty"), make_sample([("text", [1, 2])], "other")
    batch = mp.pack([empty, other, empty], share_prefix=share)
    assert batch.input_ids.tolist() == [1, 2]
    assert [x.tolist() for x in batch.unpack_tokens(batch.input_ids)] == [[], [1, 2], []]
    assert batch.cu_seqlens.tolist() == [0, 0, 2, 2]
    with pytest.raises(mp.ArgumentError, match="no sample has a token"):
        mp.pack([empty])


def columns(given):
    return mp.pack([full_sample()], loss_columns=given)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: mp.pack([]), "pack: samples is empty"),
        (lambda: mp.pack(None), "samples is NoneType"),
        (lambda: mp.pad(full_sample()), r"samples is Sample.*Fix: pass \[sample\]"),
        (lambda: mp.pad([1]), r"samples\[0\] is int"),
        (lambda: mp.pack([full_sample()], on_invalid="keep"), "on_invalid is 'keep'"),
        (lambda: mp.pack([full_sample()], pad_to_multiple_of=2.5), "pad_to_multiple_of is 2.5"),
        (lambda: mp.pad([full_sample()], pad_to_multiple_of=0), "pad_to_multiple_of is 0"),
        (lambda: mp.pad([full_sample()], side="top"), "side is 'top'"),
        (
            lambda: mp.pack([full_sample()]).unpack_tokens(torch.zeros(3)),
            r"unpack_tokens: .* \[3\]",
        ),
        (lambda: mp.pack([full_sample()]).unpack_loss(torch.tensor(1.0)), r"unpack_loss: .* \[\]"),
        (
            lambda: mp.pack([full_sample()], media=[1]),
            "media is list, expected pixels by cache key",
        ),
        (lambda: columns([1]), "the columns are list"),
        (lambda: mp.collate(full_sample()), "items is Sample"),
        (lambda: mp.collate([full_sample().to_dict()]), r"items\[0\] is dict.*from_dict"),
        (lambda: mp.collate([(full_sample(), 0.5)]), r"items\[0\] is tuple"),
        (
            lambda: mp.collate([full_sample(), (full_sample("b"), {"a": 1.0})]),
            r"items\[1\] has the columns \['a'\]",
        ),
        (lambda: mp.idle_batch("qwen"), "idle_batch: like is .*Fix: pass a Sample"),
    ],
)
def test_wrong_arguments_are_one_line(call, says):
    with pytest.raises(mp.ArgumentError, match=says) as error:
        call()
    assert "\n" not in str(error.value)


# every rule of packing, broken


def text(name="s", ids=(1, 2), **fields):
    return make_sample([("text", ids[:1]), ("response", ids[1:])], name, **fields)


def planned(samples, **options):
    dropped = mp.plan(samples, max_tokens=5, on_invalid="drop", **options).dropped
    raise mp.SchemaError([p for d in dropped for p in d.problems])


CODEC = mp.schema.CodecIds(
    "codec", np.zeros((1, 1), np.int32), codebook_sizes=(8,), frame_rate=12.5
)
OLD, NEW = (text(v, policy_versions=[mp.schema.PolicyVersion(1, 2, v)]) for v in "13")
KEPT = text("a", kept_ids=mp.schema.Ragged.of([[2, 3]]))
ODD_PIXELS = {full_sample().media[0].cache_key: np.zeros((3, PATCH_DIM))}
BREAKS = {
    "MM401": lambda: mp.pack([text(family="qwen2_vl")]),  # whose packing is turned off
    "MM402": lambda: mp.pack(
        [text("a"), text("b")], share_prefix=True, token_columns={"x": [[0.0, 1.0], [0.0, 2.0]]}
    ),
    "MM403": lambda: mp.pack([full_sample()], loss_columns={"x": [[1.0]]}),
    "MM404": lambda: mp.pack([full_sample()], media=ODD_PIXELS),
    "MM405": lambda: planned([full_sample("a"), text("b")]),
    "MM406": lambda: mp.pack([text("a"), text("b", family="qwen2_5_omni")]),
    "MM407": lambda: mp.pack([replace(text(), codec_ids=[CODEC])]),
    "MM408": lambda: mp.pack([KEPT, replace(KEPT, sample_id="b", kept_ids=None)]),
    "MM409": lambda: planned([OLD, NEW], max_policy_lag=1),
}


def test_every_rule_of_packing_is_broken_here():
    assert sorted(BREAKS) == sorted(code for code in RULES if code.startswith("MM4"))


@pytest.mark.parametrize("code", sorted(BREAKS))
def test_a_broken_rule_is_named(code, monkeypatch):
    monkeypatch.setitem(FAMILIES, "qwen2_vl", replace(FAMILIES["qwen2_vl"], packing="no"))
    with pytest.raises(mp.SchemaError) as caught:
        BREAKS[code]()
    assert [p.code for p in caught.value.problems] == [code]
    assert f"({code})" in str(caught.value) and RULES[code].fix in str(caught.value)


def test_a_family_that_cannot_share(monkeypatch):
    monkeypatch.setitem(FAMILIES, "qwen2_vl", replace(FAMILIES["qwen2_vl"], sharing="none"))
    sample = make_sample([("text", [1])], family="qwen2_vl")
    mp.pack([sample])
    with pytest.raises(mp.SchemaError, match=r"can't be shared .MM401."):
        mp.pack([sample], share_prefix=True)


def test_all_broken_rules_are_listed_or_dropped():
    bad, good = full_sample("bad"), make_sample([("text", [1]), ("response", [2])], "good")
    bad.loss_spans[0].start = 0
    other = make_sample([("text", [1])], "other", family="qwen2_vl")
    with pytest.raises(mp.SchemaError) as caught:
        mp.pack([bad, good, other])
    codes = [p.code for p in caught.value.problems]
    assert "MM202" in codes and codes[-1] == "MM406"
    batch = mp.pack([bad, good, other], on_invalid="drop")
    assert batch.sample_ids == ["good"]
    assert [p.code for p in batch.dropped] == codes
    assert mp.pack([bad, other], on_invalid="drop").family == "qwen2_vl"
    with pytest.raises(mp.SchemaError, match="no valid sample is left"):
        mp.pack([bad], on_invalid="drop")


def test_one_key_of_two_media_across_samples():
    a = make_sample([("image", (1, 4, 4), "x")], "a")
    b = make_sample([("image", (1, 2, 8), "y")], "b")
    b.media[0].cache_key = a.media[0].cache_key
    with pytest.raises(mp.SchemaError, match="MM109"):
        mp.pack([a, b])
    batch = mp.pack([a, b], on_invalid="drop")
    assert batch.sample_ids == ["a"] and [p.code for p in batch.dropped] == ["MM109"]


# pixels


def image_sample(sample_id="s", name="x"):
    return make_sample([("image", (1, 4, 4), name), ("response", [5])], sample_id)


@pytest.mark.parametrize("share", [False, True])
def test_pixels_come_from_any_sample_that_has_them_or_the_store(share):
    bare, full = image_sample("bare"), with_pixels([image_sample("full")])[0]
    pixels = full.media[0].pixel_values
    for given_samples in ([bare, full], [full, bare]):
        batch = mp.pack(given_samples, share_prefix=share)
        np.testing.assert_array_equal(batch.pixel_values, pixels)
    other = image_sample("other", "y")
    store = {bare.media[0].cache_key: pixels, other.media[0].cache_key: torch.from_numpy(-pixels)}
    batch = mp.pack([other, bare], media=store, share_prefix=share)
    np.testing.assert_array_equal(batch.pixel_values, np.concatenate([-pixels, pixels]))
    for medium, start in zip(batch.media, (0, 16), strict=True):  # held once
        assert medium.pixel_values.data_ptr() == batch.pixel_values[start:].data_ptr()
    assert bare.media[0].pixel_values is None
    assert mp.pack([full, other]).pixel_values is None
