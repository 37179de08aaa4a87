"""What a PackLoader is given, checked, and the order of its steps: items by groups, shuffled by epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mmpack.adapters.checks import check_each, check_kind
from mmpack.errors import ArgumentError, check_whole, kind_of

STATE_VERSION = 1


def groups_in(names: Sequence[str]) -> list[list[int]]:
    """The items of each group, groups in order of first appearance."""
    found: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        found.setdefault(name, []).append(i)
    return list(found.values())


def steps_of(
    groups: list[list[int]],
    groups_per_step: int | None,
    shuffle: bool,
    drop_last: bool,
    seed: int,
    epoch: int,
) -> list[list[int]]:
    """The items of each step. Shuffled as torch's DistributedSampler does: one permutation of seed + epoch."""
    order = list(range(len(groups)))
    if shuffle:
        generator = torch.Generator().manual_seed((seed + epoch) % 2**64)
        order = torch.randperm(len(groups), generator=generator).tolist()
    size = max(len(groups), 1) if groups_per_step is None else groups_per_step
    cuts = [order[i : i + size] for i in range(0, len(order), size)]
    if drop_last and cuts and len(cuts[-1]) < size:
        cuts.pop()
    return [[i for g in cut for i in groups[g]] for cut in cuts]


# ---- arguments ----------------------------------------------------------------------------------------


def check_source(
    samples: Any,
    steps: Any,
    loss_columns: Mapping[str, Sequence[Any]],
    groups: Sequence[str] | None,
    ordered: bool,
) -> None:
    """Raise ArgumentError unless there is one source, with a value per item in each column."""
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
        return check_kind(
            "PackLoader: steps", steps, Iterable, "pass an iterable of lists of samples"
        )
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
        raise ArgumentError(
            f"PackLoader: samples is {kind_of(samples)}, which lacks a length or items by index. "
            "Fix: pass a list, a map-style data set, or steps="
        )
    check_each("PackLoader", len(samples), "samples", {**loss_columns, "groups": groups})


def check_ranks(rank: int, ranks: int) -> None:
    check_whole("PackLoader", "ranks", ranks)
    check_whole("PackLoader", "rank", rank, least=0)
    if rank >= ranks:
        raise ArgumentError(
            f"PackLoader: rank is {rank}, of {ranks} ranks. Fix: pass 0 to {ranks - 1}; ranks is the world size"
        )


def device_of(given: torch.device | str) -> torch.device:
    """With its number: the current device is a thread's own. Raises ArgumentError for none, or one that is not here."""
    check_kind("PackLoader: device", given, str | torch.device, "pass model.device")
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise ArgumentError(
            f"PackLoader: device is {str(given)!r:.60}, which torch does not have here. Fix: pass model.device"
        ) from None
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_state(state: Any, order: Mapping[str, Any], planned: Mapping[str, Any]) -> None:
    """Raise ArgumentError for what is no state, and for one of a loader with another `order`, or in the middle of a
    step other `planned` options."""
    kinds = {"order": Mapping, "planned": Mapping}
    kinds |= {"step_digest": str | None, "samples_digest": str | None}
    numbers = ("epoch", "step", "batch")
    if not isinstance(state, Mapping) or not {"version", *numbers, *kinds} <= set(state):
        raise ArgumentError(
            "PackLoader: this is not a state of PackLoader. Fix: pass what its state_dict() returned"
        )
    if state["version"] != STATE_VERSION:
        raise ArgumentError(
            f"PackLoader: the state has version {state['version']!r:.20}, this mmpack reads {STATE_VERSION}. "
            "Fix: use the mmpack that wrote it"
        )
    for name in numbers:
        check_whole("PackLoader", f"the state's {name}", state[name], least=0)
    for name, kind in kinds.items():
        fix = "pass what state_dict() returned, unchanged"
        check_kind(f"PackLoader: the state's {name}", state[name], kind, fix)
    odd = _changes(state["order"], order)
    if state["batch"]:
        # a state of before `keep_groups` is of a loader without it
        odd += _changes({"keep_groups": False, **state["planned"]}, planned)
    if odd:
        raise ArgumentError(
            f"PackLoader: the state is of a loader with {'; '.join(odd)}. Fix: pass the same options"
            + (", or a state saved between steps" if state["batch"] else "")
        )


def _changes(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}={theirs.get(name)!r:.40}, this one's is {value!r:.40}"
        for name, value in mine.items()
        if theirs.get(name) != value
    ]
