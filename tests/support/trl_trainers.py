"""TRL's GRPO trainer on drawn problems, stock and packed, built alike: tiny model, a CPU, plain SGD, few steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, TrainerCallback

from mmpack.adapters.transformers.attention import is_attached
from mmpack.adapters.trl import MmpackGRPO, MmpackRLOO
from mmpack.demo.datasets import load_exercises
from mmpack.demo.qwen_processor import qwen_vl_processor

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")


class Packed(MmpackGRPO, trl.GRPOTrainer):
    pass


class PackedRLOO(MmpackRLOO, trl.RLOOTrainer):
    pass


class Gradients(TrainerCallback):
    """Those of each step, before it is taken."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        own = ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
        self.seen.append({name: grad.clone() for name, grad in own})


@cache
def small_processor() -> Any:
    """At most six merged patches per image."""
    return qwen_vl_processor(min_pixels=28 * 28, max_pixels=6 * 28 * 28)


def rows_of(numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of a data set: problems of the fixture, by number."""
    exercises = load_exercises()
    return [
        {
            "prompt": [{"role": "user", "content": exercises[n].prompt}],
            "images": list(exercises[n].images),
        }
        for n in numbers
    ]


# of every trainer; Adam would turn rounding of near-zero gradients into whole steps
SETTINGS: dict[str, Any] = {
    "optim": "sgd",
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


def make_trainer(
    cls: type,
    checkpoint: Path,
    output: Path,
    rows: Sequence[dict[str, Any]],
    processor: Any,
    peft_config: Any = None,
    **options: Any,
) -> Any:
    """A trainer of four completions per row and three steps. The reference model is read from `checkpoint`."""
    settings = SETTINGS | {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 3,
        "learning_rate": 0.5,
    }
    config = trl.RLOOConfig if issubclass(cls, trl.RLOOTrainer) else trl.GRPOConfig
    return cls(
        model=AutoModelForImageTextToText.from_pretrained(checkpoint),
        reward_funcs=reward,
        args=config(output_dir=str(output), **(settings | options)),
        train_dataset=datasets.Dataset.from_list(list(rows)),
        eval_dataset=datasets.Dataset.from_list(list(rows[:1])),
        processing_class=processor,
        peft_config=peft_config,
    )


def reward(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    return [sum(ids) % 11 / 11 for ids in completion_ids]


def assert_same_steps(stock: Any, packed: Any, before: Any) -> None:
    """Named parameters of two runs: they differ by at most 1e-4 of the way that stock's moved from `before`."""
    own = dict(packed)
    start = dict(before)
    for name, parameter in stock:
        moved = (parameter - start[name]).norm()
        assert (parameter - own[name]).norm() <= 1e-4 * moved + 1e-7, name


def assert_it_is_its_own(model: Any, never: Any) -> None:
    """`generate`, a forward with a mask and a cache, and both of a deep copy, as of a model that mmpack never saw."""
    ids = torch.tensor([[1, 2, 3, 4], [151643, 151643, 5, 6]])
    given = {"input_ids": ids, "attention_mask": (ids != 151643).long()}
    never.load_state_dict(model.state_dict())
    never.eval()
    for own in (model, copy.deepcopy(model)):
        assert not is_attached(own)
        assert "mmpack" not in own.config.vision_config._attn_implementation
        own.eval()
        kwargs = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 151643} | given
        with torch.no_grad():
            assert torch.equal(own.generate(**kwargs), never.generate(**kwargs))
            assert torch.equal(own(**given).logits, never(**given).logits)
