"""Linear attention under DDP and FSDP2, two ranks: gradients of the whole model in one process."""

import pytest
import torch
from support.models import small_model, with_pixels
from support.ranks import assert_gradients, gradients_of, here, spawned
from support.samples import make_sample
from torch.nn.parallel import DistributedDataParallel

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.adapters.transformers.tower import takes_encoded_media

pytestmark = [pytest.mark.adapter, pytest.mark.slow]
NAME = "qwen3_5"


def batches():
    """Of each rank: one with pictures and shared rows, one of text only."""
    prompt = [("text", range(5)), ("image", (1, 4, 6), "x"), ("text", [7])]
    pictures = [
        make_sample([*prompt, ("response", range(n))], f"a{n}", family=NAME) for n in (3, 4)
    ]
    texts = [
        make_sample([("text", range(n)), ("response", range(9))], f"b{n}", family=NAME)
        for n in (2, 6)
    ]
    both = mp.pack(with_pixels(pictures), share_prefix=True), mp.pack(texts)
    return [batch.to(here()) for batch in both]


def loss_of(model, batch):
    logprobs = packed_logprobs(model, batch, vision="always")
    return (logprobs * torch.linspace(-1, 1, len(logprobs), device=here())).sum()


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_ranks_are_one_process(tmp_path, on):
    spawned(run, 2, tmp_path, on=on)


def run(rank, ranks):
    whole = small_model(NAME).to(here())
    with attach(whole):
        (sum(loss_of(whole, batch) for batch in batches()) / ranks).backward()
    wanted = gradients_of(whole)
    for wrap in (data_parallel, sharded):
        model = small_model(NAME).to(here()).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model = wrap(model, ranks)
        if wrap is sharded and not takes_encoded_media(model):
            continue  # transformers before 5.19: no batch without media
        with attach(model):
            loss_of(model, batches()[rank]).backward()
        assert gradients_of(model).keys() == wanted.keys()
        assert_gradients(model, wanted, wrap.__name__)


def data_parallel(model, ranks):
    return DistributedDataParallel(model, find_unused_parameters=True)


def sharded(model, ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(here().type, (ranks,))
    for unit in (*model.model.language_model.layers, *model.model.visual.blocks, model):
        fully_shard(unit, mesh=mesh)
    return model
