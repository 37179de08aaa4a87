"""Packs of two ranks each: FSDP2 over a 2-D mesh, DDP, and sharded towers have the gradients of one process."""

import pytest
import torch
from support.heard import some_samples
from support.models import (
    logprobs_and_gradients,
    relative_difference,
    small_model,
    weights_of,
    with_pixels,
)
from support.ranks import gradient_bound, gradients_of, here, logprob_bound, spawned
from support.samples import make_sample
from support.unlike_ranks import frozen_words
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mmpack as mp
from mmpack.adapters.transformers import attach, in_step, packed_logprobs
from mmpack.adapters.transformers.modules import decoder_layers, tower_blocks

pytestmark = pytest.mark.slow
NAME = "qwen2_5_vl"
CLIPS = "kimi_k25"  # whose tower averages frames, a call for each length
SOUNDS = "qwen3_omni_moe"  # whose audio tower has a call for each length


def batches():
    """Of each data rank: one with pictures and shared rows, then one of text; one of text only."""
    prompt = [("text", range(5)), ("image", (1, 4, 6), "x"), ("text", [7])]
    pictures = [make_sample([*prompt, ("response", range(n))], f"a{n}") for n in (3, 4)]
    texts = [make_sample([("text", range(n)), ("response", range(9))], f"b{n}") for n in (2, 6)]
    more = make_sample([("text", range(4)), ("response", range(5))], "c")
    first = mp.pack(with_pixels(pictures), share_prefix=True)
    own = [first, mp.pack([more])], [mp.pack(texts)]
    return [[batch.to(here()) for batch in of_rank] for of_rank in own]


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_mesh_of_two_by_two_is_one_process(tmp_path, on):
    spawned(check_mesh, 4, tmp_path, on=on)


def check_mesh(rank, ranks):
    mesh = init_device_mesh(here().type, (2, 2), mesh_dim_names=("dp", "sp"))
    whole = small_model(NAME).to(here())
    with attach(whole):
        for batch in (batch for own in batches() for batch in own):
            (packed_logprobs(whole, batch) * weights_of(batch)).sum().backward()
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    for wrap in (data_parallel, sharded):
        model = small_model(NAME).to(here()).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model = wrap(model, mesh)
        own = batches()[mesh.get_local_rank("dp")]
        step = in_step(model, own, group=mesh["dp"].get_group())
        assert len(step.packs) == 2  # of one rank an idle one, of fewer rows than ranks
        assert step.total_tokens == 3 + 4 + 5 + 9 + 9
        with attach(model):
            for batch in step.packs:
                logprobs = packed_logprobs(model, batch, sequence_group=mesh["sp"].get_group())
                loss = (logprobs * weights_of(batch)).sum()
                (loss * ranks).backward()  # gradients are averaged over all of them
        check(model, wanted, wrap.__name__)


def check(model, wanted, where):
    found = gradients_of(model)
    error = relative_difference({name: found[name] for name in wanted}, wanted)
    assert error <= gradient_bound(), (where, error)


def data_parallel(model, mesh):
    return DistributedDataParallel(model)


def sharded(model, mesh):
    """Parameters over the ranks of a sequence, copies of them over data ranks."""
    for unit in (*decoder_layers(model), *tower_blocks(model), model):
        fully_shard(unit, mesh=mesh)
    return model


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", [CLIPS, SOUNDS])
def test_sharded_towers_run_as_often_on_both_ranks(tmp_path, name, on):
    """Clips or sounds of unlike lengths, of which each rank has others: unlike numbers of calls."""
    spawned(check_towers, 2, tmp_path, name, on=on)


def check_towers(rank, ranks, name):
    samples = some_samples(name) if name == SOUNDS else clips()
    batch = mp.pack(samples, share_prefix=True).to(here())
    whole = frozen_words(small_model(name)).to(here())
    with attach(whole):
        values, wanted = logprobs_and_gradients(whole, batch)
    model = frozen_words(small_model(name)).to(here())
    heard = model.model.audio_tower.layers if name == SOUNDS else []
    for unit in (*decoder_layers(model), *tower_blocks(model), *heard, model):
        fully_shard(unit, mesh=init_device_mesh(here().type, (ranks,)))
    with attach(model):
        group = torch.distributed.group.WORLD
        logprobs = packed_logprobs(model, batch, sequence_group=group)
        ((logprobs * weights_of(batch)).sum() * ranks).backward()
    torch.testing.assert_close(logprobs, values, rtol=0, atol=logprob_bound())
    check(model, wanted, name)


def clips():
    parts = [("text", range(5))]
    for name, frames in (("f", 2), ("g", 5), ("h", 2)):
        parts += [("video", (frames, 4, 4), name), ("response", range(3))]
    return with_pixels([make_sample(parts, "v", family=CLIPS)])
