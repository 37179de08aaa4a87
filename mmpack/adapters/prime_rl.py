"""prime-rl: the traces of its environments (verifiers v1), and its training samples, as trajectories.

A trace is a graph of messages: a node holds the tokens that its message adds, so a path from the root is a context.
Nothing of prime-rl or verifiers is imported.

Run with verifiers 0.4, and records as prime-rl's sources of August 2026 write them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from mmpack.adapters.checks import as_number, check_kind
from mmpack.adapters.episodes import (
    Options,
    check_episodes,
    fields_of,
    kept_as_json,
    named,
    part_of,
    read_episodes,
    reading,
    urls_of,
)
from mmpack.errors import ArgumentError, one_line
from mmpack.processors.conversation import source_of
from mmpack.processors.wrap import Processor
from mmpack.schema.ragged import Ragged
from mmpack.schema.spans import Score
from mmpack.trajectory.chat import FINISH
from mmpack.trajectory.record_columns import mask_of
from mmpack.trajectory.records import Record
from mmpack.trajectory.trajectory import Trajectory

KEY = "prime_rl"  # in Trajectory.metadata
REFERENCE = "reference"  # name of the teacher that scored the sampled ids
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
    **options: Unpack[Options],
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
        options: `sampling` (`temperature`, …, and `logprobs`: what the logprobs mean), `expanded`, `resampled`,
            `num_experts`, as of `mp.trajectory.from_records`.

    A trace's rewards become the trajectory's, weighted (`metadata` has score and weight), its metrics the verifiers.
    `sampling_mask` (and `kept_tokens`, as it was called) become `kept_ids`, reference logprobs the teacher "reference":
    one id per token. A sampled token with an empty list is refused: no list was kept there.
    JSON dumps of traces round logprobs to four decimals unless told `float_decimals=None`, and lack routes and lists.
    Credit and loss weights are not read; `metadata["prime_rl"]` names them. Raises: ArgumentError; LayoutError.
    """
    given = check_episodes(
        rollouts, "rollouts", {"group_ids": group_ids, "policy_versions": policy_versions}
    )
    check_kind("to_trajectories: media", media, Mapping | None, "pass a dict, URL -> picture")

    def read(i: int, where: str) -> tuple[list[Record], dict[str, Any]]:
        if isinstance(given[i], Sequence) and not isinstance(given[i], str | bytes):
            samples = [fields_of(s, f"{where}[{k}]") for k, s in enumerate(given[i])]
            records = [_branch(s, processor, f"{where}[{k}]") for k, s in enumerate(samples)]
            about: dict[str, Any] = {"metadata": {KEY: [_rest(s) for s in samples]}}
        else:
            trace = fields_of(given[i], where, ("nodes",), "pass a trace, or TrainingSamples")
            records = _nodes(trace, media or {}, processor, where)
            about = _about(trace, where)
        for record in records:
            record.policy_versions = None if policy_versions is None else policy_versions[i]
        return records, about

    names = [f"rollouts[{i}]" for i in range(len(given))]
    return named(read_episodes(names, read, processor, options), group_ids)


def _record(
    given: dict[str, Any], before: list[int], media: Sequence[Any], dense: bool, where: str
) -> Record:
    """Ids that were sampled from their first sampled one on, and what is said of them.

    Args: `before`: ids of the context that `given` does not hold. `dense`: columns have a value per token, not one per
    sampled token.
    """
    ids, mask = given.get("token_ids"), given.get("mask")
    if ids is None or mask is None or len(ids) != len(mask) or not any(mask):
        raise ArgumentError(
            f"{where} has no token_ids with a mask that holds a 1. Fix: use a client that keeps token ids"
        )
    sampled = mask_of(where, mask, len(ids))
    start = int(sampled.argmax())
    own = slice(start, None)

    def column(name: str) -> np.ndarray | None:
        values = given.get(name)
        if values is None or (name == "logprobs" and not len(values)):
            return None
        count = len(ids) if dense else int(sampled.sum())
        if len(values) != count:
            of = "tokens" if dense else "sampled tokens"
            raise ArgumentError(
                f"{where}: {name} has {len(values)} values for {count} {of}. Fix: pass it whole"
            )
        out = np.zeros(len(ids), np.float32)
        out[sampled] = np.asarray(values)[sampled] if dense else values
        return out[own]

    scores = column("ref_logprobs" if dense else "reference_logprobs")
    teachers = None
    if scores is not None:
        # it scored only what was sampled: one id per list
        places = np.flatnonzero(sampled[own])
        lists = Ragged.of([[t] for t in np.asarray(ids)[own][places]], scores[places, None])
        teachers = {REFERENCE: lists.spread(places, len(ids) - start)}
    return Record(
        [*before, *ids[:start]],
        ids[own],
        sampled[own],
        media,
        column("logprobs"),
        kept_ids=_kept_lists(given, sampled, start, where),
        teachers=teachers,
    )


def _kept_lists(
    given: dict[str, Any], sampled: np.ndarray, start: int, where: str
) -> Ragged | None:
    """A list per token from `start` on. Counts are of the sampled tokens, or of all."""
    name = "sampling_mask" if given.get("sampling_mask") is not None else "kept_tokens"
    if given.get(name) is None:
        return None
    parts = fields_of(given[name], f"{where}.{name}")
    ids, counts = (_array(parts[n], np.int32) for n in ("ids", "counts"))
    whole = all(a.ndim == 1 and (a.dtype.kind in "iu" or not a.size) for a in (ids, counts))
    places = np.flatnonzero(sampled)
    if whole and len(counts) == len(sampled) != len(places) and not counts[~sampled].any():
        counts = counts[sampled]
    if not whole or len(counts) != len(places) or counts.sum() != len(ids):
        raise ArgumentError(
            f"{where}: {name} has {len(counts)} counts of {len(ids)} ids for {len(places)} sampled tokens, "
            "expected whole numbers, a count per token. Fix: pass it whole"
        )
    if not counts.all():
        raise ArgumentError(
            f"{where}: {name} keeps no id at token {places[counts == 0][0]}. Fix: set it to None: without lists for "
            "all tokens, logprobs can't be renormalised over them"
        )
    lists = Ragged.of(np.split(ids, np.cumsum(counts.astype(np.int64))[:-1]))
    return lists.spread(places - start, len(sampled) - start)


