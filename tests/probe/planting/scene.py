"""What a fault is planted in: a tiny model whose every weight counts, and samples whose tokens can be told apart.

A place is (sample, index in the sample). `Rows` finds places in a running forward by the ids that it embeds, so a plant
works in packed and padded batches and in samples by themselves, and needs nothing of the probe.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support.models import spread_out, with_pixels
from support.samples import make_sample
from support.tiny_models import tiny_model

from mmpack.families import get_family
from mmpack.schema.ragged import Ragged
from mmpack.schema.sample import Sample

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FAMILIES = (*QWEN, "internvl")


@dataclass(frozen=True)
class Answer:
    """What must be found: any of these modules, and the first token that parts there.

    A row of the tower is the token that it is merged into.
    `suggests`: a word of what the report says to look at.
    """

    modules: frozenset[str]
    sample: int
    token: int
    modality: str
    suggests: str = ""


@dataclass(frozen=True)
class Span:
    """A medium in a sample: its rows [start, stop), its modality and its content."""

    sample: int
    start: int
    stop: int
    modality: str
    medium: Any


class Scene:
    """A family's tiny model and five samples, drawn by a seed; `rng` chooses the places of faults."""

    def __init__(self, family: str, seed: int, longest: int = 24, kept_ids: bool = False):
        self.family, self.seed = family, seed
        self.rng = np.random.default_rng([seed, FAMILIES.index(family)])
        self.samples = _samples(family, self.rng, longest)
        if kept_ids:
            self.samples = [_with_kept_ids(s, self.rng) for s in self.samples]
        self.rows = Rows(self.samples)

    def model(self) -> Any:
        """A copy of the family's model: a fault in it is in no other."""
        return copy.deepcopy(_grown(self.family))

    def spans(self, *modalities: str) -> list[Span]:
        """Media of these modalities, or all, in the order of samples and tokens."""
        found = [
            Span(s, span.start, span.stop, span.modality, sample.media[span.media_index])
            for s, sample in enumerate(self.samples)
            for span in sample.modality_spans
        ]
        return [span for span in found if not modalities or span.modality in modalities]

    def pick(self, things: Any) -> Any:
        """One of them."""
        things = list(things)
        return things[int(self.rng.integers(len(things)))]

    def modality(self, sample: int, token: int) -> str:
        """Of a token: that of the medium whose row it is, else "text"."""
        for span in self.spans():
            if span.sample == sample and span.start <= token < span.stop:
                return span.modality
        return "text"

    def answer(
        self,
        model: Any,
        modules: Any,
        sample: int = 0,
        token: int = 0,
        suggests: str = "",
    ) -> Answer:
        """Of modules of `model`, or names of them."""
        names = {id(m): name for name, m in model.named_modules()}
        found = frozenset(m if isinstance(m, str) else names[id(m)] for m in modules)
        modality = self.modality(sample, token)
        return Answer(found, sample, token, modality, suggests)

    def first_prediction(self) -> tuple[int, int]:
        """The place of the first row that predicts a loss token: the first that the head is asked for."""
        return 0, self.samples[0].loss_spans[0].start - 1

    def first_medium(self, *modalities: str) -> tuple[int, int]:
        """The place of the first row of any medium."""
        span = self.spans(*modalities)[0]
        return span.sample, span.start


class Rows:
    """Where samples lie in the batch that a forward runs: filled as the ids are embedded."""

    def __init__(self, samples: list[Sample]):
        self.ids = [torch.as_tensor(s.input_ids) for s in samples]
        self.starts: dict[int, tuple[int, int]] = {}  # sample -> line, column of its first token
        self.shape: tuple[int, ...] = ()

    def watch(self, model: Any) -> None:
        """Follow the forwards of this model."""
        # a plain function: a copy of the model fills these rows, not a copy of them
        model.get_input_embeddings().register_forward_pre_hook(lambda m, args: self._find(m, args))

    def _find(self, module: Any, args: Any) -> None:
        ids = args[0].cpu()
        self.shape, self.starts = tuple(ids.shape), {}
        for s, own in enumerate(self.ids):
            for line, column in (ids == own[0]).nonzero().tolist():
                if torch.equal(ids[line, column : column + len(own)], own):
                    self.starts[s] = (line, column)

    def here(self) -> Iterator[tuple[int, int, int, int]]:
        """Samples of this forward: sample, line, first column, length."""
        for s, (line, column) in self.starts.items():
            yield s, line, column, len(self.ids[s])

    def of(self, span: Span) -> tuple[int, slice] | None:
        """Line and columns of a medium's rows, where this forward has them."""
        if span.sample not in self.starts:
            return None
        line, column = self.starts[span.sample]
        return line, slice(column + span.start, column + span.stop)


@functools.lru_cache(maxsize=4)
def _grown(family: str) -> Any:
    """Seeded; no bias is 0 and no norm's weight 1, so that leaving one out shows."""
    model = spread_out(tiny_model(family))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def _with_kept_ids(sample: Sample, rng: np.random.Generator) -> Sample:
    """Each loss token with a list of 1 to 30 ids, as a sampler leaves them."""
    targets = sample.input_ids[sample.loss_indices]
    lists = [{int(t), *rng.integers(0, 150_000, rng.integers(0, 30)).tolist()} for t in targets]
    return dataclasses.replace(sample, kept_ids=Ragged.of([sorted(ids) for ids in lists]))


def _samples(family: str, rng: np.random.Generator, longest: int) -> list[Sample]:
    about = get_family(family)
    fresh = iter(rng.permutation(np.arange(1000, 150_000))[:4000].tolist())  # no id comes twice

    def text(low: int, high: int) -> tuple[str, list[int]]:
        return "text", [next(fresh) for _ in range(int(rng.integers(low, high)))]

    def response() -> tuple[str, list[int]]:
        return "response", [next(fresh) for _ in range(int(rng.integers(3, 7)))]

    tiles = about.pixel_layout == "tiles"
    small, large = ((1, 4, 4), (2, 4, 4)) if tiles else ((1, 4, 6), (1, 12, 10))
    video = ("video", (2, 4, 4), "film") if about.video_token_id else ("image", (3, 4, 4), "tiles")
    parts = [
        [
            text(4, 9),
            ("image", small, "a"),
            text(2, 5),
            ("image", small, "b"),
            text(1, 3),
            response(),
        ],
        [text(4, 9), ("image", large, "large"), text(1, 3), response()],
        [text(4, 9), video, text(1, 3), ("image", small, "c"), text(1, 3), response()],
        [text(4, 9), ("image", small, "d"), response(), text(1, 3), response()],
        [text(longest - 4, longest), response()],
    ]
    order = rng.permutation(len(parts))
    return with_pixels([make_sample(parts[i], f"s{i}", family=family) for i in order])
