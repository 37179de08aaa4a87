"""Routes replayed in a model that PEFT, DDP or FSDP2 wraps: values and gradients of the bare model in one process."""

import copy

import pytest
import torch
from support.models import logprobs_and_gradients, relative_difference, small_model
from support.ranks import spawned
from support.routed import EXPERTS
from support.samples import make_sample
from torch.nn.parallel import DistributedDataParallel

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs

LAYERS, CHOSEN = 4, 2


def routed_batch(seed):
    """Two answers to one prompt, with experts that no router of the model chose."""
    samples = [
        make_sample(
            [("text", range(6)), ("response", range(n))], f"{seed}-{n}", family="qwen3_vl_moe"
        )
        for n in (4, 7)
    ]
    draw = torch.Generator().manual_seed(seed)
    longest = max(len(s) for s in samples)
    taken = torch.rand(longest, LAYERS, EXPERTS, generator=draw).argsort(-1)[..., :CHOSEN]
    for sample in samples:
        sample.routed_experts = mp.compact_routes(taken[: len(sample)].numpy(), EXPERTS)
    return mp.pack(samples, share_prefix=True)


def made():
    model = small_model("qwen3_vl_moe")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 3 and "experts" in name:
                parameter.mul_(12)  # another expert is another answer
    return model


def loss_of(model, batch):
    values = packed_logprobs(model, batch)
    return (values * torch.linspace(-1, 1, len(values))).sum()


@pytest.mark.adapter
def test_lora():
    peft = pytest.importorskip("peft")
    model, batch = made(), routed_batch(0)
    with attach(model):
        wanted, _ = logprobs_and_gradients(model, batch)
    bare = copy.copy(batch)
    bare.routed_experts = None
    with attach(model), torch.no_grad():
        assert (packed_logprobs(model, bare) - wanted).abs().max() > 0.05
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    wrapped = peft.get_peft_model(model, config)
    with attach(wrapped):
        values, found = logprobs_and_gradients(wrapped, batch)
    assert (values - wanted).abs().max() <= 1e-6  # LoRA starts at 0
    assert any("lora_B" in name and gradient.any() for name, gradient in found.items())


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_two_ranks_are_one_process(tmp_path, wrap):
    spawned(run, 2, tmp_path, wrap)


def run(rank, ranks, wrap):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    batches = [routed_batch(0), routed_batch(1)]
    whole = made()
    with attach(whole):
        expected = [loss_of(whole, batch) for batch in batches]
        (sum(expected) / ranks).backward()
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}

    model = made()
    if wrap == "ddp":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.model.language_model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    with attach(wrapped):
        loss = loss_of(wrapped, batches[rank])
        loss.backward()
    torch.testing.assert_close(loss, expected[rank], atol=1e-5, rtol=1e-5)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if wrap == "fsdp2":
        found = {name: gradient.full_tensor() for name, gradient in found.items()}
    used = {name: gradient for name, gradient in found.items() if name in wanted}
    assert used.keys() == wanted.keys() and relative_difference(used, wanted) <= 1e-5
