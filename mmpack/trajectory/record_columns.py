"""Columns of a record, checked: lists, versions, rewards, routes. R counts the ids of its response."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmpack.errors import ArgumentError, check_whole, kind_of
from mmpack.families import Family
from mmpack.layout.occurrences import occurring_media
from mmpack.layout.runs import placeholder_runs
from mmpack.schema.media import Medium
from mmpack.schema.ragged import Ragged
from mmpack.schema.routes import compact_routes, layers_with_experts
from mmpack.schema.sample import Sample
from mmpack.schema.spans import Score
from mmpack.trajectory.trajectory import Turn, array_of, begins_with

if TYPE_CHECKING:
    from mmpack.trajectory.records import Record

# a score, and the place in the response whose token it is of; None: the turn's
Paid = tuple[Score, int | None]


def media_in(
    ids: np.ndarray, media: Sequence[Medium], family: Family, expanded: bool
) -> list[Medium]:
    """The first of `media`, as many as `ids` have placeholders for."""
    if not expanded:
        return list(media[: int(np.isin(ids, list(family.prompt_ids.values())).sum())])
    runs = len(placeholder_runs(ids, family))
    counts = [family.spans_of(m.modality, m.grid_thw) for m in media]
    return [m for m, end in zip(media, np.cumsum(counts), strict=True) if end <= runs]


def mask_of(where: str, given: Any, count: int) -> np.ndarray:
    """bool [count]. Raises: ArgumentError."""
    mask = array_of(given)
    if mask is None:
        mask = np.zeros((0, 0), dtype=object)
    known = mask.shape == (count,) and (not count or mask.dtype.kind in "biu")
    if not known or not np.isin(mask, (0, 1)).all():
        raise ArgumentError(
            f"{where}: mask has shape {list(mask.shape)} and dtype {mask.dtype}, expected 0 or 1 [{count}]. "
            "Fix: pass one value per response id, 1 where the policy sampled"
        )
    return mask.astype(bool)


def values_of(where: str, given: Any, count: int) -> np.ndarray | None:
    """float32 [count]; those of ids that were not sampled may be anything. Raises: ArgumentError."""
    if given is None:
        return None
    values = array_of(given, np.float32)
    if values is None or values.shape != (count,):
        found = kind_of(given) if values is None else f"of shape {list(values.shape)}"
        raise ArgumentError(
            f"{where}: logprobs is {found}, expected [{count}]. "
            "Fix: pass one value per response id, anything where the mask is 0"
        )
    return values


def lists_of(given: Any, count: int, name: str, where: str, scored: bool = False) -> Ragged | None:
    """R lists. Raises: ArgumentError."""
    if given is None:
        return None
    lists = given
    if not isinstance(given, Ragged) and not scored:
        try:
            lists = Ragged.of(given)
        except ArgumentError as error:
            raise ArgumentError(f"{where}: {name}: {error}") from None
    if not isinstance(lists, Ragged) or (lists.logprobs is not None) != scored:
        fix = "Ragged.of(lists, logprobs)" if scored else "a list of ids per response id"
        raise ArgumentError(f"{where}: {name} is {kind_of(given)}. Fix: pass {fix}")
    if len(lists) != count:
        raise ArgumentError(
            f"{where}: {name} has {len(lists)} lists for {count} response ids. "
            "Fix: pass one list per id, empty where the mask is 0"
        )
    return lists


def versions_of(given: Any, count: int, where: str) -> list[tuple[int, int, str]]:
    """[start, stop) of the response and the name of the weights, in order. Raises: ArgumentError."""
    if given is None:
        return []
    if isinstance(given, str | int) and not isinstance(given, bool):
        return [(0, count, str(given))]
    if not isinstance(given, Sequence) or isinstance(given, bytes | bool):
        raise ArgumentError(
            f"{where}: policy_versions is {kind_of(given)}. Fix: pass a name, or (start, stop, name) per run of ids"
        )
    out: list[tuple[int, int, str]] = []
    end = 0
    for i, span in enumerate(given):
        try:
            start, stop, name = span
            start, stop = index(start), index(stop)
            named = isinstance(name, str | Integral) and not isinstance(name, bool)
        except (TypeError, ValueError):
            named = False
        if not named:
            raise ArgumentError(
                f"{where}: policy_versions[{i}] is {kind_of(span)}, expected whole numbers and a name. "
                "Fix: pass (start, stop, name)"
            )
        if not end <= start <= stop <= count:
            raise ArgumentError(
                f"{where}: policy_versions[{i}] is [{start}, {stop}) after {end}, of {count} response ids. "
                "Fix: sort them, without overlap, and count ids of the response"
            )
        out.append((start, stop, str(name)))
        end = stop
    return out


def rewards_of(
    record: Record, runs: Sequence[tuple[int, int]], count: int, where: str
) -> list[list[Paid]]:
    """Return the rewards of each run: a number is the last run's; a token's is its own run's, or the one before."""
    out: list[list[Paid]] = [[] for _ in runs]
    name = record.score
    if record.turn_rewards is not None:
        if record.rewards is not None:
            raise ArgumentError(f"{where} has both rewards and turn_rewards. Fix: pass one of them")
        values = _numbers(record.turn_rewards, "turn_rewards", len(runs), "turn", where)
        if not values.ndim:
            raise ArgumentError(
                f"{where}: turn_rewards is a number. Fix: pass a list, one per turn"
            )
        return [[(Score(name, value), None)] for value in values.tolist()]
    if record.rewards is None:
        return out
    values = _numbers(record.rewards, "rewards", count, "response id", where)
    if not values.ndim:
        out[-1].append((Score(name, float(values)), None))
        return out
    starts = [a for a, _ in runs]
    for at in np.flatnonzero(values).tolist():
        k = max(int(np.searchsorted(starts, at, side="right")) - 1, 0)
        inside = runs[k][0] <= at < runs[k][1]
        out[k].append((Score(name, float(values[at])), at if inside else None))
    return out


