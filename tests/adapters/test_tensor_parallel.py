"""packed_logprobs of models that torch's tensor parallel splits: values and gradients of one process.

Over all ids, over kept ids, and of teachers' lists.

Layers by columns and rows, the head by vocabulary; by `parallelize_module` and by transformers' own plan; with FSDP2.
"""

import copy
import dataclasses
import functools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from support.kept_ids import support_of
from support.models import needs_encoded_media, spread_out, with_pixels
from support.ranks import assert_gradients, gradients_of, here, spawned
from support.samples import make_sample
from support.teachers import scored
from support.tiny_models import tiny_qwen2_5_vl
from transformers import Qwen2_5_VLForConditionalGeneration

import mmpack as mp
from mmpack.adapters.transformers import (
    attach,
    heads,
    packed_listed_logprobs,
    packed_logprobs,
)
from mmpack.adapters.transformers.modules import decoder_layers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ranks.md"
COLUMNS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
ROWS = ("self_attn.o_proj", "mlp.down_proj")
VOCAB = 151_936


@functools.cache
def template():
    """Two heads, as many keys and values: each of two ranks has one."""
    config = tiny_qwen2_5_vl().config
    config.text_config.update({"hidden_size": 64, "intermediate_size": 96})
    config.text_config.update({"num_attention_heads": 2, "num_key_value_heads": 2})
    config.vision_config.out_hidden_size = 64
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    torch.manual_seed(0)
    return spread_out(Qwen2_5_VLForConditionalGeneration(config)).eval()


def made(tied=False, bias=False):
    model = copy.deepcopy(template()).to(here())
    if bias:
        values = torch.linspace(-1, 1, model.lm_head.out_features, device=here())
        model.lm_head.bias = torch.nn.Parameter(values)
    if tied:
        model.lm_head.weight = model.get_input_embeddings().weight
    return model


def batches():
    """Shared rows under a picture; text alone."""
    prompt = [("text", range(5)), ("image", (1, 4, 6), "x"), ("text", [7])]
    pictures = [make_sample([*prompt, ("response", range(n))], f"a{n}") for n in (3, 4)]
    texts = [make_sample([("text", range(n)), ("response", range(9))], f"b{n}") for n in (2, 6)]
    both = mp.pack(with_pixels(pictures), share_prefix=True), mp.pack(texts)
    return [batch.to(here()) for batch in both]


def replayed_batches():
    """The same with kept ids, and lists of two teachers."""
    rng = np.random.default_rng(0)
    out = []
    for batch in batches():
        lists = [np.unique(rng.integers(0, VOCAB, rng.integers(0, 9))) for _ in batch.loss_targets]
        kept = [
            torch.unique(torch.tensor([*x, t]))
            for x, t in zip(lists, batch.loss_targets, strict=True)
        ]
        ids = support_of([torch.from_numpy(x) for x in lists])
        scores = torch.from_numpy(rng.normal(size=(len(lists), VOCAB)))
        teachers = {"one": scored(ids, scores), "two": scored(ids, scores.flip(1))}
        replayed = dataclasses.replace(batch, kept_ids=support_of(kept), teachers=teachers)
        out.append(replayed.to(here()))
    return out


def loss_of(model, batch):
    logprobs, entropies = packed_logprobs(model, batch, vision="always", entropy=True)
    loss = (
        logprobs * torch.linspace(-1, 1, len(logprobs), device=here())
    ).sum() + entropies.sum() / 3
    if not batch.teachers:
        return loss
    again, out = packed_listed_logprobs(model, batch, vision="always")
    torch.testing.assert_close(again, logprobs, atol=1e-6, rtol=1e-6)
    assert (out.targets < logprobs).any()  # over all ids
    distilled = mp.distillation_loss(out.lists, batch.teachers, batch.cu_loss)
    return loss + 10 * distilled.loss + (out.targets * again).sum()


def in_one_process(model, own):
    """Losses of the batches, and gradients of their mean."""
    with attach(model):
        losses = [loss_of(model, batch) for batch in own]
        (sum(losses) / len(own)).backward()
    return losses, gradients_of(model)


def assert_same(model, loss, wanted_loss, wanted, where):
    torch.testing.assert_close(
        loss, wanted_loss, atol=1e-5, rtol=1e-5, msg=lambda m: f"{where}: {m}"
    )
    assert_gradients(model, wanted, where)


