"""FeatureStore on a GPU: what spills to page-locked memory comes back as it was; digests are those of the CPU."""

import copy

import pytest
import torch
from torch import nn

from mmpack.cache import FeatureStore
from mmpack.cache.tower import Tower

pytestmark = pytest.mark.gpu
SIZE = 4 * 1024 * 64 * 2  # bytes of a medium: four levels, bf16


def made():
    torch.manual_seed(0)
    return nn.Linear(64, 64).to("cuda", torch.bfloat16).requires_grad_(False)


def test_spilled_features_come_back_bit_for_bit():
    module, store = made(), FeatureStore(2 * SIZE, host_bytes=8 * SIZE)
    pixels = {k: torch.randn(1024, 64, device="cuda", dtype=torch.bfloat16) for k in "abcdef"}
    wanted = {k: module(x).cpu() for k, x in pixels.items()}
    calls = []

    def fetch(keys):
        def encode(indices):
            calls.append(len(indices))
            return [(module(pixels[keys[i]]),) * 4 for i in indices]

        return store.fetch(Tower((module,)), list(keys), [1] * len(keys), encode)

    for turn in range(3):
        for keys in ("ab", "cd", "ef", "fa"):
            found = fetch(keys)
            busy = torch.randn(2048, 2048, device="cuda") @ torch.randn(2048, 2048, device="cuda")
            for key, levels in zip(keys, found, strict=True):
                assert levels[0].device.type == "cuda"
                assert all(torch.equal(x.cpu(), wanted[key]) for x in levels), (turn, key)
            assert store.stats.device_bytes <= 2 * SIZE and busy.isfinite().all()
    assert calls == [2, 2, 2] and store.stats.dropped == 0 and store.stats.restored > 6
    assert all(x.is_pinned() for x in store._host.values())


def test_memory_of_spilled_features_is_given_back():
    module, store = made(), FeatureStore(SIZE, host_bytes=64 * SIZE)
    tower, before = Tower((module,)), torch.cuda.memory_allocated()
    for k in range(32):
        store.fetch(tower, [str(k)], [1], lambda _: [(module.weight.repeat(16, 1),) * 4])
    assert torch.cuda.memory_allocated() - before <= 2 * SIZE + 2**21
    assert store.stats.spilled == 31


def test_the_digest_is_the_cpu_s():
    module = nn.Sequential(nn.Linear(300, 200), nn.LayerNorm(200), nn.Conv2d(3, 8, 5)).bfloat16()
    on_gpu = copy.deepcopy(module).cuda()
    assert Tower((module,)).digest() == Tower((on_gpu,)).digest()
    assert Tower((module,)).equals(Tower((on_gpu,)))
    on_gpu[0].weight.data[7, 3] += 1
    assert Tower((module,)).digest() != Tower((on_gpu,)).digest()
    assert not Tower((module,)).equals(Tower((on_gpu,)))
