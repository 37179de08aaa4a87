"""OpenRLHF (0.11): its Experience (sequences [B, T] padded right, columns [B, A]) as samples and back.

Column j of A speaks of token T - A + j; OpenRLHF's own experiences have A = T - 1. It records no positions: its model
counts them in the forward. What a Sample has no field for goes through `metadata["openrlhf"]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, needs, require

with needs("openrlhf", __name__):
    import torch

from mmpack.adapters.checks import (
    check_each,
    check_samples,
    refuse_reward_on_no_token,
    valid_tokens,
)
from mmpack.adapters.json_values import Held, held
from mmpack.adapters.loss_values import (
    COLUMNS,
    batch_maker,
    padded,
    places_of,
    values_by_name,
    write_at,
)
from mmpack.adapters.processed_media import (
    inputs_of_media,
    media_of_inputs,
    name_images,
    rest_of,
)
from mmpack.adapters.row_sample import prompt_group, response_start, row_sample
from mmpack.families import get_family
from mmpack.layout.names import numbered_in_groups
from mmpack.processors.wrap import Processor
from mmpack.schema.sample import Sample
from mmpack.schema.spans import Score

KEY = "openrlhf"  # in Sample.metadata
EPISODE = ("rewards", "scores", "response_length", "truncated", "total_length")  # [B]
LISTS = ("index", "prompts", "labels", "images")  # one entry per row, or none


def to_samples(
    experience: Any,
    processor: Processor,
    *,
    images: Sequence[Sequence[Any] | None] | None = None,
    group_ids: Sequence[str] | None = None,
    sampling: dict[str, Any] | None = None,
) -> list[Sample]:
    """The rows of an Experience, or of a replay buffer's items, as samples.

    Loss spans are where `action_mask` is 1; `rollout_log_probs` there become `rollout_logprobs`, `rewards` a Score.

    Args:
        experience: an `Experience` of B rows, or a list of those of one row that a replay buffer holds.
        processor: `mp.wrap_processor` of OpenRLHF's processor.
        images: of each row, loaded: media get the content hashes and cache keys that other adapters give
            them. Without, a medium is known by its processed pixels.
        group_ids: [B]; None: rows of one prompt are a group. Samples are called `<group_id>/<k>`.
        sampling: `temperature`, `top_p`, …, and `logprobs`: "processed" or "raw", of rollout_log_probs.

    Raises: ArgumentError for masks with holes; LayoutError where grids, placeholders and images of a row differ in
    number, and for a reward of a row without actions (`empty_response`).
    """
    if not isinstance(experience, list | tuple):
        rows = [_row_of(experience, b) for b in range(len(experience.sequences))]
    else:
        rows = [_row_of(item, None) for item in experience]
    check_each("to_samples", len(rows), "rows", {"images": images, "group_ids": group_ids})
    out = []
    for b, row in enumerate(rows):
        own = None if images is None else images[b] or []
        group = None if group_ids is None else group_ids[b]
        out.append(_sample(f"to_samples: row {b}", row, processor, own, group, sampling))
    for sample, sample_id in zip(out, numbered_in_groups([s.group_id for s in out]), strict=True):
        sample.sample_id = sample_id
    return out


def from_samples(
    samples: Sequence[Sample],
    columns: Mapping[str, Sequence[Any]] | None = None,
    media: Mapping[str, Any] | None = None,
) -> Any:
    """An `Experience` of B rows, on the CPU: the same as recorded for samples that came from one, made anew for others.

    Args: `columns`: name -> one [n] array per sample, written at the loss tokens of a [B, A] column, over what was
    recorded. `media`: cache key -> pixels, of samples that were read from a trace.
    Raises: MissingExtraError without OpenRLHF; SchemaError (MM404) for missing pixels; ArgumentError for samples of
    which only some come from OpenRLHF, or with other columns.
    """
    module = require("openrlhf.trainer.ppo_utils.experience", "openrlhf", "from_samples")
    check_samples(samples, columns)
    own = [held(s.metadata, KEY) or _unrecorded(s) for s in samples]
    names = [{*o["columns"], *o["episode"], *o["lists"], *o["info"]} for o in own]
    if any(n != names[0] for n in names):
        raise ArgumentError(
            "from_samples: the samples have different columns. Fix: pass samples of one Experience"
        )
    wide = max(max(o["width"], o["start"] + len(s)) for s, o in zip(samples, own, strict=True))
    rows = [
        _step_row(s, o, wide, {name: values[b] for name, values in (columns or {}).items()})
        for b, (s, o) in enumerate(zip(samples, own, strict=True))
    ]
    made: dict[str, Any] = {name: torch.stack([r[name] for r in rows]) for name in rows[0]}
    made |= {name: torch.stack([o["episode"][name] for o in own]) for name in own[0]["episode"]}
    for name, kept in own[0]["lists"].items():
        whole = "whole" in kept
        made[name] = kept["whole"] if whole else [o["lists"][name]["each"] for o in own]
    if all(o["inputs"] is None for o in own):
        made["mm_train_inputs"] = []
    else:
        made["mm_train_inputs"] = [
            inputs_of_media(s, media) | (o["inputs"] or {}) or None
            for s, o in zip(samples, own, strict=True)
        ]
    made["info"] = {name: _joined([o["info"][name] for o in own]) for name in own[0]["info"]}
    return module.Experience(**made)


from_batch = batch_maker(from_samples)


def _row_of(experience: Any, b: int | None) -> dict[str, Any]:
    """Row b of every field; None: the experience is a replay buffer's item, one row without the batch dimension."""
    batch = 1 if b is None else len(experience.sequences)
    at = 0 if b is None else b
    row: dict[str, Any] = {"lists": {}, "info": {}}
    for field in fields(experience):
        name, value = field.name, getattr(experience, field.name)
        if name == "mm_train_inputs":
            row[name] = value[at] if value else None
            row["has_inputs"] = bool(value)
        elif name in LISTS:
            each = value is not None and len(value) == batch
            row["lists"][name] = {"each": value[at]} if each else {"whole": value}
        elif name == "info":
            stacks = int | float if b is None else torch.Tensor
            own = value if b is None else {k: v[b] for k, v in value.items()}
            row["info"] = {k: (v, isinstance(value[k], stacks)) for k, v in own.items()}
        elif value is not None:
            row[name] = value if b is None else value[b]
    return row


