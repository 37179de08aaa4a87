"""Records of other frameworks as trajectories, an episode at a time: what their readers have in common."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from mmpack.adapters.checks import check_each, check_groups, is_list
from mmpack.adapters.row_sample import prompt_group
from mmpack.errors import ArgumentError, MmpackError, kind_of, one_line
from mmpack.layout.names import numbered_in_groups
from mmpack.processors.wrap import Processor
from mmpack.trajectory.records import Record, from_records
from mmpack.trajectory.samples import to_samples
from mmpack.trajectory.trajectory import Trajectory

# an episode's number and what begins errors about it -> its records, and fields of its Trajectory
Read = Callable[[int, str], tuple[list[Record], dict[str, Any]]]


class Options(TypedDict, total=False):
    """What every reader hands to `mp.trajectory.from_records`, where it is described."""

    sampling: dict[str, Any] | None
    expanded: bool
    resampled: str
    num_experts: int | None


def read_episodes(
    names: Sequence[str], read: Read, processor: Processor, options: Options
) -> list[Trajectory]:
    """A trajectory per episode. Args: `names`: of the episodes, in errors. `options`: those of `read` come first."""
    made = []
    for i, name in enumerate(names):
        where = f"to_trajectories: {name}"
        with reading(where):
            records, about = read(i, where)
            about = {**options, **about}
            made.append(
                from_records(records, processor, trajectory_id=where, group_id=where, **about)
            )
    return made


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


def fields_of(
    given: Any, where: str, needed: Iterable[str] = (), fix: str = "pass it whole"
) -> dict[str, Any]:
    """The fields of a mapping, a pydantic model, a dataclass or a msgspec struct, values as they are.

    Raises: ArgumentError for anything else, and without one that is `needed`.
    """
    kind = type(given)
    names: Iterable[str] | None = getattr(kind, "model_fields", None)
    if isinstance(given, Mapping):
        fields = dict(given)
    else:
        if names is None and dataclasses.is_dataclass(kind):
            names = [f.name for f in dataclasses.fields(kind)]
        if names is None:
            names = getattr(kind, "__struct_fields__", None)
        if names is None:
            raise ArgumentError(f"{where} is {kind_of(given)}, expected an object. Fix: {fix}")
        fields = {name: getattr(given, name) for name in names}
    missing = [name for name in needed if fields.get(name) is None]
    if missing:
        raise ArgumentError(f"{where} has no {missing[0]}. Fix: {fix}")
    return fields


def part_of(fields: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """The fields of one that is an object itself; {} where it is absent. Raises: ArgumentError."""
    return {} if fields.get(name) is None else fields_of(fields[name], f"{where}.{name}")


def renamed(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Fields under our names. Args: `names`: ours -> theirs."""
    return {own: fields.get(theirs) for own, theirs in names.items()}


def urls_of(
    message: Any, where: str, kinds: Sequence[str] = ("image_url", "video_url")
) -> list[str]:
    """The URLs of a message's parts of these kinds, in order."""
    content = fields_of(message, where).get("content")
    out = []
    for part in content if isinstance(content, list | tuple) else ():
        fields = fields_of(part, f"{where}.content")
        if fields.get("type") in kinds:
            url = fields[fields["type"]]
            out.append(str(url if isinstance(url, str) else fields_of(url, where).get("url")))
    return out


def check_episodes(given: Any, what: str, lists: Mapping[str, Any]) -> list[Any]:
    """The episodes as a list, with one entry of each of `lists` per episode. Raises: ArgumentError."""
    refuse_no_list(what, given, "pass one entry per episode")
    check_each("to_trajectories", len(given), "episodes", lists)
    return list(given)


def refuse_no_list(name: str, given: Any, fix: str) -> None:
    if not is_list(given):
        raise ArgumentError(
            f"to_trajectories: {name} is {kind_of(given)}, expected a list. Fix: {fix}"
        )


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
    """The group of the first turn's prompt."""
    first = dataclasses.replace(
        trajectory, turns=trajectory.turns[:1], rewards=None, costs=None, verifiers=None
    )
    (sample,) = to_samples(first)
    return prompt_group(sample, len(trajectory.turns[0].context_ids))
