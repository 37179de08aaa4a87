"""DataProto as samples and back: prompts [B, P] padded left, responses [B, R] padded right, positions [B, 4, P + R].

Row 0 of verl's positions counts tokens, rows 1 to 3 are t, h, w. What a Sample has no field for goes through
`metadata["verl"]`, padding included, so that a DataProto comes back bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mmpack.adapters.checks import check_each, check_samples, refuse_reward_on_no_token
from mmpack.adapters.json_values import Held, held
from mmpack.adapters.loss_values import COLUMNS, batch_maker, padded, values_by_name, write_at
from mmpack.adapters.processed_media import (
    inputs_of_media,
    media_of_inputs,
    name_images,
    rest_of,
)
from mmpack.adapters.response_lists import (
    KEPT_IDS,
    refuse_missing,
    response_lists,
)
from mmpack.adapters.row_sample import response_start, row_sample
from mmpack.errors import ArgumentError, require
from mmpack.families import Family, get_family
from mmpack.layout.mrope import sample_positions
from mmpack.layout.names import numbered_in_groups
from mmpack.processors.wrap import Processor
from mmpack.schema.ragged import Ragged
from mmpack.schema.sample import Sample
from mmpack.schema.spans import Score

KEY = "verl"  # in Sample.metadata
LAYOUT = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")
SCORES = ("rm_scores", "token_level_scores")  # [B, R], a sequence's reward at its last token


def to_samples(
    data: Any,
    processor: Processor,
    *,
    images: Sequence[Sequence[Any] | None] | None = None,
    sampling: dict[str, Any] | None = None,
) -> list[Sample]:
    """The rows of a DataProto as samples, called `<uid>/<k>`: ids, positions and grids as verl holds them.

    Loss spans are where `response_mask` is 1; the rest of a response is an observation. `rollout_log_probs` of loss
    tokens become `rollout_logprobs`, and a row's `kept_ids`, one list of ids per response token, those of its loss
    tokens. Columns, fields and meta_info that a Sample has no place for stay in
    `metadata["verl"]`; see `mmpack.adapters.loss_values.loss_columns` and `from_samples`.

    Args:
        data: a `verl.DataProto` with prompts, responses, attention_mask, and mostly response_mask, position_ids
            ([B, 4, S], or [B, 3, S], or [B, S]) and multi_modal_inputs.
        processor: `mp.wrap_processor` of verl's processor.
        images: of each row: its media get the content hashes and cache keys that other adapters give
            them. Without, a medium is known by its processed pixels.
        sampling: `temperature`, `top_p`, …, and `logprobs`: "processed" or "raw", of rollout_log_probs.

    Raises: ArgumentError for masks with holes and ids that contradict each other; LayoutError where grids and
    placeholders of a row differ in number, and for a score of a response without tokens (`empty_response`).
    """
    tensors = dict(data.batch.items())
    missing = [k for k in ("prompts", "responses", "attention_mask") if k not in tensors]
    if missing:
        raise ArgumentError(
            f"to_samples: the DataProto has no {missing[0]!r}. Fix: pass one that a rollout returned"
        )
    check_each("to_samples", len(data), "rows", {"images": images})
    whole = {
        "field_types": {k: v.dtype.str for k, v in data.non_tensor_batch.items()},
        "meta_info": data.meta_info,
    }
    fields = [{k: v[b] for k, v in data.non_tensor_batch.items()} for b in range(len(data))]
    groups = [str(f.get("uid", b)) for b, f in enumerate(fields)]
    return [
        _sample(
            f"to_samples: row {b}",
            {k: v[b].detach().cpu() for k, v in tensors.items()},
            fields[b],
            processor,
            None if images is None else images[b] or [],
            whole,
            sample_id=sample_id,
            group_id=groups[b],
            sampling=sampling,
        )
        for b, sample_id in enumerate(numbered_in_groups(groups))
    ]


def from_samples(
    samples: Sequence[Sample],
    columns: Mapping[str, Sequence[Any]] | None = None,
    media: Mapping[str, Any] | None = None,
) -> Any:
    """A DataProto of samples, on the CPU: the same as recorded for samples that came from one, padded anew for others.

    Args: `columns`: name -> one [n] array per sample, written at the loss tokens of a [B, R] column, over what was
    recorded. `media`: cache key -> pixels, of samples that were read from a trace.
    Raises: MissingExtraError without verl; SchemaError (MM404) for missing pixels; ArgumentError for samples of which
    only some come from verl or have kept ids, or with unlike columns.
    """
    verl = require("verl", "verl", "from_samples")
    check_samples(samples, columns)
    own = [held(s.metadata, KEY) or _unrecorded(s) for s in samples]
    wide = [
        max(o["width"][0] for o in own),
        max(
            max(o["width"][1], len(s) - o["prompt_tokens"])
            for s, o in zip(samples, own, strict=True)
        ),
    ]
    rows = []
    for b, (sample, known) in enumerate(zip(samples, own, strict=True)):
        given = {name: values[b] for name, values in (columns or {}).items()}
        rows.append(_row(sample, known, wide, given))
    names = [r.keys() | o["fields"].keys() for r, o in zip(rows, own, strict=True)]
    unlike = next((n ^ names[0] for n in names if n != names[0]), None)
    if unlike is not None:
        raise ArgumentError(
            f"from_samples: only some samples have {min(unlike)!r}. Fix: pass samples of one DataProto"
        )
    tensors = {name: torch.stack([r[name] for r in rows]) for name in rows[0]}
    fields: dict[str, np.ndarray] = {}
    for name in own[0]["fields"]:
        values = [o["fields"][name] for o in own]
        fields[name] = _stacked(values, own[0]["field_types"][name])
    if any(s.kept_ids is not None for s in samples):
        kept = [_kept_column(s, o["prompt_tokens"]) for s, o in zip(samples, own, strict=True)]
        fields[KEPT_IDS] = _stacked(kept, "|O")
    if "multi_modal_inputs" in own[0]["field_types"] or any(s.media for s in samples):
        inputs = [
            None
            if known["inputs"] is None and not sample.media
            else inputs_of_media(sample, media) | (known["inputs"] or {})
            for sample, known in zip(samples, own, strict=True)
        ]
        fields["multi_modal_inputs"] = _stacked(inputs, "|O")
    return verl.DataProto.from_dict(tensors, fields, dict(own[0]["meta_info"]))


from_batch = batch_maker(from_samples)


def _sample(
    where: str,
    row: dict[str, torch.Tensor],
    fields: dict[str, Any],
    processor: Processor,
    images: Sequence[Any] | None,
    whole: dict[str, Any],
    **named: Any,
) -> Sample:
    """One row: its tensors, its fields, and what the `whole` DataProto has of its own."""
    family = processor.family
    both = torch.cat([row["prompts"], row["responses"]])
    if not torch.equal(row.get("input_ids", both), both):
        raise ArgumentError(
            f"{where}: input_ids are not prompts and responses. Fix: pass the whole DataProto"
        )
    width = len(row["prompts"])
    valid = _valid_of(where, row["attention_mask"].bool(), width)
    score = next((row[name] for name in SCORES if name in row), None)
    if score is not None and not valid[width:].any() and bool(score.any()):
        refuse_reward_on_no_token(where)
    scored = valid.clone()
    scored[:width] = False
    if "response_mask" in row:
        scored[width:] &= row["response_mask"].bool()
    inputs = fields.pop("multi_modal_inputs", None)
    kept = fields.pop(KEPT_IDS, None)
    if kept is not None:
        lists = response_lists(kept, int(valid[width:].sum()), where)
        kept = lists[np.flatnonzero(scored[width:][valid[width:]].numpy())]
        refuse_missing(kept, np.ones(len(kept), bool), where)
    media = media_of_inputs(inputs, family, where)
    if images is not None:
        name_images(media, images, processor, where)
    places, logprobs = row.get("position_ids"), row.get("rollout_log_probs")
    return row_sample(
        where,
        both[valid].numpy(),
        media,
        scored[valid].numpy(),
        family,
        response_start=int(valid[:width].sum()),
        processor=processor,
        position_ids=None if places is None else _positions(where, places, valid, family),
        rollout_logprobs=None if logprobs is None else logprobs[scored[width:]].float().numpy(),
        kept_ids=kept,
        rewards=None if score is None else [Score("verl", float(score.sum()))],
        metadata={KEY: Held(_recorded(row, fields, inputs, valid) | whole)},
        **named,
    )


def _valid_of(where: str, mask: torch.Tensor, width: int) -> torch.Tensor:
    """The attention mask bool [P + R], checked: prompts padded left, responses right."""
    prompt, response = int(mask[:width].sum()), int(mask[width:].sum())
    if not torch.equal(mask, _valid(prompt, response, width, len(mask))):
        raise ArgumentError(
            f"{where}: attention_mask has a 0 between tokens. Fix: pad prompts left and responses right"
        )
    return mask


def _recorded(
    row: dict[str, torch.Tensor],
    fields: dict[str, Any],
    inputs: Mapping[str, Any] | None,
    valid: torch.Tensor,
) -> dict[str, Any]:
    """What `from_samples` needs of a row beyond the sample's own fields."""
    width = len(row["prompts"])
    places, mask = row.get("position_ids"), row.get("response_mask")
    return {
        "prompt_tokens": int(valid[:width].sum()),
        "width": [width, len(row["responses"])],
        "dtypes": {k: str(row[k].dtype).removeprefix("torch.") for k in LAYOUT if k in row},
        "positions": None if places is None else len(places) if places.ndim > 1 else 1,
        "text_positions": places[0, valid]
        if places is not None and places.ndim > 1 and len(places) == 4
        else None,
        "padding": {
            "ids": torch.cat([row["prompts"], row["responses"]])[~valid],
            "position_ids": None if places is None else places[..., ~valid],
            "response_mask": None if mask is None else mask[~valid[width:]],
        },
        "columns": {k: v for k, v in row.items() if k not in LAYOUT},
        "fields": fields,
        "inputs": None if inputs is None else rest_of(inputs),
    }


