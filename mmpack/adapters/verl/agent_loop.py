"""verl's agent loops and gateway: what they record, before padding, as trajectories. Nothing of verl is imported.

A row is an `AgentLoopOutput`, or a `Trajectory` of uni-agent's gateway; an episode has one row, or one per chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmpack.adapters.checks import as_list, as_number
from mmpack.adapters.episodes import check_episodes, fields_of, kept_as_json, named, reading
from mmpack.adapters.response_lists import KEPT_IDS, response_lists
from mmpack.errors import ArgumentError, kind_of
from mmpack.layout.runs import true_runs
from mmpack.processors.wrap import Processor
from mmpack.schema.ragged import Ragged
from mmpack.schema.spans import Score
from mmpack.trajectory.records import Record, from_records
from mmpack.trajectory.trajectory import Trajectory

KEY = "verl"  # in Trajectory.metadata
TEACHER = "teacher"  # its name in Sample.teachers
_IDS = ("prompt_ids", "response_ids", "response_mask")
_READ = (
    *_IDS,
    "response_logprobs",
    "routed_experts",
    "multi_modal_data",
    "reward_score",
    "metrics",
    "extra_fields",
)
_READ_EXTRA = ("teacher_ids", "teacher_logprobs")


def to_trajectories(
    outputs: Sequence[Any],
    processor: Processor,
    *,
    group_ids: Sequence[str] | None = None,
    media: Sequence[Sequence[Any] | None] | None = None,
    sampling: dict[str, Any] | None = None,
    expanded: bool = True,
    resampled: str = "both",
    num_experts: int | None = None,
) -> list[Trajectory]:
    """One trajectory per episode, called `<group_id>/<k>`: runs of 1 in `response_mask` are turns.

    Args:
        outputs: per episode an `AgentLoopOutput`, or a list of them, in order, where the loop began new contexts; or
            the list of `Trajectory`s that a session of uni-agent's gateway returns. Dicts of their fields will do.
        processor: `mp.wrap_processor` of verl's processor.
        group_ids: one per episode; None: episodes of one prompt are a group.
        media: of each episode, in the order of its placeholders, in place of `multi_modal_data["images"]`. Needed for
            videos. Only of episodes with one output.
        sampling: `temperature`, …, and `logprobs`: what `response_logprobs` mean.
        expanded: whether ids hold a picture once per vision token, as verl's do.
        resampled, num_experts: as of `mp.trajectory.from_records`.

    `reward_score`, or `reward_info["reward"]`, becomes the episode's reward, `extra_fields["turn_scores"]` those of
    turns where there is one per turn, `extra_fields["kept_ids"]` the lists of what was sampled. `teacher_ids` and
    `teacher_logprobs` become the teacher "teacher". The policy's version is known where `min_global_steps` and
    `max_global_steps` are equal; where they differ, verl does not record which token is of which. What is JSON of the
    other fields is in `metadata["verl"]`, `left_out` names the rest. What came after the last sampled id is cut.
    Raises: ArgumentError for audio and for videos without `media`; LayoutError.
    """
    episodes = check_episodes(outputs, "outputs", {"group_ids": group_ids, "media": media})
    made = []
    for i, given in enumerate(episodes):
        where = f"to_trajectories: outputs[{i}]"
        several = isinstance(given, Sequence) and not isinstance(given, str | bytes)
        rows = [_fields(row, where) for row in (given if several else [given])]
        if not rows:
            raise ArgumentError(f"{where} is empty. Fix: leave the episode out")
        own = None if media is None else as_list(media[i], f"to_trajectories: media[{i}]")
        if own is not None and len(rows) > 1:
            raise ArgumentError(
                f"{where} has {len(rows)} outputs, but media= is for one. Fix: let each output hold its own images"
            )
        with reading(where):
            records = [_record(row, own, where) for row in rows]
            rest = [_rest(row) for row in rows]
        made.append(
            from_records(
                records,
                processor,
                trajectory_id=where,
                group_id=where,
                expanded=expanded,
                resampled=resampled,
                num_experts=num_experts,
                sampling=sampling,
                rewards=_rewards(rows, where),
                metadata={KEY: rest},
            )
        )
    return named(made, group_ids)


def _fields(row: Any, where: str) -> dict[str, Any]:
    """The fields of an output, arrays and pictures as they are."""
    fields = fields_of(row, where)
    missing = [name for name in _IDS if fields.get(name) is None]
    if missing:
        raise ArgumentError(
            f"{where} has no {missing[0]}. Fix: pass AgentLoopOutputs, before padding"
        )
    for name in ("multi_modal_data", "extra_fields", "reward_info"):
        if not isinstance(fields.get(name), Mapping | None):
            what = kind_of(fields[name])
            raise ArgumentError(f"{where}: {name} is {what}, expected a dict. Fix: leave it out")
    return fields


def _record(row: dict[str, Any], media: list[Any] | None, where: str) -> Record:
    extra = row.get("extra_fields") or {}
    scores: Any = extra.get("turn_scores")
    listed = isinstance(scores, Sequence) and not isinstance(scores, str)
    per_turn = listed and len(scores) == _turns(row["response_mask"])
    first, last = (extra.get(f"{name}_global_steps") for name in ("min", "max"))
    return Record(
        row["prompt_ids"],
        row["response_ids"],
        row["response_mask"],
        _images(row, where) if media is None else media,
        row.get("response_logprobs"),
        None if first is None or first != last else str(first),
        kept_ids=_kept(row, extra, where),
        teachers=_teachers(row, extra, where),
        routed_experts=row.get("routed_experts"),
        turn_rewards=[as_number(v, f"{where}: turn_scores[{k}]") for k, v in enumerate(scores)]
        if per_turn
        else None,
        score="turn_score",
    )


def _kept(row: dict[str, Any], extra: Mapping[str, Any], where: str) -> Ragged | None:
    """A list per response id, as `mmpack`'s engine of verl takes it from the same place."""
    if extra.get(KEPT_IDS) is None:
        return None
    return response_lists(extra[KEPT_IDS], len(row["response_ids"]), where)


