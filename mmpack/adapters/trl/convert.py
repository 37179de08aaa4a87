"""TRL's batch, the dict of `_generate_and_score_completions` ([B, P], [B, C]), as samples, and a batch back as that.

What a Sample has no field for goes through `metadata["trl"]`, so that nothing is lost, not even in a trace file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mmpack.adapters.checks import check_each, check_same
from mmpack.adapters.loss_values import COLUMNS, at_loss_tokens
from mmpack.adapters.processed_media import name_images
from mmpack.adapters.response_lists import (
    KEPT_IDS,
    ragged_of,
    refuse_missing,
    response_lists,
)
from mmpack.adapters.row_sample import prompt_group
from mmpack.adapters.trl.batch_rows import media_of_rows, rows_to_samples
from mmpack.adapters.trl.recut import GROUPS, VIDEOS
from mmpack.errors import ArgumentError, LayoutError
from mmpack.layout.names import numbered_in_groups
from mmpack.layout.runs import true_runs
from mmpack.packing.batch import PackedBatch
from mmpack.packing.pixels import float_pixels
from mmpack.processors.wrap import wrap_processor
from mmpack.schema.sample import Sample
from mmpack.schema.spans import ObservationSpan

KEY = "trl"  # in Sample.metadata
FILL = {"importance_sampling_ratio": 1.0}  # what TRL pads columns with, where it is not 0
LAYOUT = {
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "num_items_in_batch",
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "mm_token_type_ids",
    KEPT_IDS,
    GROUPS,
}


def to_samples(
    outputs: Mapping[str, Any],
    processing_class: Any,
    *,
    images: Sequence[Sequence[Any] | None] | None = None,
    group_ids: Sequence[str] | None = None,
    sampling: dict[str, Any] | None = None,
) -> list[Sample]:
    """What `GRPOTrainer` holds as samples, one per completion: ids as they are, positions by the family's rule.

    Loss spans are the tokens that `completion_mask` and `tool_mask` keep, tool tokens are observations,
    `sampling_per_token_logps` become `rollout_logprobs`; lists of `kept_ids`, as `MmpackGRPO` has them, are of the
    sample's. A field that is None is absent.

    Args:
        outputs: of `_generate_and_score_completions`, or one of the batches that it is split into.
        processing_class: the trainer's processor; its settings are recorded, for parity.
        images: of each row, as the data set has them: media get the content hashes and cache keys that
            other adapters give them. Without, a medium is known by its processed pixels.
        group_ids: [B]; None: rows of one prompt are a group.
        sampling: `temperature`, `top_p`, …, and `logprobs`: "processed" or "raw", of the sampling logprobs.

    Raises: ArgumentError for fields that this adapter does not know, and for `images` or `group_ids` of another
    length than the batch; LayoutError where ids, images and mm_token_type_ids contradict each other.
    """
    outputs = {name: value for name, value in outputs.items() if value is not None}
    if VIDEOS in outputs:
        raise ArgumentError(
            "to_samples: the rows have videos, which TRL's batch does not describe. "
            "Fix: make the samples with mp.wrap_processor"
        )
    unknown = [name for name in outputs if name not in LAYOUT | COLUMNS[KEY].keys()]
    if unknown:
        raise ArgumentError(
            f"to_samples: {unknown[0]!r} is not a field of a batch of mmpack's families. Fix: drop it"
        )
    rows = len(outputs["prompt_ids"])
    given = {"images": images, "group_ids": group_ids, KEPT_IDS: outputs.get(KEPT_IDS)}
    check_each("to_samples", rows, "rows", given)
    wrapped = wrap_processor(processing_class)
    pad_id = wrapped.tokenizer.pad_token_id
    ids = torch.cat([outputs["prompt_ids"], outputs["completion_ids"]], dim=1)
    lengths = _completion_lengths(outputs, pad_id)
    places = torch.arange(outputs["completion_ids"].shape[1])
    present = torch.cat([outputs["prompt_mask"].cpu().bool(), places < lengths[:, None]], dim=1)
    pixels, grids = outputs.get("pixel_values"), outputs.get("image_grid_thw")
    media = media_of_rows(pixels, grids, outputs.get("num_images"), wrapped.family)
    if images is not None and media:
        for b, (row, own) in enumerate(zip(media, images, strict=True)):
            name_images({"image": row}, own or (), wrapped, f"to_samples: row {b}")
    start = outputs["prompt_ids"].shape[1]
    attended = torch.cat([outputs["prompt_mask"], outputs["completion_mask"]], dim=1).cpu().bool()
    scored = attended.clone()
    if "tool_mask" in outputs:
        scored[:, start:] &= outputs["tool_mask"].cpu().bool()
    samples = rows_to_samples(ids, present, start, wrapped.family, media, scored, wrapped)
    _check_types(outputs, samples, present)

    prompts = outputs["prompt_mask"].sum(dim=1).tolist()
    if group_ids is None:
        group_ids = [prompt_group(s, p) for s, p in zip(samples, prompts, strict=True)]
    sample_ids = numbered_in_groups(group_ids)
    for b, (sample, prompt) in enumerate(zip(samples, prompts, strict=True)):
        tools = (attended & ~scored)[b, present[b]].numpy()
        sample.observation_spans = None
        if "tool_mask" in outputs:
            sample.observation_spans = [
                ObservationSpan(a, z, "tool", turn)
                for turn, (a, z) in enumerate(true_runs(tools), start=1)
            ]
        sample.group_id, sample.sample_id = group_ids[b], sample_ids[b]
        sample.sampling = sampling
        known = _metadata(outputs, b, prompt, int(lengths[b]), pad_id)
        sample.metadata[KEY] = known
        if KEPT_IDS in outputs:
            at, where = sample.loss_indices, f"to_samples: row {b}"
            lists = response_lists(outputs[KEPT_IDS][b], int(lengths[b]), where)
            sample.kept_ids = lists[at - prompt]
            refuse_missing(sample.kept_ids, np.ones(len(at), bool), where)
        logprobs = at_loss_tokens(sample, known, "sampling_per_token_logps")
        if logprobs is not None and not logprobs.isnan().any():
            sample.rollout_logprobs = logprobs.float().numpy()
    return samples


def from_batch(batch: PackedBatch, samples: Sequence[Sample] | None = None) -> dict[str, Any]:
    """TRL's dict of a packed batch: prompts padded left, completions right, an image as often as it occurs.

    Ids, images and loss tokens are the batch's, and so are its `loss_columns` of names that
    `mmpack.adapters.loss_values.loss_columns` gives, and its `kept_ids`: of each row a Ragged with a list per
    completion token, empty where there is no loss.
    `samples`, those of the batch in its order, give the rest: where a prompt ends, the width of the rectangles, tool
    tokens, values of tokens out of the loss. Without them a prompt ends at its first loss token.

    Returns: tensors on the batch's device, of TRL's names and dtypes. Raises: ArgumentError for other samples, and
    for videos, which TRL has no place for.
    """
    if samples is not None:
        check_same(batch, samples)
    if any(m.modality != "image" for m in batch.media):
        raise ArgumentError(
            "from_batch: the batch holds a video, but TRL trains on images only. Fix: leave the sample out"
        )
    ids = [x.tolist() for x in batch.unpack_tokens(batch.input_ids)]
    scored = [x.tolist() for x in batch.unpack_loss(batch.loss_token_index)]
    if samples is None:
        known = [_unrecorded(batch, i, n) for i, n in zip(ids, scored, strict=True)]
    else:
        known = [s.metadata[KEY] for s in samples]
    prompts = [k["prompt_tokens"] for k in known]
    wide = [max(k["width"][0] for k in known), max(k["width"][1] for k in known)]
    pad_id = known[0]["pad_token_id"]

    def rectangle(rows: Sequence[Sequence[Any]], fill: Any, side: int) -> torch.Tensor:
        padded = [[fill] * (wide[side] - len(r)) for r in rows]
        pairs = zip(rows, padded, strict=True)
        both = [[*p, *r] if side == 0 else [*r, *p] for r, p in pairs]
        return torch.tensor(both, device=batch.device)

    out: dict[str, Any] = {
        "prompt_ids": rectangle([i[:p] for i, p in zip(ids, prompts, strict=True)], pad_id, 0),
        "prompt_mask": rectangle([[1] * p for p in prompts], 0, 0),
        "completion_ids": rectangle([i[p:] for i, p in zip(ids, prompts, strict=True)], pad_id, 1),
        "completion_mask": rectangle([k["completion_mask"] for k in known], 0, 1),
    }
    if "tool_mask" in known[0]:
        out["tool_mask"] = rectangle([k["tool_mask"] for k in known], 1, 1)
    totals = {k.get("num_items_in_batch") for k in known}
    if len(totals) > 1:
        raise ArgumentError(
            f"from_batch: the samples come from several of TRL's batches, with {sorted(map(str, totals))} loss tokens. "
            "Fix: call it once per batch"
        )
    if totals != {None}:
        out["num_items_in_batch"] = torch.tensor(totals.pop(), device=batch.device)
    if GROUPS in known[0]:
        out[GROUPS] = torch.tensor([k[GROUPS] for k in known], device=batch.device)
    for name, column in COLUMNS[KEY].items():
        fill = FILL.get(name, 0.0)
        recorded = [k["columns"].get(name) for k in known]
        if column in batch.loss_columns:
            values = [x.tolist() for x in batch.unpack_loss(batch.loss_columns[column].float())]
            sizes = [len(i) - p for i, p in zip(ids, prompts, strict=True)]
            recorded = [
                _written(row, size, fill, v, np.asarray(n, dtype=np.int64) - p)
                for row, size, v, n, p in zip(recorded, sizes, values, scored, prompts, strict=True)
            ]
        if recorded[0] is None:
            continue
        if isinstance(recorded[0], float):  # advantages [B]; the ratio of a sequence [B, 1]
            whole = torch.tensor(recorded, device=batch.device)
            out[name] = whole if name == "advantages" else whole[:, None]
        else:
            rows = [[math.nan if v is None else v for v in row] for row in recorded]
            out[name] = rectangle(rows, fill, 1)
    if batch.kept_ids is not None:
        own = zip(ids, prompts, scored, batch.unpack_loss(batch.kept_ids), strict=True)
        out[KEPT_IDS] = [
            ragged_of(lists).spread(np.asarray(n, dtype=np.int64) - p, len(i) - p)
            for i, p, n, lists in own
        ]
    if batch.media or any(k.get("pictures") for k in known):
        out |= _images(batch, prompts, wide)
    return out


def _completion_lengths(outputs: Mapping[str, Any], pad_id: int) -> torch.Tensor:
    """[B]: tokens of each completion. mask_truncated_completions masks all of one: there padding is known by its id."""
    mask, ids = outputs["completion_mask"].cpu(), outputs["completion_ids"].cpu()
    places = torch.arange(1, ids.shape[1] + 1)
    by_id = ((ids != pad_id) * places).amax(dim=1)
    return torch.where(mask.any(dim=1), (mask.bool() * places).amax(dim=1), by_id)


def _check_types(
    outputs: Mapping[str, Any], samples: Sequence[Sample], present: torch.Tensor
) -> None:
    """TRL makes mm_token_type_ids from a second rendering of the prompt."""
    given = outputs.get("mm_token_type_ids")
    if given is None:
        return
    own = torch.zeros_like(present, dtype=given.dtype)
    for row, first, s in zip(own, present.long().argmax(dim=1).tolist(), samples, strict=True):
        for span in s.modality_spans:
            row[first + span.start : first + span.stop] = 1
    if not torch.equal(own, given.cpu()):
        raise LayoutError(
            "to_samples: mm_token_type_ids contradict the ids: TRL rendered the prompt twice, and the two differ "
            "(chat_template). Fix: give processing_class the template that generation uses",
            "MM105",
        )


def _metadata(
    outputs: Mapping[str, Any], b: int, prompt: int, length: int, pad_id: int
) -> dict[str, Any]:
    """What `from_batch` needs of row `b` beyond the sample's own fields, as JSON has it."""
    out: dict[str, Any] = {
        "prompt_tokens": prompt,
        "width": [outputs["prompt_ids"].shape[1], outputs["completion_ids"].shape[1]],
        "pad_token_id": pad_id,
        "completion_mask": outputs["completion_mask"][b, :length].tolist(),
    }
    if "pixel_values" in outputs:
        out["pictures"] = True  # of the batch; this row may have none
    if "tool_mask" in outputs:
        # in full: of a masked completion even padding is 0
        out["tool_mask"] = outputs["tool_mask"][b].tolist()
    if "num_items_in_batch" in outputs:
        out["num_items_in_batch"] = int(outputs["num_items_in_batch"])
    if GROUPS in outputs:
        out[GROUPS] = int(outputs[GROUPS][b])
    columns: dict[str, Any] = {}
    for name in COLUMNS[KEY]:
        values = outputs.get(name)
        if values is None:
            continue
        if values.ndim == 1 or values.shape[1] != outputs["completion_ids"].shape[1]:
            columns[name] = float(values[b].item())  # one per sample
        else:
            row = values[b, :length].tolist()
            columns[name] = [None if math.isnan(v) else v for v in row]  # JSON has no NaN
    return out | {"columns": columns}


