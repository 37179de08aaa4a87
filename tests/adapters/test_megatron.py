"""Megatron-Core over gloo on the CPU: packs and their samples alone, forward and all gradients, in every layout."""

import dataclasses
import tempfile
from types import SimpleNamespace

import pytest
import torch

import mmpack as mp

pytest.importorskip("megatron.core")
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from support.megatron_models import (
    FAMILY,
    MOE,
    VOCAB,
    alone,
    assert_same,
    build,
    check_layout,
    gradients,
    name_of,
    packs,
    scheduled,
    start,
    step,
    text_samples,
    weights_of,
    with_routes,
)
from support.megatron_vision import (
    QWEN3,
    build_qwen3_vl,
    build_vlm,
    by_transformers,
    in_transformers,
    pictured_samples,
    transformers_model,
)
from support.ranks import spawned
from test_docs_run import run

from mmpack.adapters.megatron import (
    attach,
    attach_thd,
    detach,
    model_inputs,
    packed_listed_logprobs,
    packed_logprobs,
    thd,
)
from mmpack.adapters.vime.sharing import share

pytestmark = pytest.mark.megatron
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
BALANCED = MOE | {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}
REPLAYED = MOE | {"moe_enable_routing_replay": True}


def test_one_rank(tmp_path):
    spawned(check_one, 1, tmp_path)


def check_one(rank, ranks):
    check_layout({})
    check_layout({}, position="rope", **FULL)
    check_layout({}, **CORE)
    check_layout({}, **MOE)
    check_balance()
    routed = [with_routes(text_samples(2, seed), seed) for seed in range(2)]
    check_layout({}, routed, **REPLAYED)
    check_layout({}, routed, **REPLAYED, **FULL)
    check_values()
    check_page()
    check_thd()
    check_vime()
    check_refusals()
    check_pictures()
    check_pictures(qwen3=True)


def check_balance(sizes=None):
    """Rows that samples share count as often in the balance of experts as they would in separate samples."""
    equal = [text_samples(2, seed, equal=6) for seed in range(2)]
    check_layout(sizes or {}, equal, together=True, **BALANCED)


def check_values():
    """Temperature, entropy, kept ids, teachers and a plain pack, by log_softmax of Megatron's own logits."""
    start()
    (model,) = build({})
    samples = text_samples(2)
    with torch.no_grad():
        right = torch.cat([alone(model, s) for s in samples])
        with attach(model):
            (plain,), (batch,) = packs([samples], model, share=False), packs([samples], model)
            torch.testing.assert_close(packed_logprobs(model, plain), right, rtol=0, atol=1e-5)
            logits = model(**model_inputs(batch, model))[0][batch.loss_rows.long()] / 0.7
            targets, count = batch.loss_targets, len(batch.loss_targets)
            ids = torch.stack([targets, (targets + 7) % VOCAB], 1).sort().values
            batch.kept_ids = mp.ops.Support(2 * torch.arange(count + 1), ids.flatten())
            batch.teachers = {"32B": batch.kept_ids}
            every = logits.log_softmax(-1)
            kept = logits.gather(1, ids).log_softmax(-1)
            own = kept[ids == targets[:, None]]
            found = packed_logprobs(model, batch, temperature=0.7, entropy=True)
            close(found, (own, -(kept.exp() * kept).sum(-1)))
            of_all = packed_logprobs(model, batch, temperature=0.7, kept_ids=False)
            chosen = every.gather(1, targets[:, None])[:, 0]
            close([of_all], [chosen])
            first, listed = packed_listed_logprobs(model, batch, temperature=0.7, entropy=True)
            close(
                (first, listed.targets, listed.lists["32B"], listed.entropy),
                (own, chosen, every.gather(1, ids).flatten(), -(every.exp() * every).sum(-1)),
            )
        torch.testing.assert_close(torch.cat([alone(model, s) for s in samples]), right)


def check_page():
    """docs/megatron.md, as a step of Megatron's schedule."""
    start()
    samples = text_samples(2)
    columns = {
        "advantages": [torch.ones(s.num_loss_tokens) * (-1) ** i for i, s in enumerate(samples)]
    }
    micro_batches = [(samples, columns)]
    page = "docs/megatron.md"
    chunks = build({})
    ran = run(page, {"mp": mp, "chunks": chunks, "micro_batches": micro_batches})
    scheduled(chunks, ran["batches"], ran["forward_step"])
    assert all(p.main_grad.abs().sum() > 0 for p in chunks[0].module.parameters())


