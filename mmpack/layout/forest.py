"""The prefix forest of a set of samples: rows that several samples share are laid out once.

A segment is a run of rows shared by the same samples; segments come in depth-first order, so that the rows
that see row k are one interval. Two samples share a token if its id, position, medium and routes agree, and all before
it; a run of placeholders is shared as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmpack.families import get_family
from mmpack.layout.batch_positions import position_rule, positions_of
from mmpack.layout.occurrences import joined, medium_key, occurrences
from mmpack.schema.sample import Sample


@dataclass(frozen=True)
class Forest:
    """G segments over `num_tokens` rows; B samples. All arrays int64."""

    segment_offsets: np.ndarray  # [G+1] rows
    segment_parent: np.ndarray  # [G], -1 for a root
    segment_sample: np.ndarray  # [G] a sample that has the segment
    # [G] token index of the segment's first row, in any sample that has it
    segment_depth: np.ndarray
    sample_segment: np.ndarray  # [B] each sample's last segment

    @property
    def num_tokens(self) -> int:
        return int(self.segment_offsets[-1])

    @property
    def shared(self) -> bool:
        """Whether any row belongs to two samples."""
        return len(self.segment_parent) != len(self.sample_segment) or bool(
            (self.segment_parent >= 0).any()
        )

    def path(self, sample: int) -> list[int]:
        """The segments of a sample, root first."""
        out, segment = [], int(self.sample_segment[sample])
        while segment >= 0:
            out.append(segment)
            segment = int(self.segment_parent[segment])
        return out[::-1]

    def rows(self, sample: int) -> np.ndarray:
        """int64 [L]: the row of each token of a sample."""
        offsets = self.segment_offsets
        return np.concatenate(
            [np.arange(offsets[g], offsets[g + 1], dtype=np.int64) for g in self.path(sample)]
        )

    def visible_until(self) -> np.ndarray:
        """int32 [T]: row q sees row k exactly if k <= q < visible_until[k]."""
        end = self.segment_offsets[1:].copy()
        for g in range(len(end) - 1, -1, -1):
            parent = self.segment_parent[g]
            if parent >= 0:
                end[parent] = max(end[parent], end[g])
        return np.repeat(end.astype(np.int32), np.diff(self.segment_offsets))


def build_forest(
    samples: Sequence[Sample], share: bool = True, positions: Sequence[np.ndarray] | None = None
) -> Forest:
    """The forest of `samples`, in their order; `share=False` gives each sample a root of its own.

    Args: `positions`: int64 [rows, L] of each sample, as `positions_of` gives them; computed where they are needed.

    Example: two samples that share their first two tokens.
        >>> import mmpack as mp
        >>> from mmpack.layout.forest import build_forest
        >>> text = {"schema_version": "1", "group_id": "q", "family": "qwen2_vl", "media": [], "modality_spans": []}
        >>> samples = [
        ...     mp.Sample.from_dict(text | {"sample_id": f"q/{k}", "input_ids": [5, 6, 7 + k], "loss_spans": []})
        ...     for k in range(2)
        ... ]
        >>> forest = build_forest(samples)
        >>> forest.segment_offsets.tolist(), forest.segment_parent.tolist()
        ([0, 2, 3, 4], [-1, 0, 0])
        >>> forest.rows(1).tolist(), forest.visible_until().tolist()
        ([0, 1, 3], [4, 4, 3, 4])
    """
    if not share:
        count = len(samples)
        lengths = [len(s) for s in samples]
        return Forest(
            np.cumsum([0, *lengths], dtype=np.int64),
            np.full(count, -1, dtype=np.int64),
            np.arange(count, dtype=np.int64),
            np.zeros(count, dtype=np.int64),
            np.arange(count, dtype=np.int64),
        )
    return _grow(_paths(samples, positions))


@dataclass(frozen=True)
class _Path:
    """A sample's tokens as they are compared: two of them share their rows as far as all arrays agree."""

    tokens: np.ndarray  # int64 [L]: id; of a run's tokens the run's number, negative
    positions: np.ndarray | None  # int64 [rows, L]; None: they follow from the tokens
    routes: np.ndarray | None  # int64 [L, c]

    def __len__(self) -> int:
        return len(self.tokens)

    def at(self, index: int) -> tuple[int, bytes, bytes]:
        positions = b"" if self.positions is None else self.positions[:, index].tobytes()
        routes = b"" if self.routes is None else self.routes[index].tobytes()
        return int(self.tokens[index]), positions, routes

    def agrees_until(self, other: _Path, start: int, stop: int) -> int:
        """The first index from `start` on at which they differ; else `stop`. Blocks grow: most paths part soon."""
        size = 64
        while start < stop:
            block = slice(start, min(start + size, stop))
            differs = self.tokens[block] != other.tokens[block]
            if self.positions is not None and other.positions is not None:
                differs |= (self.positions[:, block] != other.positions[:, block]).any(axis=0)
            if self.routes is not None and other.routes is not None:
                differs |= (self.routes[block] != other.routes[block]).any(axis=1)
            if differs.any():
                return start + int(np.argmax(differs))
            start, size = block.stop, min(4 * size, 2**15)
        return stop