def _positions(where: str, places: torch.Tensor, valid: torch.Tensor, family: Family) -> np.ndarray:
    """int64 [rows, L] of the family, from verl's [4, S], [3, S] or [S]."""
    own = places[..., valid].long()
    if own.ndim == 1:
        own = own.expand(family.position_rows, -1)
    elif len(own) == 1 + family.position_rows:
        own = own[1:]
    if len(own) != family.position_rows:
        raise ArgumentError(
            f"{where}: position_ids have {len(own)} rows, {family.name} has {family.position_rows}. "
            "Fix: wrap this model's processor"
        )
    return np.ascontiguousarray(own.numpy())


def _valid(prompt: int, response: int, width: int, length: int) -> torch.Tensor:
    """bool [length]: tokens around the border between the rectangles of prompts and responses."""
    at = torch.arange(length)
    return (at >= width - prompt) & (at < width + response)


def _unrecorded(sample: Sample) -> dict[str, Any]:
    start = response_start(sample)
    return {
        "prompt_tokens": start,
        "width": [start, len(sample) - start],
        "dtypes": dict.fromkeys(LAYOUT, "int64"),
        "positions": 4 if get_family(sample.family).position_rows == 3 else 1,
        "text_positions": None,
        "padding": {},
        "columns": {},
        "fields": {"uid": sample.group_id},
        "field_types": {"uid": "|O"},
        "inputs": None,
        "meta_info": {},
    }


