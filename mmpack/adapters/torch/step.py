"""One optimizer step of a PackLoader: a plan of the samples of all ranks, and this rank's batches."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mmpack.errors import ArgumentError
from mmpack.families import get_family
from mmpack.packing.batch import PackedBatch
from mmpack.packing.calls import Counts, calls_of, counts_of, most_of
from mmpack.planning.plan import Plan
from mmpack.schema.dead_letters import DeadLetter
from mmpack.schema.plain_json import canonical_json
from mmpack.schema.sample import Sample


@dataclass(eq=False)
class Step:
    """Iterate over it once, for this rank's batches. What follows an optimizer step is the next Step.

    Its samples must stay as they are until it ends: a loader's `state_dict()` names them by their tokens.

    `samples`: of all ranks. `bins`: indices into them of this rank's batches, in order. `share`: whether each batch
    shares prefixes. `first`: the batches that a run before this one took already; iteration begins there, and `len`
    counts what it gives. `dead`: with `dead_letters`, what was left out: it is not among `samples`, or no bin has it.
    """

    epoch: int
    number: int  # of the step in its epoch
    samples: list[Sample]
    plan: Plan
    bins: list[list[int]]
    share: list[bool]
    first: int = 0
    dead: list[DeadLetter] = field(default_factory=list)
    # where steps that know their place begin this one, and the next
    places: tuple[Any, Any] = field(default=(None, None), repr=False)
    _batches: Iterator[PackedBatch] | None = field(default=None, repr=False)

    @property
    def total_tokens(self) -> int:
        """Loss tokens of all ranks' batches, as `policy_loss` takes them."""
        return self.plan.total_tokens

    @property
    def total_samples(self) -> int:
        return self.plan.total_samples

    def __len__(self) -> int:
        return len(self.bins) - self.first

    def __iter__(self) -> Iterator[PackedBatch]:
        if self._batches is None:
            raise ArgumentError(
                f"PackLoader: step {self.number} of epoch {self.epoch} is over, or its batches were read already. "
                "Fix: read each step once, in the loop over the loader"
            )
        batches, self._batches = self._batches, None
        return batches

    @functools.cached_property
    def tower_runs(self) -> list[Counts]:
        """How often the towers run in each micro-batch, on the rank that needs them most: known from the plan."""
        ranks = [[self.plan.bins[b] for b in rank] for rank in self.plan.ranks]
        return [most_of(map(self._counts, bins)) for bins in zip(*ranks, strict=True)]

    def _counts(self, members: list[int]) -> Counts:
        """How often the towers run for one batch, if it holds each medium once."""
        if not members:
            return Counts()
        samples = [self.samples[i] for i in members]
        media = {m.cache_key: m for s in samples for m in s.media}
        return counts_of(calls_of(get_family(samples[0].family), list(media.values())))

    @functools.cached_property
    def digest(self) -> str:
        """sha256 hex of the batches of all ranks: which samples lie in which, their tokens and media."""
        kept = sorted(i for members in self.plan.bins for i in members)
        contents = [
            (s.sample_id, digest_of(s.input_ids.tolist()), [m.cache_key for m in s.media])
            for s in (self.samples[i] for i in kept)
        ]
        return digest_of([contents, self.plan.bins, self.plan.ranks, self.plan.share])


Cut = Step | str | None  # a step that a place is in the middle of, or its digest, as states have it


def digest_of_cut(cut: Cut) -> str | None:
    """A step's digest is made only when it is asked for: it reads all tokens."""
    return cut.digest if isinstance(cut, Step) else cut


def digest_of(value: Any) -> str:
    """sha256 hex of plain values."""
    text = canonical_json({"of": value})
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
