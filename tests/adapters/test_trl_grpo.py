"""MmpackGRPO in TRL's real GRPOTrainer, on images, against the stock one: logprobs, losses, gradients, metrics."""

import copy
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.float64 import Wide, assert_as_exact_as_separate, wide_copy
from support.models import relative_difference, small_model
from support.trl_trainers import (
    Packed,
    assert_same_steps,
    make_trainer,
    rows_of,
    small_processor,
    trl,
)

import mmpack as mp
from mmpack.adapters.transformers.attention import is_attached
from mmpack.adapters.trl import MmpackGRPO, from_batch, grpo, loss_columns, to_samples
from mmpack.demo.chat_templates import QWEN2_5_VL
from mmpack.errors import (
    ArgumentError,
    BackendError,
    LayoutError,
    MissingExtraError,
    ModelError,
)
from mmpack.families import get_family

ROOT = Path(__file__).resolve().parents[2]
FAMILY = get_family("qwen2_5_vl")
STOPS = list(range(30_000))  # one token in five ends a completion, so that lengths differ


def tiny():
    """Larger weights, so that attention is far from uniform; not so large that fp32 itself is off by the bounds."""
    return small_model("qwen2_5_vl", factor=2)


@pytest.fixture(scope="module")
def processor():
    return small_processor()


@pytest.fixture(scope="module")
def rows():
    """A problem of one image and one of two."""
    return rows_of((0, 8))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def build(processor, rows, checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    def build(cls, **options):
        trainer = make_trainer(cls, checkpoint, folder, rows, processor, **options)
        trainer.eos_token_ids = STOPS
        trainer.current_gradient_accumulation_steps = 1
        return trainer

    return build


def generated(trainer, rows, seed=0):
    """The real batch, of four completions per row."""
    torch.manual_seed(seed)
    trainer.model.train()
    return trainer._generate_and_score_completions([r for r in rows for _ in range(4)])


def loss_and_gradients(trainer, inputs):
    trainer.model.zero_grad(set_to_none=True)
    trainer._metrics["train"].clear()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients, dict(trainer._metrics["train"])


LOSSES = {
    **{kind: {} for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "two-sided": {"loss_type": "dapo", "delta": 1.5, "use_bias_correction_kl": True},
    "top entropy": {"loss_type": "dapo", "top_entropy_quantile": 0.4},
    "off-policy mask": {"loss_type": "bnpo", "off_policy_mask_threshold": 0.001},
}


PAIR = {
    "beta": 0.05,
    "num_iterations": 2,
    "temperature": 0.7,
    "mask_truncated_completions": True,
    "gradient_checkpointing": False,
}


@pytest.fixture(scope="module")
def pair(build, rows):
    """Stock and packed trainer of one model, moved off its reference, and one real batch that both read."""
    trainers = [
        build(
            cls,
            **PAIR,
        )
        for cls in (trl.GRPOTrainer, Packed)
    ]
    for trainer in trainers:
        noise = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.add_(torch.randn(p.shape, generator=noise) * p.abs().mean() * 0.1)
    inputs = [generated(t, rows) for t in trainers]
    return trainers, inputs


@pytest.fixture(scope="module")
def off_policy(micro_batch):
    """Old logprobs far enough from the policy for every clip."""
    old, noise = micro_batch["old_per_token_logps"], torch.Generator().manual_seed(0)
    drawn = torch.randn(old.shape, generator=noise) * micro_batch["completion_mask"]
    return micro_batch | {"old_per_token_logps": old + 0.3 * drawn}


@pytest.fixture(scope="module")
def micro_batch(pair):
    """Half of stock's batch, shuffled and split by TRL: what one loss pass reads."""
    from trl.trainer import utils

    torch.manual_seed(0)
    whole = utils.shuffle_sequence_dict(utils.split_pixel_values_by_grid(pair[1][0]))
    halves = [utils.unsplit_pixel_values_by_grid(h) for h in utils.split_tensor_dict(whole, 2)]
    return max(halves, key=lambda h: h["completion_mask"].sum())  # fewer masked ones


def test_old_and_reference_logprobs_are_stock_s(pair):
    stock, packed = pair[1]
    assert stock.keys() == packed.keys()
    lengths = stock["completion_mask"].sum(dim=1)
    assert 0 in lengths and len(set(lengths.tolist())) > 2  # truncated ones, and many lengths
    for name, value in stock.items():
        if name.endswith("_logps"):
            assert (packed[name] - value).abs().max() < 1e-5
            assert torch.equal(packed[name] == 0, value == 0)  # where nothing is attended
        elif torch.is_tensor(value):
            assert torch.equal(packed[name], value), name
    gap = stock["old_per_token_logps"] - stock["ref_per_token_logps"]
    assert gap.abs().max() > 0.01


QUICK = ("grpo", "dapo", "vespo", "gspo", "top entropy")  # the rest differ from these only in TRL


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LOSSES]
)
def test_every_loss_is_trl_s(pair, off_policy, name, monkeypatch):
    options = {"loss_type": name} | LOSSES[name]
    for trainer in pair[0]:
        for key, value in options.items():
            holder = trainer if hasattr(trainer, key) else trainer.args
            monkeypatch.setattr(holder, key, value)
    assert_losses_agree(pair[0], off_policy)


