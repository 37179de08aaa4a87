"""What a PackLoader is given, checked where it enters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mmpack.errors import ArgumentError, check_whole, kind_of


def changes(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}={theirs.get(name)!r:.40}, this one's is {value!r:.40}"
        for name, value in mine.items()
        if theirs.get(name) != value
    ]


def check_kinds(state: Mapping[str, Any], **kinds: Any) -> None:
    for name, kind in kinds.items():
        if not isinstance(state[name], kind):
            raise ArgumentError(
                f"PackLoader: the state's {name} is {kind_of(state[name])}. Fix: pass what state_dict() returned, "
                "unchanged"
            )


def check_numbers(
    groups_per_step: int | None, ranks: int, rank: int, prefetch: int, seed: int
) -> None:
    if groups_per_step is not None:
        check_whole("PackLoader", "groups_per_step", groups_per_step)
    check_whole("PackLoader", "ranks", ranks)
    check_whole("PackLoader", "rank", rank, least=0)
    check_whole("PackLoader", "prefetch", prefetch, least=0)
    check_whole("PackLoader", "seed", seed, least=0)
    if rank >= ranks:
        raise ArgumentError(
            f"PackLoader: rank is {rank}, of {ranks} ranks. Fix: pass 0 to {ranks - 1}; ranks is the world size"
        )


def check_source(
    samples: Any,
    steps: Any,
    loss_columns: Mapping[str, Sequence[Any]],
    groups: Sequence[str] | None,
    ordered: bool,
) -> None:
    if (samples is None) == (steps is None):
        raise ArgumentError(
            "PackLoader: it takes either samples or steps. Fix: pass exactly one of them"
        )
    if steps is not None:
        if ordered or loss_columns:
            raise ArgumentError(
                "PackLoader: steps bring their own order and columns. Fix: leave out groups_per_step, groups, "
                "shuffle, drop_last and loss_columns; a step's items may be pairs (Sample, columns)"
            )
        if not hasattr(steps, "__iter__"):
            raise ArgumentError(
                f"PackLoader: steps is {type(steps).__name__}. Fix: pass an iterable of lists of samples"
            )
        return
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
        raise ArgumentError(
            f"PackLoader: samples is {type(samples).__name__}, which lacks a length or items by index. "
            "Fix: pass a list, a map-style data set, or steps="
        )
    given = loss_columns if groups is None else {**loss_columns, "groups": groups}
    for name, column in given.items():
        if not hasattr(column, "__len__") or len(column) != len(samples):
            found = len(column) if hasattr(column, "__len__") else type(column).__name__
            raise ArgumentError(
                f"PackLoader: {name} has {found} entries for {len(samples)} samples. Fix: pass one for each"
            )


def device_of(given: torch.device | str) -> torch.device:
    """With its number: the current device is a thread's own. Raises ArgumentError for none, or one that is not here."""
    try:
        if not isinstance(given, str | torch.device):
            raise TypeError
        device = torch.device(given)
        torch.empty(0, device=device)
    except (TypeError, RuntimeError, AssertionError):
        shown = (
            kind_of(given) if not isinstance(given, str | torch.device) else f"{str(given)!r:.60}"
        )
        raise ArgumentError(
            f"PackLoader: device is {shown}, which torch does not have here. Fix: pass model.device"
        ) from None
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