def check_thd(sizes=None):
    """Logits of every token, and gradients, of a call as vime's and slime's actors make it."""
    samples = [*pictured_samples([["a:4x6"], ["b:10x12", "a:4x6"]])]
    order = [s.media[span.media_index] for s in samples for span in s.modality_spans]
    given = {"pixel_values": torch.cat([torch.as_tensor(m.pixel_values) for m in order])}
    given["image_grid_thw"] = torch.tensor([m.grid_thw for m in order])
    lengths = [len(s.input_ids) for s in samples]
    ids = torch.cat([torch.as_tensor(s.input_ids) for s in samples])
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    ids = torch.nn.functional.pad(ids, (0, -len(ids) % 2 + 2))[None]  # rows of no sample

    def logprobs(model):
        params = PackedSeqParams("thd", ends, ends, max_seqlen_q=99, max_seqlen_kv=99)
        logits = model(
            input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=params, **given
        )
        assert logits.shape[1] == ids.shape[1]
        chosen = vocab_parallel_cross_entropy(
            logits[0, : ends[-1] - 1].clone(), ids[0, 1 : ends[-1]]
        )
        at = [
            torch.arange(len(s))[s.loss_indices] + e - 1
            for s, e in zip(samples, ends, strict=False)
        ]
        return -chosen[torch.cat(at).long()]

    start()
    (model,) = build_vlm({})
    with attach(model):
        batch = mp.pack(samples)
        wanted = packed_logprobs(model, batch)
    (wanted * weights_of(batch.loss_targets)).sum().backward()
    right = [wanted.detach()], gradients([model])
    start(**(sizes or {}))
    (model,) = build_vlm(sizes or {})
    with attach_thd(model, FAMILY.name):
        found = logprobs(model)
        (found * weights_of(batch.loss_targets)).sum().backward()
        with pytest.raises(mp.ModelError, match="labels were passed"):
            params = PackedSeqParams("thd", ends, ends)
            model(input_ids=ids, labels=ids, packed_seq_params=params)
    finalize_model_grads([model])
    assert_same([found.detach()], [model], right, (sizes, "THD"))


def check_vime():
    """Their hooks name one function; models of Qwen2.5-VL's ids are that checkpoint's."""
    start()
    chunks = build({})
    with tempfile.TemporaryDirectory() as folder:
        transformers_model().config.save_pretrained(folder)
        args = SimpleNamespace(hf_checkpoint=folder)
        share(args, 0, 0, chunks, None, None)
        share(args, chunks, "ref_")  # once
        assert chunks[0].module.forward.func is thd._forward
        args.use_rollout_routing_replay = True
        with pytest.raises(mp.ModelError, match="use_rollout_routing_replay is on"):
            share(args, chunks, "")


def close(found, right):
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def check_refusals():
    start()
    (model,) = build({}, **MOE)
    config = model.module.config
    (batch,) = packs([text_samples()], model)
    with pytest.raises(mp.ModelError, match=r"call mmpack\.adapters\.megatron\.attach"):
        model_inputs(batch, model)
    with pytest.raises(mp.ModelError, match="Linear is no GPTModel"):
        attach(torch.nn.Linear(1, 1))
    bad = {"attention_dropout": 0.1, "window_size": (4, 0), "fp8_dot_product_attention": True}
    bad |= {"softmax_type": "learnable", "moe_z_loss_coeff": 0.1, "mtp_num_layers": 1}
    bad |= {"cuda_graph_impl": "local", "moe_router_load_balancing_type": "sinkhorn"}
    for name, value in bad.items():
        own = getattr(config, name)
        setattr(config, name, value)
        with pytest.raises(mp.ModelError, match=f"attach: {name} is"):
            attach(model)
        setattr(config, name, own)
    handle = attach(model)
    assert "forward" in vars(model.module.decoder.layers[0].self_attention.core_attention)
    assert attach([model]).chunks == []  # once
    with pytest.raises(mp.ArgumentError, match="batch is of type PaddedBatch"):
        model_inputs(mp.pad(text_samples()), model)
    with pytest.raises(mp.ModelError, match="the batch has media, and the model is a GPTModel"):
        model_inputs(mp.pack(pictured_samples([["a:4x6"]])), model)
    routes = with_routes(text_samples())
    bad = (lambda r: r[:, :1], "of 1 layers"), (lambda r: r[..., :1], "1 experts")
    for change, why in (*bad, (lambda r: r + 4, "name expert")):
        other = [dataclasses.replace(s, routed_experts=change(s.routed_experts)) for s in routes]
        with pytest.raises(mp.ModelError, match=why):
            model_inputs(mp.pack(other), model)
    inputs = model_inputs(batch, model) | {"attention_mask": torch.zeros(1, 1, 1, 1)}
    with pytest.raises(mp.ModelError, match="an attention_mask"):
        model(**inputs)
    model.module.vocab_size = 10
    with pytest.raises(mp.ModelError, match="the model's are 0 to 9"):
        model_inputs(batch, model)
    handle.detach()
    detach(model)
    assert "forward" not in vars(model.module.decoder.layers[0].self_attention.core_attention)


