"""SkyRL: what its generators return (`GeneratorOutput`), flat or step by step, as trajectories. Nothing is imported.

A flat row is an episode with a loss mask; step-wise rows are one request each, and `is_last_step` ends an episode.

Run with records as sources of August 2026 write them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmpack.adapters.checks import as_list, as_number, check_each, check_groups, is_list
from mmpack.adapters.episodes import fields_of, kept_as_json, named, reading
from mmpack.errors import ArgumentError, kind_of
from mmpack.processors.wrap import Processor
from mmpack.schema.spans import Score
from mmpack.trajectory.records import Record, from_records
from mmpack.trajectory.trajectory import Trajectory

KEY = "skyrl"  # in Trajectory.metadata
REWARD, STEP_REWARD = "reward", "step_reward"
_LISTS = ("prompt_token_ids", "response_ids", "loss_masks", "rewards")
_OPTIONAL = (
    "stop_reasons",
    "rollout_logprobs",
    "trajectory_ids",
    "rollout_expert_indices",
    "is_last_step",
    "env_metrics",
    "pixel_values",
    "image_grid_thw",
)
# its generators' and Harbor's words -> those of Sample
_FINISH = {
    "stop": "stop",
    "complete": "stop",
    "length": "length",
    "context_length": "length",
    "tool_calls": "tool",
    "abort": "abort",
    "error": "abort",
    "agent_timeout": "abort",
}


def to_trajectories(
    output: Mapping[str, Any],
    processor: Processor,
    *,
    group_ids: Sequence[str] | None = None,
    images: Sequence[Sequence[Any] | None] | None = None,
    policy_versions: Sequence[str | int | None] | None = None,
    sampling: dict[str, Any] | None = None,
    expanded: bool = True,
    resampled: str = "both",
    num_experts: int | None = None,
) -> list[Trajectory]:
    """One trajectory per episode: a row, or the rows up to `is_last_step`.

    Args:
        output: `GeneratorOutput`, also merged by `merge_stepwise_output`.
        processor: `mp.wrap_processor` of the model's processor.
        group_ids: one per row; None: `trajectory_ids`' instance_id, and without these, rows of one prompt are a group.
        images: of each row, in the order of their placeholders; None: `pixel_values` and `image_grid_thw`, if there.
        policy_versions: of each row: SkyRL does not record them. `inference_engine_client.weight_version` is one.
        sampling: `temperature`, …, and `logprobs`: what `rollout_logprobs` mean.
        expanded: whether ids hold a picture once per vision token.
        resampled, num_experts: as of `mp.trajectory.from_records`.

    Trajectories are called `<instance_id>_<repetition_id>`, without `trajectory_ids` `<group_id>/<k>`. An episode's
    reward is called "reward"; step by step it is the last row's, as in SkyRL's trainer, and the others are the turns'
    "step_reward" (`trajectory_groups(samples, weights={"reward": 1.0, "step_reward": 0.0})` leaves them out). Rewards
    per token stay on their tokens. A row whose mask is 0 throughout, as overlong filters leave it, is a turn without
    loss. `stop_reasons` and `env_metrics` are in the turns' metadata. Raises: ArgumentError; LayoutError.
    """
    rows = _rows(
        output, {"images": images, "policy_versions": policy_versions, "group_ids": group_ids}
    )
    check_groups("to_trajectories", group_ids or ())
    count = len(output["response_ids"])
    steps = output.get("is_last_step")
    made, names, groups = [], [], []
    start = 0
    for i in range(count):
        with reading(f"to_trajectories: is_last_step[{i}]"):
            if steps is not None and not steps[i]:
                continue
        where = (
            f"to_trajectories: rows {start} to {i}" if i > start else f"to_trajectories: row {i}"
        )
        own = rows[start : i + 1]
        name, group = _identity(own, where)
        records = [
            _record(
                row,
                processor,
                last,
                None if images is None else images[start + k],
                f"to_trajectories: row {start + k}",
            )
            for k, (row, last) in enumerate(zip(own, [False] * (i - start) + [True], strict=True))
        ]
        if policy_versions is not None:
            for k, record in enumerate(records):
                record.policy_versions = policy_versions[start + k]
        rewards = _episode_reward(own[-1], where)
        trajectory = from_records(
            records,
            processor,
            trajectory_id=name or where,
            group_id=group or where,
            expanded=expanded,
            resampled=resampled,
            num_experts=num_experts,
            rewards=rewards,
            sampling=sampling,
        )
        made.append(trajectory)
        names.append(name)
        groups.append(group if group_ids is None else group_ids[start])
        start = i + 1
    if start != count:
        raise ArgumentError(
            f"to_trajectories: rows {start} to {count - 1} have no last step. Fix: pass the output whole"
        )
    known = [group for group in groups if group is not None]
    if len(known) < len(groups):
        return named(made, None)
    if None in names or len(set(names)) < len(names):
        return named(made, known)
    return [replace(t, group_id=group) for t, group in zip(made, known, strict=True)]


def _rows(output: Any, more: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The lists of an output as rows. Raises: ArgumentError."""
    if not isinstance(output, Mapping):
        raise ArgumentError(
            f"to_trajectories: output is {kind_of(output)}, expected a dict. Fix: pass a GeneratorOutput"
        )
    missing = [name for name in _LISTS if output.get(name) is None]
    if missing:
        raise ArgumentError(f"to_trajectories: output has no {missing[0]}. Fix: pass it whole")
    if not is_list(output["response_ids"]):
        what = kind_of(output["response_ids"])
        raise ArgumentError(
            f"to_trajectories: response_ids is {what}. Fix: pass a list of ids per row"
        )
    count = len(output["response_ids"])
    given = {name: output.get(name) for name in (*_LISTS, *_OPTIONAL)}
    check_each("to_trajectories", count, "rows", {**given, **more})
    known = {name: values for name, values in given.items() if values is not None}
    return [{name: values[i] for name, values in known.items()} for i in range(count)]


