"""UniRL's real stages, algorithms and train stack, stock and through mmpack: logprobs, values, losses, gradients."""

import gc
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conformance.subject import Subject
from support.kits import get_kit
from support.models import smallest_qwen2_5_vl
from support.ranks import spawned

from mmpack.errors import ArgumentError, ModelError

pytestmark = pytest.mark.unirl
pytest.importorskip("unirl")
# what a CPU needs instead of a recipe's GPUs; rates of 0 let many steps have the same weights
SMALL = [
    "bundle.config.model_precision=fp32",
    "bundle.config.attn_implementation=sdpa",
    "backend.fsdp_cfg.param_dtype=fp32",
    "backend.optimizer_cfg.learning_rate=0",
]
ENABLED = "stack._target_=mmpack.adapters.unirl.Stack"


@pytest.fixture(scope="module")
def subject():
    return Subject(get_kit("qwen2_5_vl"))


@pytest.fixture(scope="module")
def prompts(subject):
    """Two prompts with pictures, the second twice as long, and one without: what UniRL's chat template makes."""
    asked = [("What?", 1), ("How many sides has it, and which colour? " * 2, 2), ("Why?", 0)]
    out = []
    for n, (text, pictures) in enumerate(asked):
        shown = (subject.pictures[:2] * 2)[n : n + pictures]
        content = [{"type": "image"}] * pictures + [{"type": "text", "text": text}]
        chat = subject.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        out.append(subject.processor(text=[chat], images=shown or None, return_tensors="pt"))
    return out


def rows(prompts, counts=(4, 4, 2)):
    """Prompts, names and responses: siblings, of 0 to 8 tokens."""
    rng = np.random.default_rng(0)
    groups = [n for n, count in enumerate(counts) for _ in range(count)]
    lengths = [int(k) for k in rng.integers(1, 9, len(groups))]
    lengths[1] = 0
    responses = [rng.integers(10, 200, k).tolist() for k in lengths]
    return (
        [prompts[g] for g in groups],
        [f"p{g}/{k}" for k, g in enumerate(groups)],
        responses,
    )


@pytest.fixture(scope="module")
def part(prompts):
    from support.unirl_steps import part_of
    from unirl.models.qwen_vl.conditions import QwenVLARConditions

    given, names, responses = rows(prompts)
    return part_of(given, responses, QwenVLARConditions, names=names)


@pytest.fixture(scope="module")
def text_part():
    """A second turn, whose prompt goes on from the first one's response, beside its siblings."""
    from support.unirl_steps import part_of
    from unirl.models.qwen3.conditions import Qwen3ARConditions

    rng = np.random.default_rng(2)
    first, other, tool = (rng.integers(10, 200, n).tolist() for n in (20, 9, 3))
    turns = [
        (first, [11, 12, 13]),
        (first, [14]),
        (first + [11, 12, 13] + tool, [15, 16]),
        (other, [17, 18]),
    ]
    prompts = [{"input_ids": torch.tensor([p])} for p, _ in turns]
    names = ["a/0", "a/1", "a/0/0/0", "b/0"]
    return part_of(prompts, [r for _, r in turns], Qwen3ARConditions, names=names)


def qwen_vl(subject):
    from unirl.models.qwen_vl.ar import QwenVLARStage

    model = smallest_qwen2_5_vl()
    return QwenVLARStage(
        model=SimpleNamespace(transformer=model, tokenizer=subject.processor.tokenizer)
    )


def qwen3():
    from support.kits.base import spread_out
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from unirl.models.qwen3.ar import Qwen3ARStage
    from unirl.models.types.value_head import ValueHead

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = spread_out(Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)))
    model.value_head = ValueHead(32)
    torch.nn.init.normal_(model.value_head.proj.weight)
    return Qwen3ARStage(
        model=SimpleNamespace(transformer=model, tokenizer=SimpleNamespace(pad_token_id=0))
    )


