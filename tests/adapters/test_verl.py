"""verl's real DataProto in and out, and its real FSDP engine on a CPU: its own logprobs, losses and gradients."""

import copy
import dataclasses
import importlib
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.models import spread_out
from support.same import assert_equal
from support.tiny_models import tiny_qwen2_5_vl
from support.verl_steps import actor_config, assert_same_step, inferred, trained, with_columns
from test_docs_run import blocks, run

import mmpack as mp
from mmpack.adapters.loss_values import loss_columns
from mmpack.adapters.verl import from_batch, to_samples, use
from mmpack.adapters.verl.data import from_samples
from mmpack.contracts import TOLERANCES
from mmpack.errors import ArgumentError, LayoutError, ModelError

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("verl_on_cpu")]
IMAGE_PAD = 151655


@pytest.fixture(scope="session")
def made(fixture):
    """What verl's agent loop makes of the fixture."""
    from matrix.verl_trace import data_proto

    return data_proto(fixture)


@pytest.fixture
def data(made, fixture):
    """As it stands after a step: columns of the trainer, tool tokens in a response, fields of every kind."""
    data = copy.deepcopy(made)
    draw = torch.Generator().manual_seed(1)
    mask = data.batch["response_mask"]
    mask[1, 1:3] = 0
    shape = tuple(mask.shape)
    data.batch["old_log_probs"] = torch.randn(shape, generator=draw)
    data.batch["ref_log_prob"] = torch.randn(shape, generator=draw).bfloat16()
    data.batch["advantages"] = torch.randn(shape, generator=draw)
    data.batch["advantages"][0, -1] = float("nan")
    data.batch["token_level_scores"] = torch.randn(shape, generator=draw) * mask
    width = data.batch["input_ids"].shape[1]
    data.batch["routed_experts"] = torch.randint(
        0, 8, (len(data), width, 2, 2), generator=draw, dtype=torch.int16
    )
    data.non_tensor_batch["uid"] = np.array([g for _, g in fixture.ids], dtype=object)
    data.non_tensor_batch["index"] = np.arange(len(data))
    data.non_tensor_batch["tools_kwargs"] = objects([{"a": (1, None)}, [1, 2]] * (len(data) // 2))
    data.meta_info["temperature"] = 0.7
    return data


def objects(values):
    out = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        out[i] = value
    return out


def test_samples_are_what_verl_holds(made, fixture):
    samples = to_samples(made, fixture.processor, images=fixture.images())
    assert made.batch["position_ids"].shape[1] == 4
    for b, s in enumerate(samples):
        valid = made.batch["attention_mask"][b].bool()
        assert np.array_equal(s.input_ids, made.batch["input_ids"][b][valid])
        assert np.array_equal(s.position_ids, made.batch["position_ids"][b][1:, valid])
        assert s.input_ids[s.loss_indices].tolist() == fixture.rows[b][1]
        assert s.rollout_logprobs.tolist() == fixture.rows[b][2]
        grids = made.non_tensor_batch["multi_modal_inputs"][b]["image_grid_thw"].tolist()
        assert [list(m.grid_thw) for m in s.media] == grids
    assert mp.validate(samples) == []


def test_a_dataproto_comes_back_bit_for_bit(data, fixture, tmp_path):
    """In memory, in part, through a file and through a pack."""
    samples = to_samples(data, fixture.processor)
    assert_same(from_samples(samples), data)
    assert_same(from_samples(samples[2:5]), data[2:5])
    mp.write_trace(tmp_path / "t.jsonl", samples)
    store = {m.cache_key: m.pixel_values for s in samples for m in s.media}
    assert_same(from_samples(list(mp.read_trace(tmp_path / "t.jsonl", media=store))), data)
    bare = list(mp.read_trace(tmp_path / "t.jsonl"))
    assert_same(from_samples(bare, media=store), data)
    with pytest.raises(mp.SchemaError, match="MM404"):
        from_samples(bare)
    columns = loss_columns(samples)
    assert set(columns) == {"old_logprobs", "ref_logprobs", "advantages", "token_level_scores"}
    batch = mp.pack(samples, share_prefix=True, loss_columns=columns)
    assert_same(from_batch(batch, samples), data)
    batch.loss_columns["old_logprobs"] = torch.arange(batch.num_loss_tokens, dtype=torch.float32)
    mask = data.batch["response_mask"].bool()
    changed = from_batch(batch, samples).batch["old_log_probs"]
    assert torch.equal(changed[mask], torch.arange(int(mask.sum()), dtype=torch.float32))
    assert torch.equal(changed[~mask], data.batch["old_log_probs"][~mask])
    with pytest.raises(ArgumentError, match="not those of the batch"):
        from_batch(batch, samples[::-1])


def test_samples_from_elsewhere_go_through_verl_s_own_functions(processed, fixture):
    from verl.workers.utils.padding import left_right_2_no_padding

    data = from_samples(processed)
    nested = left_right_2_no_padding(data.to_tensordict())
    for s, ids, places in zip(
        processed, nested["input_ids"].unbind(), nested["position_ids"].unbind(), strict=True
    ):
        assert np.array_equal(ids, s.input_ids)
        assert np.array_equal(places[1:], s.position_ids)
        assert np.array_equal(places[0], np.arange(len(s)))
    again = to_samples(data, fixture.processor, images=fixture.images())
    assert [s.media_cache_keys for s in again] == [s.media_cache_keys for s in processed]
    assert mp.compare(processed, again).ok


def test_what_doesn_t_fit_is_one_line(data, fixture):
    with pytest.raises(ArgumentError, match="images has 0 entries"):
        to_samples(data, fixture.processor, images=[])
    samples = to_samples(data, fixture.processor)
    one = [torch.zeros(s.num_loss_tokens) for s in samples]
    for columns in (one[1:], [one[0][:1], *one[1:]], [torch.zeros(99), *one[1:]]):
        with pytest.raises(ArgumentError, match=r"advantages has \d+ entries for"):
            from_samples(samples, {"advantages": columns})
    (prompt, ids, _), (name, _) = fixture.rows[0], fixture.ids[0]
    other = fixture.processor(fixture.messages[prompt], ids, sample_id=name)
    with pytest.raises(ArgumentError, match="only some samples have"):
        from_samples([*samples, other])
    start = samples[1].loss_spans[0].start  # a tool's words are an observation
    assert samples[1].loss_spans[0].stop == start + 1
    assert [(s.start - start, s.stop - start) for s in samples[1].observation_spans] == [(1, 3)]


def test_a_reward_of_no_tokens_is_named(fixture):
    """verl's own scatter puts it into the last padded column."""
    from matrix.verl_trace import data_proto
    from verl.experimental.agent_loop import agent_loop

    empty = copy.copy(fixture)
    object.__setattr__(empty, "rows", [(0, [], [])] + fixture.rows[1:])
    assert to_samples(data_proto(empty), fixture.processor)[0].num_loss_tokens == 0
    with pytest.MonkeyPatch.context() as patched:
        scored = partial(agent_loop.AgentLoopOutput, reward_score=1.0)
        patched.setattr(agent_loop, "AgentLoopOutput", scored)
        rewarded = data_proto(empty)
    last = rewarded.batch["responses"].shape[1] - 1
    assert rewarded.batch["rm_scores"][0].nonzero().tolist() == [[last]]
    with pytest.raises(LayoutError, match=r"row 0 .*empty_response"):
        to_samples(rewarded, fixture.processor)


def test_traps_are_named(made, fixture):
    data = copy.deepcopy(made)
    row = next(i for i, (p, _, _) in enumerate(fixture.rows) if len(fixture.pictures[p]) == 2)
    inputs = dict(data.non_tensor_batch["multi_modal_inputs"][row])
    first = int(inputs["image_grid_thw"][0].prod())
    inputs["image_grid_thw"] = inputs["image_grid_thw"][:1]
    data.non_tensor_batch["multi_modal_inputs"][row] = inputs
    with pytest.raises(ArgumentError, match=rf"row {row} .*dropped_image"):
        to_samples(data, fixture.processor)
    inputs["pixel_values"] = inputs["pixel_values"][:first]
    with pytest.raises(LayoutError, match=rf"row {row} .*dropped_image"):
        to_samples(data, fixture.processor)
    data, width = copy.deepcopy(made), made.batch["prompts"].shape[1]
    data.batch["responses"][0, 1] = data.batch["input_ids"][0, width + 1] = IMAGE_PAD
    samples = to_samples(data, fixture.processor)  # a sampled placeholder stays a word
    assert len(samples[0].media) == len(fixture.pictures[0])
    assert "MM203" in {p.code for p in mp.validate(samples)}
    data.batch["attention_mask"][0, width - 2] = 0
    with pytest.raises(ArgumentError, match="0 between tokens"):
        to_samples(data, fixture.processor)


# ---------------------------------------------------------------- the engine


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    spread_out(tiny_qwen2_5_vl()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def engine(verl_on_cpu, checkpoint):
    from conformance.verl_cpu import make_engine

    return make_engine(checkpoint)


def test_log_probs_are_verl_s(engine, data):
    """Micro-batches of 2 rows; groups are apart, so bins have rows in another order."""
    data.reorder(torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]))
    settings = {"micro_batch_size_per_gpu": 2, "calculate_sum_pi_squared": True}
    stock = inferred(engine, data, **settings)
    handle = use(engine)
    with handle:
        own = inferred(engine, data, **settings)
    off = inferred(engine, data, micro_batch_size_per_gpu=2)
    mask = data.batch["attention_mask"][:, data.batch["prompts"].shape[1] :].bool()
    bound = TOLERANCES["layouts"].value
    assert stock.keys() == own.keys() and len(own) == 3
    for name, values in own.items():
        assert float((values - stock[name])[mask].abs().max()) <= bound
        if name in off:
            assert torch.equal(off[name], stock[name])  # untouched when off
    assert not torch.equal(own["log_probs"], stock["log_probs"])  # and it was on
    prompts = data.batch["attention_mask"].sum() - mask.sum()  # every group is whole in a bin
    assert handle.stats["tokens_unshared"] - handle.stats["tokens"] >= prompts // 2
    patches = sum(len(x["pixel_values"]) for x in data.non_tensor_batch["multi_modal_inputs"])
    assert handle.stats["patches_encoded"] == patches // 2


@pytest.mark.parametrize("settings", ["one row", "dynamic"])
def test_loss_and_gradients_are_verl_s(engine, data, settings):
    """The bins are mmpack's: fewer micro-batches, and the same step."""
    from mmpack.adapters.transformers.attention import is_attached

    data.reorder(torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]))
    with_columns(engine, data)
    longest = int(data.batch["attention_mask"].sum(1).max())
    given = {
        "one row": {"micro_batch_size_per_gpu": 1},
        "dynamic": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 2 * longest},
    }[settings]
    stock = trained(engine, data, **given)
    assert engine.module.is_gradient_checkpointing
    with use(engine):
        assert not is_attached(engine.module)
        own = trained(engine, data, **given)
        assert not is_attached(engine.module)
    assert own.micro_batches < stock.micro_batches
    assert_same_step(own, stock)


