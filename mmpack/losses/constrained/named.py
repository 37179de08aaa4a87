"""Rewards and costs by name, in two types that don't mix, and their advantages.

A tensor is [B], one number per sample, or [N], one per loss token. No type has arithmetic: `Rewards + Costs` is refused
by mypy and when it runs. Only `constrained_advantages` reads both kinds, and returns a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, get_args

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_name, check_number, kind_of
from mmpack.losses.advantages.group import AdvantageKind, group_advantages
from mmpack.losses.rewards.columns import columns_by_name, names_of
from mmpack.losses.samples import check_column, check_columns, check_finite
from mmpack.ops.inputs import can_look_at, check_are_tensors
from mmpack.ops.segments import segment_sum
from mmpack.schema.sample import Sample, as_samples
from mmpack.schema.spans import Cost, Score

Per = Literal["sample", "token"]
Self = TypeVar("Self", bound="Named")


class Named:
    """Base: finite floats of one shape and device by name, which never change.

    Args:
        values: name to [B] or [N] floats. They are taken without their graph.
        per: what a number is of: a `sample` [B] or a loss `token` [N].

    Raises ArgumentError for no name, names that are no strings, and tensors that are not finite floats [n] of one
    length and device. Values on a GPU are not read.
    """

    sign: ClassVar[int]  # +1: more is better; -1: less is
    instead_of_a_tensor: ClassVar[str] = (
        "advantages(…) of rewards and of costs, then constrained_advantages, which returns a tensor"
    )

    def __init__(self, values: Mapping[str, Tensor], per: Per = "sample") -> None:
        check_name(type(self).__name__, "per", per, get_args(Per))
        _check_values(type(self).__name__, values)
        self._values = {name: value.detach() for name, value in values.items()}
        self._per = per

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

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
        return type(self)({name: self._values[name] for name in names}, self._per)

    def map(self: Self, change: Callable[[Tensor], Tensor]) -> Self:
        """`change` of each tensor, under the same name and type: the result is still a cost if it was one."""
        _check_callable(f"{type(self).__name__}.map", change)
        values = {name: change(value) for name, value in self._values.items()}
        return type(self)(values, self._per)

    def mean(self) -> dict[str, float]:
        """The mean of each name as a number of the host, to log it; waits for a GPU. Raises ArgumentError if n = 0."""
        totals, count = self.sums()
        if count == 0:
            raise ArgumentError(
                f"{type(self).__name__}.mean: there is no {self._per}. Fix: skip empty batches"
            )
        return {name: total / count for name, total in totals.items()}

    def sums(self) -> tuple[dict[str, float], int]:
        """The sum of each name, float64 on the host, and how many numbers it is of: parts of a mean over ranks."""
        summed = torch.stack(list(self._values.values())).double().sum(dim=1).tolist()
        for name, number in zip(self.names, summed, strict=True):
            where = f"the sum of {name!r}"
            fix = "find where the NaN comes from"
            check_number(f"{type(self).__name__}.sums", where, number, fix=fix)
        return dict(zip(self.names, summed, strict=True)), self.shape[0]

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self.names))
        return f"{type(self).__name__}({names}; {self.shape[0]} per {self._per})"

    if not TYPE_CHECKING:  # mypy sees no operator at all
        __array_ufunc__ = None  # numpy leaves the operators to this class

        def _refuse(self, *others: Any) -> None:
            where = f", the other side is {kind_of(others[0])}" if others else ""
            raise ArgumentError(
                f"{type(self).__name__}: supports no arithmetic{where}, since costs must not mix with rewards. "
                "Fix: combine both by constrained_advantages; total and map keep the type"
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


class RewardAdvantages(Named):
    """Advantage per sample or token."""

    sign = 1


class CostAdvantages(Named):
    """Cost advantage per sample or token."""

    sign = -1


ScoresType = TypeVar("ScoresType", bound="_Scores[Any]")
Advantages = TypeVar("Advantages", RewardAdvantages, CostAdvantages)


class _Scores(Named, Generic[Advantages]):
    """What Rewards and Costs have in common: they are read from samples, summed up, and compared within groups."""

    _field: str  # of Sample
    _score: type[Score | Cost]
    _advantages: type[Advantages]

    @classmethod
    def of(
        cls: type[ScoresType],
        samples: list[Sample],
        *,
        names: Iterable[str] | None = None,
        missing: float | None = None,
    ) -> ScoresType:
        """The scores of samples, [B] float32 on the CPU: by name, those of all scopes added up.

        Args: names: which; None: all that any sample has. missing: the number of a sample that has no score of a
        name; None: that is an ArgumentError, for a cost that nobody measured is not a cost of 0.
        """
        what = f"{cls.__name__}.of"
        given = as_samples(samples, what)
        scores = [getattr(sample, cls._field) or [] for sample in given]
        ids = [sample.sample_id for sample in given]
        columns = columns_by_name(what, scores, cls._score, names, missing, ids)
        return cls({name: column.float() for name, column in columns.items()})

    def total(self: Self, weights: Mapping[str, float] | None = None, name: str = "total") -> Self:
        """All names added up under one name, each times its weight (0 or more); None: all, with weight 1.

        Sums are float64, in the order of the names.
        """
        what = f"{type(self).__name__}.total"
        names_of(what, [name])
        if weights is not None:
            _check_weights(what, weights, self.names)
        first = next(iter(self._values.values()))
        summed = torch.zeros_like(first, dtype=torch.float64)
        for key, value in self._values.items():
            weight = 1.0 if weights is None else weights.get(key, 0.0)
            summed = summed + value.double() * weight
        return type(self)({name: summed.to(first.dtype)}, self._per)

    def per_sample(self: Self, cu_loss: Tensor) -> Self:
        """[N] to [B]: the sum over each sample's loss tokens, 0 for one without a token, float32."""
        what = f"{type(self).__name__}.per_sample"
        if self._per != "token":
            raise ArgumentError(f"{what}: numbers are per sample already. Fix: leave out this call")
        check_columns(what, cu_loss, self._values)
        return type(self)({n: segment_sum(v, cu_loss).float() for n, v in self._values.items()})

    def advantages(
        self, group_index: Tensor | None = None, kind: AdvantageKind = "grpo", eps: float = 1e-6
    ) -> Advantages:
        """`mp.group_advantages` of each name by itself, [B]; without group_index the batch is one group."""
        if self._per != "sample":
            raise ArgumentError(
                f"{type(self).__name__}.advantages: numbers are per token, but groups are of samples. "
                "Fix: call per_sample(batch.cu_loss) first, or advantages_by with an estimator per token"
            )
        if group_index is None:
            group_index = torch.zeros(self.shape, dtype=torch.int64, device=self.device)
        return self._advantages(
            {n: group_advantages(v, group_index, kind, eps) for n, v in self._values.items()}
        )

    def advantages_by(self, estimate: Callable[[str, Tensor], Tensor]) -> Advantages:
        """`estimate(name, numbers)` of each name, as by `mp.gae` with that name's critic."""
        what = f"{type(self).__name__}.advantages_by"
        _check_callable(what, estimate)
        made = {name: estimate(name, value) for name, value in self._values.items()}
        for name, found in made.items():
            fix = "return one advantage for each number"
            check_column(what, f"estimate({name!r})", found, *self.shape, "values", found, fix)
        return self._advantages(made, self._per)


