"""`scatter_scores`: named scores of samples, turns, regions and spans to loss tokens, [N] float32, in one launch.

The ops are mmpack::scatter_rewards (numbers [B] of samples) and mmpack::scatter_scores (a table of all scores).
Where a score lands is decided on the host. So is its amount, but for numbers [B] that lie on a GPU: those are not read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_name, check_number, kind_of
from mmpack.losses.rewards import SCATTER_REWARDS, SCATTER_SCORES
from mmpack.losses.rewards.placing import (
    ALL,
    LAST,
    MEAN,
    REGION,
    SEQUENCE,
    SPAN,
    TURN,
    Flat,
    Table,
    cut_to_last,
    scoped,
    table_of,
)
from mmpack.losses.samples import check_batch, check_weights
from mmpack.ops.custom_op import by_backend, define_op
from mmpack.ops.inputs import check_are_tensors
from mmpack.ops.records import Size
from mmpack.packing.places import LossPlaces
from mmpack.schema.spans import Score

At = Literal["last", "all", "mean"]
AT = {"last": LAST, "all": ALL, "mean": MEAN}
KINDS = {"turn": TURN, "region": REGION}
FARTHEST = 2**31 - 1  # no turn, region or token is that far


def scatter_scores(
    what: str,
    batch: Any,
    *scores: Any,
    of: type = Score,
    name: str = "reward",
    weights: Mapping[str, float] | None = None,
    at: str | Mapping[str, str] = "last",
) -> Tensor:
    """The sum of all scores on each loss token, [N] float32 on the batch's device; see `scatter_rewards`.

    Args: what: the function that errors name. scores: each B lists of `of`, [B] numbers, or a dict of name to [B]
    numbers. of: the type of a score, with `name`, `scope` and `value`. name: what bare numbers are called.
    """
    check_batch(what, batch)
    _check_places(what, at)
    if weights is not None:
        check_weights(what, weights)
    given = _collect(what, batch, scores, of, name, weights)
    _check_named(what, "weights", weights, given.names)
    if isinstance(at, Mapping):
        _check_named(what, "at", at, given.names)
    given.on_device = [
        (own, x.to(batch.cu_loss.device, non_blocking=True)) for own, x in given.on_device
    ]
    if len(given.on_device) == 1 and not given.count:
        ((own, numbers),) = given.on_device
        weight = 1.0 if weights is None else weights[own]
        count = len(batch.loss_turn)
        alone: Tensor = scatter_op(numbers, batch.cu_loss, count, weight, _place(at, own))
        return alone
    return _scatter(what, batch, given, weights, at)


@dataclass
class _Given:
    """All scores, in the order in which they add up: those of the host, by column; then numbers on a GPU."""

    sample: list[int]
    name: list[str]
    scope: list[Any]
    value: list[float]
    on_device: list[tuple[str, Tensor]]  # (name, [B])
    names: set[str]  # of all, those that `weights` leave out too

    @property
    def count(self) -> int:
        return len(self.value)


def _collect(
    what: str,
    batch: Any,
    scores: tuple[Any, ...],
    of: type,
    name: str,
    weights: Mapping[str, float] | None,
) -> _Given:
    """The scores that `weights` name, or all. Raises ArgumentError for what is none, and for values of these."""
    rows: list[tuple[int, Any, Any, Any]] = []  # sample, name, scope, value: a batch has thousands
    on_device: list[tuple[str, Tensor]] = []
    size = len(batch.sample_ids)
    for source in scores:
        named = source if isinstance(source, Mapping) else {name: source}
        for own, column in named.items():
            word = "rewards" if own == name else f"rewards[{own!r}]"
            _check_column(what, word, column, size)
            if isinstance(column, Tensor):
                if batch.cu_loss.is_cuda:
                    if size:
                        on_device.append((own, column.detach()))
                    continue
                column = column.detach().cpu().double().numpy()
            if isinstance(column, np.ndarray) and column.dtype.kind in "iuf":
                rows += [(b, own, "sequence", x) for b, x in enumerate(column.tolist())]
                continue
            for b, item in enumerate(column):
                if isinstance(item, Tensor) and item.ndim == 0 and not item.is_complex():
                    item = item.item()
                if isinstance(item, Real):
                    rows.append((b, own, "sequence", _float(item)))
                else:
                    rows += [(b, s.name, s.scope, s.value) for s in _scores(what, b, item, of)]
    for own in (*(row[1] for row in rows), *(own for own, _ in on_device)):
        if not isinstance(own, str):
            raise ArgumentError(
                f"{what}: the name of a score is {kind_of(own)}, expected a str. Fix: name it by a str"
            )
    names = {*(row[1] for row in rows), *(own for own, _ in on_device)}
    if weights is not None and not names <= weights.keys():
        rows = [row for row in rows if row[1] in weights]
        on_device = [(own, x) for own, x in on_device if own in weights]
    columns: list[list[Any]] = list(map(list, zip(*rows, strict=True))) or [[] for _ in range(4)]
    whose, own_names, scopes, values = columns
    if set(map(type, values)) - {float} or not np.isfinite(values).all():
        fix = "pass a finite number, or leave the score out"
        for b, own, _, value in rows:
            check_number(what, f"{own!r} of sample {batch.sample_ids[b]!r}", value, fix=fix)
        values = list(map(float, values))
    return _Given(whose, own_names, scopes, values, on_device, names)


def _scores(what: str, sample: int, item: Any, of: type) -> list[Any]:
    if type(item) is list and all(type(score) is of for score in item):
        return item
    listed = isinstance(item, Iterable) and not isinstance(item, Tensor)
    scores = list(item) if listed else [item]
    if isinstance(item, str) or not all(isinstance(score, of) for score in scores):
        raise ArgumentError(
            f"{what}: rewards[{sample}] is {item!r}, expected a number or a list of {of.__name__}. "
            f"Fix: pass one number per sample, or {of.__name__}(name, value)"
        )
    return scores


def _scatter(
    what: str,
    batch: Any,
    given: _Given,
    weights: Mapping[str, float] | None,
    at: str | Mapping[str, str],
) -> Tensor:
    """One launch for all scores."""
    places, count = _places_of(batch), len(batch.loss_turn)
    size, device = len(batch.sample_ids), batch.cu_loss.device
    flat, factor = _flattened(what, batch, given, weights, at)
    owner, start, stop = scoped(places, flat)
    tokens = np.bincount(owner, stop - start, len(factor))
    amount = factor.copy()
    with np.errstate(over="ignore"):  # found below
        amount[: given.count] *= given.value
    _check_have_tokens(what, batch, given, amount, tokens)
    shared = np.maximum(np.where(flat.at == MEAN, tokens, 1), 1)
    table = table_of(*cut_to_last(owner, start, stop, flat.at), count)
    if not given.on_device:
        _check_sums(what, table, amount / shared)
        values, factors = amount / shared, None
    else:
        values = amount[: given.count] / shared[: given.count]
        factors = np.concatenate([np.ones(given.count), (factor / shared)[given.count :]])[
            table.index
        ]
    moved = _moved(device, table, values, factors)
    numbers = moved["values"]
    if given.on_device:
        columns = [x.double() for _, x in given.on_device]
        numbers = torch.cat([numbers, *columns])
        assert len(numbers) == given.count + size * len(columns)
    scattered: Tensor = table_op(
        numbers,
        moved["index"],
        moved.get("factors"),
        moved["offsets"],
        moved["edges"],
        count,
        table.most,
    )
    return scattered


def _flattened(
    what: str,
    batch: Any,
    given: _Given,
    weights: Mapping[str, float] | None,
    at: str | Mapping[str, str],
) -> tuple[Flat, np.ndarray]:
    """The scores as columns, and the factor of each."""
    size = len(batch.sample_ids)
    names = given.name + [name for name, _ in given.on_device for _ in range(size)]
    scope = [_scope(what, batch, b, s) for b, s in zip(given.sample, given.scope, strict=True)]
    scope += [(SEQUENCE, 0, 0)] * (len(names) - given.count)
    kind, first, second = np.array(scope, dtype=np.int64).reshape(-1, 3).T
    place = {name: AT[_place(at, name)] for name in set(names)}
    flat = Flat(
        sample=np.array(given.sample + list(range(size)) * len(given.on_device), dtype=np.int64),
        kind=kind,
        first=first,
        second=second,
        at=np.array([place[name] for name in names], dtype=np.int64),
    )
    factor = [1.0 if weights is None else float(weights[name]) for name in names]
    return flat, np.array(factor, dtype=np.float64)


def _scope(what: str, batch: Any, sample: int, scope: Any) -> tuple[int, int, int]:
    """Kind and numbers of a scope."""
    if type(scope) is dict and len(scope) == 1:  # as most are: a batch has thousands
        ((kind, value),) = scope.items()
        if kind in KINDS and type(value) is int and 0 <= value <= FARTHEST:
            return KINDS[kind], value, 0
    if isinstance(scope, str) and scope == "sequence":
        return SEQUENCE, 0, 0
    if isinstance(scope, dict) and len(scope) == 1:
        ((kind, value),) = scope.items()
        if kind in KINDS and (type(value) is int or _are_integers(value)):
            return KINDS[kind], _near(value), 0
        if kind == "span" and _is_pair(value):
            return SPAN, _near(value[0]), _near(value[1])
    raise ArgumentError(
        f"{what}: scope {scope!r} of sample {batch.sample_ids[sample]!r} is unknown. "
        f'Fix: use "sequence", {{"turn": k}}, {{"region": k}} or {{"span": [start, stop]}}'
    )


def _float(number: Any) -> Any:
    """As a float where one holds it; `check_number` names the others."""
    return float(number) if abs(number) <= sys.float_info.max else number


def _is_pair(value: Any) -> bool:
    listed = isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim == 1)
    return listed and len(value) == 2 and _are_integers(*value)


def _near(number: Any) -> int:
    """A whole number of any size, cut to what turns, regions and tokens can be."""
    return min(max(int(number), -1), FARTHEST)


def _are_integers(*values: Any) -> bool:
    return all(isinstance(value, Integral) for value in values)


def _places_of(batch: Any) -> LossPlaces:
    """Where the turns, regions and spans are: made with the batch, or of its tensors."""
    places = getattr(batch, "loss_places", None)
    if isinstance(places, LossPlaces):
        return places
    columns = (batch.cu_loss, batch.loss_turn, batch.loss_token_index, batch.region_rows)
    return LossPlaces.of(*(column.cpu().numpy() for column in columns))


def _moved(
    device: torch.device, table: Table, values: np.ndarray, factors: np.ndarray | None
) -> dict[str, Tensor]:
    """All columns of a launch on `device`, by one copy that nobody waits for."""
    columns = {"edges": table.edges, "offsets": table.offsets, "index": table.index}
    columns |= {"values": values.view(np.int64)}
    columns |= {} if factors is None else {"factors": factors.view(np.int64)}
    joined = torch.from_numpy(np.concatenate(list(columns.values())))
    parts = joined.to(device, non_blocking=True).split([len(x) for x in columns.values()])
    moved = dict(zip(columns, parts, strict=True))
    floats = {
        name: moved[name].view(torch.float64) for name in {"values", "factors"} & moved.keys()
    }
    return moved | floats


def _check_have_tokens(
    what: str, batch: Any, given: _Given, amount: np.ndarray, tokens: np.ndarray
) -> None:
    lost = np.flatnonzero((tokens[: given.count] == 0) & (amount[: given.count] != 0))
    if len(lost):
        k = int(lost[0])
        raise ArgumentError(
            f"{what}: {given.name[k]!r} of sample {batch.sample_ids[given.sample[k]]!r} is {given.value[k]} for "
            f"{given.scope[k]!r}, which has no loss token. Fix: leave the sample out of the batch, give the score 0, "
            "or credit turns: mp.losses.turns_of(samples).rewards() has those without loss, for earlier ones' returns"
        )


def _check_sums(what: str, table: Table, amount: np.ndarray) -> None:
    piece = np.repeat(np.arange(len(table.offsets) - 1), np.diff(table.offsets))
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.bincount(piece, amount[table.index])
    too_large = ~(np.abs(sums) <= np.finfo(np.float32).max)
    if too_large.any():
        raise ArgumentError(
            f"{what}: scores add up to {sums[too_large][0]:g} on one token, which float32 can't hold. "
            "Fix: pass smaller weights"
        )


def _place(at: str | Mapping[str, str], name: str) -> str:
    return at if isinstance(at, str) else at.get(name, "last")


def _check_places(what: str, at: Any) -> None:
    if not isinstance(at, Mapping):
        check_name(what, "at", at, get_args(At))
        return
    for name, place in at.items():
        check_name(what, f"at[{name!r}]", place, get_args(At))


def _check_named(what: str, option: str, named: Mapping[str, Any] | None, there: set[str]) -> None:
    """A name that no score bears may be misspelt, where there are scores without a name in `named`."""
    if named is None:
        return
    missing = sorted(named.keys() - there, key=repr)
    left_out = sorted(there - named.keys(), key=repr)
    if option == "weights" and left_out and not named:
        raise ArgumentError(
            f"{what}: weights name no score and leave out {', '.join(map(repr, left_out))}. "
            "Fix: name the scores to use, or pass None to use all"
        )
    if missing and left_out:
        zero = ", with the factor 0 for those to leave out" if option == "weights" else ""
        raise ArgumentError(
            f"{what}: {option} names {missing[0]!r}, which no score of the batch has, and not "
            f"{', '.join(map(repr, left_out))}. Fix: name scores as they are{zero}"
        )


def _check_column(what: str, word: str, column: Any, num_samples: int) -> None:
    shape = None
    if isinstance(column, Tensor):
        check_are_tensors(what, rewards=column)
        if column.is_meta:
            raise ArgumentError(
                f"{what}: {word} are on the meta device. Fix: pass a tensor that has values"
            )
        if column.is_complex():
            raise ArgumentError(f"{what}: {word} are {column.dtype}. Fix: pass real numbers")
    if isinstance(column, (Tensor, np.ndarray)):
        shape = column.shape
    elif isinstance(column, Sequence) and not isinstance(column, (str, bytes)):
        shape = (len(column),)
    if shape is None or tuple(shape) != (num_samples,):
        found = kind_of(column) if shape is None else f"of shape {list(shape)}"
        raise ArgumentError(
            f"{what}: {word} is {found} for {num_samples} samples, expected one per sample. "
            f"Fix: pass [B] numbers or B lists of Score"
        )


def _fake(rewards: Tensor, cu_loss: Tensor, count: Size, weight: float, at: str) -> Tensor:
    return cu_loss.new_empty(count, dtype=torch.float32)


scatter_op = define_op("scatter_rewards", by_backend(SCATTER_REWARDS, "scatter_rewards"), _fake)


def _fake_table(
    values: Tensor,
    index: Tensor,
    factors: Tensor | None,
    offsets: Tensor,
    edges: Tensor,
    count: Size,
    most: int,
) -> Tensor:
    return values.new_empty(count, dtype=torch.float32)


# values [K] float64; index, factors [terms] (None: 1); offsets, edges [pieces+1] int64; most: terms of one piece.
table_op = define_op("scatter_scores", by_backend(SCATTER_SCORES, "scatter_scores"), _fake_table)
