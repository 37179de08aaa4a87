"""What packing and padding do alike: keep valid samples of one family, collect their media, index their loss tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmpack.errors import ArgumentError, SchemaError
from mmpack.families import FAMILIES, Family
from mmpack.packing.batch import Batch, loss_index
from mmpack.packing.columns import Column, given_columns, loss_columns_of, split_column
from mmpack.packing.media import MediaTable, patch_offsets
from mmpack.packing.replay import Alike, replay_fields
from mmpack.progress import tracked
from mmpack.schema.media import Medium
from mmpack.schema.rules import Problem, packing_problems, problems_of
from mmpack.schema.sample import Sample, as_samples


@dataclass
class Prepared:
    """Valid samples of one family, their columns, and why others were left out."""

    what: str  # `pack` or `pad`: begins every error
    samples: list[Sample]
    family: Family
    loss_columns: Mapping[str, Column] | None
    token_columns: Mapping[str, Column] | None
    dropped: list[Problem]


def prepare(
    samples: Sequence[Sample],
    loss_columns: Mapping[str, Column] | None,
    token_columns: Mapping[str, Column] | None,
    what: str,
    on_invalid: str,
) -> Prepared:
    """The samples to use. The first valid one decides on the family, and the first use of a cache key on its content.

    Raises: SchemaError with all broken rules, or where `on_invalid="drop"` leaves no sample; ArgumentError.
    """
    given = as_samples(samples, what)
    keep, dropped = _keep_valid(given, what, on_invalid)
    if dropped:
        loss_columns = _kept_columns(loss_columns, given, loss_tokens_of, keep, what)
        token_columns = _kept_columns(token_columns, given, _tokens_of, keep, what)
    kept = [given[i] for i in keep]
    family = FAMILIES[kept[0].family]
    return Prepared(what, kept, family, loss_columns, token_columns, dropped)


def row_multiple(pad_to_multiple_of: int | None, what: str) -> int:
    """The multiple that rows are padded to; 1 if none is asked for. Raises ArgumentError."""
    multiple = 1 if pad_to_multiple_of is None else pad_to_multiple_of
    if not isinstance(multiple, int) or multiple < 1:
        raise ArgumentError(
            f"{what}: pad_to_multiple_of is {multiple!r}. Fix: pass a whole number, 1 or more"
        )
    return multiple


def common_fields(
    given: Prepared,
    sample_rows: list[np.ndarray],
    order: Sequence[tuple[int, int]],
    media: Mapping[str, Any] | None,
    pin_memory: bool = False,
) -> dict[str, Any]:
    """The fields of `Batch`.

    Args: `sample_rows`: int64 [L] of each sample. `order`: (sample, media_index) of each occurrence of a medium, in row
    order. `media`: cache key -> pixels. `pin_memory`: the pixels lie in page-locked memory.
    """
    samples = given.samples
    table = MediaTable(given.family, media, given.what)
    occurrence = [table.add(samples[b].media[m], samples[b].processor) for b, m in order]
    # where a run is shared, another sample than its first may hold the pixels
    for sample in samples:
        for medium in sample.media:
            table.add(medium, sample.processor)
    index, counts = loss_index(sample_rows, samples)
    offsets = patch_offsets(table.media)
    vision = np.cumsum([0] + [m.num_tokens for m in table.media], dtype=np.int64)
    return vars(index) | {
        "family": given.family.name,
        "sample_ids": [s.sample_id for s in samples],
        "group_index": torch.tensor(_numbered(s.group_id for s in samples), dtype=torch.int64),
        "rewards": [s.rewards or [] for s in samples],
        "costs": [s.costs or [] for s in samples],
        "verifiers": [s.verifiers or [] for s in samples],
        "media": table.media,
        "vision_token_offsets": torch.from_numpy(vision),
        "patch_offsets": torch.tensor(offsets, dtype=torch.int64),
        "pixel_values": _held_once(table, offsets, pin_memory),
        "audio_features": _held_once(
            table, patch_offsets(table.media, audio=True), pin_memory, audio=True
        ),
        "byte_values": table.byte_values,
        "media_occurrence": torch.tensor(occurrence, dtype=torch.int32),
        "media_order": occurrence,
        "loss_columns": loss_columns_of(samples, given.loss_columns, given.what),
        **replay_fields(samples),
        "token_rows": torch.from_numpy(np.concatenate(sample_rows)),
        "token_counts": [len(s) for s in samples],
        "loss_counts": counts,
        "dropped": given.dropped,
    }


def counted(batch: Batch, tokens: int, padded: int) -> dict[str, int]:
    """The `stats` of every batch, of `tokens` rows, `padded` with the padding."""
    return {
        "tokens": tokens,
        "tokens_unshared": sum(batch.token_counts),
        "tokens_padded": padded,
        "loss_tokens": batch.num_loss_tokens,
        "media": len(batch.media),
        "media_occurrences": len(batch.media_order),
    }


def _keep_valid(
    samples: Sequence[Sample], what: str, on_invalid: str
) -> tuple[list[int], list[Problem]]:
    """Indices of the samples to use, and the broken rules of the others. Raises as `prepare`."""
    if on_invalid not in ("raise", "drop"):
        raise ArgumentError(f"{what}: on_invalid is {on_invalid!r}. Fix: use 'raise' or 'drop'")
    if not samples:
        raise ArgumentError(f"{what}: samples is empty. Fix: pass at least one")
    broken: list[Problem] = []
    keep: list[int] = []
    contents: dict[str, Medium] = {}
    alike = Alike()
    for i, sample in enumerate(tracked(samples, {"pack": "packing", "pad": "padding"}[what])):
        family = FAMILIES.get(sample.family) if isinstance(sample.family, str) else None
        if family is None:
            broken.append(Problem("MM006", sample.sample_id, "family", f"is {sample.family!r:.60}"))
            continue
        problems = list(problems_of(sample)) + packing_problems(sample)
        if keep and sample.family != samples[keep[0]].family:
            message = f"is {sample.family}, the first sample's is {samples[keep[0]].family}"
            problems.append(Problem("MM406", sample.sample_id, "family", message))
        if what == "pack" and family.packing != "yes":
            message = f"is {sample.family}, which can't be packed"
            problems.append(Problem("MM401", sample.sample_id, "family", message))
        problems += [] if problems else alike.problems(sample)
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
            alike.add(sample)
            contents = {medium.cache_key: medium for medium in sample.media} | contents
    if broken and on_invalid == "raise":
        raise SchemaError(broken, what)
    if not keep:
        raise SchemaError(broken, f"{what}: no valid sample is left")
    if not any(len(samples[i]) for i in keep):
        raise ArgumentError(f"{what}: no sample has a token. Fix: leave empty samples out")
    return keep, broken


def _kept_columns(
    given: Mapping[str, Column] | None,
    samples: Sequence[Sample],
    count: Callable[[Sample], int],
    keep: list[int],
    what: str,
) -> dict[str, Column]:
    """The columns of the kept samples, where some were dropped. `count`: values of a sample."""
    counts = [count(s) for s in samples]
    out: dict[str, Column] = {}
    for name, column in given_columns(given, what).items():
        pieces = split_column(name, column, counts, what)
        out[name] = [pieces[i] for i in keep]
    return out


def loss_tokens_of(sample: Sample) -> int:
    """Loss tokens; 0 where an invalid sample has no such number, or spans that run backwards."""
    try:
        return max(sample.num_loss_tokens, 0)
    except (TypeError, AttributeError):
        return 0


def _tokens_of(sample: Sample) -> int:
    """Tokens; 0 where an invalid sample's ids have no length."""
    return len(sample.input_ids) if hasattr(sample.input_ids, "__len__") else 0


def _numbered(names: Iterable[str]) -> list[int]:
    """The number of each name, in order of first appearance."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def _held_once(
    table: MediaTable, offsets: list[int], pin_memory: bool, audio: bool = False
) -> torch.Tensor | None:
    """All media's pixels in one buffer; each medium's are a view. None if a medium has none. `audio`: features."""
    pixels = table.stacked(pin_memory, audio)
    if pixels is not None:
        for medium, start, stop in zip(table.media, offsets, offsets[1:], strict=False):
            if (medium.modality == "audio") != audio:
                continue
            medium.pixel_values = pixels[start:stop]
    return pixels


def _unlike(a: Medium, b: Medium) -> bool:
    """Whether two media of one cache key contradict each other."""
    hashes = {a.content_hash, b.content_hash} - {None}
    return (a.modality, tuple(a.grid_thw)) != (b.modality, tuple(b.grid_thw)) or len(hashes) > 1