@pytest.mark.slow
def test_the_entropy_bonus_is_trl_s(build, pair, off_policy):
    """TRL reads it once, when a trainer is built."""
    trainers = []
    for moved in pair[0]:
        trainer = build(type(moved), entropy_coef=0.1, **PAIR | {"loss_type": "grpo"})
        trainer.model.load_state_dict(moved.model.state_dict())
        trainers.append(trainer)
    assert_losses_agree(trainers, off_policy)


def assert_losses_agree(trainers, inputs):
    """Losses, gradients and TRL's metrics of the stock and the packed trainer."""
    seen = [loss_and_gradients(trainer, inputs) for trainer in trainers]
    (loss, gradients, metrics), (own_loss, own_gradients, own_metrics) = seen
    assert math.isfinite(loss) and abs(loss) > 1e-4
    assert own_loss == pytest.approx(loss, abs=1e-5)
    assert relative_difference(own_gradients, gradients) < 1e-5
    ours = {k: v for k, v in own_metrics.items() if not k.startswith("mmpack/")}
    assert ours.keys() == metrics.keys()
    for key, value in metrics.items():
        assert ours[key] == pytest.approx(value, abs=1e-5), key


def test_real_batches_come_back_bit_for_bit(pair, micro_batch, rows):
    """With pictures named by the data set, as samples that mmpack finds nothing wrong with."""
    processor = pair[0][0].processing_class
    images = [r["images"] for r in rows for _ in range(4)]
    for outputs, given in ((pair[1][0], images), (micro_batch, None)):
        samples = to_samples(outputs, processor, images=given)
        mp.check(samples)
        batch = mp.pack(samples, share_prefix=True, loss_columns=loss_columns(samples))
        assert {"old_logprobs", "ref_logprobs"} <= batch.loss_columns.keys()
        back = from_batch(batch, samples)
        assert back.keys() == outputs.keys()
        for name, value in outputs.items():
            same = torch.equal(back[name], value) if torch.is_tensor(value) else back[name] == value
            assert same, name
            assert not torch.is_tensor(value) or back[name].dtype == value.dtype, name


def test_rows_without_pictures(pair):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (2, 7), generator=g)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
    with torch.no_grad():
        (a, entropy, _), (b, own, _) = (
            t._get_per_token_logps_and_entropies(t.model, ids, mask, 4, compute_entropy=True)
            for t in pair[0]
        )
    assert (a - b).abs().max() < 1e-5
    assert (entropy - own).abs().max() < 1e-5
    assert b.count_nonzero() == 4 + 2


