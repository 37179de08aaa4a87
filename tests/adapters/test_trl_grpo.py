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
from support.trl_ranks import Ours, Stock
from support.trl_trainers import (
    Packed,
    PackedRLOO,
    assert_it_is_its_own,
    assert_same_steps,
    make_trainer,
    rows_of,
    small_processor,
    trl,
)
from trl.trainer import utils

from mmpack.adapters.trl import MmpackGRPO, grpo, to_samples
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
PAIR = {
    "beta": 0.05,
    "num_iterations": 2,
    "temperature": 0.7,
    "mask_truncated_completions": True,
    "gradient_checkpointing": False,
}
BONUS = {"_entropy_bonus_enabled": True, "entropy_coef": 0.1}
LOSSES = {
    **{kind: {} for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "two-sided": {"loss_type": "dapo", "delta": 1.5, "use_bias_correction_kl": True},
    "top entropy, and a bonus": {"loss_type": "dapo", "top_entropy_quantile": 0.4} | BONUS,
    "off-policy mask": {"loss_type": "bnpo", "off_policy_mask_threshold": 0.001},
}
QUICK = ("gspo", "top entropy, and a bonus")  # the rest differ from these only in TRL


@pytest.fixture(scope="module")
def rows():
    """A problem of one image and one of two."""
    return rows_of((0, 8))


@pytest.fixture(scope="module")
def build(rows, small_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    def build(cls, **options):
        trainer = make_trainer(cls, small_checkpoint, folder, rows, small_processor(), **options)
        trainer.eos_token_ids = STOPS
        trainer.current_gradient_accumulation_steps = 1
        return trainer

    return build


def generated(trainer, rows):
    """The real batch, of four completions per row."""
    torch.manual_seed(0)
    trainer.model.train()
    return trainer._generate_and_score_completions([r for r in rows for _ in range(4)])


def loss_and_gradients(trainer, inputs):
    trainer.model.zero_grad(set_to_none=True)
    trainer._metrics["train"].clear()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients, dict(trainer._metrics["train"])


@pytest.fixture(scope="module")
def pair(build, rows):
    """Stock and packed trainer of one model, moved off its reference, and one real batch that both read."""
    trainers = [build(cls, **PAIR) for cls in (Stock, Ours)]
    for trainer in trainers:
        noise = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.add_(torch.randn(p.shape, generator=noise) * p.abs().mean() * 0.1)
    return trainers, [generated(t, rows) for t in trainers]


@pytest.fixture(scope="module")
def micro_batch(pair):
    """Half of stock's batch, shuffled and split by TRL: what one loss pass reads."""
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
            attended = stock["completion_mask"]
            assert (packed[name] - value * attended).abs().max() < 1e-5
            assert torch.equal(packed[name] != 0, attended.bool())
        elif torch.is_tensor(value):
            assert torch.equal(packed[name], value), name
    gap = stock["old_per_token_logps"] - stock["ref_per_token_logps"]
    assert gap.abs().max() > 0.01


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LOSSES]
)
def test_every_loss_is_trl_s(pair, micro_batch, name, monkeypatch):
    """Old logprobs far enough from the policy for every clip."""
    old, noise = micro_batch["old_per_token_logps"], torch.Generator().manual_seed(0)
    drawn = torch.randn(old.shape, generator=noise) * micro_batch["completion_mask"]
    inputs = micro_batch | {"old_per_token_logps": old + 0.3 * drawn}
    for trainer in pair[0]:
        for key, value in ({"loss_type": name} | LOSSES[name]).items():
            holder = trainer if hasattr(trainer, key) else trainer.args
            monkeypatch.setattr(holder, key, value)
    seen = [loss_and_gradients(trainer, inputs) for trainer in pair[0]]
    (loss, gradients, metrics), (own_loss, own_gradients, own_metrics) = seen
    assert math.isfinite(loss) and abs(loss) > 1e-4
    assert own_loss == pytest.approx(loss, abs=1e-5)
    assert relative_difference(own_gradients, gradients) < 1e-5
    ours = {k: v for k, v in own_metrics.items() if not k.startswith("mmpack/")}
    assert ours.keys() == metrics.keys()
    for key, value in metrics.items():
        assert ours[key] == pytest.approx(value, abs=1e-5), key