def _sample(
    where: str,
    row: dict[str, Any],
    processor: Processor,
    images: Sequence[Any] | None,
    group: str | None,
    sampling: dict[str, Any] | None,
) -> Sample:
    ids, mask = row["sequences"].cpu(), row["attention_mask"].cpu().bool()
    own = valid_tokens(mask.numpy(), where, "pad at the end only")
    actions = row["action_mask"].cpu()
    first = len(ids) - len(actions)  # the token of column 0
    scored = torch.zeros(len(ids), dtype=torch.bool)
    scored[first:] = actions.bool()
    scored &= mask
    rewards = row.get("rewards")
    if rewards is not None and not scored.any() and float(rewards) != 0:
        refuse_reward_on_no_token(where)
    media = media_of_inputs(row.get("mm_train_inputs"), processor.family, where)
    if images is not None:
        name_images(media, images, processor, where)
    at = np.flatnonzero(scored[own].numpy())
    prompt = int(at[0]) if len(at) else own.stop - own.start
    logprobs = row.get("rollout_log_probs")
    sample = row_sample(
        where,
        ids[own].numpy(),
        media,
        scored[own].numpy(),
        processor.family,
        response_start=prompt,
        processor=processor,
        sample_id="",
        group_id=group or "",
        sampling=sampling,
        rollout_logprobs=None
        if logprobs is None
        else logprobs.cpu()[scored[first:]].float().numpy(),
        rewards=None if rewards is None else [Score("openrlhf", float(rewards))],
        finish_reason=_finish(row.get("truncated")),
        metadata={KEY: Held(_recorded(row, own.start, ids[~mask], actions[~scored[first:]]))},
    )
    if group is None:
        sample.group_id = prompt_group(sample, prompt)
    return sample