@pytest.mark.parametrize("alone", [False, True])
def test_top_k_distillation_is_verl_s(engine, data, alone):
    from verl.trainer.distillation import distillation_ppo_loss
    from verl.workers.config import DistillationConfig, DistillationLossConfig

    with_columns(engine, data)
    draw = torch.Generator().manual_seed(2)
    shape = (*data.batch["input_ids"].shape, 5)
    data.batch["teacher_ids"] = torch.randint(0, 150_000, shape, generator=draw)
    data.batch["teacher_logprobs"] = torch.randn(shape, generator=draw).log_softmax(-1)
    own_settings = DistillationLossConfig(
        loss_mode="forward_kl_topk",
        topk=5,
        use_task_rewards=not alone,
        use_policy_gradient=False,
        loss_max_clamp=None,  # or of drawn teachers nothing has a gradient
        log_prob_min_clamp=None,
    )
    config = DistillationConfig(enabled=False, distillation_loss=own_settings)
    loss = partial(
        distillation_ppo_loss, config=actor_config(entropy_coeff=0.0), distillation_config=config
    )
    flags = {"distillation_use_topk": True, "distillation_only": alone, "calculate_entropy": False}
    stock = trained(engine, data, loss, **flags)
    with use(engine):
        own = trained(engine, data, loss, **flags)
    assert_same_step(own, stock)


