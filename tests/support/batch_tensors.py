"""Every tensor of a batch by its place, and batches that are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch


def tensors(value: Any, name: str = "batch") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a batch holds, by its place; pixels of single media too."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            yield from tensors(getattr(value, f.name), f"{name}.{f.name}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{name}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from tensors(item, f"{name}[{i}]")


def assert_same(a: Any, b: Any) -> None:
    mine, theirs = dict(tensors(a)), dict(tensors(b))
    assert mine.keys() == theirs.keys() and len(mine) > 20
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name
    assert (a.sample_ids, a.stats, repr(a)) == (b.sample_ids, b.stats, repr(b))
