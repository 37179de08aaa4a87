"""The axes of the chain: by name and value, a run of the same step in another layout, or with something cached."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from chain.passes.problem import Problem
from chain.passes.run import STORE_BYTES, Part, Way, run
from chain.passes.suffix import prefix_run
from chain.record import Record
from chain.stages import STAGES, TOWER

from mmpack.adapters.transformers.attention import attach
from mmpack.adapters.transformers.linear_attention import has_linear_attention
from mmpack.adapters.transformers.tower import takes_encoded_media, tower_and_projector
from mmpack.cache.features import FeatureStore
from mmpack.errors import ArgumentError
from mmpack.invariant import batch_invariant
from mmpack.packing.pack import pack
from mmpack.packing.pad import pad
from mmpack.schema.sample import Sample

Run = Callable[[Any, Problem], Record]
_ALL = frozenset(STAGES)
# runs whose attention is transformers' own, which the invariant mode refuses
OWN_ATTENTION = {
    ("padding", "left, own attention"),
    ("padding", "right, own attention"),
    ("prefix_cache", "on"),
}


def reference(model: Any, problem: Problem, way: Way | None = None) -> Record:
    """Each sample packed by itself: batch 1, no padding, nothing cached."""
    return run(model, problem, alone(model, problem), way)


def alone(model: Any, problem: Problem) -> list[Part]:
    """A batch of each sample."""
    return [
        Part(pack([sample]).to(_device(model)), (i,)) for i, sample in enumerate(problem.samples)
    ]


def padded_alone(model: Any, problem: Problem) -> list[Part]:
    """The same as rectangles, for transformers' own attention."""
    return [
        Part(pad([sample]).to(_device(model)), (i,)) for i, sample in enumerate(problem.samples)
    ]


def axes_here(model: Any) -> dict[str, dict[str, Run]]:
    """The axes of one process; those of caches need a transformers whose forward takes encoded media."""
    out: dict[str, dict[str, Run]] = {
        "batch": {str(n): _in_batches(n) for n in (2, 4)},
        "pictures": {str(n): _beside_pictures(n) for n in (0, 1, 3)},
        "padding": {
            "left": _padded("left"),
            "right": _padded("right"),
            "left, own attention": _padded("left", attached=False),
            "right, own attention": _padded("right", attached=False),
        },
        "packed": {"in order": _packed(), "reversed": _packed(backwards=True)},
        "shared": {"prefix": _packed(share_prefix=True)},
    }
    if takes_encoded_media(model):
        out["feature_cache"] = {"store": _stored_features, "encode_once": _encoded_once}
        if not has_linear_attention(model):  # its state is no KV per token
            out["prefix_cache"] = {"on": prefix_run}
    return out


def equal_stages(axis: str, value: str) -> tuple[frozenset[str], frozenset[str]]:
    """Stages that `mmpack.invariant` holds equal bit for bit, forward and backward.

    The loss is a sum over the batches: its parts are rounded on their own.
    """
    forward = _ALL - {"loss"}
    if axis == "shared":  # branches are added first
        return forward, frozenset()
    if axis in ("tensor_parallel", "processor_cache"):
        return _ALL, _ALL
    # so are gradients to a picture that several samples have
    return forward, _ALL - frozenset(TOWER)


def within_mode(take: Run) -> Run:
    """The run within `mmpack.invariant`."""

    def run_it(model: Any, problem: Problem) -> Record:
        with batch_invariant(model):
            return take(model, problem)

    return run_it


def _in_batches(size: int) -> Run:
    def run_it(model: Any, problem: Problem) -> Record:
        parts = [
            _part(model, problem, range(k, min(k + size, len(problem.samples))), pad, side="right")
            for k in range(0, len(problem.samples), size)
        ]
        return run(model, problem, parts)

    return run_it


def _beside_pictures(count: int) -> Run:
    """All samples packed behind another one that has `count` pictures."""

    def run_it(model: Any, problem: Problem) -> Record:
        found = [c for c in problem.companions if len(c.media) == count]
        if not found:
            raise ArgumentError(
                f"chain: no companion has {count} pictures. Fix: give the problem one"
            )
        batch = pack([found[0], *problem.samples]).to(_device(model))
        return run(model, problem, [Part(batch, (None, *range(len(problem.samples))))])

    return run_it


def _padded(side: str, attached: bool = True) -> Run:
    def run_it(model: Any, problem: Problem) -> Record:
        part = _part(model, problem, range(len(problem.samples)), pad, side=side)
        return run(model, problem, [part], Way(attached=attached))

    return run_it


def _packed(backwards: bool = False, share_prefix: bool = False) -> Run:
    def run_it(model: Any, problem: Problem) -> Record:
        order = range(len(problem.samples))
        order = order[::-1] if backwards else order
        return run(model, problem, [_part(model, problem, order, pack, share_prefix=share_prefix)])

    return run_it


def _encoded_once(model: Any, problem: Problem) -> Record:
    half = len(problem.samples) // 2
    parts = [
        _part(model, problem, some, pack)
        for some in (range(half), range(half, len(problem.samples)))
    ]
    return run(model, problem, parts, Way(once=True))


def _stored_features(model: Any, problem: Problem) -> Record:
    """The second pass of each batch, whose features come from the store; the tower is not trained."""
    store, parts = FeatureStore(STORE_BYTES), alone(model, problem)
    with _frozen_tower(model):
        run(model, problem, parts, Way(features=store))
        return run(model, problem, parts, Way(features=store))


def processed_run(samples: Sequence[Sample]) -> Run:
    """The step with samples that a processor made with other settings of its cache: their pixels are what counts."""

    def run_it(model: Any, problem: Problem) -> Record:
        other = replace(problem, samples=list(samples))
        return run(model, other, alone(model, other))

    return run_it


def _part(model: Any, problem: Problem, chosen: Any, make: Any, **options: Any) -> Part:
    samples = [problem.samples[i] for i in chosen]
    return Part(make(samples, **options).to(_device(model)), tuple(chosen))


def _device(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device


@contextlib.contextmanager
def _frozen_tower(model: Any) -> Iterator[None]:
    with attach(model):
        weights = [p for m in tower_and_projector(model).modules for p in m.parameters()]
    trained = [p for p in weights if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)
