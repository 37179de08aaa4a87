"""What really parts between two models, bit by bit: every leaf's inputs and outputs, whole, without a probe."""

from __future__ import annotations

from typing import Any

import torch
from support.kept_ids import values

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs, packed_logprobs
from mmpack.adapters.transformers.unwrap import unwrap
from planting.registry import Plant
from planting.scene import Answer, Scene

Event = tuple[str, list[torch.Tensor]]


def events_of(model: Any, scene: Scene) -> tuple[list[Event], torch.Tensor]:
    """In the order of execution, before and after each leaf; and logits [T, V] of the samples' pack."""
    whole, events, handles = unwrap(model, "events_of"), [], []

    def keep(name: str, values: Any) -> None:
        values = values if isinstance(values, tuple) else (values,)
        events.append((name, [v.detach().clone() for v in values if torch.is_tensor(v)]))

    for name, module in whole.named_modules():
        if not next(module.children(), None):
            first = name.endswith("rotary_emb")  # rows, of which it takes the dtype only
            handles.append(
                module.register_forward_pre_hook(lambda m, a, n=name, i=first: keep(n, a[i:]))
            )
            handles.append(module.register_forward_hook(lambda m, a, out, n=name: keep(n, out)))
    with torch.no_grad(), attach(model):
        logits = model(**model_inputs(mp.pack(scene.samples), model)).logits[0]
    for handle in handles:
        handle.remove()
    return events, logits


def assert_read(scene: Scene, plant: Plant) -> None:
    """The models are the same to the bit, and so are logits; what is read of them differs at every loss token."""
    healthy, planted, answer = plant.pair(scene)
    scene.rows.watch(healthy)
    (a, logits), (b, other) = events_of(healthy, scene), events_of(planted, scene)
    for (_, x), (_, y) in zip(a, b, strict=True):
        assert all(map(torch.equal, x, y))
    assert torch.equal(logits, other)
    batch = mp.pack(scene.samples)
    rows = logits[batch.loss_rows.long()].double()
    kept, _ = values(rows, batch.loss_targets, batch.kept_ids)
    with torch.no_grad(), attach(planted):
        read = packed_logprobs(planted, batch, **plant.side)
    every = rows.log_softmax(-1).gather(1, batch.loss_targets[:, None])[:, 0]
    assert (read - every).abs().max() <= 1e-5
    assert (kept - every > 1).all()
    assert (answer.sample, answer.token) == scene.first_prediction()


def places(scene: Scene) -> list[tuple[int, int]]:
    """(sample, index) of each row of the pack, by where the ids lie."""
    found = {column + t: (s, t) for s, _, column, n in scene.rows.here() for t in range(n)}
    return [found[row] for row in range(len(found))]


def first_parting(
    scene: Scene, healthy: list[Event], planted: list[Event]
) -> tuple[str, tuple[int, int]]:
    """The first leaf of which a bit differs; and the first place of the first rows of text model that differ."""
    where = places(scene)
    name = ""
    for (one, a), (other, b) in zip(healthy, planted, strict=True):
        if len(a) != len(b) or all(map(torch.equal, a, b)):
            assert one == other
            continue
        name = name or other
        for x, y in zip(a, b, strict=True):
            if "visual" in other or "vision_tower" in other or "projector" in other:
                continue
            axis = next(i for i, n in enumerate(x.shape) if n == len(where))
            off = (x != y).movedim(axis, 0).flatten(1).any(1).nonzero().flatten().tolist()
            if off:
                return name, min(where[row] for row in off)
    raise AssertionError(f"the text model's rows are equal; first: {name!r}")


def assert_planted(scene: Scene, pair: tuple[Any, Any, Answer]) -> None:
    """The answer is what bits say, and logits differ there or later, never before."""
    healthy, planted, answer = pair
    a, logits = events_of(healthy, scene)
    b, other = events_of(planted, scene)
    name, place = first_parting(scene, a, b)
    assert name in answer.modules, (name, answer)
    assert place == answer.reached, (name, place, answer)
    off = (logits != other).any(1).nonzero().flatten().tolist()
    where = [places(scene)[row] for row in off]
    assert where, "no logit differs"
    assert min(where) >= place, (min(where), place)
