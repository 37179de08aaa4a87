"""What packing and padding do alike: keep valid samples of one family, collect their media, index their loss tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mmpack.errors import ArgumentError, SchemaError
from mmpack.families import get_family
from mmpack.pack.batch import loss_index
from mmpack.pack.columns import Column, loss_columns
from mmpack.pack.media import MediaTable, patch_offsets, stack_pixels
from mmpack.schema.rules import Problem, problems_of
from mmpack.schema.sample import Sample


def keep_valid(
    samples: Sequence[Sample], what: str, on_invalid: str
) -> tuple[list[int], list[Problem]]:
    """Indices of the samples to use, and the broken rules of the others. Raises SchemaError, ArgumentError."""
    if on_invalid not in ("raise", "drop"):
        raise ArgumentError(f"{what}: on_invalid is {on_invalid!r}. Fix: use 'raise' or 'drop'")
    if not samples:
        raise ArgumentError(f"{what}: no samples. Fix: pass at least one")
    broken: list[Problem] = []
    keep = []
    family = samples[0].family
    for i, sample in enumerate(samples):
        problems = list(problems_of(sample))
        if sample.family != family:
            message = f"is {sample.family}, the first sample is {family}"
            problems.append(Problem("MM406", sample.sample_id, "family", message))
        if get_family(sample.family).packing != "yes":
            message = f"{sample.family} can't be packed"
            problems.append(Problem("MM401", sample.sample_id, "family", message))
        broken += problems
        if not problems:
            keep.append(i)
    if broken and on_invalid == "raise":
        raise SchemaError(broken, what)
    if not keep:
        raise SchemaError(broken, f"{what}: no valid sample is left")
    return keep, broken


def kept_columns(
    given: Mapping[str, Column] | None, counts: list[int], keep: list[int]
) -> dict[str, Column]:
    """The columns of the kept samples, where some were dropped. `counts`: values of each sample."""
    out: dict[str, Column] = {}
    for name, column in (given or {}).items():
        flat = isinstance(column, (np.ndarray, torch.Tensor)) and len(column) == sum(counts)
        pieces: Sequence[Any] = torch.as_tensor(column).split(counts) if flat else column
        out[name] = [pieces[i] for i in keep] if len(pieces) == len(counts) else column
    return out


def common_fields(
    samples: Sequence[Sample],
    sample_rows: list[np.ndarray],
    order: Sequence[tuple[int, int]],
    media: Mapping[str, Any] | None,
    columns: Mapping[str, Column] | None,
    what: str,
) -> dict[str, Any]:
    """The fields of `Batch`. `order`: (sample, media_index) of each placeholder run, in row order."""
    table = MediaTable()
    occurrence = [table.add(samples[b].media[m], media) for b, m in order]
    index, counts = loss_index(sample_rows, list(samples))
    groups: dict[str, int] = {}
    numbered = [groups.setdefault(s.group_id, len(groups)) for s in samples]
    vision = np.cumsum([0] + [m.num_tokens for m in table.media], dtype=np.int64)
    return vars(index) | {
        "family": samples[0].family,
        "sample_ids": [s.sample_id for s in samples],
        "group_index": torch.tensor(numbered, dtype=torch.int64),
        "rewards": [s.rewards or [] for s in samples],
        "costs": [s.costs or [] for s in samples],
        "media": table.media,
        "vision_token_offsets": torch.from_numpy(vision),
        "patch_offsets": torch.tensor(patch_offsets(table.media), dtype=torch.int64),
        "pixel_values": stack_pixels(table.media),
        "media_occurrence": torch.tensor(occurrence, dtype=torch.int32),
        "loss_columns": loss_columns(samples, columns, what),
        "token_rows": torch.from_numpy(np.concatenate(sample_rows)),
        "token_counts": [len(s) for s in samples],
        "loss_counts": counts,
    }