def _array(given: Any, dtype: Any = None) -> np.ndarray:
    """An array of an array, of bytes, or of an object with dtype, shape and data."""
    if isinstance(given, bytes):
        return np.frombuffer(given, dtype).copy()
    if hasattr(given, "__array__") or isinstance(given, list | tuple):
        return np.asarray(given)
    parts = fields_of(given, "to_trajectories: an encoded array")
    kind = np.dtype(parts.get("dtype") or dtype or np.uint8)
    return np.frombuffer(parts["data"], kind).reshape(parts["shape"]).copy()


def _processed(arrays: Mapping[str, Any], processor: Processor, where: str) -> list[Any]:
    """Media of pixels as the renderer's processor made them."""
    from mmpack.adapters.processed_media import media_of_inputs

    inputs = {name: _array(value) for name, value in arrays.items()}
    found = media_of_inputs(inputs, processor.family, where)
    if found["video"]:
        raise ArgumentError(
            f"{where} has videos as pixels, which can't be read here. Fix: pass media={{url: video}}"
        )
    return list(found["image"])


# ---- traces --------------------------------------------------------------------------------------


def _nodes(
    trace: dict[str, Any], media: Mapping[str, Any], processor: Processor, where: str
) -> list[Record]:
    """A record per sampled node: the tokens of its path up to the first sampled one, and the rest of its own."""
    nodes = [fields_of(n, f"{where}.nodes[{k}]") for k, n in enumerate(trace["nodes"])]
    calls = [fields_of(c, f"{where}.calls[{k}]") for k, c in enumerate(trace.get("calls") or ())]
    finish = {c["node"]: c.get("finish_reason") for c in calls if c.get("node") is not None}
    out: list[Record] = []
    for k, node in enumerate(nodes):
        if not node.get("sampled"):
            continue
        at = f"{where}.nodes[{k}]"
        with reading(at):
            path = _path(nodes, k, at)
            before = [t for n in path[:-1] for t in n["token_ids"]]
            record = _record(node, before, _media_of(path, media, processor, at), False, at)
            record.routed_experts = _routes(path, len(before) + len(node["token_ids"]), at)
            record.finish_reason = FINISH.get(finish.get(k) or "")
            since = path[_last_sampled(path[:-1]) + 1 : -1]
            record.source = source_of([_role(n, at) for n in since]) if out else "environment"
            out.append(record)
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
        items = part_of(node, "multi_modal_data", where).get("mm_items")
        urls = urls_of(node["message"], f"{where}.message", ("image_url",))
        known = [media.get(url, url if url.startswith("data:") else None) for url in urls]
        if None not in known:
            out += known
        elif items:
            for item in items.get("image", ()):
                out += _processed(item, processor, where)
        else:
            at = known.index(None)
            raise ArgumentError(
                f"{where}: the picture {urls[at]!r:.80} is not among the media. Fix: pass media={{url: picture}}"
            )
    return out


def _routes(path: list[dict[str, Any]], count: int, where: str) -> np.ndarray | None:
    """[count, layers, k] of the whole path, if each node has its own."""
    own = [n.get("routed_experts") for n in path if n["token_ids"]]
    if any(r is None for r in own):
        return None
    routes = np.concatenate([_array(r) for r in own])
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
        at = f"{where}.rewards[{name!r:.40}]"
        reward = {"weight": 1.0, **fields_of(given, at)}
        score, weight = (as_number(reward.get(n), f"{at}.{n}") for n in ("score", "weight"))
        kept = {} if weight == 1.0 else {"score": score, "weight": weight}
        rewards.append(Score(str(name), score * weight, metadata=kept))
    metrics = [
        Score(str(name), as_number(value, f"{where}.metrics[{name!r:.40}]"))
        for name, value in (trace.get("metrics") or {}).items()
        if value is not None
    ]
    nodes = [fields_of(n, where) for n in trace["nodes"]]
    unread = [name for name in _STREAMS if any(n.get(name) is not None for n in nodes)]
    kept = kept_as_json({k: trace.get(k) for k in _KEPT} | {"unread": unread or None})
    return {"rewards": rewards or None, "verifiers": metrics or None, "metadata": {KEY: kept}}


# ---- training samples ----------------------------------------------------------------------------


def _branch(sample: dict[str, Any], processor: Processor, where: str) -> Record:
    """One branch as a flat row; a node that several share is sampled in the first of them only."""
    pixels = part_of(sample, "mm_kwargs", where)
    media = _processed(pixels, processor, where) if pixels else []
    record = _record(sample, [], media, True, where)
    if sample.get("routed_experts") is not None:
        record.routed_experts = _array(sample["routed_experts"])
    return record


def _rest(sample: dict[str, Any]) -> dict[str, Any]:
    kept = kept_as_json({name: sample.get(name) for name in _OF_SAMPLE})
    warmth = set(sample.get("temperatures") or ())
    return kept | ({"temperature": float(next(iter(warmth)))} if len(warmth) == 1 else {})
