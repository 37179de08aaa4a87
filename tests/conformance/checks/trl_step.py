"""One step of TRL's real GRPOTrainer, stock and packed: the same weights afterwards."""

from __future__ import annotations

import copy
import importlib
import tempfile
from pathlib import Path
from typing import Any

import torch
from conformance.agree import NotHere, expect
from conformance.subject import Subject

from mmpack.errors import installed_version

FARTHEST = 1e-4  # of the way that stock's weights moved
# of the longest way: as far a weight may move whose true gradient is 0 (a key's bias), by the rounding of others
STILL = 1e-8
GENERATIONS, PROMPTS = 2, 2


def trl(subject: Subject) -> None:
    """Two prompts with a picture each, two completions of each, plain SGD."""
    for package in ("trl", "datasets"):
        if installed_version(package) is None:
            raise NotHere(f"{package} is not installed")
    library: Any = importlib.import_module("trl")
    from mmpack.adapters.trl import MmpackGRPO

    packed = type("Packed", (MmpackGRPO, library.GRPOTrainer), {})
    processor = copy.copy(subject.processor)
    for name, value in subject.kit.for_trl.items():
        setattr(processor, name, value)
    with tempfile.TemporaryDirectory() as folder:
        subject.kit.small(spread=2.0).save_pretrained(folder)
        before = _load(subject, folder)
        start = {n: p.detach().clone() for n, p in before.named_parameters()}
        stock, own = (
            _stepped(subject, kind, folder, processor) for kind in (library.GRPOTrainer, packed)
        )
    moved = 0
    most = max(float((value - start[name]).norm()) for name, value in stock.items())
    for name, value in stock.items():
        way = float((value - start[name]).norm())
        off = float((value - own[name]).norm())
        rounding = 2.0**-23 * float(value.norm())  # of the sum of a weight and its step
        expect(
            off <= FARTHEST * way + rounding + STILL * most,
            f"{name} is {off:.2e} from stock's, which moved by {way:.2e}",
        )
        moved += way > 0
    expect(moved > 0, "stock's step moved nothing")


def _load(subject: Subject, folder: str) -> Any:
    return subject.kit.classes()[0].from_pretrained(folder)


def _stepped(subject: Subject, kind: Any, folder: str, processor: Any) -> dict[str, torch.Tensor]:
    """Weights after one step."""
    import datasets

    library: Any = importlib.import_module("trl")
    rows = [
        {"prompt": [{"role": "user", "content": f"What is drawn, {n}?"}], "images": [picture]}
        for n, picture in enumerate(subject.pictures[:PROMPTS])
    ]
    trainer = kind(
        model=_load(subject, folder),
        reward_funcs=_reward,
        args=library.GRPOConfig(
            output_dir=str(Path(folder) / "runs"),
            per_device_train_batch_size=GENERATIONS * PROMPTS,
            num_generations=GENERATIONS,
            max_completion_length=5,
            max_steps=1,
            learning_rate=0.5,
            # Adam would turn rounding of near-zero gradients into whole steps
            optim="sgd",
            gradient_checkpointing=False,
            router_aux_loss_coef=0.0,  # the packed pass refuses it
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=0,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=processor,
    )
    trainer.train()
    return {n: p.detach() for n, p in trainer.model.named_parameters()}


def _reward(completion_ids: Any, **columns: Any) -> list[float]:
    return [sum(ids) % 11 / 11 for ids in completion_ids]