def test_gradients_are_stock_s(pair, micro_batch, monkeypatch):
    """Both against stock ones in float64; no ratio is near the edge of a clip."""
    inputs = {k: v for k, v in micro_batch.items() if k != "old_per_token_logps"}
    (_, stock, _), (_, packed, _) = (loss_and_gradients(t, inputs) for t in pair[0])
    monkeypatch.setattr(pair[0][0], "model", wide_copy(pair[0][0].model))
    with Wide():
        _, exactly, _ = loss_and_gradients(pair[0][0], inputs)
    assert all(g.dtype == torch.float64 for g in exactly.values())
    assert_as_exact_as_separate(packed, stock, exactly)


def test_a_micro_batch_of_masked_completions_gives_a_zero(pair, micro_batch):
    masked = micro_batch | {"completion_mask": torch.zeros_like(micro_batch["completion_mask"])}
    for trainer in pair[0]:
        loss, gradients, _ = loss_and_gradients(trainer, masked)
        assert loss == 0
        assert all(g.abs().max() == 0 for g in gradients.values())


@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_real_run_learns_the_same(build, checkpointing):
    """Generation, two updates a generation, reference, evaluation; TRL checkpoints gradients by default."""
    runs = []
    for cls in (trl.GRPOTrainer, Packed):
        trainer = build(cls, beta=0.05, num_iterations=2, gradient_checkpointing=checkpointing)
        trainer.train()
        trainer.evaluate()
        runs.append(trainer)
    stock, packed = runs
    assert len(stock.state.log_history) == len(packed.state.log_history) == 5
    for theirs, ours in zip(stock.state.log_history, packed.state.log_history, strict=True):
        assert {k for k in ours if "mmpack/" not in k} == theirs.keys()
        for key, value in theirs.items():
            if not any(word in key for word in ("time", "runtime", "per_second")):
                assert ours[key] == pytest.approx(value, rel=1e-4, abs=2e-6), key
    assert_same_steps(
        stock.model.named_parameters(), packed.model.named_parameters(), tiny().named_parameters()
    )
    stats = packed.mmpack_stats
    assert stats.samples == 4 * (3 + 2 * 2 + 3)  # losses; two olds and references; an evaluation's
    assert stats.tokens < stats.tokens_stock / 2
    assert stats.patches * 4 == stats.patches_stock  # each image once for four completions
    assert "tokens" in str(stats) and f"{stats.patches_stock:,}" in str(stats)


def test_saved_models_know_nothing_of_it(pair, tmp_path):
    from transformers import Qwen2_5_VLForConditionalGeneration

    packed = pair[0][1]
    packed.save_model(str(tmp_path))
    assert "mmpack" not in (tmp_path / "config.json").read_text()
    assert not is_attached(Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path))