def values_and_gradients(stage, part, conditions_cls, **options):
    model = stage.model.transformer
    model.zero_grad()
    conditions = conditions_cls.from_dict(part.conditions)
    made = stage.replay(conditions, segment=part.segment, temperature=0.7, **options)
    values = torch.stack([made.log_probs, made.values] if options else [made])
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(1))
    (values * weights).sum().backward()
    return values.detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def check_same(stock, ours, bound=1e-5):
    assert stock.keys() == ours.keys()
    for name, own in stock.items():
        assert (own - ours[name]).norm() <= bound * own.norm() + 1e-7, name


@pytest.mark.parametrize("checkpoints", [False, True])
def test_replay_of_pictures_is_stock(subject, part, checkpoints):
    """All gradients, the tower's too; a row without a token, rows without a picture."""
    from unirl.models.qwen_vl.conditions import QwenVLARConditions

    from mmpack.adapters.unirl import Replay

    stage = qwen_vl(subject)
    if checkpoints:
        stage.model.transformer.train().gradient_checkpointing_enable({"use_reentrant": False})
    stock = values_and_gradients(stage, part, QwenVLARConditions)
    with Replay(stage):
        stats = stage.replay.__self__.stats
        ours = values_and_gradients(stage, part, QwenVLARConditions)
    assert ours[0].shape == stock[0].shape and ours[0].dtype == stock[0].dtype
    assert (ours[0] - stock[0]).abs().max() <= 1e-5
    check_same(stock[1], ours[1])
    # prompts and pictures once per prompt; one picture is in both prompts
    shown = [len(p) for p in part.conditions["pixel_values"] if p is not None]
    assert stats["patches_encoded"] == shown[0] + shown[4] and stats["media"] == 2
    assert stats["tokens_unshared"] > 2 * stats["tokens"]
    assert "replay" not in vars(stage)


def test_replay_of_text_and_values_is_stock(text_part):
    from unirl.models.qwen3.conditions import Qwen3ARConditions

    from mmpack.adapters.unirl import Replay

    stage = qwen3()
    stock = values_and_gradients(stage, text_part, Qwen3ARConditions, return_values=True)
    with Replay(stage):
        stats = stage.replay.__self__.stats
        ours = values_and_gradients(stage, text_part, Qwen3ARConditions, return_values=True)
    assert (ours[0] - stock[0]).abs().max() <= 1e-5
    check_same(stock[1], ours[1])
    assert any("value_head" in name for name in stock[1])
    # the second turn's prompt goes on from the first's rows: 20 of the prompt, 3 + 1 + 3 + 2, 9 + 2; no last tokens
    assert stats["tokens_unshared"] - stats["tokens"] == 2 * 20 + 3


def test_media_are_known_while_their_pixels_live(subject, part):
    from unirl.models.qwen_vl.conditions import QwenVLARConditions

    from mmpack.adapters.unirl import Replay

    stage = qwen_vl(subject)
    given = QwenVLARConditions.from_dict(part.conditions)
    shown = [p if p is None else p.clone() for p in given.pixel_values]
    given = QwenVLARConditions(given.prompt, shown, given.image_grid_thw)
    with Replay(stage):
        replay = stage.replay.__self__
        again = [replay.samples(given, part.segment) for _ in range(2)]
        assert again[0][0].media[0] is again[1][0].media[0] and len(replay.media) == 8
        del again, given, shown
        gc.collect()
        assert len(replay.media) == 0


# ---- the recipe -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(subject, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unirl")
    smallest_qwen2_5_vl().save_pretrained(folder)
    subject.processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def recipe(checkpoint, tmp_path_factory):
    """`(line, …) -> configuration`, composed by Hydra as UniRL's command prints it with `--cfg job`."""
    from support.unirl_steps import RECIPE
    from unirl.train_ar import main

    folder = tmp_path_factory.mktemp("recipes") / "ar"
    folder.mkdir()
    (folder / "geo3k.yaml").write_text("# @package _global_\n" + RECIPE.read_text())

    def compose(*lines):
        import contextlib
        import io

        from omegaconf import OmegaConf

        command = ["train_ar", "--config-path", str(folder.parent), "--config-name", "ar/geo3k"]
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(io.StringIO()) as out,
        ):
            patch.setenv("QWEN_VL_PATH", str(checkpoint))
            patch.setenv("DATA_PATH", "train.jsonl")
            patch.setattr(sys, "argv", [*command, "--cfg", "job", "--resolve", *SMALL, *lines])
            main()
        return OmegaConf.create(out.getvalue())

    return compose