def with_kept_ids(data):
    """A list of ids for each response token, as an engine's `extra_fields` may hold them; none where a tool wrote."""
    rng = np.random.default_rng(0)
    width = data.batch["prompts"].shape[1]
    lists = []
    for b, response in enumerate(data.batch["responses"]):
        valid = data.batch["attention_mask"][b, width:].bool()
        sampled = data.batch["response_mask"][b, valid].tolist()
        pairs = zip(response[valid].tolist(), sampled, strict=True)
        drawn = [
            {t, *rng.integers(0, 150_000, rng.integers(0, 20)).tolist()} if m else ()
            for t, m in pairs
        ]
        lists.append(mp.schema.Ragged.of([sorted(ids) for ids in drawn]))
    data.non_tensor_batch["kept_ids"] = objects(lists)
    return lists


def test_kept_ids_go_to_samples_and_back(data, fixture):
    lists = with_kept_ids(data)
    samples = to_samples(data, fixture.processor)
    for sample, own in zip(samples, lists, strict=True):
        assert mp.validate(sample) == []
        filled = [x.tolist() for x in own.lists() if len(x)]
        assert [x.tolist() for x in sample.kept_ids.lists()] == filled
    assert from_samples(samples).non_tensor_batch["kept_ids"].tolist() == lists
    bare = [dataclasses.replace(samples[0], kept_ids=None), *samples[1:]]
    with pytest.raises(ArgumentError, match="has no kept_ids, but other samples have"):
        from_samples(bare)
    data.non_tensor_batch["kept_ids"][0] = lists[0][:-1]
    with pytest.raises(ArgumentError, match=r"row 0: kept_ids has .* lists for .* response tokens"):
        to_samples(data, fixture.processor)