def test_generated_ids_are_trained_on_and_nothing_is_rendered_again(build, rows, monkeypatch):
    """TRL renders each prompt a second time, without its `chat_template`: other ids, other mm_token_type_ids."""
    trainer = build(Packed, num_iterations=2, max_steps=1)
    trainer.chat_template = QWEN2_5_VL.replace("a helpful", "an exceedingly patient and thorough")
    rollouts, packs = [], []
    generate = trainer.model.generate

    def spy_generate(input_ids, attention_mask, **kwargs):
        out = generate(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        whole = torch.cat([attention_mask, torch.ones_like(out[:, input_ids.shape[1] :])], dim=1)
        rollouts.extend(row[m.bool()].tolist() for row, m in zip(out, whole, strict=True))
        return out

    def spy_pack(samples, model):
        packs.append(samples)
        return pack(samples, model)

    pack = grpo.pack_shared
    monkeypatch.setattr(trainer.model, "generate", spy_generate)
    monkeypatch.setattr(grpo, "pack_shared", spy_pack)
    outputs = generated(trainer, rows)

    samples = [s for part in packs for s in part]
    assert len(samples) == len(rollouts) == 8
    for sample, ids in zip(samples, rollouts, strict=True):
        assert sample.input_ids.tolist() == ids[: len(sample)]  # cut at the stop
        assert sample.num_loss_tokens > 0
    # what was rendered again says otherwise, and is not read
    second = outputs["mm_token_type_ids"].shape[1]
    assert second != outputs["prompt_ids"].shape[1] + outputs["completion_ids"].shape[1]
    with pytest.raises(LayoutError, match="chat_template"):
        to_samples(outputs, trainer.processing_class)

    for sample, row in zip(samples, outputs["old_per_token_logps"], strict=True):
        alone = alone_logprobs(trainer.model, sample)
        assert (row[: len(alone)] - alone).abs().max() < 1e-5


def alone_logprobs(model, sample):
    """Of one completion, by the model's own forward and `get_rope_index`."""
    ids = torch.from_numpy(sample.input_ids)[None]
    runs = [sample.media[s.media_index] for s in sample.modality_spans]
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == FAMILY.image_token_id).long(),
            pixel_values=torch.cat([m.pixel_values for m in runs]),
            image_grid_thw=torch.tensor([m.grid_thw for m in runs]),
            use_cache=False,
        ).logits[0]
    at = torch.from_numpy(sample.loss_indices)
    return logits[at - 1].log_softmax(dim=-1).gather(1, ids[0, at, None])[:, 0]


class Engine:
    """What GRPOTrainer sees of a VLLMGeneration: prompts in; prompts, completions and logprobs out."""

    def __init__(self, change=lambda ids: ids):
        self.change = change

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler):
        rng = np.random.default_rng(0)
        completions = [rng.integers(0, 1000, rng.integers(2, 6)).tolist() for _ in prompts]
        logprobs = [[[-12 + 0.3 * rng.standard_normal()] for _ in c] for c in completions]
        logprobs[0][0] = [None]  # as extract_logprobs gives a NaN on
        return [self.change(list(p)) for p in prompts], completions, logprobs, None


def with_engine(trainer, engine):
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = engine
    if isinstance(trainer, Packed):
        engine.generate = grpo.check_prompts(engine.generate, FAMILY)
    return trainer


def test_importance_sampling_correction_is_trl_s(build, rows):
    seen = []
    for cls in (trl.GRPOTrainer, Packed):
        trainer = with_engine(build(cls, vllm_importance_sampling_mode="token_truncate"), Engine())
        outputs = generated(trainer, rows[1:])
        loss, _, metrics = loss_and_gradients(trainer, copy.copy(outputs))
        seen.append((outputs, loss, metrics))
    (stock, loss, _), (packed, own_loss, metrics) = seen
    assert (
        packed.keys() == stock.keys() >= {"importance_sampling_ratio", "sampling_per_token_logps"}
    )
    ratio = stock["importance_sampling_ratio"]
    assert (ratio != 1).any()
    assert (packed["importance_sampling_ratio"] - ratio).abs().max() < 1e-4
    assert own_loss == pytest.approx(loss, abs=1e-5)
    samples = to_samples(packed, trainer.processing_class)
    assert samples[0].rollout_logprobs is None  # a NaN is no logprob
    assert samples[1].rollout_logprobs == pytest.approx(
        packed["sampling_per_token_logps"][1, : samples[1].num_loss_tokens].numpy()
    )


def again(ids):
    """The engine expands what was expanded."""
    return [t for i in ids for t in ([i] * (2 if i == FAMILY.image_token_id else 1))]


