"""verl's agent loops: their `AgentLoopOutput`s, before padding, as trajectories. Nothing of verl is imported."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mmpack.adapters.checks import as_list, as_number, check_each, check_groups
from mmpack.adapters.row_sample import prompt_group
from mmpack.errors import ArgumentError, kind_of
from mmpack.layout.names import numbered_in_groups
from mmpack.processors.wrap import Processor
from mmpack.schema.spans import Score
from mmpack.trajectory.masked import from_masked
from mmpack.trajectory.samples import to_samples
from mmpack.trajectory.trajectory import Trajectory

KEY = "verl"  # in Trajectory.metadata
_IDS = ("prompt_ids", "response_ids", "response_mask")
_READ = (*_IDS, "response_logprobs", "multi_modal_data", "reward_score", "metrics")


def to_trajectories(
    outputs: Sequence[Any],
    processor: Processor,
    *,
    group_ids: Sequence[str] | None = None,
    media: Sequence[Sequence[Any] | None] | None = None,
    sampling: dict[str, Any] | None = None,
    expanded: bool = True,
) -> list[Trajectory]:
    """One trajectory per episode, called `<group_id>/<k>`: runs of 1 in `response_mask` are turns.

    Args:
        outputs: per episode an `AgentLoopOutput` (or a dict of its fields), or a list of them, in order, where the loop
            began new contexts: a window, a summary.
        processor: `mp.wrap_processor` of verl's processor.
        group_ids: one per episode; None: episodes of one prompt are a group.
        media: of each episode, in the order of its placeholders, in place of `multi_modal_data["images"]`. Needed for
            videos. Of an episode with several outputs: those of all of them, one output after the other.
        sampling: `temperature`, …, and `logprobs`: what `response_logprobs` mean.
        expanded: whether ids hold a picture once per vision token, as verl's do.

    `reward_score` becomes the episode's reward, `extra_fields["turn_scores"]` those of turns where there is one per
    turn. What is JSON of the other fields is in `metadata["verl"]`, `left_out` names the rest. What came after the last
    sampled id is cut. Raises: ArgumentError for audio and for videos without `media`; LayoutError.
    """
    if isinstance(outputs, Mapping | str | bytes) or not isinstance(outputs, Sequence):
        raise ArgumentError(
            f"to_trajectories: outputs is {kind_of(outputs)}, expected a list. Fix: one AgentLoopOutput per episode"
        )
    check_each(
        "to_trajectories", len(outputs), "episodes", {"group_ids": group_ids, "media": media}
    )
    made = []
    for i, given in enumerate(outputs):
        several = isinstance(given, Sequence) and not isinstance(given, str | bytes)
        rows = [
            _fields(row, f"to_trajectories: outputs[{i}]")
            for row in (given if several else [given])
        ]
        own = None if media is None else as_list(media[i], f"to_trajectories: media[{i}]")
        made.append(
            _episode(rows, processor, own, sampling, expanded, f"to_trajectories: outputs[{i}]")
        )
    if group_ids is None:
        group_ids = [_group(t) for t in made]
    check_groups("to_trajectories", group_ids)
    names = numbered_in_groups(group_ids)
    return [
        dataclasses.replace(t, trajectory_id=name, group_id=group)
        for t, name, group in zip(made, names, group_ids, strict=True)
    ]


def _episode(
    rows: list[dict[str, Any]],
    processor: Processor,
    media: list[Any] | None,
    sampling: dict[str, Any] | None,
    expanded: bool,
    where: str,
) -> Trajectory:
    if not rows:
        raise ArgumentError(f"{where} is empty. Fix: leave the episode out")
    if media is not None and len(rows) > 1:
        raise ArgumentError(
            f"{where} has {len(rows)} outputs, media is of one. Fix: let each output hold its own images"
        )
    parts = []
    for row in rows:
        part = from_masked(
            row["prompt_ids"],
            row["response_ids"],
            row["response_mask"],
            processor,
            trajectory_id=where,
            group_id=where,
            media=_images(row, where) if media is None else media,
            logprobs=row.get("response_logprobs"),
            expanded=expanded,
            sampling=sampling,
        )
        scores = (row.get("extra_fields") or {}).get("turn_scores")
        if isinstance(scores, Sequence) and len(scores) == len(part.turns):
            for k, (turn, value) in enumerate(zip(part.turns, scores, strict=True)):
                number = as_number(value, f"{where}: turn_scores[{k}]")
                turn.rewards = [Score("turn_score", number)]
        parts.append(part)
    rewards = [Score("reward_score", as_number(v, f"{where}: reward_score")) for v in _scores(rows)]
    return dataclasses.replace(
        parts[0],
        turns=[turn for part in parts for turn in part.turns],
        rewards=rewards or None,
        metadata={KEY: [_rest(row) for row in rows]},
    )


def _scores(rows: list[dict[str, Any]]) -> list[Any]:
    """The episode's score, which verl writes into its last output."""
    given = [row["reward_score"] for row in rows if row.get("reward_score") is not None]
    return given[-1:]


def _fields(row: Any, where: str) -> dict[str, Any]:
    """The fields of an output, arrays and pictures as they are."""
    if isinstance(row, Mapping):
        fields = dict(row)
    else:
        names = getattr(type(row), "model_fields", None)
        if names is None:
            raise ArgumentError(f"{where} is {kind_of(row)}. Fix: pass AgentLoopOutputs")
        fields = {name: getattr(row, name) for name in names}
    missing = [name for name in _IDS if fields.get(name) is None]
    if missing:
        raise ArgumentError(f"{where} has no {missing[0]}. Fix: pass AgentLoopOutputs, not padded")
    for name in ("multi_modal_data", "extra_fields"):
        if not isinstance(fields.get(name), Mapping | None):
            what = kind_of(fields[name])
            raise ArgumentError(f"{where}: {name} is {what}, expected a dict. Fix: leave it out")
    return fields


def _images(row: dict[str, Any], where: str) -> list[Any]:
    data = row.get("multi_modal_data") or {}
    for kind, fix in (("audios", "leave it out: audio is not read"), ("videos", "pass media=")):
        if data.get(kind) is not None and as_list(data[kind], f"{where}: {kind}"):
            raise ArgumentError(f"{where} has {kind}. Fix: {fix}")
    images = data.get("images", data.get("image"))
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def _group(trajectory: Trajectory) -> str:
    first = dataclasses.replace(trajectory, turns=trajectory.turns[:1], rewards=None)
    (sample,) = to_samples(first)
    return prompt_group(sample, len(trajectory.turns[0].context_ids))


def _rest(row: dict[str, Any]) -> dict[str, Any]:
    """What JSON can hold of the other fields, and the names of those that it can't."""
    kept: dict[str, Any] = {}
    left_out = []
    extra = row.get("extra_fields") or {}
    for name, value in [*row.items(), *((f"extra_fields.{k}", v) for k, v in extra.items())]:
        if name in (*_READ, "extra_fields") or value is None:
            continue
        try:
            kept[name] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            left_out.append(name)
    return kept | ({"left_out": left_out} if left_out else {})