def _recorded(
    row: dict[str, Any], start: int, padding: torch.Tensor, action_padding: torch.Tensor
) -> dict[str, Any]:
    """What `from_samples` needs of a row beyond the sample's own fields."""
    masks = ("sequences", "attention_mask", "action_mask")
    return {
        "width": len(row["sequences"]),
        "start": start,
        "actions": len(row["action_mask"]),
        "dtypes": {name: str(row[name].dtype).removeprefix("torch.") for name in masks},
        "padding": padding,
        "action_padding": action_padding,
        "columns": {name: row[name] for name in COLUMNS[KEY] if name in row},
        "episode": {name: row[name] for name in EPISODE if name in row},
        "lists": row["lists"],
        "info": row["info"],
        "inputs": rest_of(row.get("mm_train_inputs") or {}) if row["has_inputs"] else None,
    }


def _finish(truncated: torch.Tensor | None) -> str | None:
    return None if truncated is None else "length" if bool(truncated) else "stop"


def _unrecorded(sample: Sample) -> dict[str, Any]:
    length = len(sample)
    episode = {
        "response_length": torch.tensor(length - response_start(sample)),
        "truncated": torch.tensor(sample.finish_reason == "length"),
        "total_length": torch.tensor(float(length)),
    }
    if sample.rewards is not None:
        whole = [s.value for s in sample.rewards if s.scope == "sequence"]
        episode["rewards"] = torch.tensor(float(sum(whole)))
    return {
        "width": length,
        "start": 0,
        "actions": length - 1,
        "dtypes": {"sequences": "int64", "attention_mask": "int64", "action_mask": "int64"},
        "padding": None,
        "action_padding": None,
        "columns": {},
        "episode": episode,
        "lists": {},
        "info": {},
        "inputs": {},
    }


def _step_row(
    sample: Sample, known: dict[str, Any], wide: int, given: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """One row of every [B, T] and [B, A] field, `wide` tokens long: padded at the end beyond what was recorded."""
    more = wide - known["width"]
    start, length = known["start"], len(sample)
    dtypes = {k: getattr(torch, v) for k, v in known["dtypes"].items()}
    mask = torch.zeros(wide, dtype=torch.bool)
    mask[start : start + length] = True
    pad_id = get_family(sample.family).pad_token_id
    ids = padded(torch.from_numpy(sample.input_ids), mask, pad_id, known["padding"])
    places = torch.from_numpy(sample.loss_indices) + places_of(known)[0]
    at = torch.zeros(known["actions"] + more, dtype=torch.bool)
    at[places] = True
    ones = torch.ones(len(places), dtype=dtypes["action_mask"])
    actions = padded(ones, at, 0, known["action_padding"])
    out = {
        "sequences": ids.to(dtypes["sequences"]),
        "attention_mask": mask.to(dtypes["attention_mask"]),
        "action_mask": actions,
    }
    columns = {k: torch.cat([v, v.new_zeros(more)]) for k, v in known["columns"].items()}
    known_names = COLUMNS[KEY].values()
    unknown = sorted(given.keys() - known_names)
    if unknown:
        raise ArgumentError(
            f"from_samples: an Experience has no column {unknown[0]!r}. "
            f"Fix: use one of {', '.join(known_names)}"
        )
    return out | write_at(
        columns, values_by_name(sample, given, COLUMNS[KEY]), places, len(actions)
    )


def _joined(values: list[tuple[Any, bool]]) -> Any:
    """A key of info: one tensor [B, …], or the list that `make_experience_batch` makes of anything but numbers."""
    own = [value for value, _ in values]
    return torch.stack([torch.as_tensor(v) for v in own]) if values[0][1] else own
