"""Tensors by name, in types that don't mix: Rewards and Costs, Verifiers, and the advantages of the first two.

A tensor is [B], one number per sample, or [N], one per loss token. No type has arithmetic: `Rewards + Costs` is refused
by mypy and when it runs. Only `constrained_advantages` reads both kinds, and returns a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_name, check_number, kind_of
from mmpack.losses.advantages.group import AdvantageKind, group_advantages
from mmpack.losses.samples import check_columns
from mmpack.ops.inputs import can_look_at, check_are_tensors
from mmpack.ops.segments import segment_sum
from mmpack.schema.sample import Sample, as_samples

Per = Literal["sample", "token"]
Self = TypeVar("Self", bound="Named")


class Named:
    """Base: finite floats of one shape and device by name, with the unit of each; it never changes.

    Args:
        values: name to [B] or [N] floats. They are taken without their graph.
        units: of each name, or one for all, in words: "violations", "seconds". Only shown.
        per: what a number is of: a `sample` [B] or a loss `token` [N].

    Raises ArgumentError for no name, names that are no strings, and tensors that are not finite floats [n] of one
    length and device. Values on a GPU are not read.
    """

    sign: ClassVar[int]  # +1: more is better; -1: less is
    instead_of_a_tensor: ClassVar[str] = (
        "advantages(…) of rewards and of costs, then constrained_advantages, which returns a tensor"
    )

    def __init__(
        self, values: Mapping[str, Tensor], units: Mapping[str, str] | str = "", per: Per = "sample"
    ) -> None:
        what = type(self).__name__
        check_name(what, "per", per, get_args(Per))
        _check_values(what, values)
        self._values = {name: value.detach() for name, value in values.items()}
        self._units = _checked_units(what, units, self._values)
        self._per = per

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    @property
    def units(self) -> dict[str, str]:
        """The unit of each name."""
        return dict(self._units)

    @property
    def per(self) -> Per:
        return self._per

    @property
    def shape(self) -> tuple[int]:
        """(B,) or (N,)."""
        return (len(next(iter(self._values.values()))),)

    @property
    def device(self) -> torch.device:
        return next(iter(self._values.values())).device

    def to(self: Self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same on `device`."""
        return self.map(lambda value: value.to(device, non_blocking=non_blocking))

    def select(self: Self, *names: str) -> Self:
        """Those names only, in this order. Raises ArgumentError for one that is not there, and for none."""
        for name in names:
            check_name(type(self).__name__, "a name", name, self._values)
        units = {name: self._units[name] for name in names}
        return type(self)({name: self._values[name] for name in names}, units, self._per)

    def map(self: Self, change: Callable[[Tensor], Tensor]) -> Self:
        """`change` of each tensor, under the same name, type and unit: the result is still a cost if it was one."""
        _check_callable(f"{type(self).__name__}.map", change)
        values = {name: change(value) for name, value in self._values.items()}
        return type(self)(values, self._units, self._per)

    def clipped(self: Self, low: float | None = None, high: float | None = None) -> Self:
        """Numbers below `low` become `low`, those above `high` become `high`; None is no bound."""
        what = f"{type(self).__name__}.clipped"
        for option, bound in (("low", low), ("high", high)):
            if bound is not None:
                check_number(what, option, bound)
        if low is None and high is None:
            raise ArgumentError(
                f"{what}: neither low nor high is given. Fix: pass low=, high= or both"
            )
        if low is not None and high is not None and low > high:
            raise ArgumentError(f"{what}: low is {low}, above high, {high}. Fix: swap them")
        return self.map(lambda value: value.clamp(low, high))

    def mean(self) -> dict[str, float]:
        """The mean of each name as a number of the host, to log it; waits for a GPU. Raises ArgumentError if n = 0."""
        what = f"{type(self).__name__}.mean"
        if self.shape == (0,):
            raise ArgumentError(f"{what}: there is no {self._per}. Fix: skip empty batches")
        return dict(zip(self.names, self._sums(what, self.shape[0]), strict=True))

    def sums(self) -> tuple[dict[str, float], int]:
        """The sum of each name, float64 on the host, and how many numbers it is of: parts of a mean over ranks."""
        summed = self._sums(f"{type(self).__name__}.sums", 1)
        return dict(zip(self.names, summed, strict=True)), self.shape[0]

    def _sums(self, what: str, count: int) -> list[float]:
        stacked = torch.stack(list(self._values.values())).double().sum(dim=1) / count
        numbers: list[float] = stacked.tolist()
        for name, number in zip(self.names, numbers, strict=True):
            check_number(what, f"the mean of {name!r}", number, fix="find where the NaN comes from")
        return numbers

    def __repr__(self) -> str:
        shown = ", ".join(f"{n!r} [{u}]" if u else repr(n) for n, u in self._units.items())
        return f"{type(self).__name__}({shown}; {self.shape[0]} per {self._per})"

    if not TYPE_CHECKING:  # mypy sees no operator at all
        __array_ufunc__ = None  # numpy leaves the operators to this class

        def _refuse(self, *others: Any) -> None:
            where = f", the other side is {kind_of(others[0])}" if others else ""
            raise ArgumentError(
                f"{type(self).__name__}: supports no arithmetic{where}, since costs must not mix with rewards. "
                "Fix: combine both by constrained_advantages; total, scaled and clipped keep the type"
            )

        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
        __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __rpow__ = _refuse
        __neg__ = __pos__ = __abs__ = __iter__ = __float__ = __bool__ = __len__ = _refuse

        @classmethod
        def __torch_function__(cls, function, types, arguments=(), keywords=None):
            raise ArgumentError(
                f"{cls.__name__}: torch.{getattr(function, '__name__', function)} can't take it, since costs "
                "must not mix with rewards. "
                "Fix: use map(function), which keeps the type; combine both by constrained_advantages"
            )


