"""Two media under one cache key: other pixels are refused where they are there, hash or not."""

import dataclasses

import numpy as np
import pytest
import torch
from support.models import with_pixels
from support.samples import make_sample

import mmpack as mp
from mmpack.errors import SchemaError

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