def _numbers(given: Any, name: str, count: int, of: str, where: str) -> np.ndarray:
    """float64 [] or [count], finite. Raises: ArgumentError."""
    values = None if isinstance(given, bool) else array_of(given, np.float64)
    if values is None or values.shape not in ((), (count,)) or not np.isfinite(values).all():
        shown = "" if values is None or not values.size else f"of shape {list(values.shape)}"
        raise ArgumentError(
            f"{where}: {name} is {shown or kind_of(given)}, expected finite numbers [{count}]. Fix: pass one per {of}"
        )
    return values


class Routes(NamedTuple):
    """Routes of tokens [start, start + n) of a record."""

    values: np.ndarray  # uint8 or uint16 [n, layers, k]
    start: int

    @classmethod
    def of(cls, record: Record, num_experts: int | None, where: str) -> Routes | None:
        """Return the routes of a record, compact, of its layers with experts. Raises: ArgumentError."""
        given = record.routed_experts
        if given is None:
            return None
        check_whole(where, "routes_start", record.routes_start, least=0)
        found = array_of(given)
        array = np.zeros(0, object) if found is None else found
        if num_experts is None:
            wide = array.dtype.kind in "iu" and array.size and int(array.max()) > 255
            num_experts = 2**16 if wide else 256
        routes = layers_with_experts(compact_routes(array, num_experts))
        return cls(np.ascontiguousarray(routes), record.routes_start)

    def cut(self, stop: int, where: str) -> np.ndarray:
        """Routes of tokens [0, stop): the engine may not have run the last one yet. Raises: ArgumentError."""
        have = len(self.values)
        if have < stop - 1:
            raise ArgumentError(
                f"{where}: routed_experts end at token {have}, but the answer at {stop}. "
                "Fix: record all but the last token's, or leave out routed_experts"
            )
        missing = np.zeros((max(stop - have, 0), *self.values.shape[1:]), self.values.dtype)
        return np.concatenate([self.values[:stop], missing])


def full_routes(
    routes: Routes, sample: Sample, context: int, turns: Sequence[Turn], where: str
) -> Routes:
    """Routes from token 0 on: what an engine left out, since it had returned it, is an earlier turn's.

    Args: `sample`, `context`: the record's ids and media, and the tokens before its first answer.
    """
    if not routes.start:
        return routes
    ids, media = sample.input_ids[:context], occurring_media(sample, context)
    for turn in sorted(turns, key=len, reverse=True):
        if (
            turn.routed_experts is not None
            and turn.routed_experts.shape[1:] == routes.values.shape[1:]
            and routes.start < len(turn)
            and begins_with(ids, media, turn)
        ):
            return Routes(np.concatenate([turn.routed_experts[: routes.start], routes.values]), 0)
    raise ArgumentError(
        f"{where}: routed_experts begin at token {routes.start}, but no earlier turn has those before it. "
        "Fix: request all (routed_experts_prompt_start=0), or leave them out"
    )
