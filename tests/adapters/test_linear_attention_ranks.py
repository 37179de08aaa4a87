"""Linear attention under DDP and FSDP2, two ranks on the CPU: gradients of the whole model in one process."""

import pytest
import torch
from support.models import small_model, with_pixels
from support.samples import make_sample
from torch import distributed
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
    return mp.pack(with_pixels(pictures), share_prefix=True), mp.pack(texts)


def loss_of(model, batch):
    logprobs = packed_logprobs(model, batch, vision="always")
    return (logprobs * torch.linspace(-1, 1, len(logprobs))).sum()


def test_two_ranks_are_one_process(tmp_path):
    torch.multiprocessing.spawn(run, (2, str(tmp_path / "rendezvous")), nprocs=2)


def run(rank, ranks, rendezvous):
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks
    )
    whole = small_model(NAME)
    with attach(whole):
        (sum(loss_of(whole, batch) for batch in batches()) / ranks).backward()
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    for wrap in (data_parallel, sharded):
        model = small_model(NAME).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model = wrap(model, ranks)
        if wrap is sharded and not takes_encoded_media(model):
            continue  # transformers before 5.19: no batch without media
        with attach(model):
            loss_of(model, batches()[rank]).backward()
        for name, p in model.named_parameters():
            name = name.removeprefix("module.")
            found = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            assert (found is None) == (name not in wanted), name
            if found is not None:
                assert (found - wanted[name]).norm() <= 1e-5 * wanted[name].norm() + 1e-8, name
    distributed.destroy_process_group()


def data_parallel(model, ranks):
    return DistributedDataParallel(model, find_unused_parameters=True)


def sharded(model, ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    for unit in (*model.model.language_model.layers, *model.model.visual.blocks, model):
        fully_shard(unit, mesh=mesh)
    return model
