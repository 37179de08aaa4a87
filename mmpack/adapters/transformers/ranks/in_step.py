"""`in_step`: ranks that planned apart agree on how many micro-batches a step has, and on which of them run towers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed

from mmpack.adapters.transformers.inputs import packs_of
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import ArgumentError
from mmpack.families import family_of_config
from mmpack.packing.batch import PackedBatch
from mmpack.packing.calls import Counts, calls_of, counts_of
from mmpack.packing.idle import idle_batch


class StepPacks(NamedTuple):
    """This rank's micro-batches of a step, as many as every other rank's, and the totals that `policy_loss` takes."""

    packs: list[PackedBatch]
    total_tokens: int  # loss tokens of all ranks
    total_samples: int


def in_step(
    model: Any, packs: Sequence[PackedBatch], *, loss_columns: Sequence[str] = (), group: Any = None
) -> StepPacks:
    """The packs of this rank, with idle ones behind them where another rank has more, and the totals of all ranks.

    Every rank calls it once a step, also one without packs. Two small collectives: how many, and how often each of
    them runs the towers, which `model_inputs` then asks no more. Steps of a `PackLoader` know both from their plan.

    Args:
        model: see `model_inputs`; an idle pack is of its family, and on its device.
        packs: what `mp.pack` made, in the order in which they are run. Each one's `tower_runs` is set.
        loss_columns: names of columns that idle packs have, [0] float32, in addition to those of the first pack here.
        group: a process group; None: all ranks.

    Raises: ArgumentError for what is no pack, or without torch.distributed; ModelError for packs of another family.
    """
    whole = unwrap(model, "in_step")
    packs = checked(packs, whole, "in_step")
    device = whole.get_input_embeddings().weight.device
    own = [len(packs), sum(p.num_loss_tokens for p in packs), sum(len(p.sample_ids) for p in packs)]
    numbers = torch.tensor(own, device=device)
    parts = [torch.empty_like(numbers) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, numbers, group=group)
    everyone = torch.stack(parts)
    (most, _, _), (_, tokens, samples) = everyone.amax(0).tolist(), everyone.sum(0).tolist()
    columns = {name: torch.zeros(0) for name in loss_columns}
    columns |= {name: x[:0].cpu() for p in packs[:1] for name, x in p.loss_columns.items()}
    while len(packs) < most:
        idle = idle_batch(family_of_config(whole.config).name, loss_columns=columns)
        packs.append(idle.to(device))
    counts = [counts_of(calls_of(p.family_of(), p.media)) for p in packs]
    runs = torch.tensor(counts, dtype=torch.int64, device=device).reshape(most, 2)
    distributed.all_reduce(runs, distributed.ReduceOp.MAX, group=group)
    for pack, (vision, audio) in zip(packs, runs.tolist(), strict=True):
        pack.tower_runs = Counts(vision, audio)
    return StepPacks(packs, tokens, samples)


def checked(packs: Any, whole: Any, what: str, pixels: bool = True) -> list[PackedBatch]:
    """`packs_of`, where there is a process group. Raises: ArgumentError, ModelError, SchemaError."""
    packs = packs_of(packs, whole, what, pixels)
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ArgumentError(
            f"{what}: torch.distributed has no process group. "
            "Fix: call init_process_group, or leave this out on a single rank"
        )
    return packs
