"""FSDP2 in mixed precision with gradient checkpointing: as exact as one process in bf16, beside float64."""

import pytest
import torch
from support.float64 import exact
from support.models import (
    logprobs_and_gradients,
    relative_difference,
    smallest_qwen2_5_vl,
    with_pixels,
)
from support.ranks import here, spawned
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.transformers import attach
from mmpack.adapters.transformers.modules import decoder_layers, tower_blocks
from mmpack.contracts import TOLERANCES

LOW = torch.bfloat16


def samples_of(ranks):
    """Of each rank: pictures and shared rows, or text only."""
    prompt = [("text", range(5)), ("image", (1, 4, 6), "x"), ("text", [7])]
    out = []
    for rank in range(ranks):
        if rank % 2:
            sizes = (2 + rank, 6)
            own = [
                make_sample([("text", range(n)), ("response", range(9))], f"b{n}") for n in sizes
            ]
        else:
            own = [make_sample([*prompt, ("response", range(n + rank))], f"a{n}") for n in (3, 4)]
        out.append(with_pixels(own))
    return out


def added(parts):
    """Gradients, summed in float32."""
    total = {}
    for part in parts:
        for name, gradient in part.items():
            total[name] = total.get(name, 0) + gradient.float()
    return total


@pytest.mark.slow
@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_are_as_exact_as_one_process(tmp_path, ranks, on):
    low = smallest_qwen2_5_vl(tied=False).to(LOW)
    samples = samples_of(ranks)
    values, gradients = exact(low, [s for own in samples for s in own])
    low.to(on)
    with attach(low):
        one = [
            logprobs_and_gradients(low, mp.pack(own, share_prefix=True).to(on)) for own in samples
        ]
    one = [(v.cpu(), {n: g.cpu() for n, g in found.items()}) for v, found in one]
    wanted = {
        "values": values.split([sum(s.num_loss_tokens for s in own) for own in samples]),
        "gradients": gradients,
        "one": [v for v, _ in one],
        "apart": relative_difference(added(g for _, g in one), gradients),
    }
    assert 1e-3 < wanted["apart"] < 2e-2  # that of bf16
    torch.save(wanted, tmp_path / "wanted.pt")
    spawned(run, ranks, tmp_path, tmp_path, on=on)


def run(rank, ranks, folder):
    wanted = torch.load(folder / "wanted.pt")
    for reentrant in (False, True):
        check(rank, ranks, reentrant, wanted)


def check(rank, ranks, reentrant, wanted):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = smallest_qwen2_5_vl(tied=False).to(here()).train()
    with torch.no_grad():  # weights that bf16 has too
        for parameter in model.parameters():
            parameter.copy_(parameter.to(LOW))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:  # such checkpoints need an input with a gradient
        model.enable_input_require_grads()
    mesh = init_device_mesh(here().type, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
    for unit in (*decoder_layers(model), *tower_blocks(model), model.lm_head, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    batch = mp.pack(samples_of(ranks)[rank], share_prefix=True).to(here())
    share = TOLERANCES["parameter_gradient_vs_separate"].value
    with attach(model):
        values, gradients = logprobs_and_gradients(model, batch, vision="always")
    assert values.dtype == torch.float32
    values = values.cpu()
    squares = [(v - wanted["values"][rank]).square().sum() for v in (values, wanted["one"][rank])]
    both = torch.stack(squares).to(here())
    torch.distributed.all_reduce(both)  # of one rank alone they are few
    off, apart = both.sqrt()
    assert off <= share * apart, (reentrant, off, apart)
    found = {
        n: g.full_tensor().cpu() * ranks for n, g in gradients.items() if n in wanted["gradients"]
    }
    assert all(g.dtype == torch.float32 for g in found.values())
    off = relative_difference(found, wanted["gradients"])
    assert off <= share * wanted["apart"], (reentrant, off, wanted["apart"])
