"""GRPO over two processes beside one: every rollout follows from its prompt, so both see the same global batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.trl_trainers import Packed, make_trainer, rows_of, small_processor, trl

RANKS, STEPS = 2, 3


class Drawn:
    """Completions of one to six ids, drawn by a prompt's ids and its place in its group of four; most of them end."""

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self.use_vllm:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        out = []
        for i, ids in enumerate(prompt_ids):
            rng = np.random.default_rng([sum(ids), i % 4])
            drawn = rng.integers(0, 1000, rng.integers(0, 6)).tolist()
            out.append([*drawn, self._tokenizer.eos_token_id if rng.random() < 0.7 else 5])
        return out, None


class Stock(Drawn, trl.GRPOTrainer):
    pass


class Ours(Drawn, Packed):
    pass


def train(cls: type, checkpoint: Path, folder: Path, batch: int, **options: Any) -> Any:
    """A trainer after its steps; `batch` rows in each process."""
    settings = {"per_device_train_batch_size": batch, "max_steps": STEPS, "beta": 0.05}
    settings |= {
        "num_iterations": 2,
        "gradient_checkpointing": True,
        "lr_scheduler_type": "constant",
    }
    trainer = make_trainer(
        cls, checkpoint, folder, rows_of((0, 8, 3, 5)), small_processor(), **settings | options
    )
    trainer.train()
    return trainer


def losses_of(trainer: Any) -> list[float]:
    return [step["loss"] for step in trainer.state.log_history if "loss" in step]


def norms_of(trainer: Any) -> list[float]:
    return [step["grad_norm"] for step in trainer.state.log_history if "grad_norm" in step]


def join(rank: int, port: int, **settings: str) -> None:
    """The environment of a launcher's process."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", **settings,
    )  # fmt: skip


def assert_one_process(checkpoint: Path, folder: Path, start: dict[str, torch.Tensor]) -> None:
    """What `run` saved of the ranks, against stock TRL in one process with all rows."""
    saved = torch.load(folder / "ranks.pt")
    stock = train(Stock, checkpoint, folder / "stock", 4 * RANKS)
    assert len(saved["losses"]) == len(losses_of(stock)) == STEPS
    np.testing.assert_allclose(saved["losses"], losses_of(stock), rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(saved["norms"], norms_of(stock), rtol=1e-4)
    assert max(map(abs, losses_of(stock))) > 1e-3
    for name, parameter in stock.model.named_parameters():
        moved = (parameter.detach() - start[name]).norm()
        assert (saved["model"][name] - parameter.detach()).norm() <= 1e-4 * moved + 1e-7, name


def save(trainer: Any, folder: Path, whole: dict[str, torch.Tensor]) -> None:
    stats = trainer.mmpack_stats
    assert stats.passes > STEPS and stats.tokens < stats.tokens_stock / 1.5
    saved = {"losses": losses_of(trainer), "norms": norms_of(trainer), "model": whole}
    torch.save(saved, folder / "ranks.pt")
