"""Kept ids and routes that only one side has, or that differ: logprobs are then of unlike distributions."""

from __future__ import annotations

import numpy as np

from mmpack.parity.causes.pair import Hit, Pair
from mmpack.parity.replay import replay_differences, unlike_lists, unlike_routes

CAUSES = {"kept_ids": "truncated_support", "routed_experts": "routing"}


def replay_hits(pair: Pair) -> list[Hit]:
    """At most one hit for each field: truncated_support, routing."""
    left, right = pair.left.sample, pair.right.sample
    hits = []
    for shown in replay_differences(left, right):
        name = shown.field
        evidence = _one_sided(pair, name) or (_kept(pair) if name == "kept_ids" else _routes(pair))
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


def _kept(pair: Pair) -> str:
    a, b = (side.sample.kept_ids for side in pair.sides)
    assert a is not None and b is not None
    count = int(np.sum(unlike_lists(a, b)))
    return f"{count} of {len(a)} lists of kept ids differ"


def _routes(pair: Pair) -> str:
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
