"""verl's agent loops and gateway: what they record, before padding, as trajectories. Nothing of verl is imported.

A row is an `AgentLoopOutput`, or a `Trajectory` of uni-agent's gateway; an episode has one row, or one per chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from mmpack.adapters.checks import as_list, as_number
from mmpack.adapters.episodes import (
    Options,
    check_episodes,
    fields_of,
    kept_as_json,
    named,
    part_of,
    read_episodes,
    renamed,
)
from mmpack.adapters.response_lists import KEPT_IDS, response_lists
from mmpack.errors import ArgumentError
from mmpack.layout.runs import true_runs
from mmpack.processors.wrap import Processor
from mmpack.schema.ragged import Ragged
from mmpack.schema.spans import Score
from mmpack.trajectory.records import Record
from mmpack.trajectory.trajectory import Trajectory

KEY = "verl"  # in Trajectory.metadata
TEACHER = "teacher"  # its name in Sample.teachers
# fields of Record -> verl's
FIELDS = {
    "prompt_ids": "prompt_ids",
    "response_ids": "response_ids",
    "mask": "response_mask",
    "logprobs": "response_logprobs",
    "routed_experts": "routed_experts",
}
_NEEDED = ("prompt_ids", "response_ids", "response_mask")
_READ = (*FIELDS.values(), "multi_modal_data", "reward_score", "metrics", "extra_fields")
_READ_EXTRA = ("teacher_ids", "teacher_logprobs", KEPT_IDS)


def to_trajectories(
    outputs: Sequence[Any],
    processor: Processor,
    *,
    group_ids: Sequence[str] | None = None,
    media: Sequence[Sequence[Any] | None] | None = None,
    **options: Unpack[Options],
) -> list[Trajectory]:
    """One trajectory per episode, called `<group_id>/<k>`: runs of 1 in `response_mask` are turns.

    Args:
        outputs: per episode an `AgentLoopOutput`, or a list of them, in order, where the loop began new contexts; or
            the list of `Trajectory`s that a session of uni-agent's gateway returns. Dicts of their fields will do.
        processor: `mp.wrap_processor` of verl's processor.
        group_ids: one per episode; None: episodes of one prompt are a group.
        media: of each episode, in the order of its placeholders, in place of `multi_modal_data["images"]`. Needed for
            videos. Only of episodes with one output.
        options: `sampling` (`temperature`, …, and `logprobs`: what `response_logprobs` mean), `expanded`, `resampled`,
            `num_experts`, as of `mp.trajectory.from_records`.

    `reward_score`, or `reward_info["reward"]`, becomes the episode's reward, `extra_fields["turn_scores"]` those of
    turns where there is one per turn, `extra_fields["kept_ids"]` the lists of what was sampled. `teacher_ids` and
    `teacher_logprobs` become the teacher "teacher". The policy's version is known where `min_global_steps` and
    `max_global_steps` are equal; where they differ, verl does not record which token is of which. What is JSON of the
    other fields is in `metadata["verl"]`, `left_out` names the rest. What came after the last sampled id is cut.
    Raises: ArgumentError for audio and for videos without `media`; LayoutError.
    """
    episodes = check_episodes(outputs, "outputs", {"group_ids": group_ids, "media": media})

    def read(i: int, where: str) -> tuple[list[Record], dict[str, Any]]:
        several = isinstance(episodes[i], Sequence) and not isinstance(episodes[i], str | bytes)
        rows = [
            fields_of(row, where, _NEEDED, "pass AgentLoopOutputs, before padding")
            for row in (episodes[i] if several else [episodes[i]])
        ]
        if not rows:
            raise ArgumentError(f"{where} is empty. Fix: leave the episode out")
        own = None if media is None else as_list(media[i], f"to_trajectories: media[{i}]")
        if own is not None and len(rows) > 1:
            raise ArgumentError(
                f"{where} has {len(rows)} outputs, but media= is for one. Fix: let each output hold its own images"
            )
        about = {"rewards": _rewards(rows, where), "metadata": {KEY: [_rest(r) for r in rows]}}
        return [_record(row, own, where) for row in rows], about

    names = [f"outputs[{i}]" for i in range(len(episodes))]
    return named(read_episodes(names, read, processor, options), group_ids)


def _record(row: dict[str, Any], media: list[Any] | None, where: str) -> Record:
    extra = part_of(row, "extra_fields", where)
    scores: Any = extra.get("turn_scores")
    turns = len(true_runs(np.asarray(row["response_mask"]).astype(bool)))
    listed = isinstance(scores, Sequence) and not isinstance(scores, str)
    first, last = (extra.get(f"{name}_global_steps") for name in ("min", "max"))
    return Record(
        **renamed(row, FIELDS),
        media=_images(row, where) if media is None else media,
        policy_versions=None if first is None or first != last else str(first),
        kept_ids=None
        if extra.get(KEPT_IDS) is None
        else response_lists(extra[KEPT_IDS], len(row["response_ids"]), where),
        teachers=_teachers(row, extra, where),
        turn_rewards=[as_number(v, f"{where}: turn_scores[{k}]") for k, v in enumerate(scores)]
        if listed and len(scores) == turns
        else None,
        score="turn_score",
    )


def _teachers(row: dict[str, Any], extra: Mapping[str, Any], where: str) -> Any:
    """A list per response id: verl's row t - 1 [S, K] is the teacher's distribution of token t."""
    ids, values = extra.get("teacher_ids"), extra.get("teacher_logprobs")
    if ids is None or values is None:
        return None
    ids, values = np.asarray(ids), np.asarray(values, dtype=np.float64)
    start, count = len(row["prompt_ids"]), len(row["response_ids"])
    if ids.ndim != 2 or ids.shape != values.shape or len(ids) != start + count:
        raise ArgumentError(
            f"{where}: teacher_ids is {list(ids.shape)} and teacher_logprobs {list(values.shape)}, expected "
            f"[{start + count}, K] both. Fix: pass them as verl's teacher returns them, before padding"
        )
    sampled = np.asarray(row["response_mask"]).astype(bool)
    lists, scores = (
        [own if s else own[:0] for own, s in zip(of[start - 1 : -1], sampled, strict=True)]
        for of in (ids, values)
    )
    return {TEACHER: Ragged.of(lists, scores)}


def _rewards(rows: list[dict[str, Any]], where: str) -> list[Score] | None:
    """The episode's score, which verl writes into its last output, or the gateway into each."""
    given = [("reward_score", row.get("reward_score")) for row in rows]
    posted = [("reward", part_of(row, "reward_info", where).get("reward")) for row in rows]
    for scores in (given, posted):
        known = [Score(n, as_number(v, f"{where}: {n}")) for n, v in scores if v is not None]
        if known:
            return known[-1:]
    return None


def _images(row: dict[str, Any], where: str) -> list[Any]:
    data = part_of(row, "multi_modal_data", where)
    for kind, fix in (("audios", "leave it out: audio is not read"), ("videos", "pass media=")):
        if as_list(data.get(kind), f"{where}: {kind}"):
            raise ArgumentError(f"{where} has {kind}. Fix: {fix}")
    images = data.get("images", data.get("image"))
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def _rest(row: dict[str, Any]) -> dict[str, Any]:
    """What JSON can hold of the other fields, and the names of those that it can't."""
    extra = {f"extra_fields.{k}": v for k, v in (row.get("extra_fields") or {}).items()}
    return kept_as_json({**row, **extra}, [*_READ, *(f"extra_fields.{n}" for n in _READ_EXTRA)])