def _identity(rows: list[dict[str, Any]], where: str) -> tuple[str | None, str | None]:
    """The name and the group of an episode, by its trajectory_ids. Raises: ArgumentError where rows differ."""
    ids = []
    for row in rows:
        given = row.get("trajectory_ids")
        fields = {} if given is None else fields_of(given, f"{where}: trajectory_ids")
        ids.append((fields.get("instance_id"), fields.get("repetition_id")))
    with reading(f"{where}: trajectory_ids"):
        several = len(set(ids)) > 1
    if several:
        raise ArgumentError(
            f"{where} have several trajectory_ids: {ids[0]} and others. Fix: end each episode with is_last_step"
        )
    instance, repetition = ids[0]
    if instance is None:
        return None, None
    return f"{instance}_{repetition}", str(instance)


def _record(
    row: dict[str, Any], processor: Processor, last: bool, images: Any, where: str
) -> Record:
    reason = row.get("stop_reasons")
    if row["loss_masks"] is None:
        raise ArgumentError(
            f"{where} has no loss_masks, which say what ids were sampled. Fix: pass a list of 0 or 1 per row"
        )
    about = kept_as_json({"stop_reason": reason, "env_metrics": row.get("env_metrics")})
    rewards: Any = row["rewards"]
    if not is_list(rewards):
        # the last row's is the episode's
        value = as_number(rewards, f"{where}: rewards")
        rewards = value if value and not last else None
    return Record(
        row["prompt_token_ids"],
        row["response_ids"],
        row["loss_masks"],
        _media(row, processor, where) if images is None else as_list(images, f"{where}: images"),
        row.get("rollout_logprobs"),
        routed_experts=row.get("rollout_expert_indices"),
        rewards=rewards,
        score=REWARD if last else STEP_REWARD,
        finish_reason=_FINISH.get(reason) if isinstance(reason, str) else None,
        metadata={KEY: about} if about else {},
    )


def _episode_reward(row: dict[str, Any], where: str) -> list[Score] | None:
    if is_list(row["rewards"]):
        return None
    return [Score(REWARD, as_number(row["rewards"], f"{where}: rewards"))]


def _media(row: dict[str, Any], processor: Processor, where: str) -> list[Any]:
    if row.get("pixel_values") is None:
        return []
    from mmpack.adapters.processed_media import media_of_inputs

    inputs = {name: row.get(name) for name in ("pixel_values", "image_grid_thw")}
    return list(media_of_inputs(inputs, processor.family, where)["image"])
