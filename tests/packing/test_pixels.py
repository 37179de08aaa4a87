"""Pixels of a batch: joined bit for bit, read where they lie, never lent on; one cache key has the same pixels."""

import dataclasses
import gc

import numpy as np
import pytest
import torch
from support.batch_tensors import assert_same
from support.models import with_pixels
from support.samples import make_medium, make_sample

import mmpack as mp
from mmpack.errors import ArgumentError, SchemaError
from mmpack.packing.media import held_pixels
from mmpack.packing.tensors import joined, to_int32, to_read

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
    "change", [np.copy, torch.from_numpy, lambda x: torch.from_numpy(x).double(), lambda x: None]
)
def test_the_same_pixels_in_any_form(change):
    samples = two(change)
    batch = mp.pack(samples)
    assert len(batch.media) == 1
    assert np.array_equal(batch.pixel_values.numpy(), samples[0].media[0].pixel_values)


@pytest.mark.parametrize("layout", [mp.pack, mp.pad])
@pytest.mark.parametrize(
    ("field", "value"), [("media", [1]), ("loss_spans", None), ("input_ids", 3)]
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


def drawn(dtype, *shapes):
    torch.manual_seed(0)
    if dtype == torch.uint8:
        return [torch.randint(0, 256, shape, dtype=dtype) for shape in shapes]
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.fixture(params=[False, True], ids=["pageable", "pinned"])
def pin_memory(request, monkeypatch):
    """Without a GPU torch pins nothing: what is to be pinned is made as usual, and noted."""
    if request.param and not torch.cuda.is_available():
        empty, pinned = torch.empty, set()

        def noted(*args, pin_memory, **options):
            made = empty(*args, **options)
            if pin_memory:
                pinned.add(made.data_ptr())
            return made

        monkeypatch.setattr(torch, "empty", noted)
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: x.data_ptr() in pinned)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("shape", [(6,), (3, 2, 4)], ids=["patches", "tiles"])
def test_they_are_torch_cats(dtype, shape, pin_memory):
    parts = drawn(dtype, (4, *shape), (0, *shape), (1, *shape))
    parts.append(drawn(dtype, (2 * 5, *shape))[0][::2])  # rows apart
    parts.append(drawn(dtype, (*shape, 3))[0].movedim(-1, 0))  # columns apart
    made = joined(parts, pin_memory)
    assert made.dtype == dtype and made.is_contiguous() and torch.equal(made, torch.cat(parts))
    assert made.is_pinned() == pin_memory


@pytest.mark.parametrize("count", [1, 2])
def test_memory_is_its_own(count, pin_memory):
    parts = drawn(torch.float32, *[(2, 3)] * count)
    made = joined(parts, pin_memory)
    want = made.clone()
    for part in parts:
        part.zero_()
    assert torch.equal(made, want)
    made.zero_()  # and may be written to


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
