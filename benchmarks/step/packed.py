"""Peers without padding: mmpack's packs, and flattened micro-batches as verl makes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.step.job import Job, Outcome
from benchmarks.step.ranks import local
from benchmarks.step.work import Work
from mmpack.adapters.transformers import checkpoint_layers, packed_logprobs
from mmpack.adapters.transformers.attention import attention_plan_of
from mmpack.adapters.transformers.media_inputs import pixel_inputs
from mmpack.packing.batch import PackedBatch
from mmpack.packing.pack import pack


def packed(
    model: Any, job: Job, members: list[int], share_prefix: bool, keep: bool = False
) -> Outcome:
    """mmpack's packs and logprobs.

    Args: `keep`: the last layers keep their activations, as many as memory takes.
    """
    samples, advantages = job.of(members)
    batch = pack(samples, share_prefix=share_prefix)
    grids = [medium.grid_thw for medium in batch.media]
    work = Work(
        len(batch.input_ids), batch.attention_plan.pairs, len(batch.loss_rows_unique), grids
    )
    if keep:
        kept = checkpoint_layers(model, batch, _free_bytes(model, job.device))
        work = replace(work, kept_layers=kept.layers, kept_blocks=kept.blocks)
    batch = batch.to(job.device)
    return _outcome(job, batch, packed_logprobs(model, batch), advantages, work)


def removed_padding(model: Any, job: Job, members: list[int]) -> Outcome:
    """As verl does: one row of ids, each sample's media encoded for it, logits and logprobs of all rows."""
    samples, advantages = job.of(members)
    batch = pack(samples)
    grids = [batch.media[i].grid_thw for i in batch.media_order]
    work = Work(len(batch.input_ids), batch.attention_plan.pairs, len(batch.input_ids), grids)
    batch = batch.to(job.device)
    linear = {} if batch.segment_plan is None else {"segment_plan": batch.segment_plan}
    out = model(
        input_ids=batch.input_ids[None],
        position_ids=batch.position_ids[:, None],
        visible_until=batch.visible_until,
        visible_from=batch.visible_from,
        attention_plan=attention_plan_of(batch, model),
        use_cache=False,
        **linear,
        **pixel_inputs(batch),
    )
    following = batch.input_ids.roll(-1)
    every = torch.log_softmax(out.logits[0], -1).gather(-1, following[:, None])[:, 0].float()
    return _outcome(job, batch, every[batch.loss_rows.long()], advantages, work)


def _free_bytes(model: Any, device: torch.device) -> int:
    """What weights and gradients leave of the device, less a tenth for the allocator; on a CPU 1 GB."""
    if device.type != "cuda":
        return 1 << 30
    own = sum(local(p).numel() * p.element_size() for p in model.parameters())
    whole = torch.cuda.get_device_properties(device).total_memory
    return max(0, int(0.9 * whole) - 2 * own)


def _outcome(
    job: Job, batch: PackedBatch, logprobs: torch.Tensor, advantages: torch.Tensor, work: Work
) -> Outcome:
    counts = batch.cu_loss.diff().long()
    each = torch.repeat_interleave(advantages, counts, output_size=len(logprobs))
    loss = -(logprobs * each).sum() / job.total_tokens
    return Outcome(loss, work, logprobs.detach)