def test_the_engine_renormalises_over_kept_ids(engine, data):
    """verl's own logits of the same rows, cut to the lists by torch."""
    from support.kept_ids import support_of, values

    lists = with_kept_ids(data)
    logits = []
    head = engine.module.get_output_embeddings()
    hook = head.register_forward_hook(lambda m, a, out: logits.append(out.detach().double()))
    inferred(engine, data)  # micro-batches in their order
    hook.remove()
    with use(engine):
        own = inferred(engine, data)
    mask = data.batch["attention_mask"][:, data.batch["prompts"].shape[1] :].bool()
    rows = (row for part in logits for row in part)  # of unlike widths
    for b, (row, given) in enumerate(zip(rows, lists, strict=True)):
        n, length = int(mask[b].sum()), int(data.batch["attention_mask"][b].sum())
        response = data.batch["responses"][b, :n]
        filled = [
            torch.as_tensor(ids, dtype=torch.int64) if len(ids) else t[None]
            for ids, t in zip(given.lists(), response, strict=True)
        ]
        scores = row[length - n - 1 : length - 1] / 0.7
        wanted = values(scores, response, support_of(filled))
        for name, value in zip(("log_probs", "entropy"), wanted, strict=True):
            assert (own[name][b, :n] - value).abs().max() <= TOLERANCES["layouts"].value


def test_what_it_can_t_do_is_refused(engine, data, monkeypatch):
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLAttention
    from verl.models.transformers.qwen2_vl import qwen2_vl_attn_forward

    with use(engine) as used:
        with pytest.raises(ModelError, match="already"):
            use(engine)
        assert "forward_step" in vars(used)  # the first still stands
    offloading = copy.copy(engine.model_config)
    object.__setattr__(offloading, "enable_activation_offload", True)  # it is frozen
    for owner, name, value, said in (
        (engine, "model_config", offloading, "enable_activation_offload is on"),
        (Qwen2_5_VLAttention, "forward", qwen2_vl_attn_forward, "use_remove_padding"),  # verl's
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            with pytest.raises(ModelError, match=said):
                use(engine)
    assert "forward_step" not in vars(engine)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_one_line_of_configuration(engine, checkpoint, data, monkeypatch, caplog, strategy):
    """With the settings of verl's example scripts, which `use` would refuse."""
    from conformance.verl_cpu import make_engine
    from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

    monkeypatch.setenv("VERL_ENGINE_VENDOR", "mmpack")  # so that it is unset afterwards
    options = {"use_fused_kernels": True, "use_remove_padding": True}
    external = "mmpack.adapters.verl.enable"
    packed = make_engine(checkpoint, strategy=strategy, external_lib=external, **options)
    assert [r.message for r in caplog.records if "use_fused_kernels is off" in r.message]
    enable = sys.modules[external]
    assert type(packed) is enable.MmpackEngine
    assert EngineRegistry.get_engine_cls("value_model", "fsdp2").__module__.startswith("verl.")
    with_columns(engine, data)
    own, stock = trained(packed, data), trained(engine, data)
    if strategy == "fsdp":  # one flat gradient, whose norm is compared
        own = own._replace(gradients=stock.gradients)
    assert_same_step(own, stock)
    assert packed.handle.stats["tokens"] < packed.handle.stats["tokens_unshared"]
    packed.initialize()  # as verl resets it
    assert packed.forward_step.__self__ is packed.handle and not packed.handle.stats
    monkeypatch.delenv("VERL_ENGINE_VENDOR")
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is FSDPEngineWithLMHead
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "metax")
    with pytest.raises(ModelError, match="'metax'"):
        importlib.reload(enable)


