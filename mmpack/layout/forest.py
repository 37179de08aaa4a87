"""The prefix forest of a set of samples: rows that several samples share are laid out once.

A segment is a run of rows shared by the same samples; segments come in depth-first order, so that the rows
that see row k are one interval. Two samples share a token if its id, position, medium and routes agree, and all before
it; a run of placeholders is shared as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmpack.families import Family, get_family
from mmpack.layout.mrope import sample_positions
from mmpack.layout.occurrences import joined, occurrences
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
        return np.repeat(end, np.diff(self.segment_offsets)).astype(np.int32)


def build_forest(
    samples: Sequence[Sample],
    share: bool = True,
    positions: Sequence[np.ndarray] | None = None,
) -> Forest:
    """The forest of `samples`, in their order; `share=False` gives each sample a root of its own.

    Args: `positions`: int64 [rows, L] of each sample; computed from the samples if not given.

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
    if positions is None:
        positions = [positions_of(s) for s in samples]
    return _grow(_token_keys(samples, positions))


def positions_of(sample: Sample, family: Family | None = None) -> np.ndarray:
    """int64 [rows, L]: as the producer used them, or by the family's rule where it recorded none.

    `family`: the sample's, if it is known already.
    """
    if sample.position_ids is not None:
        return sample.position_ids
    return sample_positions(sample, family=family)[0]


def _token_keys(samples: Sequence[Sample], positions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """int64 [L, 2 + rows + …] per sample: id, number of the run (-1: text), positions, routes. Equal rows: one token.

    Runs have one number if media, ids, positions and routes agree in all of their tokens. Where placeholders see each
    other, media that touch are one run: what one of them is, changes the other.
    """
    runs: dict[tuple[tuple[str, ...], bytes, bytes, bytes], int] = {}
    keys = []
    for sample, position, routes in zip(samples, positions, _route_keys(samples), strict=True):
        run = np.full(len(sample), -1, dtype=np.int64)
        for start, stop, media in _runs(sample):
            ids, places = sample.input_ids[start:stop], position[:, start:stop]
            own = routes[start:stop].tobytes()
            key = (media, ids.tobytes(), places.tobytes(), own)
            run[start:stop] = runs.setdefault(key, len(runs))
        keys.append(np.column_stack([sample.input_ids, run, position.T, routes]))
    return keys


def _runs(sample: Sample) -> list[tuple[int, int, tuple[str, ...]]]:
    """Tokens [start, stop) that are shared as a whole, and the cache keys of their media."""
    touching = bool(get_family(sample.family).two_way_media)
    out: list[tuple[int, int, tuple[str, ...]]] = []
    for start, stop, indices in joined(occurrences(sample)):
        media = tuple(sample.media[m].cache_key for m in indices)
        if touching and out and out[-1][1] == start:
            start, _, before = out.pop()
            media = before + media
        out.append((start, stop, media))
    return out


def _route_keys(samples: Sequence[Sample]) -> list[np.ndarray]:
    """int64 [L, c] per sample: equal rows, equal routes; c is 0 where no sample has routes.

    With routes, a hidden state follows from them too: where they differ, no row can stand for both. One number says
    which layers and how many experts they are of, so that a sample without routes shares with its like only.
    """
    most = max(
        (s.routed_experts[:1].size for s in samples if s.routed_experts is not None), default=0
    )
    if not most:
        return [np.zeros((len(s), 0), np.int64) for s in samples]
    width = -(-most // 4)  # four ids of 16 bits in a number
    out = []
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


def _grow(keys: list[np.ndarray]) -> Forest:
    offsets, parents, owners, depths = [0], list[int](), list[int](), list[int]()
    last = np.full(len(keys), -1, dtype=np.int64)
    roots = _branches(keys, list(range(len(keys))), 0)
    # parent, depth, samples that have it
    todo = [(-1, 0, branch) for branch in reversed(roots)]
    while todo:
        parent, depth, members = todo.pop()
        stop = _common(keys, members, depth)
        segment = len(parents)
        offsets.append(offsets[-1] + stop - depth)
        parents.append(parent)
        owners.append(members[0])
        depths.append(depth)
        going_on = [m for m in members if len(keys[m]) > stop]
        for m in members:
            if len(keys[m]) == stop:
                last[m] = segment
        todo += [(segment, stop, branch) for branch in reversed(_branches(keys, going_on, stop))]
    return Forest(
        segment_offsets=np.asarray(offsets, dtype=np.int64),
        segment_parent=np.asarray(parents, dtype=np.int64),
        segment_sample=np.asarray(owners, dtype=np.int64),
        segment_depth=np.asarray(depths, dtype=np.int64),
        sample_segment=last,
    )


def _branches(keys: list[np.ndarray], members: list[int], depth: int) -> list[list[int]]:
    """`members` by their token at `depth`, in order of first appearance; one without a token is a branch of its own."""
    groups: dict[bytes, list[int]] = {}
    for m in members:
        token = keys[m][depth].tobytes() if len(keys[m]) > depth else b"end" + str(m).encode()
        groups.setdefault(token, []).append(m)
    return list(groups.values())


def _common(keys: list[np.ndarray], members: list[int], depth: int) -> int:
    """How far all `members` agree, from `depth` on."""
    first = keys[members[0]]
    stop = len(first)
    for m in members[1:]:
        stop = min(stop, len(keys[m]))
        differs = (first[depth:stop] != keys[m][depth:stop]).any(axis=1)
        if differs.any():
            stop = depth + int(np.argmax(differs))
    return stop
