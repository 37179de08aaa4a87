"""Pixels that are not to be written to, as Arrow and Ray hand them out: read where they lie, and never lent on."""

import gc

import numpy as np
import pytest
import torch
from support.batch_tensors import assert_same
from support.models import with_pixels
from support.samples import make_sample

import mmpack as mp
from mmpack.packing.tensors import to_read


def over_bytes(array):
    """The same values over a bytes object, which nobody may change."""
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


@pytest.fixture
def samples():
    parts = [("image", (1, 4, 6), "x"), ("text", [1]), ("image", (1, 4, 4), "y")]
    return with_pixels([make_sample([*parts, ("response", [2, 3 + k])], f"s{k}") for k in range(2)])


def test_it_is_read_where_it_lies_and_stays():
    array = over_bytes(np.arange(6, dtype=np.float32).reshape(2, 3))
    tensor = to_read(array)
    assert tensor.data_ptr() == array.ctypes.data
    assert to_read(array[:, ::2]).tolist() == [[0, 2], [3, 5]]
    del array
    gc.collect()
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert to_read(over_bytes(np.zeros((0, 3)))).shape == (0, 3)


@pytest.mark.parametrize("make", [mp.pack, mp.pad])
def test_batches_are_the_same_bits(samples, make):
    wanted = make(samples)
    for sample in samples:
        for medium in sample.media:
            medium.pixel_values = over_bytes(medium.pixel_values)
    assert_same(make(samples), wanted)


def test_whoever_writes_into_a_batch_changes_no_source(samples):
    source = samples[0].media[0].pixel_values
    sources = {m.cache_key: over_bytes(m.pixel_values) for s in samples for m in s.media}
    for sample in samples:
        for medium in sample.media:
            medium.pixel_values = None
    missing = samples[0].media[1].cache_key
    for media in (sources, {k: v for k, v in sources.items() if k != missing}):
        batch = mp.pack(samples, media=media)
        assert (batch.pixel_values is None) == (missing not in media)
        held = batch.media[0].pixel_values
        assert torch.equal(held, torch.from_numpy(source))
        held.zero_()
        assert np.array_equal(sources[batch.media[0].cache_key], source)
