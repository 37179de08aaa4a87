"""packed_logprobs of DistributedDataParallel, two ranks on the CPU: gradients of the whole model in one process."""

import pytest
import torch
from support.models import smallest_qwen2_5_vl, with_pixels
from support.samples import make_sample
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import mmpack as mp
from mmpack.adapters.transformers import attach, is_attached, model_inputs, packed_logprobs

pytestmark = pytest.mark.adapter


def batches():
    """Of each rank two: the first has pictures and shared rows; the second has text, then nothing to score."""
    prompt = [("text", range(5)), ("image", (1, 4, 6), "x"), ("text", [7])]
    pictures = [make_sample([*prompt, ("response", range(n))], f"a{n}") for n in (3, 4)]
    video = [make_sample([("video", (2, 4, 4), "f"), ("response", range(5))], "f")]
    texts = [make_sample([("text", range(n)), ("response", range(9))], f"b{n}") for n in (2, 6)]
    unscored = [make_sample([("text", range(4))], "c")]
    return [
        [mp.pack(with_pixels(pictures), share_prefix=True), mp.pack(with_pixels(video))],
        [mp.pack(texts), mp.pack(unscored)],
    ]


def loss_of(model, batch, entropy):
    values = packed_logprobs(model, batch, entropy=entropy)
    logprobs, entropies = values if entropy else (values, values * 0)
    return (logprobs * torch.linspace(-1, 1, len(logprobs))).sum() + entropies.sum() / 3


# tied head, find_unused_parameters, use_reentrant (None: no gradient checkpointing), entropies
QUICK = [(True, False, False, False), (False, True, False, True)]
MORE = [(True, True, None, True), (False, False, True, False)]


@pytest.mark.parametrize("settings", [QUICK, pytest.param(MORE, marks=pytest.mark.slow)])
def test_two_ranks_are_one_process(tmp_path, settings):
    torch.multiprocessing.spawn(run, (2, str(tmp_path / "rendezvous"), settings), nprocs=2)


def run(rank, ranks, rendezvous, settings):
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks
    )
    for own in settings:
        check(rank, ranks, *own)
    distributed.destroy_process_group()


def check(rank, ranks, tied, unused, reentrant, entropy):
    whole = smallest_qwen2_5_vl(tied)
    with attach(whole):
        sum(loss_of(whole, b, entropy) / ranks for own in batches() for b in own).backward()
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    del whole

    model = smallest_qwen2_5_vl(tied).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    parallel = DistributedDataParallel(model, find_unused_parameters=unused)
    first, second = batches()[rank]
    for _ in range(2):  # DDP's buckets of the second time are others
        parallel.zero_grad()
        with parallel.no_sync(), attach(parallel):
            loss = loss_of(parallel, first, entropy)
            loss.backward()
        with attach(parallel) as same:
            assert same is parallel and is_attached(model)
            loss = loss_of(parallel, second, entropy)
        loss.backward()
        assert not is_attached(parallel)
        for name, parameter in model.named_parameters():
            expected = wanted.get(name, torch.zeros_like(parameter))
            off = (parameter.grad - expected).norm()
            assert off <= 1e-5 * expected.norm() + 1e-7, (name, tied, unused, reentrant)
    with torch.no_grad(), attach(parallel):
        alone = packed_logprobs(model, first)
        assert torch.equal(packed_logprobs(parallel, first), alone)
        parallel(**model_inputs(first, parallel))