def _unrecorded(batch: PackedBatch, ids: list[int], scored: list[int]) -> dict[str, Any]:
    """`_metadata` of a sample that did not come from TRL."""
    prompt = scored[0] if scored else len(ids)
    return {
        "prompt_tokens": prompt,
        "width": [prompt, len(ids) - prompt],
        "pad_token_id": batch.family_of().pad_token_id,
        "completion_mask": [1] * (len(ids) - prompt),
        "columns": {},
    }


def _written(
    row: list[Any] | None, size: int, fill: float, values: list[float], at: np.ndarray
) -> list[Any]:
    """`row` (or `fill`) of `size` completion tokens, with `values` at the places `at`."""
    out = list(row) if isinstance(row, list) else [fill] * size
    for place, value in zip(at.tolist(), values, strict=True):
        out[place] = value
    return out


def _images(batch: PackedBatch, prompts: list[int], wide: list[int]) -> dict[str, Any]:
    """Pixels, grids and counts of each row's images, and which tokens stand for them."""
    pixels = None if batch.pixel_values is None else float_pixels(batch)
    if pixels is None:
        if batch.media:
            raise ArgumentError(
                "from_batch: a medium has no pixels. Fix: pack with mp.pack(…, media=store)"
            )
        pixels = torch.zeros(0, batch.family_of().patch_dim, device=batch.device)
    order: list[int] = []
    counts = []
    types = torch.zeros(len(prompts), sum(wide), dtype=torch.int64)
    rows = batch.token_rows.cpu().split(batch.token_counts)
    for b, (own, prompt) in enumerate(zip(rows, prompts, strict=True)):
        first = wide[0] - prompt
        token = {row: t for t, row in enumerate(own.tolist())}
        spans = [s for s in batch.modality_spans if s.start in token]
        for s in spans:
            types[b, first + token[s.start] : first + token[s.stop - 1] + 1] = 1
        order += [s.media_index for s in spans]
        counts.append(len(spans))
    ends = batch.patch_offsets.tolist()
    grids = torch.tensor([batch.media[i].grid_thw for i in order], dtype=torch.int64)
    return {
        "pixel_values": torch.cat([pixels[:0], *(pixels[ends[i] : ends[i + 1]] for i in order)]),
        "image_grid_thw": grids.view(-1, 3).to(batch.device),
        "num_images": counts,
        "mm_token_type_ids": types.to(batch.device),
    }