@pytest.fixture(scope="module")
def group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


CASES = {
    "grpo": (),
    "lora": ("+backend.lora_cfg={_target_:unirl.train.configs.LoraConfig,rank:4}",),
    "torch's checkpoints": (
        "bundle.config.use_gradient_checkpointing=false",
        "+backend.fsdp_cfg.activation_checkpointing=true",
    ),
    "grpo by replay": (
        "+algorithm.old_logp_source=replay",
        "+algorithm.loss_agg_mode=seq-mean-token-mean",
    ),
    "gspo": ("algorithm._target_=unirl.algorithms.gspo.GSPO",),
    "drpo": ("algorithm._target_=unirl.algorithms.drpo.DRPO", "~algorithm.clip_range"),
    "two updates": ("+stack.num_updates_per_batch=2",),
    "budget": (
        "+stack.micro_planner={_target_:unirl.train.stack.planner.TokenBudgetPlanner,token_budget:120}",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_recipe_trains_as_stock(recipe, group, part, name):
    """The recipe with its one line: FSDP2, checkpoints, micro-batches; then its own replay and planner."""
    from support.unirl_steps import roles, step

    cfg = recipe(ENABLED, *CASES[name])
    made = roles(cfg)
    ours, gradients = step(made.stack, part)
    stats = made.stack.replay.stats
    assert stats["tokens_unshared"] > 1.5 * stats["tokens"]
    made.stack.replay.stop()
    stock, theirs = step(made.stack, part)
    assert ours.loss == pytest.approx(stock.loss, rel=1e-5, abs=1e-6)
    assert ours.grad_norm == pytest.approx(stock.grad_norm, rel=1e-5) and stock.grad_norm > 0
    check_same(theirs, gradients)
    assert len(ours.micros) < len(stock.micros)


def train(rank, ranks, folder):
    """One rank's half of the rows, of which one takes fewer micro-batches than the other."""
    from omegaconf import OmegaConf
    from support.unirl_steps import roles, step
    from torch import distributed

    from mmpack.adapters.unirl import stack as module

    alone, sync = [], module._sync_micro_count
    module._sync_micro_count = lambda count: alone.append(count) or sync(count)
    made = roles(OmegaConf.load(folder / "recipe.yaml"))
    part = torch.load(folder / "part.pt", weights_only=False).slice(5 * rank, 5 * rank + 5)
    ours, gradients = step(made.stack, part)
    counts = [None] * ranks
    distributed.all_gather_object(counts, (*alone, len(ours.micros)))
    assert counts == [(1, 2), (2, 2)]
    made.stack.replay.stop()
    stock, theirs = step(made.stack, part)
    assert ours.loss == pytest.approx(stock.loss, rel=1e-5, abs=1e-6)
    assert ours.grad_norm == pytest.approx(stock.grad_norm, rel=1e-5) and stock.grad_norm > 0
    check_same(theirs, gradients)


@pytest.mark.slow
def test_two_ranks_train_as_stock(recipe, part, tmp_path):
    from omegaconf import OmegaConf

    OmegaConf.save(recipe(ENABLED, "+stack.max_tokens=80"), tmp_path / "recipe.yaml")
    torch.save(part.select([0, 1, 2, 3, 8, 4, 5, 6, 7, 9]), tmp_path / "part.pt")
    spawned(train, 2, tmp_path, tmp_path)


@pytest.mark.parametrize("name", ["ppo", "sft", "agentic"])
def test_text_trains_as_stock(group, text_part, name):
    """A head's values, with anchors by micro-batch; supervised; turns as the agentic trainer joins and pads them."""
    from support.unirl_steps import step
    from unirl.algorithms.grpo import GRPO
    from unirl.algorithms.ppo import PPO
    from unirl.algorithms.sft import SFT
    from unirl.models.qwen3.conditions import Qwen3ARConditions
    from unirl.train.backend.base import LrSchedulerConfig, OptimizerConfig
    from unirl.train.backend.fsdp import FSDPBackend
    from unirl.train.configs import FSDPConfig
    from unirl.train.stack import TrainStack

    from mmpack.adapters.unirl import enable

    stage = qwen3()
    backend = FSDPBackend(
        bundle=SimpleNamespace(transformer=stage.model.transformer),
        block_class_names=("Qwen3DecoderLayer",),
        fsdp_cfg=FSDPConfig(param_dtype="fp32"),
        optimizer_cfg=OptimizerConfig(0.0, 0.9, 0.999, 1e-8, 0.0),
        scheduler_cfg=LrSchedulerConfig("constant", 0, 1),
    )
    own = {"ppo": PPO, "sft": SFT, "agentic": GRPO}[name]
    algorithm = own(stage=stage, conditions_cls=Qwen3ARConditions)
    stack = TrainStack(
        fsdp_backend=backend, algorithm=algorithm, micro_batch_size=2, max_grad_norm=1.0
    )
    part = turns(stack, text_part) if name == "agentic" else text_part
    stock, theirs = step(stack, part)
    with enable(stack) as owner:
        assert owner is stage
        ours, gradients = step(stack, part)
    assert ours.loss == pytest.approx(stock.loss, rel=1e-5, abs=1e-6) and stock.grad_norm > 0
    check_same(theirs, gradients)
    assert any("value_head" in n for n in gradients) == (name == "ppo")


def turns(stack, part):
    """The part that `AgenticTrainer` makes of three trajectories, one of two turns, for three ranks."""
    from unirl.trainer.agentic import AgenticTrainer
    from unirl.types.sample import Part, Sample

    taken = []
    trainer = AgenticTrainer.__new__(AgenticTrainer)
    trainer.__dict__ |= {
        "_mask_overflow_loss": False,
        "num_devices": 3,
        "sampling_params": {"ar": part.sampling_params},
        "stack": SimpleNamespace(train_track=lambda part, **_: taken.append(part)),
        "wandb_logger": SimpleNamespace(log_rollout_step=lambda *_, **__: None),
    }
    first, other, second, last = (part.select([i]) for i in range(4))
    tool = Part(sample_ids=["a/0/0"])  # what answers the first turn
    paths = [
        Sample(parts=[Part.input([name]), *own])
        for name, own in (("a", (first, tool, second)), ("a", (other,)), ("b", (last,)))
    ]
    scores = torch.tensor([1.0, 0.0, 0.5])
    trainer._train_and_log(paths, scores, scores - 0.5, rollout_id=0, training_progress=0.0, t0=0.0)
    assert taken[0].batch_size == 6  # two rows again, for three ranks
    return taken[0]


@pytest.mark.slow
def test_its_program_for_sft_trains_as_stock(recipe, subject, tmp_path, monkeypatch):
    """`python -m unirl.train_sft`: Ray, manifest, evaluation, steps that change the weights."""
    import json

    import ray
    from omegaconf import OmegaConf
    from unirl.train_sft import main
    from unirl.trainer.sft import SFTTrainer

    rows = []
    for n, picture in enumerate(subject.pictures[:2]):
        picture.save(tmp_path / f"{n}.png")
        media = [{"uri": f"{n}.png", "modality": "image", "role": "condition"}]
        rows += [
            {
                "sample_id": f"{n}-{k}",
                "prompt": f"{n}?",
                "response": "abc " * (k + 1),
                "media": media,
            }
            for k in range(4)
        ]
    manifest = str(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"train_manifest_path": manifest, "eval_manifest_path": manifest}
    cfg = recipe("backend.optimizer_cfg.learning_rate=0.001")
    conditions = cfg.algorithm.conditions_cls
    own = {
        "algorithm": {"_target_": "unirl.algorithms.sft.SFT", "conditions_cls": conditions},
        "data_source": {"_target_": "unirl.data.sft.SupervisedDataSource", **source},
        "track_builder": {"_target_": "unirl.train.sft.ARSupervisedTrackBuilder"},
        "num_devices": 1,
        "devices_per_node": 1,
        "batch_size": 8,
        "num_steps": 2,
        "eval_interval": 2,
    }
    for name, value in own.items():
        cfg[name] = value
    made = {}

    def see(name, method):
        def seen(trainer, *args, **options):
            made["stack"] = trainer.stack.role_cls.__name__
            made.setdefault(name, []).append(method(trainer, *args, **options))
            return made[name][-1]

        monkeypatch.setattr(SFTTrainer, name, seen)

    for name in ("train_step", "evaluate"):
        see(name, getattr(SFTTrainer, name))

    def run(target):
        cfg.stack._target_ = target
        OmegaConf.save(cfg, tmp_path / "sft.yaml")
        command = ["train_sft", "--config-path", str(tmp_path), "--config-name", "sft"]
        monkeypatch.setattr(sys, "argv", [*command, f"hydra.run.dir={tmp_path}"])
        made.clear()
        main()
        return dict(made)

    ray.init(num_cpus=4, num_gpus=2, include_dashboard=False)  # a program keeps its "GPU"
    try:
        stock = run("unirl.train.stack.TrainStack")
        ours = run("mmpack.adapters.unirl.Stack")
    finally:
        ray.shutdown()
    assert (stock["stack"], ours["stack"]) == ("TrainStack", "Stack")
    assert ours["evaluate"] == pytest.approx(stock["evaluate"], rel=1e-5)
    assert len(stock["evaluate"]) == 2 and stock["evaluate"][1] < stock["evaluate"][0]
    for own, theirs in zip(ours["train_step"], stock["train_step"], strict=True):
        assert own.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert own.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)


# ---- micro-batches ----------------------------------------------------------------------------------


def test_groups_meet_within_their_update(subject, part, monkeypatch):
    from unirl.models.qwen_vl.conditions import QwenVLARConditions

    from mmpack.adapters.transformers.rope import pack_shared
    from mmpack.adapters.unirl import Planner, Replay
    from mmpack.adapters.unirl import stack as module

    stage = qwen_vl(subject)
    apart = part.select([0, 4, 8, 1, 5, 9, 2, 6, 3, 7])
    with Replay(stage):
        replay = stage.replay.__self__
        algorithm = SimpleNamespace(conditions_cls=QwenVLARConditions)

        def arranged(most, updates=1):
            """The names in each micro-batch of each update, and its rows."""
            planner = Planner(algorithm, replay, most)
            made, plan = planner.arrange(apart, num_updates=updates, micro_batch_size=4)
            assert [a for u in plan for a, _ in u] == [0, *[b for u in plan for _, b in u][:-1]]
            held = [[made.slice(a, b) for a, b in update] for update in plan]
            rows = [
                pack_shared(
                    replay.samples(QwenVLARConditions.from_dict(m.conditions), m.segment),
                    stage.model.transformer,
                ).num_tokens
                for update in held
                for m in update
            ]
            return [[m.sample_ids for m in update] for update in held], rows

        [micros], rows = arranged(110)
        groups = [{name.split("/")[0] for name in names} for names in micros]
        assert len(micros) > 1 and sum(map(len, groups)) == 3 and max(rows) <= 110
        # UniRL's own, of as many samples, take groups apart
        assert sorted(n for names in micros for n in names) == sorted(part.sample_ids)
        updates, _ = arranged(110, updates=2)
        assert [{n for m in update for n in m} for update in updates] == [
            set(apart.sample_ids[:5]),
            set(apart.sample_ids[5:]),
        ]
        # a rank that needs fewer than another makes as many
        fewer = len(micros)
        monkeypatch.setattr(module, "_sync_micro_count", lambda count: count + 2)
        [micros], _ = arranged(110)
        assert len(micros) == fewer + 2 and all(micros)
        # one sample beyond the budget is a micro-batch by itself
        monkeypatch.setattr(module, "_sync_micro_count", lambda count: count)
        [micros], _ = arranged(10)
        assert max(map(len, micros)) < 10


def test_balanced_shards_keep_groups_whole(part):
    from unirl.distributed.group.dispatch import DISPATCH_MODE_REGISTRY, Dispatch
    from unirl.distributed.group.remote import RankInfo

    from mmpack.adapters.unirl import Stack

    mode = Stack.train_track._distributed_config["dispatch_mode"]
    handle = SimpleNamespace(
        dp_size=2, world_size=2, rank_infos=[RankInfo(dp_rank=n, dp_size=2) for n in range(2)]
    )

    def names(given, mode):
        send = DISPATCH_MODE_REGISTRY[mode]["dispatch_fn"]
        shards = send(handle, (given,), {"training_progress": 0.0}, given.batch_size)
        assert all(options == {"training_progress": 0.0} for _, options in shards)
        return [own.sample_ids for (own,), _ in shards]

    assert names(part, mode) == names(part, Dispatch.DP_SCATTER)  # its groups are side by side
    apart = part.balance_shards(2, min_spread=0.0)
    groups = [{name.split("/")[0] for name in own} for own in names(apart, Dispatch.DP_SCATTER)]
    assert {"p0", "p1"} <= groups[0] & groups[1]  # UniRL takes them apart
    dealt = names(apart, mode)
    groups = [{name.split("/")[0] for name in own} for own in dealt]
    assert groups[0] & groups[1] == {"p2"}  # no rank has room for its two
    assert list(map(len, dealt)) == [5, 5] and sorted([*dealt[0], *dealt[1]]) == sorted(
        part.sample_ids
    )
    with pytest.raises(ArgumentError, match="2 ranks don't divide 9 samples"):
        names(part.slice(0, 9), mode)


# ---- what is refused --------------------------------------------------------------------------------


def test_what_it_cannot_serve_is_refused_by_name(subject, part):
    from unirl.models.qwen3_5.ar import Qwen3_5ARStage
    from unirl.train.stack import TrainStack

    from mmpack.adapters.unirl import Replay, enable

    with pytest.raises(ModelError, match="Qwen3_5ARStage scores in a way of its own"):
        Replay(Qwen3_5ARStage.__new__(Qwen3_5ARStage))
    stage = qwen_vl(subject)
    algorithm = SimpleNamespace(
        stage=stage, supports_multi_update=True, recomputes_anchor=False, anchor_fields=()
    )

    def stack(backend=None, **options):
        return TrainStack(fsdp_backend=backend, algorithm=algorithm, max_grad_norm=1.0, **options)

    with pytest.raises(ModelError, match=r"sp_size is on.*Fix: set fsdp_cfg\.sp_size: 1"):
        enable(stack(SimpleNamespace(_sp_size=2)))
    with pytest.raises(ModelError, match="shuffle_updates is on"):
        enable(stack(num_updates_per_batch=2, shuffle_updates=True))
    used = stack()
    own = used.update_planner.micro_planner
    handle = enable(used)
    with pytest.raises(ModelError, match="computes for it already"):
        enable(used)
    from unirl.models.qwen_vl.conditions import QwenVLARConditions

    given = QwenVLARConditions.from_dict(part.conditions)
    with pytest.raises(ModelError, match="the model has no value head"):
        stage.replay(given, segment=part.segment, return_values=True)
    handle.stop()
    assert used.update_planner.micro_planner is own and "replay" not in vars(stage)
