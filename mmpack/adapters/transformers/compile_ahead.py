"""Compiling while a process waits for its first rollouts, instead of in its first step."""

from __future__ import annotations

from typing import Any

import torch

from mmpack.adapters.transformers.logprobs import packed_logprobs
from mmpack.adapters.transformers.unwrap import is_engine, unwrap
from mmpack.errors import ModelError
from mmpack.packing.batch import Batch


def compile_ahead(model: Any, batch: Batch, *, old_logprobs: bool = True, **options: Any) -> None:
    """Compile, or load from caches on disk, what steps over batches like this one run, before the first of them.

    It runs `packed_logprobs(model, batch, **options)` forward and backward, by gradients of 0, and leaves weights,
    gradients and torch's random numbers as they are. The model must be attached, as in a step; call `compile_layers`
    before. Under DDP and FSDP2 call it on every rank.

    Args:
        batch: of prompts with their media and made-up responses, or of an earlier trace: with prefixes shared or not,
            media or none, and of about as many rows as the steps' packs, since attention's backends are chosen by size.
        old_logprobs: also one pass without gradients, as old and reference logprobs take.
        options: of `packed_logprobs`, as the steps pass them.

    Raises: ModelError for a model that has gradients, and for DeepSpeed's engine; else as `packed_logprobs`.
    """
    whole = unwrap(model, "compile_ahead")
    if is_engine(model):
        raise ModelError(
            "compile_ahead: DeepSpeed's engine runs its own backward. Fix: leave compile_ahead out"
        )
    trained = [p for p in whole.parameters() if p.requires_grad]
    if any(p.grad is not None for p in trained):
        raise ModelError(
            "compile_ahead: the model has gradients, which would be lost. "
            "Fix: call it before the first backward, or after optimizer.zero_grad()"
        )
    device = whole.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if old_logprobs:
            with torch.no_grad():
                packed_logprobs(model, batch, **options)
        found = packed_logprobs(model, batch, **options)
        values = found if isinstance(found, tuple) else (found,)
        if trained:  # a reference model has no backward
            torch.autograd.backward(values, [torch.zeros_like(x) for x in values])
    for parameter in trained:
        parameter.grad = None
