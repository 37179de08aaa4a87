"""Which rows are recorded: tokens of samples (text model) and rows of media (vision tower), and where each is kept.

A place is the index of a row in the arrays of a record. The text model's rows are (sample, token). A tower's rows are
(sample, medium, row), in the order of its pixels, also where a tower computes them window by window; its modules have
as many rows per patch as they have: 1 before merging, 1/4 after, or more, as with a class token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, kind_of
from mmpack.families import get_family
from mmpack.schema.sample import Sample

TEXT = "text"
BEFORE = "text before media"


@dataclass
class Places:
    """Places of a set of samples. `tokens`: (sample, token) of each place; `media`: (sample, medium, patches)."""

    sample_ids: list[str]
    lengths: list[int]
    tokens: np.ndarray  # int64 [places, 2]
    token_kinds: list[str]  # names that token_kind counts
    token_kind: np.ndarray  # int16 [places]
    media: np.ndarray  # int64 [occurrences, 4]: sample, medium, patches, first token
    grids: np.ndarray  # int64 [occurrences, 3]
    placeholders: list[list[int]]  # of each occurrence: its tokens, in order
    modalities: list[str]  # of each occurrence
    # whether patches lie row by row in t tiles; else those that are merged lie together
    tiles: bool = False
    first: dict[int, int] = field(default_factory=dict)  # sample -> its first place

    def __post_init__(self) -> None:
        if not self.first:
            for place, sample in enumerate(self.tokens[:, 0].tolist()):
                self.first.setdefault(sample, place)

    @property
    def patches(self) -> np.ndarray:
        """int64 [occurrences + 1]: where each medium's patches begin."""
        return np.concatenate([[0], np.cumsum(self.media[:, 2])]).astype(np.int64)

    def count(self, space: str) -> int:
        """How many places a space has: `text`, or rows per patch as in `1/4`."""
        if space == TEXT:
            return len(self.tokens)
        return int(Fraction(space) * int(self.patches[-1]))

    def numbers_of(self, samples: Sequence[Sample]) -> list[int]:
        """The number of each sample among all that are probed: a side may run them in parts. Raises: ArgumentError."""
        numbers = {name: k for k, name in enumerate(self.sample_ids)}
        for sample in samples:
            if sample.sample_id not in numbers:
                raise ArgumentError(
                    f"probe: sample {sample.sample_id!r:.60} is none of those that are recorded. "
                    "Fix: run the samples that probe.run was given"
                )
        return [numbers[sample.sample_id] for sample in samples]

    def chosen(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Places of a sample's tokens, and the tokens."""
        start = self.first.get(sample)
        if start is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        stop = int(np.searchsorted(self.tokens[:, 0], sample, side="right"))
        return np.arange(start, stop), self.tokens[start:stop, 1]

    def describe(self, space: str, place: int) -> dict[str, Any]:
        """sample, token, modality; of a tower's row also medium and row."""
        if space == TEXT:
            sample, token = self.tokens[place].tolist()
            kind = self.token_kinds[self.token_kind[place]]
            return {"sample": self.sample_ids[sample], "token": token, "modality": kind}
        share = Fraction(space)
        ends = [int(share * int(p)) for p in self.patches]
        which = int(np.searchsorted(ends, place, side="right")) - 1
        sample, medium, _, token = self.media[which].tolist()
        row, rows = place - ends[which], ends[which + 1] - ends[which]
        own = self.placeholders[which]
        if own:
            token = own[self._merged(which, row, rows, len(own))]
        return {
            "sample": self.sample_ids[sample],
            "token": token,
            "modality": self.modalities[which],
            "medium": medium,
            "row": row,
        }

    def _merged(self, which: int, row: int, rows: int, tokens: int) -> int:
        """Which of a medium's `tokens` a row of its `rows` becomes; a class token the first of its tile."""
        t, h, w = self.grids[which].tolist()
        side = math.isqrt(max(h * w * t // tokens, 1))  # of the square that is merged
        per_tile = rows // t
        if not self.tiles or per_tile not in (h * w, h * w + 1):
            return row * tokens // rows
        tile, patch = divmod(row, per_tile)
        y, x = divmod(max(patch - (per_tile - h * w), 0), w)
        return tile * (tokens // t) + (y // side) * (w // side) + x // side

    def kinds(self, space: str) -> tuple[list[str], np.ndarray]:
        """Names, and for each place of the space which name it has."""
        if space == TEXT:
            return self.token_kinds, self.token_kind
        names = sorted(set(self.modalities))
        share = Fraction(space)
        counts = [int(share * int(p)) for p in self.media[:, 2]]
        kind = np.repeat([names.index(m) for m in self.modalities], counts)
        return names, kind.astype(np.int16)

    def to_dict(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in SAVED}
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in given.items()}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Places:
        given = {name: document[name] for name in SAVED}
        for name, (dtype, shape) in ARRAYS.items():
            given[name] = np.array(given[name], dtype=dtype).reshape(shape)
        return cls(**given)


ARRAYS = {  # fields that are arrays
    "tokens": (np.int64, (-1, 2)),
    "token_kind": (np.int16, -1),
    "media": (np.int64, (-1, 4)),
    "grids": (np.int64, (-1, 3)),
}
SAVED = tuple(f.name for f in fields(Places) if f.name != "first")


def places_of(samples: Sequence[Sample], tokens: Any = "all") -> Places:
    """Places of these samples. `tokens`: "all", "loss" (the rows that predict loss tokens), or indices.

    Indices are for each sample, negative from its end: a sequence of ints; or `{{sample_id: indices}}`, and no token of
    samples that it leaves out. Raises: ArgumentError.
    """
    if not len(samples):
        raise ArgumentError("probe: samples is empty. Fix: pass one or more")
    names = [s.sample_id for s in samples]
    if len(set(names)) < len(names):
        raise ArgumentError(
            "probe: two samples have the same sample_id. Fix: give each sample an id of its own"
        )
    pairs, kinds, kind_of_place = [], [BEFORE], []
    media, grids, placeholders, modalities = [], [], [], []
    for i, sample in enumerate(samples):
        chosen = _chosen(sample, tokens)
        labels = _labels(sample)
        for token in chosen:
            label = labels[token]
            if label not in kinds:
                kinds.append(label)
            pairs.append((i, token))
            kind_of_place.append(kinds.index(label))
        for j, medium in enumerate(sample.media):
            own = _placeholders(sample, j)
            media.append((i, j, medium.num_patches, own[0] if own else 0))
            grids.append(medium.grid_thw)
            placeholders.append(own)
            modalities.append(medium.modality)
    if not pairs:
        raise ArgumentError(
            f"probe: tokens={tokens!r:.60} chooses no token. Fix: pass tokens='all', or samples with loss tokens"
        )
    return Places(
        sample_ids=names,
        lengths=[len(s) for s in samples],
        tokens=np.array(pairs, dtype=np.int64),
        token_kinds=kinds,
        token_kind=np.array(kind_of_place, dtype=np.int16),
        media=np.array(media, dtype=np.int64).reshape(-1, 4),
        grids=np.array(grids, dtype=np.int64).reshape(-1, 3),
        placeholders=placeholders,
        modalities=modalities,
        tiles=get_family(samples[0].family).pixel_layout == "tiles",
    )


def _chosen(sample: Sample, tokens: Any) -> list[int]:
    length = len(sample)
    if isinstance(tokens, str):
        if tokens == "all":
            return list(range(length))
        if tokens == "loss":
            return sorted({t - 1 for s in sample.loss_spans for t in range(s.start, s.stop)})
        raise ArgumentError(f"probe: tokens is {tokens!r:.60}. Fix: pass 'all', 'loss' or indices")
    if isinstance(tokens, Mapping):
        tokens = tokens.get(sample.sample_id, ())
    try:
        indices = np.asarray(list(tokens))
    except TypeError:
        indices = np.empty(0, dtype=object)
    if (indices.size and indices.dtype.kind not in "iu") or indices.dtype == object:
        raise ArgumentError(
            f"probe: tokens is {kind_of(tokens)}, expected whole numbers. "
            f"Fix: pass 'all', 'loss', [0, -1] or {{sample_id: indices}}"
        )
    out = {int(i) + length * (int(i) < 0) for i in indices}
    wrong = [i for i in out if not 0 <= i < length]
    if wrong:
        raise ArgumentError(
            f"probe: token {wrong[0]} is not in sample {sample.sample_id!r:.60} of {length} tokens. "
            "Fix: pass indices into its input_ids"
        )
    return sorted(out)


def _labels(sample: Sample) -> list[str]:
    """Label of each token: its modality, or for text what it follows."""
    out = [BEFORE] * len(sample)
    spans = sorted(sample.modality_spans, key=lambda s: s.start)
    for k, span in enumerate(spans):
        stop = spans[k + 1].start if k + 1 < len(spans) else len(sample)
        out[span.start : span.stop] = [span.modality] * (span.stop - span.start)
        out[span.stop : stop] = [f"text after {span.modality}"] * (stop - span.stop)
    return out


def _placeholders(sample: Sample, medium: int) -> list[int]:
    """Tokens of a medium's placeholders; of frames between texts too."""
    spans = sorted(
        (s for s in sample.modality_spans if s.media_index == medium), key=lambda s: s.start
    )
    return [token for span in spans for token in range(span.start, span.stop)]
