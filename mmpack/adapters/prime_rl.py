"""prime-rl: the traces of its environments (verifiers v1), and its training samples, as trajectories.

A trace is a graph of messages: a node holds the tokens that its message adds, so a path from the root is a context.
Nothing of prime-rl or verifiers is imported.

Run with verifiers 0.4, and records as prime-rl's sources of August 2026 write them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmpack.adapters.checks import as_number
from mmpack.adapters.episodes import check_episodes, fields_of, kept_as_json, named, reading
from mmpack.adapters.prime_rl_columns import (
    array_of,
    at_sampled,
    kept_lists,
    processed_media,
    reference_of,
)
from mmpack.errors import ArgumentError, kind_of, one_line
from mmpack.processors.conversation import source_of
from mmpack.processors.wrap import Processor
from mmpack.schema.spans import Score
from mmpack.trajectory.chat import FINISH
from mmpack.trajectory.masked import mask_of
from mmpack.trajectory.records import Record, from_records
from mmpack.trajectory.trajectory import Trajectory

KEY = "prime_rl"  # in Trajectory.metadata
_STREAMS = ("advantages", "trainer_logprobs", "entropies", "loss_weights")  # of a node; not read
_KEPT = ("id", "ok", "stop_condition", "metrics")
_OF_SAMPLE = ("env_name", "advantages", "rl_weights", "ce_weights", "ref_kl_weights")


def to_trajectories(
    rollouts: Sequence[Any],
    processor: Processor,
    *,
    group_ids: Sequence[str] | None = None,
    media: Mapping[str, Any] | None = None,
    policy_versions: Sequence[str | int | None] | None = None,
    sampling: dict[str, Any] | None = None,
    expanded: bool = True,
    resampled: str = "both",
    num_experts: int | None = None,
) -> list[Trajectory]:
    """One trajectory per rollout, called `<group_id>/<k>`. Each sampled node of a trace is a turn, once.

    Args:
        rollouts: per rollout a `Trace` of verifiers (`Episode.traces` are some), as an object or as its dict with
            mode="python"; or the list of `TrainingSample`s that prime-rl made of one, one per branch.
        processor: `mp.wrap_processor` of the model's processor.
        group_ids: one per rollout; None: rollouts of one prompt are a group.
        media: pictures by the URL that messages have them under; `data:` URLs need none. Without it, pixels in a node
            or a sample are taken as they are.
        policy_versions: of each rollout, where one is known (`episode.run.work.policy`, where start and end agree).
        sampling: `temperature`, …, and `logprobs`: what the logprobs mean.
        expanded: whether ids hold a picture once per vision token.
        resampled, num_experts: as of `mp.trajectory.from_records`.

    A trace's rewards become the trajectory's, weighted (`metadata` has score and weight), its metrics the verifiers.
    `sampling_mask` (and `kept_tokens`, as it was called) become `kept_ids`, reference logprobs the teacher "reference":
    one id per token. A sampled token with an empty list is refused: no list was kept there.
    JSON dumps of traces round logprobs to four decimals unless told `float_decimals=None`, and lack routes and lists.
    Credit and loss weights are not read; `metadata["prime_rl"]` names them. Raises: ArgumentError; LayoutError.
    """
    given = check_episodes(
        rollouts, "rollouts", {"group_ids": group_ids, "policy_versions": policy_versions}
    )
    if not isinstance(media, Mapping | None):
        raise ArgumentError(
            f"to_trajectories: media is {kind_of(media)}, expected a dict. Fix: pass URL -> picture"
        )
    made = []
    for i, rollout in enumerate(given):
        where = f"to_trajectories: rollouts[{i}]"
        with reading(where):
            if isinstance(rollout, Sequence) and not isinstance(rollout, str | bytes):
                samples = [fields_of(s, f"{where}[{k}]") for k, s in enumerate(rollout)]
                records = [_branch(s, processor, f"{where}[{k}]") for k, s in enumerate(samples)]
                about: dict[str, Any] = {"metadata": {KEY: [_rest(s) for s in samples]}}
            else:
                trace = fields_of(rollout, where)
                records = _nodes(trace, media or {}, processor, where)
                about = _about(trace, where)
        version = None if policy_versions is None else policy_versions[i]
        for record in records:
            record.policy_versions = version
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
                **about,
            )
        )
    return named(made, group_ids)


# ---- traces --------------------------------------------------------------------------------------


def _nodes(
    trace: dict[str, Any], media: Mapping[str, Any], processor: Processor, where: str
) -> list[Record]:
    """A record per sampled node: the tokens of its path up to the first sampled one, and the rest of its own."""
    given = trace.get("nodes")
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ArgumentError(
            f"{where} has no nodes. Fix: pass a trace, or a list of TrainingSamples"
        )
    nodes = [fields_of(n, f"{where}.nodes[{k}]") for k, n in enumerate(given)]
    calls = [fields_of(c, f"{where}.calls[{k}]") for k, c in enumerate(trace.get("calls") or ())]
    out: list[Record] = []
    finish = {c["node"]: c.get("finish_reason") for c in calls if c.get("node") is not None}
    for k, node in enumerate(nodes):
        at = f"{where}.nodes[{k}]"
        with reading(at):
            if not node.get("sampled"):
                continue
            ids, mask = node.get("token_ids"), node.get("mask")
            if not ids or not mask or len(ids) != len(mask) or not any(mask):
                raise ArgumentError(
                    f"{at} was sampled and has no token_ids with a mask. Fix: use a client that keeps token ids"
                )
            path = _path(nodes, k, at)
            sampled = mask_of(at, mask, len(ids))
            start = int(sampled.argmax())
            count = len(ids) - start
            own = sampled[start:]
            before = [t for n in path[:-1] for t in n["token_ids"]]
            since = path[:-1][_last_sampled(path[:-1]) + 1 :]
            out.append(
                Record(
                    [*before, *ids[:start]],
                    ids[start:],
                    own,
                    _media_of(path, media, processor, at),
                    at_sampled(node.get("logprobs") or None, own, "logprobs", at),
                    kept_ids=kept_lists(node, own, at),
                    teachers=reference_of(node.get("reference_logprobs"), ids[start:], own, at),
                    routed_experts=_routes(path, len(before) + start + count, at),
                    finish_reason=FINISH.get(finish.get(k) or ""),
                    source=source_of([_role(n, at) for n in since]) if out else "environment",
                )
            )
    if not out:
        raise ArgumentError(
            f"{where} has no sampled node, so nothing to train on. Fix: leave it out"
        )
    return out


def _path(nodes: list[dict[str, Any]], k: int, where: str) -> list[dict[str, Any]]:
    """From the root to node k."""
    path: list[dict[str, Any]] = []
    at: int | None = k
    while at is not None:
        if not isinstance(at, int) or not 0 <= at < len(nodes) or len(path) == len(nodes):
            raise ArgumentError(
                f"{where}: its parents lead to {one_line(f'{at!r:.40}')}. Fix: pass the trace whole"
            )
        path.append(nodes[at])
        at = nodes[at].get("parent")
    return path[::-1]


def _last_sampled(path: list[dict[str, Any]]) -> int:
    return max((k for k, n in enumerate(path) if n.get("sampled")), default=-1)


def _role(node: dict[str, Any], where: str) -> str:
    role = fields_of(node["message"], f"{where}.message").get("role")
    return role if isinstance(role, str) else "user"


def _media_of(
    path: list[dict[str, Any]], media: Mapping[str, Any], processor: Processor, where: str
) -> list[Any]:
    """The pictures of a path: those of its messages, or what the renderer made of them."""
    out: list[Any] = []
    for node in path:
        found = node.get("multi_modal_data")
        items = None if found is None else fields_of(found, where).get("mm_items")
        urls = _urls(fields_of(node["message"], f"{where}.message").get("content"))
        known = [media.get(url, url if url.startswith("data:") else None) for url in urls]
        if None not in known:
            out += known
        elif items:
            for item in items.get("image", ()):
                out += processed_media({k: array_of(v) for k, v in item.items()}, processor, where)
        else:
            at = known.index(None)
            raise ArgumentError(
                f"{where}: the picture {urls[at]!r:.80} is not among the media. Fix: pass media={{url: picture}}"
            )
    return out


def _urls(content: Any) -> list[str]:
    """Of the image parts of a message."""
    out = []
    for part in content if isinstance(content, list | tuple) else ():
        fields = fields_of(part, "to_trajectories: a part of a message")
        if fields.get("type") == "image_url":
            url = fields["image_url"]
            url = url if isinstance(url, str) else fields_of(url, "image_url").get("url")
            out.append(str(url))
    return out


def _routes(path: list[dict[str, Any]], count: int, where: str) -> np.ndarray | None:
    """[count, layers, k] of the whole path, if each node has its own."""
    own = [n.get("routed_experts") for n in path if n["token_ids"]]
    if any(r is None for r in own):
        return None
    routes = np.concatenate([array_of(r) for r in own])
    if len(routes) != count:
        raise ArgumentError(
            f"{where}: its path has routes of {len(routes)} tokens and {count} tokens. Fix: pass the trace whole"
        )
    return routes


def _about(trace: dict[str, Any], where: str) -> dict[str, Any]:
    """Rewards, metrics and what else JSON can hold of a trace."""
    rewards = []
    for name, given in (trace.get("rewards") or {}).items():
        if given is None:
            continue
        reward = fields_of(given, f"{where}.rewards[{name!r:.40}]")
        score, weight = (
            as_number(value, f"{where}.rewards[{name!r:.40}].{n}")
            for n, value in (("score", reward.get("score")), ("weight", reward.get("weight", 1.0)))
        )
        kept = {} if weight == 1.0 else {"score": score, "weight": weight}
        rewards.append(Score(str(name), score * weight, metadata=kept))
    metrics = [
        Score(str(name), as_number(value, f"{where}.metrics[{name!r:.40}]"))
        for name, value in (trace.get("metrics") or {}).items()
        if value is not None
    ]
    nodes = [fields_of(n, where) for n in trace["nodes"]]
    unread = [name for name in _STREAMS if any(n.get(name) is not None for n in nodes)]
    kept = kept_as_json({k: trace.get(k) for k in _KEPT} | ({"unread": unread} if unread else {}))
    return {"rewards": rewards or None, "verifiers": metrics or None, "metadata": {KEY: kept}}


# ---- training samples ----------------------------------------------------------------------------


def _branch(sample: dict[str, Any], processor: Processor, where: str) -> Record:
    """One branch as a flat row; a node that several share is sampled in the first of them only."""
    ids, mask = sample.get("token_ids"), sample.get("mask")
    if ids is None or mask is None or len(ids) != len(mask) or not any(mask):
        raise ArgumentError(
            f"{where} has no token_ids with a mask that holds a 1. Fix: pass TrainingSamples"
        )
    sampled = mask_of(where, mask, len(ids))
    start = int(sampled.argmax())
    own = sampled[start:]

    def tail(name: str) -> Any:
        values = sample.get(name)
        if values is not None and len(values) != len(ids):
            raise ArgumentError(
                f"{where}: {name} has {len(values)} values for {len(ids)} tokens. Fix: pass it whole"
            )
        return None if values is None else values[start:]

    pixels = {k: array_of(v) for k, v in (sample.get("mm_kwargs") or {}).items()}
    reference = tail("ref_logprobs")
    if reference is not None:
        reference = [v for v, m in zip(reference, own, strict=True) if m]
    return Record(
        ids[:start],
        ids[start:],
        own,
        processed_media(pixels, processor, where) if pixels else (),
        tail("logprobs"),
        kept_ids=kept_lists(sample, sampled, where, start),
        teachers=reference_of(reference, ids[start:], own, where),
        routed_experts=None
        if sample.get("routed_experts") is None
        else array_of(sample["routed_experts"]),
    )


def _rest(sample: dict[str, Any]) -> dict[str, Any]:
    kept = kept_as_json({name: sample.get(name) for name in _OF_SAMPLE})
    warmth = set(sample.get("temperatures") or ())
    return kept | ({"temperature": float(next(iter(warmth)))} if len(warmth) == 1 else {})