class _Scores(Named):
    """What Rewards, Costs and Verifiers have in common: they are read from samples, scaled, and summed up."""

    _field: ClassVar[str]  # of Sample

    @classmethod
    def of(
        cls: type[ScoresType],
        samples: list[Sample],
        *,
        names: list[str] | None = None,
        missing: float | None = None,
        units: Mapping[str, str] | str = "",
    ) -> ScoresType:
        """The scores of samples, [B] float32 on the CPU: by name, those of all scopes added up.

        Args: names: which; None: all that any sample has. missing: the number of a sample that has no score of a
        name; None: that is an ArgumentError, for a cost that nobody measured is not a cost of 0.
        """
        given = as_samples(samples, f"{cls.__name__}.of")
        scores = [getattr(sample, cls._field) or [] for sample in given]
        if names is None:
            names = list(dict.fromkeys(score.name for of_one in scores for score in of_one))
        check_names(f"{cls.__name__}.of", names)
        if missing is not None:
            check_number(f"{cls.__name__}.of", "missing", missing)
        values: dict[str, Tensor] = {}
        for name in names:
            numbers = []
            for sample, of_one in zip(given, scores, strict=True):
                mine = [score.value for score in of_one if score.name == name]
                for value in mine:
                    where = f"{name!r} of sample {sample.sample_id!r}"
                    check_number(f"{cls.__name__}.of", where, value, fix="leave it out")
                if not mine and missing is None:
                    raise ArgumentError(
                        f"{cls.__name__}.of: sample {sample.sample_id!r} has none of {name!r} among its {cls._field}. "
                        "Fix: score it, or pass missing=, the value to use in its place"
                    )
                numbers.append(sum(mine) if mine else missing)
            values[name] = torch.tensor(numbers, dtype=torch.float32)
        return cls(values, units)

    def scaled(self: Self, by: Mapping[str, float], units: Mapping[str, str] | str = "") -> Self:
        """Each number times the factor of its name, above 0, so that the sign stays; `units` are those of the result.

        Names without a factor stay as they are.
        """
        _check_weights(f"{type(self).__name__}.scaled", by, self.names, least=None)
        values = {n: v * by[n] if n in by else v for n, v in self._values.items()}
        given = dict.fromkeys(by, units) if isinstance(units, str) else units
        given = _checked_units(f"{type(self).__name__}.scaled", given, self._values, self._units)
        return type(self)(values, given, self._per)

    def total(
        self: Self, weights: Mapping[str, float] | None = None, name: str = "total", unit: str = ""
    ) -> Self:
        """All names added up under one name, each times its weight (0 or more); None: all, with weight 1.

        Sums are float64, in the order of the names.
        """
        what = f"{type(self).__name__}.total"
        check_names(what, [name])
        if weights is not None:
            _check_weights(what, weights, self.names, least=0)
        first = next(iter(self._values.values()))
        summed = torch.zeros_like(first, dtype=torch.float64)
        for key, value in self._values.items():
            weight = 1.0 if weights is None else weights.get(key, 0.0)
            summed = summed + value.double() * weight
        return type(self)({name: summed.to(first.dtype)}, unit, self._per)

    def per_sample(self: Self, cu_loss: Tensor) -> Self:
        """[N] to [B]: the sum over each sample's loss tokens, 0 for one without a token, float32."""
        what = f"{type(self).__name__}.per_sample"
        if self._per != "token":
            raise ArgumentError(f"{what}: numbers are per sample already. Fix: leave out this call")
        check_columns(what, cu_loss, self._values)
        values = {n: segment_sum(v, cu_loss).float() for n, v in self._values.items()}
        return type(self)(values, self._units)


