"""Peers on rectangles: a group a micro-batch, as TRL calls the model."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.step.job import Job, Outcome
from benchmarks.step.models import liger_module
from benchmarks.step.work import Work
from mmpack.adapters.transformers import model_inputs
from mmpack.errors import ArgumentError
from mmpack.packing.pad import PaddedBatch, pad
from mmpack.schema.sample import Sample


def padded(model: Any, job: Job, members: list[int], mask: bool = True) -> Outcome:
    """Logits of the responses, then log_softmax, a sample at a time, in the model's dtype.

    Args: `mask`: hand `attention_mask` over. Padded on the right, the loss is right without it.
    """
    samples, advantages = job.of(members)
    batch = pad(samples, side="right").to(job.device)
    inputs, kept = _inputs(batch, model), _kept(samples, batch)
    if not mask:
        del inputs["attention_mask"]
    logits = model(**inputs, logits_to_keep=kept + 1).logits[:, :-1]
    ids, scored = batch.input_ids[:, -kept:], batch.loss_mask[:, -kept:]
    chosen = [
        torch.log_softmax(row, -1).gather(-1, of[:, None])[:, 0]
        for row, of in zip(logits, ids, strict=True)
    ]
    logprobs = torch.stack(chosen).float()
    loss = -(logprobs * scored * advantages[:, None]).sum() / job.total_tokens
    return Outcome(loss, _work(batch, kept), lambda: logprobs.detach()[scored])


def liger(model: Any, job: Job, members: list[int]) -> Outcome:
    """Liger's fused GRPO loss on the hidden states of the rectangle, as TRL calls it."""
    losses = liger_module("chunked_loss")
    if job.ranks > 1:
        raise ArgumentError("benchmarks.step: liger needs the whole head. Fix: leave out --fsdp")
    samples, advantages = job.of(members)
    batch = pad(samples, side="right").to(job.device)
    kept = _kept(samples, batch)
    hidden = model.model(**_inputs(batch, model)).last_hidden_state[:, -kept - 1 : -1]
    fused = losses.LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, loss_type="dapo", compiled=job.device.type != "cpu"
    )
    # torch 2.11 fails to guard the dynamic shapes that a second micro-batch would make
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):  # type: ignore[attr-defined]
        loss, _ = fused(
            hidden,
            model.lm_head.weight,
            batch.input_ids[:, -kept:].contiguous(),
            batch.loss_mask[:, -kept:].long(),
            advantages,
            num_items_in_batch=torch.tensor(job.total_tokens, device=job.device),
        )
    return Outcome(loss, _work(batch, kept), None)


def _inputs(batch: PaddedBatch, model: Any) -> dict[str, Any]:
    inputs = model_inputs(batch, model)
    # as the model's own count gives them: without the row that tells packed sequences apart
    return inputs | {"position_ids": inputs["position_ids"][1:]}


def _kept(samples: list[Sample], batch: PaddedBatch) -> int:
    """Columns from the first response token on."""
    return batch.input_ids.shape[1] - min(s.loss_spans[0].start for s in samples)


def _work(batch: PaddedBatch, kept: int) -> Work:
    count, width = batch.input_ids.shape
    grids = [batch.media[i].grid_thw for i in batch.media_order]
    return Work(count * width, count * width * (width + 1) // 2, count * (kept + 1), grids)
