"""Two media under one cache key: other pixels are refused where they are there, hash or not."""

import dataclasses

import numpy as np
import pytest
import torch
from support.models import with_pixels
from support.samples import make_medium, make_sample

import mmpack as mp
from mmpack.errors import ArgumentError, SchemaError
from mmpack.packing.media import held_pixels
from mmpack.packing.tensors import to_int32

PARTS = [("text", [1]), ("image", (1, 4, 6), "x"), ("response", [2, 3])]


def two(change, hashes=(None, None)):
    """Two samples that show one medium, the second's pixels changed."""
    samples = with_pixels([make_sample(PARTS, "a"), make_sample(PARTS, "b")])
    for sample, content_hash in zip(samples, hashes, strict=True):
        sample.media[0] = dataclasses.replace(sample.media[0], content_hash=content_hash)
    samples[1].media[0].pixel_values = change(samples[1].media[0].pixel_values)
    return samples


@pytest.mark.parametrize("make", [mp.pack, mp.pad])
@pytest.mark.parametrize("hashes", [(None, None), ("sha256:" + "0" * 64, None)])
def test_other_pixels_of_one_cache_key(make, hashes):
    samples = two(lambda x: x + 1e-3, hashes)
    with pytest.raises(SchemaError, match=r"cache key of 'x' but other pixels \(MM109\)"):
        make(samples)


@pytest.mark.parametrize(
    "change",
    [
        np.copy,
        torch.from_numpy,
        lambda x: torch.from_numpy(x).double(),
        lambda x: None,
    ],
)
def test_the_same_pixels_in_any_form(change):
    samples = two(change)
    batch = mp.pack(samples)
    assert len(batch.media) == 1
    assert np.array_equal(batch.pixel_values.numpy(), samples[0].media[0].pixel_values)


def test_pixels_of_one_hash_are_not_read():
    """What a processor made has a hash; comparing would read all pixels of all samples again."""
    digest = "sha256:" + "0" * 64
    assert len(mp.pack(two(lambda x: x + 1e-3, (digest, digest))).media) == 1


def test_pixels_that_come_later_are_compared_too():
    samples = two(lambda x: x + 1e-3)
    first = make_sample(PARTS, "c")
    first.media[0] = dataclasses.replace(
        first.media[0], content_hash=None, cache_key=samples[0].media[0].cache_key
    )
    with pytest.raises(SchemaError, match="but other pixels"):
        mp.pack([first, *samples])


@pytest.mark.parametrize("layout", [mp.pack, mp.pad])
@pytest.mark.parametrize(
    ("field", "value"), [("media", None), ("media", [1]), ("loss_spans", None), ("input_ids", 3)]
)
def test_a_malformed_sample_is_named_or_left_out(layout, field, value):
    good, bad = with_pixels(
        [make_sample([("image", (1, 4, 4)), ("response", [5, 6])], n) for n in ("good", "bad")]
    )
    setattr(bad, field, value)
    with pytest.raises(SchemaError, match=rf"bad\.{field}"):
        layout([good, bad])
    batch = layout([bad, good], on_invalid="drop", loss_columns={"a": [[], [1.0, 2.0]]})
    assert batch.sample_ids == ["good"] and batch.loss_columns["a"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"media": [1]}, "media is list, expected pixels by cache key"),
        ({"loss_columns": [1]}, "the columns are list"),
        ({"token_columns": 3}, "the columns are int"),
    ],
)
def test_lists_where_names_are_due(given, match):
    with pytest.raises(mp.ArgumentError, match=match):
        mp.pack(with_pixels([make_sample([("text", [1]), ("response", [5, 6])])]), **given)


def test_pixels_are_the_mediums_own_else_the_stores():
    own, stored = (make_medium(name, (1, 4, 6)) for name in "ab")
    own.pixel_values = np.zeros((24, 1176))
    pixels = np.ones((24, 1176))
    found = held_pixels([own, stored], "test", {own.cache_key: None, stored.cache_key: pixels})
    assert found[0] is own.pixel_values and found[1] is pixels
    with pytest.raises(SchemaError, match=r"test: b.pixel_values is missing \(MM404\)"):
        held_pixels([own, stored], "test")


@pytest.mark.parametrize("value", [2**31, -(2**31)])
def test_what_32_bits_do_not_hold(value):
    with pytest.raises(ArgumentError, match="does not fit 32 bits"):
        to_int32(np.array([0, value]))
    assert to_int32(np.array([value - 1 if value > 0 else value + 1])).dtype == torch.int32
