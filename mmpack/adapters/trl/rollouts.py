"""TRL's multi-turn rollouts, before padding, as trajectories: what a `rollout_func` returns, or its tool loop holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmpack.adapters.checks import as_list, check_each
from mmpack.adapters.episodes import fields_of, kept_as_json, named, refuse_no_list
from mmpack.adapters.response_lists import KEPT_IDS, response_lists
from mmpack.errors import ArgumentError, kind_of
from mmpack.processors.wrap import Processor, wrap_processor
from mmpack.schema.ragged import Ragged
from mmpack.trajectory.records import Record, from_records
from mmpack.trajectory.trajectory import Trajectory

KEY = "trl"  # in Trajectory.metadata
MASKS = ("env_mask", "tool_mask")
_READ = (
    *("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids", "images"),
    *(KEPT_IDS, *MASKS),
)


def to_trajectories(
    rollouts: Mapping[str, Any],
    processing_class: Any,
    *,
    images: Sequence[Sequence[Any] | None] | None = None,
    group_ids: Sequence[str] | None = None,
    sampling: dict[str, Any] | None = None,
    expanded: bool = True,
) -> list[Trajectory]:
    """One trajectory per completion, called `<group_id>/<k>`: runs of 1 in the mask are turns.

    Args:
        rollouts: `prompt_ids` [n][P], `completion_ids` [n][C], `logprobs` [n][C] ([n][C][k] with `logprob_token_ids`),
            `kept_ids` [n][C] lists of ids, as `MmpackGRPO` takes them, and `env_mask` or `tool_mask` [n][C], 1 where
            the policy sampled; without one, all of it is sampled.
        processing_class: the trainer's processor, or `mp.wrap_processor` of it.
        images: of each completion, the data set's and then the tools', in order; None: `rollouts["images"]`, if there.
        group_ids: one per completion; None: completions of one prompt are a group.
        sampling: `temperature`, …, and `logprobs`: what the logprobs mean.
        expanded: whether ids hold a picture once per vision token, as TRL's do.

    Fields for reward functions, one value per completion, are in `metadata["trl"]` where JSON can hold them; `left_out`
    names the others. What came after the last sampled id is cut. Raises: ArgumentError; LayoutError.
    """
    rollouts = fields_of(rollouts, "to_trajectories: rollouts", _READ[:2], "pass the whole dict")
    completions = rollouts["completion_ids"]
    refuse_no_list("completion_ids", completions, "pass a list of ids per completion")
    count = len(completions)
    images = rollouts.get("images") if images is None else images
    masks = [name for name in MASKS if rollouts.get(name) is not None]
    if len(masks) > 1:
        raise ArgumentError(
            "to_trajectories: rollouts has both env_mask and tool_mask. Fix: pass one of them"
        )
    lists = {name: rollouts.get(name) for name in ("prompt_ids", "logprobs", KEPT_IDS, *masks)}
    lists |= {"images": images, "group_ids": group_ids}
    check_each("to_trajectories", count, "completions", lists)
    processor = processing_class
    if not isinstance(processor, Processor):
        processor = wrap_processor(processing_class)
    made = []
    for i in range(count):
        ids = completions[i]
        refuse_no_list(f"completion_ids[{i}]", ids, "pass the ids of one completion")
        record = Record(
            rollouts["prompt_ids"][i],
            ids,
            rollouts[masks[0]][i] if masks else None,
            media=() if images is None else as_list(images[i], f"to_trajectories: images[{i}]"),
            logprobs=_logprobs(rollouts, i),
            kept_ids=_lists(rollouts, i),
        )
        made.append(
            from_records(
                [record],
                processor,
                trajectory_id=f"to_trajectories: completion {i}",
                group_id=str(i),
                expanded=expanded,
                sampling=sampling,
                metadata=_rest(rollouts, i, count),
            )
        )
    return named(made, group_ids)


def _lists(rollouts: Mapping[str, Any], i: int) -> Ragged | None:
    given = rollouts.get(KEPT_IDS)
    if given is None or given[i] is None:
        return None
    count = len(rollouts["completion_ids"][i])
    return response_lists(given[i], count, f"to_trajectories: completion {i}")


def _logprobs(rollouts: Mapping[str, Any], i: int) -> Any:
    """[C] of the sampled ids: vLLM gives several per token, the sampled one among them."""
    given = rollouts.get("logprobs")
    if given is None or given[i] is None:
        return None
    ids, nested = rollouts["completion_ids"][i], list | tuple
    if not isinstance(given[i], nested) or not any(isinstance(v, nested) for v in given[i]):
        return given[i]
    row = given[i]
    names: Any = rollouts.get("logprob_token_ids")
    out = []
    for c, values in enumerate(row):
        among: Any = [ids[c]] if c < len(ids) else []
        if names is not None or not isinstance(values, nested) or len(values) != 1:
            try:
                among = list(names[i][c])
            except (LookupError, TypeError):
                among = []
        if not isinstance(values, nested):
            raise ArgumentError(
                f"to_trajectories: logprobs of completion {i} are {kind_of(values)} at token {c}, and lists at "
                "others. Fix: pass one value per token, or one list per token"
            )
        if len(among) != len(values) or c >= len(ids) or ids[c] not in among:
            raise ArgumentError(
                f"to_trajectories: logprobs of completion {i} have {len(values)} values at token {c}, and which "
                "one is the sampled id's is not known. Fix: pass logprob_token_ids, or one value per token"
            )
        out.append(values[list(among).index(ids[c])])
    return out


def _rest(rollouts: Mapping[str, Any], i: int, count: int) -> dict[str, Any]:
    own = {
        name: values[i] if isinstance(values, Sequence) and len(values) == count else values
        for name, values in rollouts.items()
    }
    kept = kept_as_json(own, _READ)
    return {KEY: kept} if kept else {}
