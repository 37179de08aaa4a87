"""Fields of the engine's run that the trainer replays: kept ids of loss tokens, routes of experts.

Where one side has it and the other has not, logprobs differ: that is a difference, not something left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmpack.parity.causes.pair import Hit, Pair
from mmpack.parity.differences import Difference
from mmpack.schema.ragged import Ragged
from mmpack.schema.routes import rows_read
from mmpack.schema.sample import Sample

REPLAYED = ("kept_ids", "routed_experts")


def replay_differences(left: Sample, right: Sample) -> Iterator[Difference]:
    """The first difference of each field of REPLAYED that only one side has, or that differs over the same tokens."""
    for name in REPLAYED:
        a, b = getattr(left, name), getattr(right, name)
        if a is not None and b is not None:
            if _same_tokens(name, left, right):
                yield from _kept(left, right) if name == "kept_ids" else _routes(left, right)
        elif a is not b and (left.num_loss_tokens or right.num_loss_tokens):
            yield Difference(name, _described(name, a), _described(name, b))


def lacking_replay(left: Sample, right: Sample) -> Iterator[tuple[str, str]]:
    """(field, who) of REPLAYED, as `fields.lacking` gives them."""
    for name in REPLAYED:
        a, b = getattr(left, name), getattr(right, name)
        if a is None or b is None:
            yield name, "both" if a is None and b is None else "rollout" if a is None else "train"
        elif not _same_tokens(name, left, right):
            yield name, "moved"


def _kept(left: Sample, right: Sample) -> Iterator[Difference]:
    a, b = left.kept_ids, right.kept_ids
    assert a is not None and b is not None
    if a != b:
        k = int(np.argmax(unlike_lists(a, b)))
        token = int(left.loss_indices[k])
        one, two = (f"{_ids(x[k : k + 1])} kept" for x in (a, b))
        yield Difference("kept_ids", one, two, token, (token, token + 1))


def _routes(left: Sample, right: Sample) -> Iterator[Difference]:
    name, a, b = "routed_experts", left.routed_experts, right.routed_experts
    assert a is not None and b is not None
    if a.shape[1:] != b.shape[1:]:
        yield Difference(name, _described(name, a), _described(name, b))
    elif not np.array_equal(a, b) and (unlike := unlike_routes(left, right)).any():
        token, layer = (int(i) for i in np.argwhere(unlike)[0])
        one, two = (f"experts {x[token, layer].tolist()} in layer {layer}" for x in (a, b))
        yield Difference(name, one, two, token, (token, token + 1))


def unlike_lists(a: Ragged, b: Ragged) -> np.ndarray:
    """bool [n]: lists that differ; `a` and `b` have n each."""
    out = a.lengths != b.lengths
    same = np.flatnonzero(~out)
    x, y = a[same], b[same]
    owner = np.repeat(same, x.lengths)
    out[owner[x.ids != y.ids]] = True
    return out


def unlike_routes(left: Sample, right: Sample) -> np.ndarray:
    """bool [rows, layers]: where other experts are taken, of rows that a logprob reads. Their order says nothing."""
    rows = rows_read(len(left), left.loss_indices)
    return unlike_experts(*(s.routed_experts[:rows] for s in (left, right)))  # type: ignore[index]


def unlike_experts(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    unlike: np.ndarray = (np.sort(a, axis=-1) != np.sort(b, axis=-1)).any(axis=-1)
    return unlike


def _same_tokens(name: str, left: Sample, right: Sample) -> bool:
    """Whether entries of both sides are of the same tokens."""
    if not np.array_equal(left.input_ids, right.input_ids):
        return False
    if name == "routed_experts":
        return len(left.routed_experts) == len(right.routed_experts)  # type: ignore[arg-type]
    same = np.array_equal(left.loss_indices, right.loss_indices)
    return same and len(left.kept_ids) == len(right.kept_ids)  # type: ignore[arg-type]


def _described(name: str, value: Ragged | np.ndarray | None) -> str:
    if value is None:
        return f"no {name}"
    if isinstance(value, Ragged):
        mean = len(value.ids) / max(len(value), 1)
        return f"{len(value)} lists of kept ids, {mean:.1f} each on average"
    return f"{value.shape[2]} experts in each of {value.shape[1]} layers"


def _ids(lists: Ragged) -> str:
    shown = ", ".join(map(str, lists.ids[:4].tolist()))
    more = f", … ({len(lists.ids)})" if len(lists.ids) > 4 else ""
    return f"ids {shown}{more}" if len(lists.ids) else "no id"


CAUSES = {"kept_ids": "truncated_support", "routed_experts": "routing"}


def replay_hits(pair: Pair) -> list[Hit]:
    """At most one hit for each field: truncated_support, routing."""
    left, right = pair.left.sample, pair.right.sample
    hits = []
    for shown in replay_differences(left, right):
        name = shown.field
        evidence = _one_sided(pair, name) or (
            _kept_evidence(pair) if name == "kept_ids" else _routes_evidence(pair)
        )
        where = (shown.index, shown.span)
        hits.append(Hit(CAUSES[name], name, evidence, shown.left, shown.right, *where))
    return hits


def _one_sided(pair: Pair, name: str) -> str:
    """Who has it, and what it did; nothing if both have it."""
    has = [getattr(side.sample, name) is not None for side in pair.sides]
    if all(has):
        return ""
    holder, other = pair.sides if has[0] else pair.sides[::-1]
    if name == "routed_experts":
        return f"{holder.name} recorded the experts of each token, {other.name} has none to take"
    kept = holder.sample.kept_ids
    assert kept is not None
    most = int(kept.lengths.max()) if len(kept) else 0
    sampling = holder.sample.sampling or {}
    cuts = [
        f"{k} {sampling[k]}" for k in ("top_p", "top_k", "min_p") if sampling.get(k) is not None
    ]
    by = f" ({', '.join(cuts)})" if cuts else ""
    return (
        f"{holder.name}'s sampler{by} left {len(kept.ids) / max(len(kept), 1):.1f} ids per loss token on average, "
        f"{most} at most; {other.name} normalises over the whole vocabulary"
    )


def _kept_evidence(pair: Pair) -> str:
    a, b = (side.sample.kept_ids for side in pair.sides)
    assert a is not None and b is not None
    count = int(np.sum(unlike_lists(a, b)))
    return f"{count} of {len(a)} lists of kept ids differ"


def _routes_evidence(pair: Pair) -> str:
    a, b = (side.sample.routed_experts for side in pair.sides)
    assert a is not None and b is not None
    if a.shape[1:] != b.shape[1:]:
        return "routes are of another number of layers, or of experts per token"
    unlike = unlike_routes(pair.left.sample, pair.right.sample)
    tokens, layers = unlike.any(axis=1), unlike.any(axis=0)
    return (
        f"{int(tokens.sum())} of {len(unlike)} tokens that a logprob reads take other experts, "
        f"the first in layer {int(np.argmax(layers))}"
    )