def _row(
    sample: Sample, known: dict[str, Any], wide: list[int], given: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """One row of every tensor of the DataProto."""
    start, length = known["prompt_tokens"], len(sample)
    width = wide[0]
    valid = _valid(start, length - start, width, sum(wide))
    dtypes = {k: getattr(torch, v) for k, v in known["dtypes"].items()}
    padding, pad_id = known["padding"], get_family(sample.family).pad_token_id
    ids = padded(torch.from_numpy(sample.input_ids), valid, pad_id, padding.get("ids"))
    out = {"prompts": ids[:width], "responses": ids[width:], "input_ids": ids}
    out["attention_mask"] = valid
    if known["positions"] is not None:
        own = _verl_positions(sample, known)
        out["position_ids"] = padded(own, valid, 0, padding.get("position_ids"))
    places = torch.from_numpy(sample.loss_indices) - start
    mask = torch.zeros(length - start, dtype=torch.long)
    mask[places] = 1
    out["response_mask"] = padded(mask, valid[width:], 0, padding.get("response_mask"))
    out = {k: v.to(dtypes[k]) for k, v in out.items() if k in dtypes}

    columns = {k: _widened(v, known["width"], wide) for k, v in known["columns"].items()}
    return out | write_at(columns, values_by_name(sample, given, COLUMNS[KEY]), places, wide[1])


def _verl_positions(sample: Sample, known: dict[str, Any]) -> torch.Tensor:
    """int64 [4, L], [3, L] or [L]."""
    own = sample.position_ids if sample.position_ids is not None else sample_positions(sample)[0]
    rows = torch.from_numpy(own)
    if known["positions"] == 1:
        return rows[0]
    if known["positions"] == 3:
        return rows
    text = known["text_positions"]
    if text is None or len(text) != len(sample):
        text = torch.arange(len(sample))
    return torch.cat([text[None].long(), rows])


def _widened(row: torch.Tensor, width: list[int], wide: list[int]) -> torch.Tensor:
    """A recorded row in wider rectangles: [R, …] grows on the right, [P + R, …] on both sides."""
    left, right = wide[0] - width[0], wide[1] - width[1]
    if not (left or right) or not row.ndim or len(row) not in (width[1], sum(width)):
        return row
    left = left if len(row) == sum(width) else 0
    zeros = [row.new_zeros(n, *row.shape[1:]) for n in (left, right)]
    return torch.cat([zeros[0], row, zeros[1]])


def _kept_column(sample: Sample, start: int) -> Ragged:
    """A list per token of the response, which begins at `start`. Raises: ArgumentError for a sample without lists."""
    lists = sample.kept_ids
    if lists is None and sample.num_loss_tokens:
        raise ArgumentError(
            f"from_samples: {sample.sample_id!r:.60} has no kept_ids, but other samples have. "
            "Fix: record them for all, or set them to None on all"
        )
    own = Ragged.empty(0) if lists is None else lists
    return own.spread(sample.loss_indices - start, len(sample) - start)


def _stacked(values: list[Any], kind: str) -> np.ndarray:
    """[B] of objects, or one array of `kind`."""
    if np.dtype(kind) != np.dtype(object):
        return np.array(values, dtype=np.dtype(kind))
    out = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):  # at once, lists of one length would become a rectangle
        out[i] = value
    return out
