"""A transformers model under FSDP2, two ranks: values and gradients of the whole model in one process."""

import pytest
import torch
from support.models import spread_out, with_pixels
from support.ranks import assert_gradients, gradients_of, here, spawned
from support.samples import make_sample
from support.tiny_models import tiny_qwen2_5_vl

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs, packed_logprobs
from mmpack.adapters.transformers.tower import takes_encoded_media

pytestmark = pytest.mark.adapter


def batches():
    """Of each rank: one with pictures and shared rows, one of text only."""
    prompt = [("text", range(5)), ("image", (1, 4, 6), "x"), ("text", [7])]
    pictures = [make_sample([*prompt, ("response", range(n))], f"a{n}") for n in (3, 4)]
    texts = [make_sample([("text", range(n)), ("response", range(9))], f"b{n}") for n in (2, 6)]
    both = mp.pack(with_pixels(pictures), share_prefix=True), mp.pack(texts)
    return [batch.to(here()) for batch in both]


def loss_of(model, batch, entropy):
    values = packed_logprobs(model, batch, vision="always", entropy=entropy)
    logprobs, entropies = values if entropy else (values, values * 0)
    return (
        logprobs * torch.linspace(-1, 1, len(logprobs), device=here())
    ).sum() + entropies.sum() / 3


def made(tied):
    model = spread_out(tiny_qwen2_5_vl())
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model.to(here())


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_ranks_are_one_process(tmp_path, on):
    spawned(check_both, 2, tmp_path, on=on)


def check_both(rank, ranks):
    check(rank, ranks, tied=True, entropy=False)
    check(rank, ranks, tied=False, entropy=True)


def check(rank, ranks, tied, entropy):
    """`tied`: the head is the embedding, and no unit of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    whole = made(tied)
    attach(whole)
    expected = [loss_of(whole, batch, entropy) for batch in batches()]
    (sum(expected) / ranks).backward()
    wanted = gradients_of(whole)

    model, own = made(tied), batches()[rank]
    mesh = init_device_mesh(here().type, (ranks,))
    for unit in (*model.model.language_model.layers, *model.model.visual.blocks):
        fully_shard(unit, mesh=mesh)
    low = MixedPrecisionPolicy(output_dtype=torch.bfloat16)  # of logits, not of their logprobs
    for unit in (model,) if tied else (model.lm_head, model):
        fully_shard(unit, mesh=mesh, mp_policy=low)
    forward = model.lm_head.forward = model.lm_head.forward  # of its own, as accelerate's hooks set
    with pytest.raises(mp.ModelError, match="the model is sharded, and its own attention"):
        model_inputs(mp.pad([make_sample([("text", [1, 2])])]).to(here()), model, vision="always")
    handle = attach(model)
    if not takes_encoded_media(model):  # transformers before 5.19
        with pytest.raises(mp.ModelError, match="newer, or put media into every batch"):
            model_inputs(batches()[1], model, vision="always")
        return
    for _ in range(2):  # the second time as every time but the first
        model.zero_grad()
        loss = loss_of(model, own, entropy)
        loss.backward()
        torch.testing.assert_close(loss, expected[rank], atol=1e-5, rtol=1e-5)
        assert_gradients(model, wanted)
    assert own.stats["patches_encoded"] == (4 if rank else 24)
    assert vars(model.lm_head)["forward"] is forward

    inputs = model_inputs(own, model, vision="always")
    handle.detach()
    with pytest.raises(mp.ModelError, match="detached before its forward"):
        model(**inputs)
