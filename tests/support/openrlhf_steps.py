"""A step of OpenRLHF's own ActorPPOTrainer under DeepSpeed, on two ranks of the CPU: by its launcher and ours."""

import copy
import os

import torch
from support.openrlhf_parts import import_trainer, strategy_of

RANKS = 2
GIVEN = {
    "reward.remote_url": "reward.py",
    "algo.advantage.estimator": "group_norm",
    "algo.kl.use_loss": None,
    "algo.kl.estimator": "k3",
    "actor.entropy_coef": 0.001,
    "rollout.n_samples_per_prompt": 2,
    "rollout.temperature": 0.8,
    "data.max_images_per_prompt": 4,
    "train.batch_size": 8,
    "train.micro_batch_size": 2,
    "actor.num_gpus_per_node": 1,
    "ref.num_gpus_per_node": 1,
    "ds.attn_implementation": "sdpa",
    "actor.gradient_checkpointing_enable": None,
}
OPTIONS = [str(w) for name, v in GIVEN.items() for w in (f"--{name}", v) if w is not None]


def run(rank, port, checkpoint, folder, stage):
    """One rank's steps by both launchers, to FOLDER/RANK.pt: old logprobs, status, weights, what mmpack computed."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": RANKS}
    where |= {"RANK": rank, "LOCAL_RANK": rank, "TORCH_COMPILE_DISABLE": 1}
    os.environ |= {name: str(value) for name, value in where.items()}
    torch.set_num_threads(1)
    trainer = import_trainer()
    import deepspeed
    from openrlhf.models import Actor

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which would be compiled
    torch.distributed.init_process_group("gloo")
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda: None
    made = rows_of_rank(rank)
    checkpoint = str(checkpoint)
    own = ["--actor.model_name_or_path", checkpoint, "--ds.zero_stage", stage, *OPTIONS]
    out = {}
    for module in ("openrlhf.cli.train_ppo_ray", "mmpack.adapters.openrlhf"):
        strategy = strategy_of(module, *own)
        out[module] = step(trainer, Actor, strategy, checkpoint, copy.deepcopy(made))
    torch.save(out, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def rows_of_rank(rank):
    """Four rows of the fixture, two prompts with two responses each; one token of the first rank's is masked."""
    from matrix.fixture import make_fixture
    from matrix.openrlhf_trace import experience

    fixture = make_fixture()
    fixture.rows[:] = fixture.rows[4 * rank : 4 * rank + 4]
    made = experience(fixture)
    draw = torch.Generator().manual_seed(rank)
    made.advantages = torch.randn(made.action_mask.shape, generator=draw) * made.action_mask
    if rank == 0:
        made.action_mask[1, made.action_mask[1].nonzero()[0, 0]] = 0
    return made


def step(trainer, actor_class, strategy, checkpoint, rows):
    """Old and reference logprobs, then an optimizer's step of two micro-batches."""
    from openrlhf.utils.vlm_utils import merge_mm_train_inputs

    strategy.param_dtype = "fp32"  # the command offers two halves only
    torch.cuda.current_device = lambda: 0  # a device's number, as the replay buffer asks for it
    strategy.setup_distributed()
    config = strategy.get_ds_train_config
    strategy.get_ds_train_config = lambda **options: on_cpu(config(**options))
    args = strategy.args

    def make():
        out = actor_class(
            checkpoint, attn_implementation="sdpa", temperature=args.rollout.temperature
        )
        out.model.float()
        return out

    actor, reference = make(), strategy.prepare(make())
    actor.gradient_checkpointing_enable({"use_reentrant": False})
    chosen = {"optim": "adam", "adam": vars(args.actor.adam) | {"lr": 1e-3}, "max_norm": 1.0}
    chosen |= {"lr_scheduler": "cosine_with_min_lr", "lr_warmup_ratio": 0.0, "scheduler_steps": 4}
    actor, optimizer, scheduler = strategy.prepare((actor, chosen | {"min_lr_ratio": 0.1}))
    steps = trainer.ActorPPOTrainer(
        strategy,
        actor,
        None,
        optimizer,
        scheduler,
        micro_train_batch_size=2,
        dataloader_pin_memory=False,
    )
    inputs = merge_mm_train_inputs(rows.mm_train_inputs, "cpu")
    given = rows.sequences, rows.action_mask, rows.attention_mask
    with torch.no_grad():
        rows.action_log_probs = actor(*given, ring_attn_group=None, **inputs)
        rows.base_action_log_probs = reference(*given, ring_attn_group=None, **inputs)
    rows.base_action_log_probs -= 0.1 * rows.action_mask  # or there is no KL
    old = rows.action_log_probs
    steps.replay_buffer.append(rows)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.manual_seed(5)  # of the shuffle
    status = steps.ppo_train(0.01)
    handle = getattr(vars(actor).get("forward"), "__self__", None)
    return {
        "old": old,
        "status": status,
        "weights": weights_of(actor, strategy.stage),
        "stats": dict(handle.stats) if handle else None,
    }


def on_cpu(config):
    """DeepSpeed's configuration with torch's own Adam, so that nothing is compiled."""
    config["optimizer"]["params"]["torch_adam"] = True
    return config | {"zero_force_ds_cpu_optimizer": False}


def weights_of(actor, stage):
    import deepspeed

    named = dict(actor.model.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values()), enabled=stage == 3):
        return {name: p.detach().float().clone() for name, p in named.items()}
