"""The list of plants: a name, the families that it makes sense in, and the function that plants it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planting.scene import FAMILIES, Answer, Scene

Planting = Callable[[Scene, Any], Answer]


@dataclass(frozen=True)
class Plant:
    """A fault. `prepare` is done to both sides before it; `longest` is the length of the longest sample;
    `layouts` are those that it shows in. `kept_ids`: the samples have some. `side`: options of the planted
    side, where it is the fault and not the model."""

    name: str
    families: tuple[str, ...]
    put: Planting
    prepare: Callable[[Any], Any] | None = None
    longest: int = 24
    layouts: tuple[str, ...] = ("packed", "padded", "alone")
    kept_ids: bool = False
    side: dict[str, Any] = field(default_factory=dict)

    def scene(self, family: str, seed: int) -> Scene:
        """What it is planted in."""
        return Scene(family, seed, self.longest, self.kept_ids)

    def pair(self, scene: Scene) -> tuple[Any, Any, Answer]:
        """The healthy model, the planted one, and what must be found between them."""
        healthy, planted = scene.model(), scene.model()
        if self.prepare is not None:
            healthy, planted = self.prepare(healthy), self.prepare(planted)
        scene.rows.watch(planted)
        return healthy, planted, self.put(scene, planted)


PLANTS: dict[str, Plant] = {}


def plant(name: str, *families: str, **more: Any) -> Callable[[Planting], Planting]:
    """Put the function that follows on the list; for all families where none is named."""

    def add(put: Planting) -> Planting:
        assert name not in PLANTS
        PLANTS[name] = Plant(name, families or FAMILIES, put, **more)
        return put

    return add
