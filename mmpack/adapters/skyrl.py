"""SkyRL: what its generators return (`GeneratorOutput`), flat or step by step, as trajectories. Nothing is imported.

A flat row is an episode with a loss mask; step-wise rows are one request each, and `is_last_step` ends an episode.

Run with records as sources of August 2026 write them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Unpack

from mmpack.adapters.checks import as_list, as_number, check_each, check_groups, check_kind, is_list
from mmpack.adapters.episodes import (
    Options,
    fields_of,
    kept_as_json,
    named,
    part_of,
    read_episodes,
    reading,
    refuse_no_list,
    renamed,
)
from mmpack.errors import ArgumentError
from mmpack.processors.wrap import Processor
from mmpack.schema.spans import Score
from mmpack.trajectory.records import Record
from mmpack.trajectory.trajectory import Trajectory

KEY = "skyrl"  # in Trajectory.metadata
REWARD, STEP_REWARD = "reward", "step_reward"
# fields of Record -> SkyRL's
FIELDS = {
    "prompt_ids": "prompt_token_ids",
    "response_ids": "response_ids",
    "mask": "loss_masks",
    "logprobs": "rollout_logprobs",
    "routed_experts": "rollout_expert_indices",
    "policy_versions": "policy_versions",
}
_NEEDED = ("prompt_token_ids", "response_ids", "loss_masks", "rewards")
_READ = (
    *(*_NEEDED, "rollout_logprobs", "rollout_expert_indices", "is_last_step", "trajectory_ids"),
    *("stop_reasons", "env_metrics", "pixel_values", "image_grid_thw"),
)
# its generators' and Harbor's words -> those of Sample
_FINISH = {"stop": "stop", "complete": "stop", "length": "length", "context_length": "length"}
_FINISH |= {"tool_calls": "tool", "abort": "abort", "error": "abort", "agent_timeout": "abort"}


def to_trajectories(
    output: Mapping[str, Any],
    processor: Processor,
    *,
    group_ids: Sequence[str] | None = None,
    images: Sequence[Sequence[Any] | None] | None = None,
    policy_versions: Sequence[str | int | None] | None = None,
    **options: Unpack[Options],
) -> list[Trajectory]:
    """One trajectory per episode: a row, or the rows up to `is_last_step`.

    Args:
        output: `GeneratorOutput`, also merged by `merge_stepwise_output`.
        processor: `mp.wrap_processor` of the model's processor.
        group_ids: one per row; None: `trajectory_ids`' instance_id, and without these, rows of one prompt are a group.
        images: of each row, in the order of their placeholders; None: `pixel_values` and `image_grid_thw`, if there.
        policy_versions: of each row: SkyRL does not record them. `inference_engine_client.weight_version` is one.
        options: `sampling` (`temperature`, …, and `logprobs`: what `rollout_logprobs` mean), `expanded`, `resampled`,
            `num_experts`, as of `mp.trajectory.from_records`.

    Trajectories are called `<instance_id>_<repetition_id>`, without `trajectory_ids` `<group_id>/<k>`. An episode's
    reward is called "reward"; step by step it is the last row's, as in SkyRL's trainer, and the others are the turns'
    "step_reward" (`trajectory_groups(samples, weights={"reward": 1.0, "step_reward": 0.0})` leaves them out). Rewards
    per token stay on their tokens. A row whose mask is 0 throughout, as overlong filters leave it, is a turn without
    loss. `stop_reasons` and `env_metrics` are in the turns' metadata. Raises: ArgumentError; LayoutError.
    """
    given = {"images": images, "policy_versions": policy_versions, "group_ids": group_ids}
    rows = _rows(output, given)
    check_groups("to_trajectories", group_ids or ())
    with reading("to_trajectories: is_last_step"):
        ends = [0, *(i + 1 for i, row in enumerate(rows) if row.get("is_last_step", True))]
    if ends[-1] != len(rows):
        raise ArgumentError(
            f"to_trajectories: rows {ends[-1]} to {len(rows) - 1} have no last step. "
            "Fix: pass the output whole"
        )
    episodes = [range(a, b) for a, b in pairwise(ends)]
    names = [f"rows {own[0]} to {own[-1]}" if len(own) > 1 else f"row {own[0]}" for own in episodes]
    known = [_identity([rows[i] for i in own], n) for own, n in zip(episodes, names, strict=True)]

    def read(e: int, where: str) -> tuple[list[Record], dict[str, Any]]:
        last = episodes[e][-1]
        at = "to_trajectories: row"
        records = [_record(rows[i], processor, i == last, f"{at} {i}") for i in episodes[e]]
        rewards = rows[last]["rewards"]
        if is_list(rewards):
            return records, {}
        return records, {"rewards": [Score(REWARD, as_number(rewards, f"{where}: rewards"))]}

    made = read_episodes(names, read, processor, options)
    called, groups = [name for name, _ in known], [group for _, group in known]
    if group_ids is not None:
        groups = [group_ids[own[0]] for own in episodes]
    if None in groups or None in called or len(set(called)) < len(called):
        return named(made, None if None in groups else groups)
    about = zip(made, called, groups, strict=True)
    return [replace(t, trajectory_id=name, group_id=group) for t, name, group in about]


def _rows(output: Any, more: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The lists of an output, and `more`, as rows. Raises: ArgumentError."""
    check_kind("to_trajectories: output", output, Mapping, "pass a GeneratorOutput, a dict")
    lists = fields_of(output, "to_trajectories: output", _NEEDED)
    refuse_no_list("response_ids", lists["response_ids"], "pass a list of ids per row")
    count = len(lists["response_ids"])
    given = {name: lists.get(name) for name in _READ} | dict(more)
    check_each("to_trajectories", count, "rows", given)
    known = {name: values for name, values in given.items() if values is not None}
    return [{name: values[i] for name, values in known.items()} for i in range(count)]