def test_gradients_are_stock_s(pair, micro_batch, monkeypatch):
    """Both against stock ones in float64; no ratio is near the edge of a clip. Masked completions: zeros."""
    inputs = {k: v for k, v in micro_batch.items() if k != "old_per_token_logps"}
    (_, stock, _), (_, packed, _) = (loss_and_gradients(t, inputs) for t in pair[0])
    monkeypatch.setattr(pair[0][0], "model", wide_copy(pair[0][0].model))
    with Wide():
        _, exactly, _ = loss_and_gradients(pair[0][0], inputs)
    assert all(g.dtype == torch.float64 for g in exactly.values())
    assert_as_exact_as_separate(packed, stock, exactly)
    masked = micro_batch | {"completion_mask": torch.zeros_like(micro_batch["completion_mask"])}
    loss, gradients, _ = loss_and_gradients(pair[0][1], masked)
    assert loss == 0 and all(g.abs().max() == 0 for g in gradients.values())


def test_rows_without_pictures(pair):
    ids = torch.randint(0, 1000, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
    with torch.no_grad():
        (a, entropy, _), (b, own, _) = (
            t._get_per_token_logps_and_entropies(t.model, ids, mask, 4, compute_entropy=True)
            for t in pair[0]
        )
    kept = mask[:, -4:]  # TRL before 1.15 has values of padding
    assert (a * kept - b).abs().max() < 1e-5 and (entropy * kept - own).abs().max() < 1e-5
    assert b.count_nonzero() == 4 + 2


@pytest.mark.slow
def test_a_real_run_learns_the_same(build, tmp_path):
    """Generation, two updates a generation, reference, evaluation; TRL checkpoints gradients by default."""
    runs = []
    for cls in (trl.GRPOTrainer, Packed):
        options = {"num_iterations": 2, "max_steps": 2, "gradient_checkpointing": True}
        trainer = build(cls, beta=0.05, **options)
        trainer.train()
        trainer.evaluate()
        runs.append(trainer)
    stock, packed = runs
    assert len(stock.state.log_history) == len(packed.state.log_history) == 4
    for theirs, ours in zip(stock.state.log_history, packed.state.log_history, strict=True):
        assert {k for k in ours if "mmpack/" not in k} == theirs.keys()
        for key, value in theirs.items():
            if not any(word in key for word in ("time", "runtime", "per_second")):
                assert ours[key] == pytest.approx(value, rel=1e-4, abs=2e-6), key
    before = small_model("qwen2_5_vl", factor=2).named_parameters()
    assert_same_steps(stock.model.named_parameters(), packed.model.named_parameters(), before)
    stats = packed.mmpack_stats
    assert stats.samples == 4 * (2 + 2 + 3)  # losses; olds and references; an evaluation's
    assert stats.tokens < stats.tokens_stock / 2
    assert stats.patches * 4 == stats.patches_stock  # each image once for four completions
    assert "tokens" in str(stats) and f"{stats.patches_stock:,}" in str(stats)
    assert not packed._mmpack_stores  # its tower is trained
    assert_it_is_its_own(packed.model, small_model("qwen2_5_vl"))
    packed.save_model(str(tmp_path))
    assert "mmpack" not in (tmp_path / "config.json").read_text()


def test_generated_ids_are_trained_on_and_nothing_is_rendered_again(build, rows, monkeypatch):
    """TRL renders each prompt a second time, without its `chat_template`: other ids, other mm_token_type_ids."""
    trainer = build(Packed, num_iterations=2, max_steps=1)
    trainer.chat_template = QWEN2_5_VL.replace("a helpful", "an exceedingly patient and thorough")
    rollouts, packs = [], []
    generate, pack = trainer.model.generate, grpo.pack_shared

    def spy_generate(input_ids, attention_mask, **kwargs):
        out = generate(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        whole = torch.cat([attention_mask, torch.ones_like(out[:, input_ids.shape[1] :])], dim=1)
        rollouts.extend(row[m.bool()].tolist() for row, m in zip(out, whole, strict=True))
        return out

    def spy_pack(samples, model):
        packs.extend(samples)
        return pack(samples, model)

    monkeypatch.setattr(trainer.model, "generate", spy_generate)
    monkeypatch.setattr(grpo, "pack_shared", spy_pack)
    outputs = generated(trainer, rows)
    assert len(packs) == len(rollouts) == 8
    for sample, ids in zip(packs, rollouts, strict=True):
        assert sample.input_ids.tolist() == ids[: len(sample)]  # cut at the stop
        assert sample.num_loss_tokens > 0
    # what was rendered again says otherwise, and is not read
    with pytest.raises(LayoutError, match="chat_template"):
        to_samples(outputs, trainer.processing_class)


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
        seen.append((outputs, loss_and_gradients(trainer, copy.copy(outputs))[0]))
    (stock, loss), (packed, own_loss) = seen
    names = {"importance_sampling_ratio", "sampling_per_token_logps"}
    assert packed.keys() == stock.keys() >= names
    ratio = stock["importance_sampling_ratio"]
    assert (ratio != 1).any()
    assert (packed["importance_sampling_ratio"] - ratio).abs().max() < 1e-4
    assert own_loss == pytest.approx(loss, abs=1e-5)
    samples = to_samples(packed, trainer.processing_class)
    assert samples[0].rollout_logprobs is None  # a NaN is no logprob
    assert samples[1].rollout_logprobs == pytest.approx(
        packed["sampling_per_token_logps"][1, : samples[1].num_loss_tokens].numpy()
    )


def smaller(ids):
    first = ids.index(FAMILY.image_token_id)
    return ids[:first] + ids[first + 1 :]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        # it expands what was expanded
        (lambda ids: np.repeat(ids, 1 + (np.array(ids) == 151655)).tolist(), "double_expansion"),
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


def test_what_a_packed_pass_cannot_do_is_one_line(pair, micro_batch, monkeypatch):
    packed = pair[0][1]
    ids = torch.ones(1, 3, dtype=torch.long)
    for more, said in (
        ({"pixel_attention_mask": torch.ones(1)}, "pixel_attention_mask"),
        ({"compute_aux_loss": True}, "auxiliary loss"),
    ):
        with pytest.raises(ModelError, match=f"{said} is not supported"):
            packed._get_per_token_logps_and_entropies(packed.model, ids, ids, 1, **more)
    dropped = micro_batch | {"pixel_values": None, "image_grid_thw": None, "num_images": None}
    with pytest.raises(LayoutError, match="dropped_image"):
        packed._compute_loss(packed.model, dropped)
    first = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1)))
    for name, value in (
        ("args", SimpleNamespace(torch_compile=True, neftune_noise_alpha=None)),
        ("args", SimpleNamespace(torch_compile=False, neftune_noise_alpha=5.0)),
        ("aux_loss_enabled", True),
        ("accelerator", first),
    ):
        with monkeypatch.context() as changed, pytest.raises(ModelError, match="is on"):
            changed.setattr(packed, name, value)
            packed._start_packing()


