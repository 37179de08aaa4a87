"""How many rows a pack may have in given memory: by the terms of planning/memory.py, for the samples of a plan."""

from __future__ import annotations

from typing import Any

from mmpack.errors import ArgumentError, PlanError, check_number
from mmpack.planning.budgets import media_of
from mmpack.planning.counts import plain_counts
from mmpack.planning.layer_bytes import chunks_of
from mmpack.planning.memory import largest_pack
from mmpack.planning.prefixes import SharedPrefixes
from mmpack.schema.sample import Sample

FIX = "what weights, gradients and optimizer leave free, in bytes"


def check_memory(model: Any, memory: int | None) -> None:
    """Raise ArgumentError for memory without a model, or that is no number of bytes."""
    if model is None and memory is not None:
        raise ArgumentError("plan: memory is given without model. Fix: pass both or neither")
    if memory is not None:
        check_number("plan", "memory", memory, least=0, fix=f"pass {FIX}")


def room_of(
    samples: list[Sample], kept: list[int], model: Any, memory: int, share: bool
) -> dict[str, int | float | None]:
    """How many rows a pack of `kept` may have in `memory` bytes, with gradients and without."""
    shares = _shares(samples, kept, share)
    rows, more = (largest_pack(model, memory, *shares, grad=grad) for grad in (True, False))
    if not rows:
        raise PlanError(f"plan: {memory:,} bytes take no pack of this model. Fix: pass {FIX}")
    return {"max_tokens_grad": rows, "max_tokens_no_grad": more, "no_grad_ratio": more / rows}


def _shares(samples: list[Sample], kept: list[int], share: bool) -> list[float]:
    """What a row has, each of the group (sample) that has most: loss tokens, patches, gathered keys, vision tokens;
    chunks and branches of linear attention."""
    shared = SharedPrefixes(samples, kept) if share else None
    groups: dict[Any, list[int]] = {}
    for i in kept:
        groups.setdefault(samples[i].group_id if share else i, []).append(i)
    most = [0.0] * 6
    for members in groups.values():
        chosen = [samples[i] for i in members]
        lengths = [len(s) for s in chosen]
        counts = shared.counts(members) if shared else plain_counts(lengths)
        linear = shared.linear(members) if shared else (sum(map(chunks_of, lengths)), 0)
        media = {k: m.patches for s in chosen for k, m in media_of(s).items()}
        vision = max(sum(m.num_tokens for m in s.media) for s in chosen)
        loss = sum(s.num_loss_tokens for s in chosen)
        found = (loss, sum(media.values()), counts.keys, vision, *linear)
        most = [max(m, f / max(counts.rows, 1)) for m, f in zip(most, found, strict=True)]
    return most
