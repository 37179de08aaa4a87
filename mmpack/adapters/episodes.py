"""What readers of other frameworks' records have in common: fields of any object, groups and names of episodes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mmpack.adapters.checks import check_each, check_groups, is_list
from mmpack.adapters.row_sample import prompt_group
from mmpack.errors import ArgumentError, MmpackError, kind_of, one_line
from mmpack.layout.names import numbered_in_groups
from mmpack.trajectory.samples import to_samples
from mmpack.trajectory.trajectory import Trajectory


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """Read a foreign record, whose fields may hold anything: what one of them trips becomes an ArgumentError."""
    try:
        yield
    except MmpackError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        why = one_line(f"{type(error).__name__}: {error}")[:120]
        raise ArgumentError(
            f"{where}: a field is missing, or not what its framework writes ({why}). Fix: pass it whole"
        ) from error


def fields_of(given: Any, where: str) -> dict[str, Any]:
    """The fields of a mapping, a pydantic model, a dataclass or a msgspec struct, values as they are.

    Raises: ArgumentError for anything else.
    """
    if isinstance(given, Mapping):
        return dict(given)
    kind = type(given)
    names: Iterable[str] | None = getattr(kind, "model_fields", None)
    if names is None and dataclasses.is_dataclass(kind):
        names = [f.name for f in dataclasses.fields(kind)]
    if names is None:
        names = getattr(kind, "__struct_fields__", None)
    if names is None:
        raise ArgumentError(f"{where} is {kind_of(given)}, expected an object. Fix: pass it whole")
    return {name: getattr(given, name) for name in names}


def check_episodes(given: Any, what: str, lists: Mapping[str, Any]) -> list[Any]:
    """The episodes as a list, with one entry of each of `lists` per episode. Raises: ArgumentError."""
    if not is_list(given):
        raise ArgumentError(
            f"to_trajectories: {what} is {kind_of(given)}, expected a list. Fix: pass one entry per episode"
        )
    check_each("to_trajectories", len(given), "episodes", lists)
    return list(given)


def named(trajectories: Sequence[Trajectory], group_ids: Sequence[str] | None) -> list[Trajectory]:
    """`<group_id>/<k>` as each one's name; without group ids, episodes of one prompt are a group.

    Raises: ArgumentError.
    """
    groups = [_group(t) for t in trajectories] if group_ids is None else group_ids
    check_groups("to_trajectories", groups)
    return [
        dataclasses.replace(t, trajectory_id=name, group_id=group)
        for t, name, group in zip(trajectories, numbered_in_groups(groups), groups, strict=True)
    ]


def kept_as_json(fields: Mapping[str, Any], but: Iterable[str] = ()) -> dict[str, Any]:
    """What JSON can hold of `fields` that are not None; `left_out` names the others."""
    kept: dict[str, Any] = {}
    left_out = []
    for name, value in fields.items():
        if name in but or value is None:
            continue
        try:
            kept[name] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            left_out.append(name)
    return kept | ({"left_out": left_out} if left_out else {})


def _group(trajectory: Trajectory) -> str:
    """Of the first turn's prompt."""
    first = dataclasses.replace(
        trajectory, turns=trajectory.turns[:1], rewards=None, costs=None, verifiers=None
    )
    (sample,) = to_samples(first)
    return prompt_group(sample, len(trajectory.turns[0].context_ids))