@pytest.mark.slow
def test_glm_runs_by_transformers_forward(tmp_path, monkeypatch):
    """verl's own fails, so each sample alone through transformers is the oracle."""
    from conformance.verl_cpu import make_engine
    from support.families import mixed_batch
    from support.models import small_model

    from mmpack.adapters.transformers import model_inputs

    monkeypatch.setenv("VERL_ENGINE_VENDOR", "mmpack")
    model = small_model("glm4v")
    model.save_pretrained(tmp_path)
    samples = [dataclasses.replace(s, loss_spans=s.loss_spans[-1:]) for s in mixed_batch("glm4v")]
    data = from_samples(samples)
    external = {"external_lib": "mmpack.adapters.verl.enable", "use_remove_padding": True}
    packed = make_engine(tmp_path, **external)
    found = inferred(packed, data, micro_batch_size_per_gpu=5)["log_probs"]
    assert packed.handle.stats["tokens"] < packed.handle.stats["tokens_unshared"]
    for row, mask, s in zip(found, data.batch["response_mask"].bool(), samples, strict=True):
        with torch.no_grad():
            logits = model(**model_inputs(mp.pad([s]), model)).logits[0] / 0.7
        ids = torch.from_numpy(s.input_ids)[s.loss_indices]
        alone = logits.log_softmax(-1)[s.loss_indices - 1, ids]
        assert (row[mask] - alone).abs().max() <= TOLERANCES["layouts"].value


def test_a_group_goes_to_one_rank(monkeypatch):
    """verl's trainer, with its own upsampling and balance before."""
    import transfer_queue
    from verl.trainer.ppo.v1 import trainer_base

    from mmpack.adapters.verl.groups import keep_groups

    own = trainer_base.PPOTrainer._balance_batch
    monkeypatch.setattr(trainer_base.PPOTrainer, "_balance_batch", own)  # given back afterwards
    trainer = SimpleNamespace(
        actor_rollout_wg=SimpleNamespace(_dispatch_info={"actor": [0, 1, 2, 3]}),
        tokenizer=SimpleNamespace(eos_token_id=0),
        _get_required_batch_multiple=lambda size: size,
    )

    def balanced():
        draw = np.random.default_rng(0)
        keys = [f"a_{g}_{k}_0" for k in range(5) for g in range(16)]
        tags = [{"seq_len": int(n)} for n in draw.integers(100, 2000, len(keys))]
        batch = transfer_queue.KVBatchMeta(partition_id="train", keys=keys, tags=tags)
        metrics = {}
        batch = trainer_base.PPOTrainer._balance_batch(trainer, batch, metrics)
        assert sorted(batch.keys) == sorted(keys)
        assert dict(zip(batch.keys, batch.tags, strict=True)) == dict(zip(keys, tags, strict=True))
        ranks = [
            {k.rsplit("_", 2)[0] for k in batch.keys[r : r + 20]} for r in range(0, len(keys), 20)
        ]
        loads = [sum(t["seq_len"] for t in batch.tags[r : r + 20]) for r in range(0, 80, 20)]
        return ranks, max(loads) / min(loads), metrics, max(loads)

    assert sum(map(len, balanced()[0])) > 40  # verl's own spreads the 16 groups
    keep_groups()
    keep_groups()  # once
    ranks, unlike, metrics, most = balanced()
    assert [len(r) for r in ranks] == [4] * 4 and unlike < 1.05
    assert metrics["global_seqlen/balanced_max"] == most


def assert_same(a, b):
    """Two DataProtos, bit for bit."""
    assert set(a.batch.keys()) == set(b.batch.keys())
    for name, value in b.batch.items():
        assert a.batch[name].dtype == value.dtype, name
        bits = [x.contiguous().view(torch.uint8) for x in (a.batch[name], value)]
        assert torch.equal(*bits), name
    assert_equal(a.non_tensor_batch, b.non_tensor_batch)
    assert_equal(a.meta_info, b.meta_info, "meta_info")


def test_the_page_s_example(data, fixture):
    page = "docs/adapters.md"
    [code] = [block for block in blocks(page) if "adapters.verl import" in block[1]]
    names = {"mp": mp, "data": data, "processor": fixture.processor, "pictures": fixture.images()}
    ran = run(page, names, [code])
    assert ran["batch"].num_loss_tokens == int(data.batch["response_mask"].sum())
    assert_same(ran["data"], data)
