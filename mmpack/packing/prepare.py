"""What packing and padding do alike: keep valid samples of one family, collect their media, index their loss tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mmpack.errors import ArgumentError, SchemaError
from mmpack.families import FAMILIES, get_family
from mmpack.packing.batch import loss_index
from mmpack.packing.columns import Column, given_columns, loss_columns, split_column
from mmpack.packing.media import MediaTable, patch_offsets
from mmpack.schema.media import Medium
from mmpack.schema.rules import Problem, problems_of
from mmpack.schema.sample import Sample


def row_multiple(pad_to_multiple_of: int | None, what: str) -> int:
    """The multiple that rows are padded to; 1 if none is asked for. Raises ArgumentError."""
    multiple = 1 if pad_to_multiple_of is None else pad_to_multiple_of
    if not isinstance(multiple, int) or multiple < 1:
        raise ArgumentError(
            f"{what}: pad_to_multiple_of is {multiple!r}. Fix: pass a whole number, 1 or more"
        )
    return multiple


def keep_valid(
    samples: Sequence[Sample], what: str, on_invalid: str
) -> tuple[list[int], list[Problem]]:
    """Indices of the samples to use, and the broken rules of the others. Raises SchemaError, ArgumentError.

    The first valid sample decides on the family, and the first use of a cache key on its content.
    """
    if on_invalid not in ("raise", "drop"):
        raise ArgumentError(f"{what}: on_invalid is {on_invalid!r}. Fix: use 'raise' or 'drop'")
    if not samples:
        raise ArgumentError(f"{what}: no samples. Fix: pass at least one")
    broken: list[Problem] = []
    keep: list[int] = []
    contents: dict[str, Medium] = {}
    for i, sample in enumerate(samples):
        if sample.family not in FAMILIES:
            broken.append(Problem("MM006", sample.sample_id, "family", f"is {sample.family!r:.60}"))
            continue
        problems = list(problems_of(sample))
        if keep and sample.family != samples[keep[0]].family:
            message = f"is {sample.family}, the first sample's is {samples[keep[0]].family}"
            problems.append(Problem("MM406", sample.sample_id, "family", message))
        if what == "pack" and get_family(sample.family).packing != "yes":
            message = f"is {sample.family}, which can't be packed"
            problems.append(Problem("MM401", sample.sample_id, "family", message))
        # of a sample whose fields are not what they say, no more can be asked
        whole = not any(problem.code.startswith("MM0") for problem in problems)
        for m, medium in enumerate(sample.media if whole else ()):
            first = contents.get(medium.cache_key, medium)
            if _unlike(first, medium):
                message = f"has the cache key of {first.media_id!r:.60} but other content"
                problems.append(Problem("MM109", sample.sample_id, f"media[{m}]", message))
        broken += problems
        if not problems:
            keep.append(i)
            contents = {medium.cache_key: medium for medium in sample.media} | contents
    if broken and on_invalid == "raise":
        raise SchemaError(broken, what)
    if not keep:
        raise SchemaError(broken, f"{what}: no valid sample is left")
    if not any(len(samples[i]) for i in keep):
        raise ArgumentError(f"{what}: no sample has a token. Fix: leave empty samples out")
    return keep, broken


def kept_columns(
    given: Mapping[str, Column] | None,
    samples: Sequence[Sample],
    count: Callable[[Sample], int],
    keep: list[int],
    what: str,
) -> dict[str, Column]:
    """The columns of the kept samples, where some were dropped. `count`: values of a sample."""
    counts = [_count(count, s) for s in samples]
    out: dict[str, Column] = {}
    for name, column in given_columns(given, what).items():
        pieces = split_column(name, column, counts, what)
        out[name] = [pieces[i] for i in keep]
    return out


def loss_tokens_of(sample: Sample) -> int:
    return sample.num_loss_tokens


def _count(count: Callable[[Sample], int], sample: Sample) -> int:
    """0 where an invalid sample has no such number, or spans that run backwards."""
    try:
        return max(count(sample), 0)
    except (TypeError, AttributeError):
        return 0


def common_fields(
    samples: Sequence[Sample],
    sample_rows: list[np.ndarray],
    order: Sequence[tuple[int, int]],
    media: Mapping[str, Any] | None,
    columns: Mapping[str, Column] | None,
    what: str,
) -> dict[str, Any]:
    """The fields of `Batch`. `order`: (sample, media_index) of each placeholder run, in row order."""
    table = MediaTable(get_family(samples[0].family), media, what)
    occurrence = [table.add(samples[b].media[m]) for b, m in order]
    # where a run is shared, another sample than its first may hold the pixels
    for sample in samples:
        for medium in sample.media:
            table.add(medium)
    index, counts = loss_index(sample_rows, list(samples))
    groups: dict[str, int] = {}
    numbered = [groups.setdefault(s.group_id, len(groups)) for s in samples]
    pixels, offsets = table.stacked(), patch_offsets(table.media)
    if pixels is not None:  # held once: each medium's are a view of all
        for medium, start, stop in zip(table.media, offsets, offsets[1:], strict=False):
            medium.pixel_values = pixels[start:stop]
    vision = np.cumsum([0] + [m.num_tokens for m in table.media], dtype=np.int64)
    return vars(index) | {
        "family": samples[0].family,
        "sample_ids": [s.sample_id for s in samples],
        "group_index": torch.tensor(numbered, dtype=torch.int64),
        "rewards": [s.rewards or [] for s in samples],
        "costs": [s.costs or [] for s in samples],
        "media": table.media,
        "vision_token_offsets": torch.from_numpy(vision),
        "patch_offsets": torch.tensor(offsets, dtype=torch.int64),
        "pixel_values": pixels,
        "media_occurrence": torch.tensor(occurrence, dtype=torch.int32),
        "media_order": occurrence,
        "loss_columns": loss_columns(samples, columns, what),
        "token_rows": torch.from_numpy(np.concatenate(sample_rows)),
        "token_counts": [len(s) for s in samples],
        "loss_counts": counts,
    }


def _unlike(a: Medium, b: Medium) -> bool:
    """Whether two media of one cache key contradict each other."""
    hashes = {a.content_hash, b.content_hash} - {None}
    return (a.modality, tuple(a.grid_thw)) != (b.modality, tuple(b.grid_thw)) or len(hashes) > 1
