"""UniRL's roles as its worker makes them of a recipe; parts that it trains on; a step and its gradients."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from unirl.distributed.group.remote import RankInfo
from unirl.distributed.group.worker import Worker
from unirl.trainer.hydra import parse_hydra_cfg
from unirl.types.conditions import TextTokenCondition
from unirl.types.sample import Part
from unirl.types.sampling import ARSamplingParams
from unirl.types.segments import TextSegment

RECIPE = Path(__file__).with_name("unirl_recipe.yaml")
ROLES = {
    "bundle": (),
    "pipeline": ("bundle",),
    "backend": ("bundle",),
    "algorithm": ("pipeline",),
    "stack": ("backend", "algorithm"),
}


def roles(cfg: Any) -> SimpleNamespace:
    """What a trainer of UniRL places on a rank, made of a recipe by its own worker, without Ray."""
    worker = Worker.__new__(Worker)
    worker._init_local()
    made = worker._roles
    for name, of in ROLES.items():
        given = parse_hydra_cfg(cfg[name])
        more = {
            {"backend": "fsdp_backend"}.get(n, n) if name == "stack" else n: made[n] for n in of
        }
        worker.add_remote(name, given.pop("role_cls"), RankInfo(), given | more)
    return SimpleNamespace(**made)


def part_of(
    prompts: list[Any], responses: list[list[int]], conditions_cls: Any, **fields: Any
) -> Part:
    """Rows of prompts (a processor's output each) and responses, siblings side by side, with advantages."""
    names = fields.pop("names", None) or [f"p{i}/{i}" for i in range(len(prompts))]
    lengths = [p["input_ids"].shape[1] for p in prompts]
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for b, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        ids[b, :length], mask[b, :length] = prompt["input_ids"][0], 1
    conditions = {"prompt": TextTokenCondition(input_ids=ids, attention_mask=mask)}
    if any("pixel_values" in p for p in prompts):
        # a tensor for each row, as its rollout makes them
        for name in ("pixel_values", "image_grid_thw"):
            conditions[name] = [p[name].clone() if name in p else None for p in prompts]
    rng = np.random.default_rng(1)
    packed = {
        name: [torch.tensor(make(len(r))) for r in responses]
        for name, make in {
            "log_probs": lambda n: -5 + rng.standard_normal(n, dtype=np.float32),
            "loss_mask": lambda n: (np.arange(n) != 1).astype(np.int64),
        }.items()
    }
    segment = TextSegment.pack(tokens=[torch.tensor(r) for r in responses], **packed)
    part = Part(
        sample_ids=names,
        segment=segment,
        conditions=conditions_cls.from_dict(conditions).to_dict(),
        sampling_params=ARSamplingParams(),
        rewards=torch.tensor(rng.standard_normal(len(names), dtype=np.float32)),
        **fields,
    )
    return part.compute_advantages(scope="global")


def step(stack: Any, part: Part) -> tuple[Any, dict[str, torch.Tensor]]:
    """UniRL's `train_track`: its result, and the gradients that its optimizer was given, whole."""
    backend, taken = stack.fsdp_backend, {}
    clip = backend._clip_grad_norm

    def see(most: float) -> Any:
        for name, weight in backend.model.named_parameters():
            if weight.grad is not None:
                grad = weight.grad
                taken[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
        return clip(most)

    backend._clip_grad_norm = see
    try:
        return stack.train_track(
            part.select(list(range(part.batch_size))), training_progress=0.0
        ), taken
    finally:
        del backend._clip_grad_norm