def test_pictures_without_sizes_are_refused_before_anything_is_generated(monkeypatch):
    reached = []
    monkeypatch.setattr(
        trl.GRPOTrainer,
        "_generate_and_score_completions",
        lambda self, inputs: reached.append(inputs) or {},
    )
    trainer = Packed.__new__(Packed)
    trainer._held = {}
    text = [{"prompt": "a"}, {"prompt": "a", "images": [], "image": None}]
    for name in ("minicpmv4_6", "kimi_k25"):
        trainer._mmpack_family = get_family(name)
        assert trainer._generate_and_score_completions(text) == {} and reached.pop() == text
        for field, picture in (("images", ["p"]), ("image", "p")):
            with pytest.raises(ModelError, match=rf"sizes of {name}'s pictures.*Fix: "):
                trainer._generate_and_score_completions([*text, {"prompt": "a", field: picture}])
    trainer._mmpack_family = get_family("mistral3")
    trainer._generate_and_score_completions([{"images": ["p"]}])
    assert len(reached) == 1


def test_an_infinite_reward_is_named_and_none_is_trl_s_own():
    class Stock:
        reward_func_names = ("length", "format")

        def _calculate_rewards(self, rewards):
            return torch.tensor(rewards)

    trainer = type("Trainer", (MmpackGRPO, Stock), {"__init__": lambda self: None})()
    with pytest.raises(ArgumentError, match="format gave -inf to completion 1 of 2"):
        trainer._calculate_rewards([[0.0, 1.0], [2.0, -float("inf")]])
    rewards = trainer._calculate_rewards([[0.0, float("nan")], [2.0, 1.0]])
    assert rewards.isnan().tolist() == [[False, True], [False, False]]
    assert callable(trl.GRPOTrainer._calculate_rewards)


