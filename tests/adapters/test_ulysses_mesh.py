"""Two batches of two ranks each: FSDP2 over a 2-D mesh, and DDP, have the gradients of both batches in one process."""

import pytest
import torch
from support.models import relative_difference, small_model, weights_of, with_pixels
from support.samples import make_sample
from support.sequence import spawn
from torch.nn.parallel import DistributedDataParallel

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.contracts import TOLERANCES

pytestmark = pytest.mark.slow
NAME = "qwen2_5_vl"


def batches():
    """Of each data rank: one with pictures and shared rows, one of text only."""
    prompt = [("text", range(5)), ("image", (1, 4, 6), "x"), ("text", [7])]
    pictures = [make_sample([*prompt, ("response", range(n))], f"a{n}") for n in (3, 4)]
    texts = [make_sample([("text", range(n)), ("response", range(9))], f"b{n}") for n in (2, 6)]
    return mp.pack(with_pixels(pictures), share_prefix=True), mp.pack(texts)


def test_a_mesh_of_two_by_two_is_one_process(tmp_path):
    spawn(check_mesh, 4, tmp_path)


def check_mesh(rank, ranks):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    whole = small_model(NAME)
    with attach(whole):
        values = [packed_logprobs(whole, batch) for batch in batches()]
        pairs = zip(values, batches(), strict=True)
        sum((lp * weights_of(batch)).sum() for lp, batch in pairs).backward()
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    here = mesh.get_local_rank("dp")
    for wrap in (data_parallel, sharded):
        model = small_model(NAME).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model, batch = wrap(model, mesh), batches()[here]
        with attach(model):
            group = mesh["sp"].get_group()
            logprobs = packed_logprobs(model, batch, vision="always", sequence_group=group)
            loss = (logprobs * weights_of(batch)).sum()
            (loss * ranks).backward()  # gradients are averaged over all of them
        torch.testing.assert_close(logprobs, values[here], rtol=0, atol=1e-5)
        found = {n.removeprefix("module."): full(p.grad) for n, p in model.named_parameters()}
        assert not [name for name, gradient in found.items() if gradient is None]
        error = relative_difference({name: found[name] for name in wanted}, wanted)
        assert error <= TOLERANCES["parameter_gradient_floor"].value, (wrap.__name__, error)


def full(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def data_parallel(model, mesh):
    return DistributedDataParallel(model)


def sharded(model, mesh):
    """Parameters over the ranks of a sequence, copies of them over data ranks."""
    from torch.distributed.fsdp import fully_shard

    for unit in (*model.model.language_model.layers, *model.model.visual.blocks, model):
        fully_shard(unit, mesh=mesh)
    return model