class Rewards(_Scores[RewardAdvantages]):
    """What the policy is paid, by name.

    Example: two samples, helpful and well formed.
        >>> import torch
        >>> from mmpack.losses.constrained import Rewards
        >>> paid = Rewards({"helpful": torch.tensor([1.0, 0.0]), "format": torch.tensor([1.0, 1.0])})
        >>> paid.total({"helpful": 1.0, "format": 0.5}).tensor("total")
        tensor([1.5000, 0.5000])
    """

    sign, _field, _score, _advantages = 1, "rewards", Score, RewardAdvantages

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name: rewards may be paid, by any function that takes rewards. Costs have no such method."""
        return self.select(name)._values[name]


class Costs(_Scores[CostAdvantages]):
    """What the policy is charged, by name: more is worse, and never a negative reward.

    Example: one of two samples is harmful.
        >>> import torch
        >>> from mmpack.losses.constrained import Costs
        >>> Costs({"harm": torch.tensor([1.0, 0.0])})
        Costs('harm'; 2 per sample)
    """

    sign, _field, _score, _advantages = -1, "costs", Cost, CostAdvantages


def _check_values(what: str, values: Mapping[str, Tensor]) -> None:
    if not isinstance(values, Mapping) or not values:
        shown = "an empty dict" if isinstance(values, Mapping) else kind_of(values)
        raise ArgumentError(
            f"{what}: values are {shown}, expected tensors by name. Fix: pass {{'name': tensor}}"
        )
    first = next(iter(values.values()))
    for name, value in values.items():
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"{what}: a name is {name!r}. Fix: name each tensor by a str")
        check_are_tensors(what, **{name: value})
        fix = "pass one number per sample or loss token, of one batch"
        check_column(what, name, value, first.numel(), "floats", first, fix)
        if can_look_at(value):
            check_finite(what, name, value)


def _check_callable(what: str, given: Any) -> None:
    if not callable(given):
        raise ArgumentError(f"{what}: the argument is {kind_of(given)}. Fix: pass a function")


def _check_weights(what: str, weights: Mapping[str, float], names: tuple[str, ...]) -> None:
    """A number for some of the names, 0 or more: a negative one would turn the sign."""
    if not isinstance(weights, Mapping) or not weights:
        shown = "an empty dict" if isinstance(weights, Mapping) else kind_of(weights)
        raise ArgumentError(f"{what}: factors are {shown}. Fix: pass {{'name': number}}")
    for name, weight in weights.items():
        check_name(what, "a name", name, names)
        fix = "the sign of a cost or reward is that of its type"
        check_number(what, f"the factor of {name!r}", weight, least=0, fix=fix)
