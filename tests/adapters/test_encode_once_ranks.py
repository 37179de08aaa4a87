"""Kept features on two ranks: right under DistributedDataParallel, refused by name where a tower is sharded."""

import pytest
import torch
from support.models import smallest_qwen2_5_vl, with_pixels
from support.ranks import spawned
from support.samples import make_sample
from torch.nn.parallel import DistributedDataParallel

import mmpack as mp
from mmpack.adapters.transformers import attach, encode_once, packed_logprobs
from mmpack.adapters.transformers.tower import takes_encoded_media, tower_and_projector
from mmpack.cache import FeatureStore

pytestmark = pytest.mark.adapter


def batches():
    """Of each rank two: the first has a picture, and it with a video; the second has no media."""
    prompt = [("text", range(5)), ("image", (1, 4, 6), "x"), ("text", [7])]
    pictures = [make_sample([*prompt, ("response", range(n))], f"a{n}") for n in (3, 4)]
    both = [make_sample([*prompt, ("video", (2, 4, 4), "f"), ("response", range(5))], "f")]
    texts = [make_sample([("text", range(n)), ("response", range(9))], f"b{n}") for n in (2, 6)]
    return [
        [mp.pack(with_pixels(pictures), share_prefix=True), mp.pack(with_pixels(both))],
        [mp.pack(texts[:1]), mp.pack(texts[1:])],
    ]


def loss_of(model, batch, **kwargs):
    values = packed_logprobs(model, batch, **kwargs)
    return (values * torch.linspace(-1, 1, len(values))).sum()


def made():
    model = smallest_qwen2_5_vl()
    model.lm_head.requires_grad_(False)  # its gradient is what takes long
    return model


@pytest.mark.slow
def test_two_ranks(tmp_path):
    """Both in the same processes, whose imports take longest."""
    if not takes_encoded_media(made()):
        pytest.skip("transformers before 5.19")
    spawned(run, 2, tmp_path)


def run(rank, ranks):
    check_ddp(rank, ranks)
    check_fsdp(rank, ranks)


def check_ddp(rank, ranks):
    whole = made()
    with attach(whole):
        sum(loss_of(whole, b) / ranks for own in batches() for b in own).backward()
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    del whole
    packs = batches()[rank]
    for unused in (False, True):
        model = made()
        parallel = DistributedDataParallel(model, find_unused_parameters=unused)
        for each_reduces in (False, True):
            parallel.zero_grad()
            with attach(parallel), encode_once(parallel, packs) as features:
                parallel.require_backward_grad_sync = each_reduces
                loss_of(parallel, packs[0], features=features).backward()
                parallel.require_backward_grad_sync = True
                loss_of(parallel, packs[1], features=features).backward()
            for name, parameter in model.named_parameters():
                if name in wanted:
                    off = (parameter.grad - wanted[name]).norm()
                    assert off <= 1e-5 * wanted[name].norm() + 1e-7, (name, unused, each_reduces)

    frozen = made()
    for parameter in tower_and_projector(frozen).parameters():
        parameter.requires_grad_(False)
    parallel, store = DistributedDataParallel(frozen), FeatureStore(2**20)
    for _ in range(2):
        parallel.zero_grad()
        with attach(parallel):
            with parallel.no_sync():
                loss_of(parallel, packs[0], features=store).backward()
            loss_of(parallel, packs[1], features=store).backward()
        for name, parameter in frozen.named_parameters():
            if parameter.requires_grad:
                off = (parameter.grad - wanted[name]).norm()
                assert off <= 1e-5 * wanted[name].norm() + 1e-7, name
    assert store.stats.misses == (0 if rank else 2)
    assert store.stats.patches_encoded == (0 if rank else 24 + 32)


def check_fsdp(rank, ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, packs = init_device_mesh("cpu", (ranks,)), batches()[0]
    model = made()
    for unit in (*model.model.language_model.layers, model.model.visual, model):
        fully_shard(unit, mesh=mesh)
    sharded = r"tower is sharded \(FSDP2.*wait forever.*Fix: leave features"
    with attach(model):
        with pytest.raises(mp.ModelError, match=sharded):
            packed_logprobs(model, packs[0], max_patches=8)
        with (
            pytest.raises(mp.ModelError, match=f"encode_once: .*{sharded}"),
            encode_once(model, packs),
        ):
            pass
