"""A step of verl's engine, stock or mmpack's: what its trainer hands out, and what comes back."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from support.models import Gradients, relative_difference
from support.ranks import gradients_of


class Step(NamedTuple):
    loss: float
    gradients: Gradients
    micro_batches: int
    norm: float  # that verl clips


def nested(data: Any, **settings: Any) -> Any:
    """What verl's trainer hands to its workers."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    out = left_right_2_no_padding(data.to_tensordict())
    off = ("use_dynamic_bsz", "use_remove_padding", "use_fused_kernels")
    known = {"temperature": 0.7, "calculate_entropy": True, "micro_batch_size_per_gpu": 4}
    tu.assign_non_tensor(out, **known | dict.fromkeys(off, False) | settings)
    return out


def inferred(engine: Any, data: Any, **settings: Any) -> dict[str, torch.Tensor]:
    """log_probs, entropy and more [B, R], as the trainer reads them."""
    from verl.workers.utils.padding import no_padding_2_padding

    batch = nested(data, **settings)
    with engine.eval_mode():
        output = engine.infer_batch(batch)["model_output"]
    return {name: no_padding_2_padding(values, batch) for name, values in output.items()}


def actor_config(**more: Any) -> Any:
    from verl.workers.config import FSDPActorConfig

    sizes = {"rollout_n": 1, "ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 4}
    return FSDPActorConfig(strategy="fsdp2", **sizes, **more)


def trained(engine: Any, data: Any, loss_function: Any = None, **settings: Any) -> Step:
    """One mini-batch with verl's own loss; the weights stay."""
    from verl.workers.utils.losses import ppo_loss

    loss_function = loss_function or partial(
        ppo_loss, config=actor_config(entropy_coeff=0.01, use_kl_loss=True)
    )
    batch = nested(data, **{"global_batch_size": len(data)} | settings)
    rate = engine.optimizer.param_groups[0]
    with engine.train_mode():
        engine.optimizer_zero_grad()
        out = engine.forward_backward_batch(batch, loss_function)
        gradients = {n: g.clone() for n, g in gradients_of(engine.module).items()}
        rate["lr"] = 0.0
        norm = engine.optimizer_step()
    return Step(sum(out["loss"]), gradients, len(out["loss"]), norm)


def assert_same_step(own: Step, stock: Step) -> None:
    assert own.loss == pytest.approx(stock.loss, abs=1e-5)
    assert own.norm == pytest.approx(stock.norm, rel=1e-5)
    assert own.gradients.keys() == stock.gradients.keys()
    assert relative_difference(own.gradients, stock.gradients) <= 1e-5


def with_columns(engine: Any, data: Any, **settings: Any) -> None:
    """Give a batch what PPO's loss reads."""
    data.batch["old_log_probs"] = inferred(engine, data, **settings)["log_probs"] - 0.1
    data.batch["ref_log_prob"] = data.batch["old_log_probs"].clone()
    data.batch["advantages"] = torch.nan_to_num(data.batch["advantages"])
