"""packed_logprobs of DistributedDataParallel, two ranks: gradients of the whole model in one process."""

import warnings

import pytest
import torch
from support.models import smallest_qwen2_5_vl, with_pixels
from support.ranks import assert_gradients, gradients_of, here, spawned
from support.samples import make_sample
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
    own = [
        [mp.pack(with_pixels(pictures), share_prefix=True), mp.pack(with_pixels(video))],
        [mp.pack(texts), mp.pack(unscored)],
    ]
    return [[batch.to(here()) for batch in of_rank] for of_rank in own]


def loss_of(model, batch, entropy):
    values = packed_logprobs(model, batch, entropy=entropy)
    logprobs, entropies = values if entropy else (values, values * 0)
    return (
        logprobs * torch.linspace(-1, 1, len(logprobs), device=here())
    ).sum() + entropies.sum() / 3


# tied head, find_unused_parameters, use_reentrant (None: no gradient checkpointing), entropies
QUICK = [(True, False, False, False), (False, True, False, True)]
MORE = [(True, True, None, True), (False, False, True, False)]


@pytest.mark.slow
@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("settings", [QUICK, MORE])
def test_two_ranks_are_one_process(tmp_path, settings, on):
    spawned(check_all, 2, tmp_path, settings, on=on)


def check_all(rank, ranks, settings):
    for own in settings:
        check(rank, ranks, *own)


def check(rank, ranks, tied, unused, reentrant, entropy):
    whole = smallest_qwen2_5_vl(tied).to(here())
    with attach(whole):
        sum(loss_of(whole, b, entropy) / ranks for own in batches() for b in own).backward()
    named = dict(whole.named_parameters())
    wanted = {name: torch.zeros_like(p) for name, p in named.items()} | gradients_of(whole)
    del whole, named

    model = smallest_qwen2_5_vl(tied).to(here()).train()
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
        assert_gradients(model, wanted, (tied, unused, reentrant))
    with attach(model):
        with pytest.warns(mp.MmpackWarning, match=r"in DistributedData.* Fix: pass the wrapper"):
            packed_logprobs(model, first)
        with warnings.catch_warnings():
            warnings.simplefilter("error", mp.MmpackWarning)
            packed_logprobs(model, first)  # said once
    with torch.no_grad(), attach(parallel):
        alone = packed_logprobs(model, first)
        assert torch.equal(packed_logprobs(parallel, first), alone)
        parallel(**model_inputs(first, parallel))


def test_the_model_without_its_wrapper_warns(tmp_path, monkeypatch):
    """It would train on unreduced gradients. Not without gradients, for one rank, or where nothing wraps the model."""
    group = torch.distributed
    group.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        model, other = smallest_qwen2_5_vl(), torch.nn.ModuleList([smallest_qwen2_5_vl()])
        (batch, _), held = batches()[1], [DistributedDataParallel(m) for m in (model, other)]
        (other,) = other  # a module that calls it, as Lightning's do, is what DDP wraps
        with attach(model), attach(other):
            with warnings.catch_warnings():
                warnings.simplefilter("error", mp.MmpackWarning)
                packed_logprobs(model, batch)
                monkeypatch.setattr(group, "get_world_size", lambda *_: 2)
                packed_logprobs(other, batch)
                with torch.no_grad():
                    packed_logprobs(model, batch)
            with pytest.warns(mp.MmpackWarning, match=r"its \.module.* Fix: pass the wrapper"):
                packed_logprobs(model, batch)
        del held
    finally:
        group.destroy_process_group()