ScoresType = TypeVar("ScoresType", bound=_Scores)


class Advantages(Named):
    """Base of the two kinds of advantages."""


class RewardAdvantages(Advantages):
    """By how much more a sample or token is rewarded than was to be expected."""

    sign = 1


class CostAdvantages(Advantages):
    """By how much more a sample or token costs than was to be expected."""

    sign = -1


class Rewards(_Scores):
    """What the policy is paid, by name.

    Example: two samples, helpful and well formed.
        >>> import torch
        >>> from mmpack.losses.constrained import Rewards
        >>> paid = Rewards({"helpful": torch.tensor([1.0, 0.0]), "format": torch.tensor([1.0, 1.0])})
        >>> paid.total({"helpful": 1.0, "format": 0.5}).tensor("total")
        tensor([1.5000, 0.5000])
    """

    sign = 1
    _field = "rewards"

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name: rewards may be paid, by any function that takes rewards. Costs have no such method."""
        return self.select(name)._values[name]

    def advantages(
        self, group_index: Tensor | None = None, kind: AdvantageKind = "grpo", eps: float = 1e-6
    ) -> RewardAdvantages:
        """`mp.group_advantages` of each name by itself, [B]; without group_index the batch is one group."""
        return RewardAdvantages(_grouped(self, group_index, kind, eps))

    def advantages_by(self, estimate: Callable[[str, Tensor], Tensor]) -> RewardAdvantages:
        """`estimate(name, rewards)` of each name, as by `mp.gae` with that name's critic."""
        return RewardAdvantages(_estimated(self, estimate), per=self.per)


class Costs(_Scores):
    """What the policy is charged, by name: more is worse, and never a negative reward.

    Example: one of two samples is harmful.
        >>> import torch
        >>> from mmpack.losses.constrained import Costs
        >>> Costs({"harm": torch.tensor([1.0, 0.0])}, units="violations")
        Costs('harm' [violations]; 2 per sample)
    """

    sign = -1
    _field = "costs"

    def advantages(
        self, group_index: Tensor | None = None, kind: AdvantageKind = "grpo", eps: float = 1e-6
    ) -> CostAdvantages:
        """`mp.group_advantages` of each name by itself, [B]; without group_index the batch is one group."""
        return CostAdvantages(_grouped(self, group_index, kind, eps))

    def advantages_by(self, estimate: Callable[[str, Tensor], Tensor]) -> CostAdvantages:
        """`estimate(name, costs)` of each name, as by `mp.gae` with that name's critic."""
        return CostAdvantages(_estimated(self, estimate), per=self.per)


class Verifiers(_Scores):
    """Verdicts that are not paid; `paid` makes rewards of those that are named."""

    sign = 1
    _field = "verifiers"

    def paid(self, *names: str) -> Rewards:
        """The verdicts of these names as rewards."""
        chosen = self.select(*names)
        return Rewards(chosen._values, chosen._units, chosen._per)