def split_layers(model, mesh):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = dict.fromkeys(COLUMNS, ColwiseParallel) | dict.fromkeys(ROWS, RowwiseParallel)
    for layer in decoder_layers(model):
        parallelize_module(layer, mesh, {name: style() for name, style in plan.items()})


@pytest.mark.slow
@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_ranks_are_one_process(tmp_path, on):
    made().save_pretrained(tmp_path / "model")
    spawned(check_two, 2, tmp_path, tmp_path, on=on)


@pytest.mark.slow
@needs_encoded_media
@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_beside_fsdp2(tmp_path, on):
    spawned(check_four, 4, tmp_path, on=on)


def check_two(rank, ranks, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(here().type, (ranks,))
    batch = batches()[0]
    (wanted_loss,), wanted = in_one_process(made(), [batch])

    def check(model, where):
        with attach(model):
            loss = loss_of(model, batch)
            loss.backward()
            model.eval()
            with torch.no_grad():
                again = loss_of(model, batch)
        assert abs(again - loss) <= 1e-5 * abs(loss)
        assert_same(model, loss, wanted_loss, wanted, where)
        weight = model.lm_head.weight
        assert tuple(weight.placements) == (Shard(0),)
        assert weight.to_local().shape[0] == weight.shape[0] // ranks
        return model

    model = made()
    names = {"model": model, "mesh": mesh, "batch": batch, "attach": attach}
    blocks = [part.split("```")[0] for part in PAGE.read_text().split("```python")[1:]]
    (block,) = [block for block in blocks if "parallelize_module" in block]
    exec(
        block,
        names | {"packed_logprobs": packed_logprobs},
    )
    check(model, "parallelize_module")

    for style in (
        ColwiseParallel(output_layouts=Replicate()),
        ColwiseParallel(use_local_output=False),
    ):
        model = made()
        parallelize_module(model, mesh, {"lm_head": style})
        check(model, repr(style))

    auto = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "model", tp_plan="auto")
    if hasattr(auto.lm_head.weight, "placements"):  # older transformers split without DTensors
        check(auto, "tp_plan")

    plain, batch = batch, replayed_batches()[0]
    (wanted_loss,), wanted = in_one_process(made(bias=True), [batch])
    model = made(bias=True)
    split_layers(model, mesh)
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
    check(model, "kept ids and teachers, bias")
    batch = plain

    (wanted_loss,), wanted = in_one_process(made(tied=True), [batch])
    model = made(tied=True)
    both = {"model.language_model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(model, mesh, both | {"lm_head": ColwiseParallel()})
    model.lm_head.weight = model.get_input_embeddings().weight  # one parameter again
    check(model, "tied")

    odd = made()
    odd.lm_head.weight = torch.nn.Parameter(odd.lm_head.weight.detach()[:-1].clone())
    for model, style, match in (
        (odd, ColwiseParallel(), r"2 ranks don't divide the head's \d+"),
        (made(), RowwiseParallel(input_layouts=Replicate()), "which splits the vocabulary"),
        (made(), ColwiseParallel(input_layouts=Shard(1)), r"the head gets \d+ of the batch's"),
    ):
        parallelize_module(model, mesh, {"lm_head": style})
        with attach(model), pytest.raises(mp.ModelError, match=match):
            packed_logprobs(model, batch)
    with pytest.raises(mp.ModelError, match="forward of its own, and its vocabulary is split"):
        heads.refuse_split(model.lm_head)


def check_four(rank, ranks):
    """FSDP2 over pairs of ranks, each of which is tensor parallel; each pair has a batch of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh(here().type, (2, 2), mesh_dim_names=("data", "tensor"))
    cases = ("layers", batches()), ("head too", batches()), ("head too", replayed_batches())
    for units, both in cases:
        losses, wanted = in_one_process(made(), both)
        model = made()
        split_layers(model, mesh["tensor"])
        parallelize_module(model, mesh["tensor"], {"lm_head": ColwiseParallel()})
        heads = [model.lm_head] if units == "head too" else []
        for unit in (*decoder_layers(model), *model.model.visual.blocks, *heads, model):
            fully_shard(unit, mesh=mesh["data"])
        own = mesh["data"].get_local_rank()
        with attach(model):
            loss = loss_of(model, both[own])
            loss.backward()
        assert_same(model, loss, losses[own], wanted, units)