def _turns(mask: Any) -> int:
    """Runs of 1, where it is a mask; else from_records says why not."""
    try:
        given = np.asarray(mask)
        return len(true_runs(given.astype(bool))) if given.ndim == 1 else 0
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return 0


def _teachers(row: dict[str, Any], extra: Mapping[str, Any], where: str) -> Any:
    """A list per response id: verl's row t - 1 [S, K] is the teacher's distribution of token t."""
    ids, values = (extra.get(name) for name in _READ_EXTRA)
    if ids is None or values is None:
        return None
    start, count = len(row["prompt_ids"]), len(row["response_ids"])
    try:
        ids, values = np.asarray(ids), np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        ids = values = np.zeros(0)
    if ids.ndim != 2 or ids.shape != values.shape or len(ids) != start + count:
        raise ArgumentError(
            f"{where}: teacher_ids is {list(ids.shape)} and teacher_logprobs {list(values.shape)}, expected "
            f"[{start + count}, K] both. Fix: pass them as verl's teacher returns them, before padding"
        )
    rows = slice(start - 1, start + count - 1)
    sampled = np.asarray(row["response_mask"]).astype(bool)
    if sampled.shape != (count,):
        return None  # which from_records refuses
    lists = [own if s else own[:0] for own, s in zip(ids[rows], sampled, strict=True)]
    scores = [own if s else own[:0] for own, s in zip(values[rows], sampled, strict=True)]
    return {TEACHER: Ragged.of(lists, scores)}


def _rewards(rows: list[dict[str, Any]], where: str) -> list[Score] | None:
    """The episode's score, which verl writes into its last output, or the gateway into each."""
    given = [
        ("reward_score", row["reward_score"]) for row in rows if row.get("reward_score") is not None
    ]
    if not given:
        posted = [(row.get("reward_info") or {}).get("reward") for row in rows]
        given = [("reward", value) for value in posted if value is not None]
    return [Score(name, as_number(v, f"{where}: {name}")) for name, v in given[-1:]] or None


def _images(row: dict[str, Any], where: str) -> list[Any]:
    data = row.get("multi_modal_data") or {}
    for kind, fix in (("audios", "leave it out: audio is not read"), ("videos", "pass media=")):
        if data.get(kind) is not None and as_list(data[kind], f"{where}: {kind}"):
            raise ArgumentError(f"{where} has {kind}. Fix: {fix}")
    images = data.get("images", data.get("image"))
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def _rest(row: dict[str, Any]) -> dict[str, Any]:
    """What JSON can hold of the other fields, and the names of those that it can't."""
    extra = {f"extra_fields.{k}": v for k, v in (row.get("extra_fields") or {}).items()}
    read = [*_READ, *(f"extra_fields.{name}" for name in (*_READ_EXTRA, KEPT_IDS))]
    return kept_as_json({**row, **extra}, read)