def _grouped(
    scores: _Scores, group_index: Tensor | None, kind: AdvantageKind, eps: float
) -> dict[str, Tensor]:
    if scores.per != "sample":
        raise ArgumentError(
            f"{type(scores).__name__}.advantages: numbers are per token, but groups are of samples. "
            "Fix: call per_sample(batch.cu_loss) first, or advantages_by with an estimator per token"
        )
    if group_index is None:
        group_index = torch.zeros(scores.shape, dtype=torch.int64, device=scores.device)
    return {n: group_advantages(v, group_index, kind, eps) for n, v in scores._values.items()}


def _estimated(scores: _Scores, estimate: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    what = f"{type(scores).__name__}.advantages_by"
    _check_callable(what, estimate)
    out = {}
    for name, value in scores._values.items():
        made = estimate(name, value)
        check_are_tensors(what, **{f"estimate({name!r})": made})
        if made.shape != value.shape:
            raise ArgumentError(
                f"{what}: estimate({name!r}) returned shape {list(made.shape)} for {list(value.shape)}. "
                "Fix: return one advantage for each number"
            )
        out[name] = made
    return out


def _check_values(what: str, values: Mapping[str, Tensor]) -> None:
    if not isinstance(values, Mapping) or not values:
        shown = "an empty dict" if isinstance(values, Mapping) else kind_of(values)
        raise ArgumentError(
            f"{what}: values are {shown}, expected tensors by name. Fix: pass {{'name': tensor}}"
        )
    first: Tensor | None = None
    for name, value in values.items():
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"{what}: a name is {name!r}. Fix: name each tensor by a str")
        check_are_tensors(what, **{name: value})
        first = value if first is None else first
        if value.ndim != 1 or not value.is_floating_point() or value.dtype.itemsize < 2:
            raise ArgumentError(
                f"{what}: {name!r} has shape {list(value.shape)} and dtype {value.dtype}, expected floats [B] or [N]. "
                "Fix: pass one number per sample or loss token"
            )
        if value.shape != first.shape or value.device != first.device:
            raise ArgumentError(
                f"{what}: {name!r} is {list(value.shape)} on {value.device}, the first is {list(first.shape)} on "
                f"{first.device}. Fix: pass tensors of one batch, on one device"
            )
        if can_look_at(value) and not bool(value.isfinite().all()):
            at = int((~value.isfinite()).nonzero()[0, 0])
            raise ArgumentError(
                f"{what}: {name!r} is {float(value[at])} at {at}. Fix: leave the sample out, or score it again"
            )


def _checked_units(
    what: str,
    units: Mapping[str, str] | str,
    values: Mapping[str, Tensor],
    before: Mapping[str, str] | None = None,
) -> dict[str, str]:
    if isinstance(units, str):
        return dict.fromkeys(values, units)
    texts = isinstance(units, Mapping) and all(isinstance(u, str) for u in units.values())
    if not texts or units.keys() - values.keys():
        raise ArgumentError(
            f"{what}: units are {units!r:.80}. Fix: pass one string, or strings by the names {', '.join(values)}"
        )
    before = {} if before is None else before
    return {name: units.get(name, before.get(name, "")) for name in values}


def check_names(what: str, names: Any) -> None:
    """Raise ArgumentError unless `names` are strings in a list or tuple."""
    listed = isinstance(names, (list, tuple))
    odd = [n for n in names if not isinstance(n, str)] if listed else [names]
    if odd:
        raise ArgumentError(f"{what}: names are {kind_of(odd[0])}. Fix: pass a list of strings")


def _check_callable(what: str, given: Any) -> None:
    if not callable(given):
        raise ArgumentError(f"{what}: the argument is {kind_of(given)}. Fix: pass a function")


def _check_weights(
    what: str, weights: Mapping[str, float], names: tuple[str, ...], least: float | None
) -> None:
    """A number for some of the names, `least` or more, or above 0: a negative one would turn the sign."""
    if not isinstance(weights, Mapping) or not weights:
        shown = "an empty dict" if isinstance(weights, Mapping) else kind_of(weights)
        raise ArgumentError(f"{what}: factors are {shown}. Fix: pass {{'name': number}}")
    for name, weight in weights.items():
        check_name(what, "a name", name, names)
        above = 0 if least is None else None
        fix = "the sign of a cost or reward is that of its type"
        check_number(what, f"the factor of {name!r}", weight, least=least, above=above, fix=fix)