def check_pictures(layouts=(), qwen3=False):
    """A VLM's packs beside transformers' model with the same weights; then this process's layouts beside them."""
    build, family = (build_qwen3_vl, QWEN3) if qwen3 else (build_vlm, FAMILY)
    batches = [
        pictured_samples([["a:4x6", "b:10x12"], ["a:4x6", "a:4x6"], []], 0, family.name),
        pictured_samples(
            [[], []], 1, family.name
        ),  # on a rank of its own: a tower without pictures
    ]
    start()
    (model,) = chunks = build({})
    weights = {name_of(n, model.module): p.detach() for n, p in model.module.named_parameters()}
    right, grads = by_transformers(batches, weights, qwen3)
    with attach(chunks):
        shared = packs(batches, model)
        found = step(chunks, shared)
    assert [b.stats["patches_encoded"] for b in shared] == [144, 0]  # each once
    close(found, right)
    mine = gradients(chunks)
    for name, own in in_transformers(mine).items():
        assert (own - grads[name]).norm() <= 1e-5 * grads[name].norm() + 1e-9, name
    for sizes, options in layouts:
        check_layout(sizes, batches, (right, mine), make=build, **options)
    if qwen3:
        start()
        (model,) = chunks = build({}, **FULL)
        with attach(chunks), pytest.raises(mp.ModelError, match="can't run deepstack again"):
            packed_logprobs(model, shared[0])


def test_two_ranks(tmp_path):
    spawned(check_two, 2, tmp_path)


def check_two(rank, ranks):
    sp = {"tp": 2, "sp": True}
    for sizes in ({"tp": 2}, sp, {"pp": 2}, {}, {"cp": 2}):
        check_layout(sizes, **(FULL if sizes == sp else {}))
    check_layout({"pp": 2, "vpp": 2}, num_layers=4)
    check_layout({"cp": 2}, position="rope", **CORE)
    check_layout({"ep": 2}, **MOE)
    routed = [with_routes(text_samples(2, seed), seed) for seed in range(2)]
    for sizes in (sp | {"ep": 2}, {"cp": 2, "ep": 2}):
        check_balance(sizes)
        check_layout(sizes, routed, **REPLAYED, **FULL)
    check_pictures([({"tp": 2}, {}), (sp, FULL), ({"pp": 2}, {}), ({"cp": 2}, {}), ({}, {})])
    check_pictures([(sp, CORE), ({"tp": 2}, {}), ({"cp": 2}, {})], qwen3=True)
    check_thd(sp)
    check_bad_layouts(rank)


def check_bad_layouts(rank):
    start(cp=2)
    (model,) = build({"cp": 2}, num_attention_heads=3, num_query_groups=3, kv_channels=16)
    attach(model)
    with pytest.raises(mp.ModelError, match="3 heads, which 2 ranks"):
        packed_logprobs(model, *packs([text_samples()], model))
    (model,) = build({"cp": 2})
    attach(model)
    with pytest.raises(mp.ModelError, match="has 15 rows, this model takes multiples of 2"):
        packed_logprobs(model, mp.pack(text_samples(1, equal=6)[:1]))
    with pytest.raises(mp.ArgumentError, match="hold different batches"):
        packed_logprobs(model, *packs([text_samples(1, rank)], model))
    with pytest.raises(mp.ModelError, match="lists are not gathered"):
        packed_listed_logprobs(model, *packs([text_samples()], model))


def test_four_ranks(tmp_path):
    spawned(check_four, 4, tmp_path)


def check_four(rank, ranks):
    sp = {"tp": 2, "sp": True}
    for sizes in (sp | {"pp": 2}, sp | {"cp": 2}, {"pp": 2, "cp": 2}, {"tp": 2}):
        check_layout(sizes)
    for sizes in (sp | {"ep": 2}, {"pp": 2, "ep": 2}, {"cp": 2, "ep": 2}):
        check_layout(sizes, **MOE)
    check_pictures([(sp | {"cp": 2}, {}), (sp | {"pp": 2}, {})])