def test_wrong_use_is_an_error(monkeypatch):
    with pytest.raises(ArgumentError, match=r"class Turned\(MmpackGRPO, GRPOTrainer\)"):
        type("Turned", (trl.GRPOTrainer, MmpackGRPO), {})
    with pytest.raises(ArgumentError, match="not combined with GRPOTrainer"):
        MmpackGRPO()

    class Other(trl.GRPOTrainer):
        def _compute_loss(self, model, batch):
            pass

    monkeypatch.setattr(trl, "GRPOTrainer", Other)
    with pytest.raises(BackendError, match=r"_compute_loss of TRL .* does not take model, inputs"):
        type("Trainer", (MmpackGRPO, Other), {})()
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


@pytest.mark.parametrize("cls", [Packed, PackedRLOO])
def test_videos_of_prompts_reach_every_pass(build, cls, monkeypatch):
    """TRL generates with them, and has no place for them in its passes. Oracle: the model's own forward, row by row."""
    films = np.random.default_rng(0).integers(0, 256, (2, 4, 3, 56, 84), dtype=np.uint8)
    text = {"type": "text", "text": "What moves?"}
    prompts = [[{"role": "user", "content": [{"type": "video", "video": f}, text]}] for f in films]
    trainer, given = build(cls, num_iterations=2), []
    generate = trainer.model.generate
    monkeypatch.setattr(
        trainer.model, "generate", lambda **kwargs: given.append(kwargs) or generate(**kwargs)
    )
    inputs = generated(trainer, [{"prompt": p} for p in prompts])
    _, gradients, _ = loss_and_gradients(trainer, inputs)
    tower = [g for n, g in gradients.items() if "visual" in n]
    assert tower and all(g.abs().max() > 0 for g in tower)
    made = given[0]
    patches = made["pixel_values_videos"].split(made["video_grid_thw"].prod(dim=1).tolist())
    trainer.model.eval()
    for b, pixels in enumerate(patches):
        ids = torch.cat([inputs["prompt_ids"][b], inputs["completion_ids"][b]])
        mask = torch.cat([inputs["prompt_mask"][b], inputs["completion_mask"][b]]).bool()
        fields = {name: made[name][b : b + 1] for name in ("video_grid_thw", "second_per_grid_ts")}
        ids = ids[mask][None]
        types = (ids == trainer.model.config.video_token_id).long() * 2
        with torch.no_grad():
            logits = trainer.model(
                ids, pixel_values_videos=pixels, mm_token_type_ids=types, **fields
            ).logits
        logprobs = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        count = int(inputs["completion_mask"][b].sum())
        if cls is Packed:
            assert (inputs["old_per_token_logps"][b, :count] - logprobs[-count:]).abs().max() < 1e-5
        else:
            assert inputs["old_logps"][b] == pytest.approx(float(logprobs[-count:].sum()), abs=1e-4)