def _paths(samples: Sequence[Sample], positions: Sequence[np.ndarray] | None) -> list[_Path]:
    """Runs have one number if media, seconds, ids, positions and routes agree in all of their tokens.

    Positions by a family's rule follow from the tokens before: they are compared only where a sample recorded its own,
    or where samples follow two rules.
    """
    one_rule = all(position_rule(s) == position_rule(samples[0]) for s in samples)
    if one_rule and all(s.position_ids is None for s in samples):
        positions = None
    elif positions is None:
        positions = [positions_of(s) for s in samples]
    all_routes = _route_keys(samples)
    runs: dict[tuple[Any, ...], int] = {}
    paths = []
    for b, sample in enumerate(samples):
        tokens = np.asarray(sample.input_ids, dtype=np.int64)
        places = None if positions is None else positions[b]
        routes = all_routes[b]
        found = _runs(sample)
        if found:
            tokens = tokens.copy()
        for start, stop, media in found:
            key = (
                media,
                sample.input_ids[start:stop].tobytes(),
                b"" if places is None else places[:, start:stop].tobytes(),
                b"" if routes is None else routes[start:stop].tobytes(),
            )
            tokens[start:stop] = -1 - runs.setdefault(key, len(runs))
        paths.append(_Path(tokens, places, routes))
    return paths


def _runs(sample: Sample) -> list[tuple[int, int, tuple[Any, ...]]]:
    """Tokens [start, stop) that are shared as a whole, and the keys of their media.

    Where placeholders see each other, media that touch are one run: what one of them is, changes the other.
    """
    touching = get_family(sample.family).two_way is not None
    out: list[tuple[int, int, tuple[Any, ...]]] = []
    for start, stop, indices in joined(occurrences(sample)):
        media: tuple[Any, ...] = tuple(medium_key(sample.media[m]) for m in indices)
        if touching and out and out[-1][1] == start:
            start, _, before = out.pop()
            media = before + media
        out.append((start, stop, media))
    return out


def _route_keys(samples: Sequence[Sample]) -> list[np.ndarray | None]:
    """int64 [L, c] per sample: equal rows, equal routes; None where no sample has routes.

    With routes, a hidden state follows from them too: where they differ, no row can stand for both. One number says
    which layers and how many experts they are of, so that a sample without routes shares with its like only.
    """
    most = max(
        (s.routed_experts[:1].size for s in samples if s.routed_experts is not None), default=0
    )
    if not most:
        return [None] * len(samples)
    width = -(-most // 4)  # four ids of 16 bits in a number
    out: list[np.ndarray | None] = []
    for sample in samples:
        key = np.zeros((len(sample), 1 + width), np.int64)
        routes = sample.routed_experts
        if routes is not None:
            key[:, 0] = routes.shape[1] << 32 | routes.shape[2]
            flat = np.zeros((len(sample), 4 * width), np.uint16)
            flat[:, : routes[:1].size] = routes.reshape(len(sample), -1)
            key[:, 1:] = flat.view(np.int64)
        out.append(key)
    return out


def _grow(paths: list[_Path]) -> Forest:
    offsets, parents, owners, depths = [0], list[int](), list[int](), list[int]()
    last = np.full(len(paths), -1, dtype=np.int64)
    roots = _branches(paths, list(range(len(paths))), 0)
    # parent, depth, samples that have it
    todo = [(-1, 0, branch) for branch in reversed(roots)]
    while todo:
        parent, depth, members = todo.pop()
        stop = _common(paths, members, depth)
        segment = len(parents)
        offsets.append(offsets[-1] + stop - depth)
        parents.append(parent)
        owners.append(members[0])
        depths.append(depth)
        going_on = [m for m in members if len(paths[m]) > stop]
        for m in members:
            if len(paths[m]) == stop:
                last[m] = segment
        todo += [(segment, stop, branch) for branch in reversed(_branches(paths, going_on, stop))]
    return Forest(
        segment_offsets=np.asarray(offsets, dtype=np.int64),
        segment_parent=np.asarray(parents, dtype=np.int64),
        segment_sample=np.asarray(owners, dtype=np.int64),
        segment_depth=np.asarray(depths, dtype=np.int64),
        sample_segment=last,
    )


def _branches(paths: list[_Path], members: list[int], depth: int) -> list[list[int]]:
    """`members` by their token at `depth`, in order of first appearance; one without a token is a branch of its own."""
    groups: dict[Any, list[int]] = {}
    for m in members:
        groups.setdefault(paths[m].at(depth) if len(paths[m]) > depth else m, []).append(m)
    return list(groups.values())


def _common(paths: list[_Path], members: list[int], depth: int) -> int:
    """How far all `members` agree, from `depth` on."""
    first = paths[members[0]]
    stop = len(first)
    for m in members[1:]:
        stop = first.agrees_until(paths[m], depth, min(stop, len(paths[m])))
    return stop
