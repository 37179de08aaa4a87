"""Models that DistributedDataParallel or FSDP2 wraps, two ranks: values and gradients of one process."""

import contextlib
import warnings

import numpy as np
import pytest
import torch
from support.float64 import exact
from support.models import (
    logprobs_and_gradients,
    needs_encoded_media,
    relative_difference,
    small_model,
    smallest_qwen2_5_vl,
    with_pixels,
)
from support.ranks import assert_gradients, gradients_of, here, spawned
from support.samples import make_sample, routes_of
from torch.nn.parallel import DistributedDataParallel

import mmpack as mp
from mmpack.adapters.transformers import (
    attach,
    model_inputs,
    packed_listed_logprobs,
    packed_logprobs,
)
from mmpack.adapters.transformers.attention import is_attached
from mmpack.adapters.transformers.modules import decoder_layers, tower_blocks
from mmpack.contracts import TOLERANCES
from mmpack.versions import takes_encoded_media

pytestmark = pytest.mark.adapter
QWEN, HYBRID, EXPERTS = "qwen2_5_vl", "qwen3_5", "qwen3_vl_moe"
ON = pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def batches(family):
    """Of each rank two: pictures with shared rows, then a video; and text, then nothing to score."""
    prompt = [("text", range(5)), ("image", (1, 4, 6), "x"), ("text", [7])]
    film = [("video", (2, 4, 4), "f"), ("response", range(5))]
    parts = [
        [[*prompt, ("response", range(n))] for n in (3, 4)],
        [film],
        [[("text", range(n)), ("response", range(9))] for n in (2, 6)],
        [[("text", range(4))]],
    ]
    packs = []
    for number, own in enumerate(parts):
        samples = [make_sample(p, f"{number}/{k}", family=family) for k, p in enumerate(own)]
        for k, sample in enumerate(samples):
            if family == EXPERTS:  # that no router chose; the first two share those of their prompt
                rng = np.random.default_rng(number)
                sample.routed_experts = routes_of(sample, rng, 4, 2, 8)
            if family == QWEN and number < 3:
                n = sample.num_loss_tokens
                sample.teachers = {"7B": mp.schema.Ragged.of([[1, k + 2]] * n, [[-1.0, -2.0]] * n)}
        packs.append(mp.pack(with_pixels(samples), share_prefix=True).to(here()))
    return [packs[:2], packs[2:]]


def loss_of(model, batch, kind):
    if kind == "teachers" and batch.teachers:
        kept, out = packed_listed_logprobs(model, batch, vision="always", entropy=True)
        distilled = mp.distillation_loss(out.lists, batch.teachers, batch.cu_loss, "jsd")
        return distilled.loss + kept.mean() + out.entropy.mean() / 3
    found = packed_logprobs(model, batch, vision="always", entropy=kind == "entropy")
    logprobs, entropies = found if kind == "entropy" else (found, found * 0)
    weights = torch.linspace(-1, 1, len(logprobs), device=here())
    return (logprobs * weights).sum() + entropies.sum() / 3


def made(family, tied=True):
    return (smallest_qwen2_5_vl(tied) if family == QWEN else small_model(family)).to(here())


def data_parallel(model, **options):
    return DistributedDataParallel(model, **options)


def sharded(model):
    """`tied`: the head is the embedding, and no unit of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(here().type, (2,))
    for unit in (*decoder_layers(model), *tower_blocks(model)):
        fully_shard(unit, mesh=mesh)
    low = MixedPrecisionPolicy(output_dtype=torch.bfloat16)  # of logits, not of their logprobs
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    for unit in (model,) if tied else (model.lm_head, model):
        fully_shard(unit, mesh=mesh, mp_policy=low)
    return model


QUICK = [(QWEN, True, "plain", sharded, {}, None), (QWEN, False, "entropy", sharded, {}, None)]
# family, tied head, loss, wrapper and its options, use_reentrant (None: no gradient checkpointing)
SLOW = [
    (QWEN, True, "plain", data_parallel, {}, False),
    (QWEN, False, "entropy", data_parallel, {"find_unused_parameters": True}, None),
    (QWEN, False, "teachers", data_parallel, {}, True),
    (HYBRID, True, "plain", data_parallel, {"find_unused_parameters": True}, False),
    (HYBRID, True, "plain", sharded, {}, False),
    (EXPERTS, True, "plain", data_parallel, {"find_unused_parameters": True}, None),
    (EXPERTS, True, "plain", sharded, {}, None),
]


@ON
@pytest.mark.parametrize("cases", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_two_ranks_are_one_process(tmp_path, cases, on):
    spawned(check_all, 2, tmp_path, cases, on=on)


def check_all(rank, ranks, cases):
    for family, tied, kind, wrap, options, reentrant in cases:
        where = (family, tied, kind, wrap.__name__, reentrant)
        whole = made(family, tied)
        with attach(whole):
            losses = [[loss_of(whole, b, kind) for b in own] for own in batches(family)]
            (sum(map(sum, losses)) / ranks).backward()
        wanted = gradients_of(whole)

        model = made(family, tied).train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant and wrap is sharded:
            model.enable_input_require_grads()
        outer, own = wrap(model, **options), batches(family)[rank]
        if wrap is sharded and not takes_encoded_media(model):  # transformers before 5.19
            with attach(model), pytest.raises(mp.ModelError, match="or put media into every batch"):
                model_inputs(batches(family)[1][0], model, vision="always")
            continue
        for _ in range(2):  # DDP's buckets of the second time are others
            outer.zero_grad()
            for batch, expected in zip(own, losses[rank], strict=True):
                waits = wrap is data_parallel and batch is own[0]
                with outer.no_sync() if waits else contextlib.nullcontext(), attach(outer) as same:
                    assert same is outer and is_attached(model)
                    loss = loss_of(outer, batch, kind)
                    loss.backward()
                torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
            assert_gradients(model, wanted, where)
        if wrap is sharded:
            check_refusals(model, own[0])


def check_refusals(model, batch):
    with pytest.raises(mp.ModelError, match="the model is sharded, and its own attention"):
        text = mp.pad([make_sample([("text", [1, 2])], family=batch.family)])
        model_inputs(text.to(here()), model, vision="always")
    with attach(model):
        inputs = model_inputs(batch, model, vision="always")
    with pytest.raises(mp.ModelError, match="detached before its forward"):
        model(**inputs)


def test_the_model_without_its_wrapper_warns(tmp_path, monkeypatch):
    """It would train on unreduced gradients. Not without gradients, for one rank, or where nothing wraps the model."""
    group = torch.distributed
    group.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        model, other = smallest_qwen2_5_vl(), torch.nn.ModuleList([smallest_qwen2_5_vl()])
        (batch, _), held = batches(QWEN)[1], [DistributedDataParallel(m) for m in (model, other)]
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
            with warnings.catch_warnings():
                warnings.simplefilter("error", mp.MmpackWarning)
                packed_logprobs(model, batch)  # said once
        del held
    finally:
        group.destroy_process_group()


# ---- fsdp2 in mixed precision with gradient checkpointing ----


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
@needs_encoded_media
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