def smaller(ids):
    first = ids.index(FAMILY.image_token_id)
    return ids[:first] + ids[first + 1 :]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (again, "double_expansion"),
        (smaller, "max_pixels"),
        (lambda ids: [9, *ids], "chat_template"),
        (lambda ids: [i for i in ids if i != FAMILY.image_token_id], "dropped_image"),
    ],
)
def test_an_engine_that_ran_other_prompts_is_named(pair, rows, change, cause, monkeypatch):
    packed = pair[0][1]
    for name in ("use_vllm", "_last_loaded_step", "vllm_generation"):
        monkeypatch.setattr(packed, name, getattr(packed, name, None), raising=False)
    with pytest.raises(ModelError, match=rf"the engine ran prompt 0 with \d+ ids.*\({cause}\)"):
        generated(with_engine(packed, Engine(change)), rows)


def test_what_a_packed_pass_cannot_do_is_one_line(pair, micro_batch):
    packed = pair[0][1]
    ids = torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(ModelError, match="pixel_attention_mask is not supported"):
        packed._get_per_token_logps_and_entropies(
            packed.model, ids, ids, 1, pixel_attention_mask=torch.ones(1)
        )
    with pytest.raises(ModelError, match="auxiliary loss is not supported"):
        packed._get_per_token_logps_and_entropies(packed.model, ids, ids, 1, compute_aux_loss=True)
    dropped = micro_batch | {"pixel_values": None, "image_grid_thw": None, "num_images": None}
    with pytest.raises(LayoutError, match="dropped_image"):
        packed._compute_loss(packed.model, dropped)
    first = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1)))
    for name, on in (("torch_compile", True), ("aux_loss_enabled", True), ("accelerator", first)):
        changed = SimpleNamespace(
            accelerator=packed.accelerator,
            args=SimpleNamespace(torch_compile=name == "torch_compile"),
            aux_loss_enabled=name == "aux_loss_enabled",
        )
        setattr(changed, name, on)
        with pytest.raises(ModelError, match="is on"):
            grpo.refuse_unsupported(changed)


@pytest.mark.parametrize("name", ["minicpmv4_6", "kimi_k25"])
def test_pictures_without_sizes_are_refused_before_anything_is_generated(name, monkeypatch):
    reached = []
    monkeypatch.setattr(
        trl.GRPOTrainer,
        "_generate_and_score_completions",
        lambda self, inputs: reached.append(inputs) or {},
    )
    trainer = Packed.__new__(Packed)
    trainer._mmpack_family = get_family(name)
    text = [{"prompt": "a"}, {"prompt": "a", "images": [], "image": None}]
    assert trainer._generate_and_score_completions(text) == {} and reached == [text]
    for field, picture in (("images", ["p"]), ("image", "p")):
        with pytest.raises(ModelError, match=rf"sizes of {name}'s pictures.*Fix: "):
            trainer._generate_and_score_completions([*text, {"prompt": "a", field: picture}])
    trainer._mmpack_family = get_family("mistral3")
    trainer._generate_and_score_completions([{"images": ["p"]}])
    assert len(reached) == 2


def test_wrong_use_is_an_error(monkeypatch):
    with pytest.raises(ArgumentError, match=r"class Turned\(MmpackGRPO, GRPOTrainer\)"):
        type("Turned", (trl.GRPOTrainer, MmpackGRPO), {})
    with pytest.raises(ArgumentError, match="not combined with GRPOTrainer"):
        MmpackGRPO()
    monkeypatch.setattr(trl, "__version__", "1.17.0")
    with pytest.raises(BackendError, match=r"TRL 1\.17\.0 is installed"):
        MmpackGRPO()
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(MissingExtraError, match=r"mmpack\[trl\]"):
        MmpackGRPO()


@pytest.mark.slow
def test_the_example_runs():
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "trl_grpo.py"), "2"],
        capture_output=True,
        text=True,
        check=True,
    )
    steps = [line.split() for line in run.stdout.splitlines() if line.startswith("   ")]
    table = [s for s in steps if len(s) == 5 and s[1] != "passes"]
    assert len(table) == 2
    assert all(float(s[3]) == pytest.approx(float(s[4]), rel=1e-3) for s in table)
    assert "8.00×" in run.stdout  # each picture once for eight completions
