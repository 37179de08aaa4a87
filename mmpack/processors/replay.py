"""What the engine did in one more turn, joined to what it did before: kept ids, teachers' lists, routes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.processors.arguments import check_fields
from mmpack.schema.ragged import Ragged
from mmpack.schema.sample import Sample


class Replay(NamedTuple):
    """Of a response: n lists; n lists per teacher; routes of all tokens, its context's too [L, layers, k]."""

    kept_ids: Ragged | None
    teachers: dict[str, Ragged] | None
    routed_experts: np.ndarray | None


def joined_replay(sample: Sample, new: Replay, count: int, length: int) -> dict[str, Any]:
    """The fields of `sample` with a response of `count` ids behind it, `length` tokens in all. Raises ArgumentError."""
    check_fields(new._asdict())
    lists = {"kept_ids": new.kept_ids} | {
        f"teachers[{n!r:.40}]": x for n, x in (new.teachers or {}).items()
    }
    for name, own in lists.items():
        if own is not None and len(own) != count:
            raise ArgumentError(
                f"processor.append: {name} has {len(own)} lists for {count} response ids. "
                "Fix: pass one list per response id"
            )
    return {
        "kept_ids": _kept(sample, new.kept_ids, count),
        "teachers": _teachers(sample, new.teachers or {}, count),
        "routed_experts": _routes(sample, new.routed_experts, count, length),
    }


def _kept(sample: Sample, new: Ragged | None, count: int) -> Ragged | None:
    old = sample.kept_ids
    if not count:
        return old
    if not sample.num_loss_tokens:
        return new
    if (old is None) != (new is None):
        who = "the response" if new is None else "the sample"
        raise ArgumentError(
            f"processor.append: {who} has no kept_ids, but the other has. Fix: pass them for every turn, or for none"
        )
    return None if old is None or new is None else Ragged.cat([old, new])


def _teachers(sample: Sample, new: dict[str, Ragged], count: int) -> dict[str, Ragged] | None:
    """A teacher that says nothing of a turn has empty lists there."""
    old = sample.teachers or {}
    sides = (old, sample.num_loss_tokens), (new, count)
    return {
        name: Ragged.cat([x.get(name, Ragged.empty(n, scored=True)) for x, n in sides])
        for name in dict.fromkeys([*old, *new])
    } or None


def _routes(sample: Sample, new: np.ndarray | None, count: int, length: int) -> np.ndarray | None:
    old = sample.routed_experts
    if new is None and count and old is not None:
        raise ArgumentError(
            "processor.append: the sample has routed_experts, but the response has none. "
            "Fix: pass the engine's routes of all tokens, or set the sample's to None"
        )
    if new is None:  # what came back is not run yet: no logprob reads it
        tail = None if old is None else np.zeros((length - len(old), *old.shape[1:]), old.dtype)
        return None if old is None or tail is None else np.concatenate([old, tail])
    if len(new) != length:
        raise ArgumentError(
            f"processor.append: routed_experts has routes for {len(new)} tokens, expected {length}. "
            "Fix: pass one row per token of context and response; the last row may hold anything"
        )
    ran = int(sample.loss_indices.max()) if sample.num_loss_tokens else 0
    if ran and (old is None or not np.array_equal(old[:ran], new[:ran])):
        raise ArgumentError(
            "processor.append: routed_experts of the earlier tokens differ from the sample's. "
            "Fix: make a separate sample of this turn (mmpack.trajectory)"
        )
    return new
