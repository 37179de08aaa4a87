"""Samples as episodes: those of one trajectory in order of turn, each under the sample whose context it goes on from.

A sample goes on from another of its episode where they share leading tokens, with the same media at them. Samples
without a trajectory are an episode by their group, and share its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmpack.schema.sample import Sample
from mmpack.view.trace.roles import Roles, roles_of

LEAST = 16  # tokens that are worth folding


@dataclass(frozen=True, eq=False)
class Node:
    """A sample in its tree."""

    number: int  # in the order of drawing, over all episodes
    sample: Sample
    roles: Roles
    keys: np.ndarray  # int64 [L]: equal where placeholders stand for equal media, or for none
    parent: Node | None
    shared: int  # leading tokens that are the parent's too
    unread: int  # of these, loss tokens of the parent that are none here
    depth: int  # how many times its line branched off

    @property
    def name(self) -> str:
        """The sample, and its turn."""
        turn = self.sample.turn
        return self.sample.sample_id + ("" if turn is None else f" · turn {turn}")

    @property
    def relation(self) -> str:
        """How it follows from its parent, in words."""
        if self.parent is None:
            return ""
        if self.shared == len(self.parent.sample):
            return "goes on from"
        return "branches off from"


@dataclass(frozen=True, eq=False)
class Episode:
    """What is drawn under one heading; the nodes in order of drawing."""

    kind: str  # "trajectory" or "group"
    name: str
    nodes: list[Node]


def episodes_of(samples: Sequence[Sample]) -> list[Episode]:
    """Episodes in order of their first sample."""
    found: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        named = sample.trajectory_id is not None
        key = ("trajectory", sample.trajectory_id) if named else ("group", sample.group_id)
        found.setdefault((key[0], str(key[1])), []).append(sample)
    out, count = [], 0
    for (kind, name), members in found.items():
        if kind == "trajectory":  # sorted() keeps the order of equal turns
            members = sorted(
                members, key=lambda s: float("inf") if s.turn is None else float(s.turn)
            )
        nodes: list[Node] = []
        for sample in members:
            nodes.append(_node(count, sample, nodes))
            count += 1
        out.append(Episode(kind, name, nodes))
    return out


def shared_tokens(one: Node, sample: Sample, roles: Roles, keys: np.ndarray) -> int:
    """Leading tokens of equal ids and media, up to the first that only this sample's loss reads."""
    length = min(len(one.sample), len(sample))
    unlike = one.sample.input_ids[:length] != sample.input_ids[:length]
    unlike |= one.keys[:length] != keys[:length]
    unlike |= roles.loss[:length] & ~one.roles.loss[:length]
    return int(np.argmax(unlike)) if unlike.any() else length


def _node(number: int, sample: Sample, before: list[Node]) -> Node:
    roles = roles_of(sample)
    keys = _keys(sample, roles)
    lengths = [shared_tokens(node, sample, roles, keys) for node in before]
    if not lengths or max(lengths) < LEAST:
        return Node(number, sample, roles, keys, None, 0, 0, 0)
    parent = before[int(np.argmax(lengths))]  # the first of equals: nearest to the root
    shared = max(lengths)
    unread = int((parent.roles.loss & ~_head(roles.loss, len(parent.sample)))[:shared].sum())
    depth = parent.depth + (shared < len(parent.sample))
    return Node(number, sample, roles, keys, parent, shared, unread, depth)


def _head(values: np.ndarray, length: int) -> np.ndarray:
    """`values` cut or filled with False to `length`."""
    out = np.zeros(length, bool)
    out[: len(values)] = values[:length]
    return out


def _keys(sample: Sample, roles: Roles) -> np.ndarray:
    keys = np.array(
        [hash(medium.cache_key) for medium in sample.media] + [0], np.int64
    )  # the last: text, and media that are not there
    known = (roles.medium >= 0) & (roles.medium < len(sample.media))
    return keys[np.where(known, roles.medium, len(sample.media))]