def _identity(rows: list[dict[str, Any]], where: str) -> tuple[Any, Any]:
    """The name and the group of an episode, by its trajectory_ids. Raises: ArgumentError where rows differ."""
    where = f"to_trajectories: {where}"
    with reading(f"{where}: trajectory_ids"):
        ids = [part_of(row, "trajectory_ids", where) for row in rows]
        found = {(own.get("instance_id"), own.get("repetition_id")): None for own in ids}
    if len(found) > 1:
        raise ArgumentError(
            f"{where} have several trajectory_ids: {list(found)!r:.80}. Fix: end each episode with is_last_step"
        )
    [(instance, repetition)] = found
    return (None, None) if instance is None else (f"{instance}_{repetition}", str(instance))


def _record(row: dict[str, Any], processor: Processor, last: bool, where: str) -> Record:
    reason, rewards, media = row.get("stop_reasons"), row["rewards"], row.get("images")
    if row["loss_masks"] is None:
        raise ArgumentError(
            f"{where} has no loss_masks, which say what ids were sampled. Fix: pass a list of 0 or 1 per row"
        )
    if not is_list(rewards):
        # the last row's is the episode's
        value = as_number(rewards, f"{where}: rewards")
        rewards = value if value and not last else None
    if media is None and row.get("pixel_values") is not None:
        from mmpack.adapters.processed_media import media_of_inputs

        inputs = {name: row.get(name) for name in ("pixel_values", "image_grid_thw")}
        media = media_of_inputs(inputs, processor.family, where)["image"]
    about = kept_as_json({"stop_reason": reason, "env_metrics": row.get("env_metrics")})
    return Record(
        **renamed(row, FIELDS),
        media=as_list(media, f"{where}: images"),
        rewards=rewards,
        score=REWARD if last else STEP_REWARD,
        finish_reason=_FINISH.get(reason) if isinstance(reason, str) else None,
        metadata={KEY: about} if about else {},
    )
