"""Readers of other frameworks' records, each beside the script that writes what it reads: a new one is a row here.

Its tree comes back (test_record_readers), and each field damaged is refused (test_damaged_records).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from support.recorded_trees import (
    chains,
    processor,
    skyrl_output,
    trace,
    training_samples,
    verl_rows,
    vllm_calls,
)

from mmpack.adapters import prime_rl, skyrl
from mmpack.adapters.verl import agent_loop
from mmpack.trajectory import Trajectory, Turn


class Reader(NamedTuple):
    """`write`: one episode's record. `read`: it and pictures by their keys. `same`: fields that come back equal."""

    write: Callable[[list[Turn]], Any]
    read: Callable[[Any, dict[str, Any]], list[Trajectory]]
    same: tuple[str, ...] = ()
    pictures: bool = True


def _vllm(record: Any, media: dict[str, Any]) -> list[Trajectory]:
    from mmpack.adapters.vllm import calls

    return calls.to_trajectories([record], processor(), media=media)


def _prime(record: Any, media: dict[str, Any]) -> list[Trajectory]:
    return prime_rl.to_trajectories([record], processor(), media=media)


def _skyrl(record: Any, media: dict[str, Any]) -> list[Trajectory]:
    return skyrl.to_trajectories(record, processor())


def merged_output(turns: list[Turn]) -> dict[str, Any]:
    """As `merge_stepwise_output` joins rows that go on from each other: observations have mask 0."""
    whole, rows = skyrl_output([turns]), chains(turns)
    names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    out: dict[str, Any] = {name: [] for name in names}
    for own in rows:
        prompt, ids, mask, logprobs = (list(whole[name][own[0]]) for name in names)
        for k in own[1:]:
            new = whole["prompt_token_ids"][k][len(prompt) + len(ids) :]
            ids += [*new, *whole["response_ids"][k]]
            mask += [0] * len(new) + whole["loss_masks"][k]
            logprobs += [0.0] * len(new) + whole["rollout_logprobs"][k]
        for name, values in zip(names, (prompt, ids, mask, logprobs), strict=True):
            out[name].append(values)
    last = [False] * (len(rows) - 1) + [True]
    return out | {"rewards": [float(end) for end in last], "is_last_step": last}


READERS = {
    "vllm": Reader(vllm_calls, _vllm, ("kept_ids", "policy_versions")),
    "verl": Reader(
        verl_rows,
        lambda record, media: agent_loop.to_trajectories([record], processor()),
        ("teachers",),
    ),
    "prime_rl": Reader(trace, _prime, ("kept_ids",)),
    "prime_rl samples": Reader(training_samples, _prime, pictures=False),
    "skyrl": Reader(lambda turns: skyrl_output([turns]), _skyrl, pictures=False),
    "skyrl merged": Reader(merged_output, _skyrl, pictures=False),
}
