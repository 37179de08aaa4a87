"""PackLoader on a GPU: a consumer whose stream is far behind reads what was packed, and the host never waits for it."""

import time

import pytest
import torch
from support.batch_tensors import assert_same, tensors
from support.models import with_pixels
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.torch import PackLoader
from mmpack.adapters.torch.ahead import Mover
from mmpack.packing.pixels import float_pixels

pytestmark = pytest.mark.gpu
OPTIONS = {"max_tokens": 700, "share_prefix": True}
BUSY = 200_000_000  # cycles, about 0.1 s


def some_samples(groups=10, each=2):
    """Of one size, so that memory that was freed fits the next batch."""
    numbers = [(g, k) for g in range(groups) for k in range(each)]
    response = [("response", [500 * k + i for i in range(100)]) for k in range(each)]
    prompts = [
        [("text", [1 + g] * 20), ("image", (1, 32, 32), f"picture-{g}")] for g in range(groups)
    ]
    return with_pixels(
        [make_sample([*prompts[g], response[k]], f"s{g}/{k}", f"g{g}") for g, k in numbers]
    )


SAMPLES = some_samples()


def on_device(batch):
    return {name: x for name, x in tensors(batch) if x.is_cuda}


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_reader_that_is_behind_reads_what_was_packed(prefetch, own_stream):
    """Each batch is read by the device long after the host let go of it and others were copied."""
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    read, bins = [], []
    with torch.cuda.stream(stream):
        for step in PackLoader(SAMPLES, device="cuda", prefetch=prefetch, **OPTIONS):
            bins = step.bins
            for batch in step:
                torch.cuda._sleep(BUSY)
                read.append({name: x.clone() for name, x in on_device(batch).items()})
                del batch
    torch.cuda.synchronize()
    assert len(read) == len(bins) > 4
    for found, members in zip(read, bins, strict=True):
        wanted = dict(tensors(mp.pack([SAMPLES[i] for i in members], share_prefix=True)))
        assert len(found) > 20 and found["batch.pixel_values"].numel() > 1024 * 1176 - 1
        for name, x in found.items():
            assert torch.equal(x.cpu(), wanted[name]), name


def test_the_host_does_not_wait():
    loader = PackLoader(SAMPLES, device="cuda", **OPTIONS)
    for step in loader:  # kernels and pinned memory of a first loop
        list(step)
    torch.cuda.synchronize()
    for step in loader:
        batches = iter(step)
        next(batches)
        torch.cuda._sleep(10 * BUSY)
        start = time.perf_counter()
        left = list(batches)
        taken = time.perf_counter() - start
        assert not torch.cuda.current_stream().query(), "the device was done before the host"
        assert len(left) > 3 and taken < 0.8
        torch.cuda.synchronize()


def test_a_batch_is_made_in_pinned_memory():
    batch = mp.pack(SAMPLES[:4], share_prefix=True, pin_memory=True)
    assert [n for n, x in tensors(batch) if x.numel() and not x.is_pinned()] == []
    assert_same(batch, mp.pack(SAMPLES[:4], share_prefix=True))
    assert batch.media[0].pixel_values.data_ptr() == batch.pixel_values.data_ptr()
    batch.attention_plan.check(batch.visible_until)
    again = batch.pin_memory()
    assert again.pixel_values.data_ptr() == batch.pixel_values.data_ptr()


@pytest.mark.alone
def test_copies_have_a_stream_of_their_own():
    mover = Mover(torch.device("cuda", 0))
    pinned = mp.pack(SAMPLES[:4], share_prefix=True, pin_memory=True)
    mover.receive(*mover.send(pinned))  # a stream's first memory and kernels wait for the device
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * BUSY)  # of this stream
    batch, event = mover.send(pinned)
    event.synchronize()
    assert not torch.cuda.current_stream().query()
    mover.receive(batch, event)
    torch.cuda.synchronize()
    assert_same(batch.to("cpu"), mp.pack(SAMPLES[:4], share_prefix=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_normalised_to_the_same_bits(dtype):
    image = {"backend": "torchvision", "do_rescale": True, "rescale_factor": 1 / 255}
    image |= {
        "do_normalize": True,
        "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
    }
    rng = torch.Generator().manual_seed(0)
    samples, pixels = some_samples(4, 2), {}
    for sample in samples:
        sample.processor = {"image": image}
        for m in sample.media:
            made = torch.randint(0, 256, m.pixel_values.shape, dtype=torch.uint8, generator=rng)
            m.pixel_values = pixels.setdefault(m.cache_key, made).numpy()
    loader = PackLoader(samples, device="cuda", **OPTIONS)
    assert loader.device.index == torch.cuda.current_device()
    for step in loader:
        for batch, members in zip(step, step.bins, strict=True):
            host = mp.pack([samples[i] for i in members], share_prefix=True)
            assert batch.pixel_values.dtype == torch.uint8
            found = float_pixels(batch, dtype=dtype)
            assert torch.equal(found.cpu(), float_pixels(host).to(dtype))
            assert batch.byte_values["image"].is_cuda
