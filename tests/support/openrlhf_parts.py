"""OpenRLHF's trainer where it can't be installed whole, and where no GPU is.

It imports flash-attn and vLLM, of which nothing is called here, and asks CUDA for the current device.
"""

import contextlib
import os
import runpy
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

STAND_INS = {
    "flash_attn": (),
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils": (),
    "flash_attn.utils.distributed": ("all_gather",),
    "vllm": ("SamplingParams",),
    "vllm.inputs": ("TokensPrompt",),
    "vllm.utils": ("random_uuid",),
}


@contextlib.contextmanager
def stand_ins():
    """Within the block OpenRLHF's modules can be imported. What it took of a stand-in raises when it is called."""
    os.environ["DS_ACCELERATOR"] = "cpu"

    def absent(*args, **kwargs):
        raise RuntimeError("a stand-in was called")

    for name, functions in STAND_INS.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(dict.fromkeys(functions, absent))
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in STAND_INS:
            del sys.modules[name]


def import_trainer():
    """`openrlhf.trainer.ray.ppo_actor`, whose ActorPPOTrainer takes the steps, with all that it imports."""
    with stand_ins():
        from openrlhf.trainer.ray import ppo_actor
    return ppo_actor


class Reached(Exception):
    """The single controller would start: the second argument of `PPOTrainer.remote` is the strategy."""


def strategy_of(module, *options):
    """The strategy that `python -m MODULE OPTIONS` makes of OpenRLHF's own options, up to where it starts workers."""

    def started(model, strategy, *rest, **more):
        raise Reached(strategy)

    with stand_ins():
        import ray
        from openrlhf.trainer import ppo_trainer
        from openrlhf.trainer import ray as parts
        from openrlhf.trainer.ray import launcher

        no_group = SimpleNamespace(ready=lambda: None)
        replaced = [
            patch.object(sys, "argv", [module, *map(str, options)]),
            patch.object(ray, "is_initialized", lambda: True),
            patch.object(ray, "get", lambda made: made),
            patch.object(
                sys.modules["ray.util.placement_group"], "placement_group", lambda *a, **k: no_group
            ),
            patch.object(ppo_trainer, "PPOTrainer", SimpleNamespace(remote=started)),
            patch.object(parts, "create_vllm_engines", lambda *args, **kwargs: []),
            patch.object(launcher, "RayActorGroup", lambda *args, **kwargs: None),
        ]
        with contextlib.ExitStack() as stack:
            for one in replaced:
                stack.enter_context(one)
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except Reached as reached:
                return reached.args[0]
    raise AssertionError("no worker was started")
