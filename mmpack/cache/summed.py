"""SummedFeatures: media of a whole step, encoded once with gradients; one backward for all micro-batches.

Each micro-batch gets the features as leaves. What its backward brings is added in float32, in the order of the
backwards, and rounded once when the tower's own backward starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

from mmpack.cache.tower import Levels, Tower
from mmpack.errors import ModelError


class SummedFeatures:
    """Features of the media `keys`, for micro-batches. Of a tower that is not trained: the features alone.

    Args: `packs`: the keys of each micro-batch's media. `whole`: whether this rank has the tower's weights whole, so
    that a change of them is seen.
    """

    def __init__(
        self,
        tower: Tower,
        keys: Sequence[str],
        features: Sequence[Levels],
        packs: Sequence[Sequence[str]],
        whole: bool = True,
    ):
        self.tower = tower
        self.trained = tower.trains
        self._packs = Counter(frozenset(own) for own in packs if own)
        self._features = dict(zip(keys, features, strict=True))
        self._sums: dict[str, list[Tensor | None]] = {
            k: [None] * len(f) for k, f in self._features.items()
        }
        self._how, self._digest = tower.how(), tower.digest() if whole else None
        self._trained = _trained(tower)
        self._start = torch.zeros((), requires_grad=True)  # makes autograd come back
        self._given: Counter[frozenset[str]] = Counter()  # forwards, by their media
        self._returned: set[int] = set()  # forwards that had a backward
        self._released = False

    def fetch(
        self,
        tower: Tower,
        keys: Sequence[str],
        patches: Sequence[int],
        encode: Callable[[list[int]], list[Levels]],
    ) -> list[Levels]:
        """Features of each medium; with gradients, each call is a micro-batch. Nothing is encoded.

        Raises: ModelError for media that were not given, and for a tower that is another one, or was changed since.
        """
        self._refuse_released()
        self._check(tower)
        if tower.trains and not self.trained:
            raise ModelError(
                "encode_once: the tower is being trained, but its media were encoded without gradients. "
                "Fix: enter encode_once with gradients enabled"
            )
        missing = [key for key in keys if key not in self._features]
        if missing:
            raise ModelError(
                f"encode_once: {len(missing)} of the pack's {len(keys)} media were not in the encoded packs "
                f"(cache key {missing[0]:.12}…). Fix: pass encode_once all packs of the step"
            )
        own = [tuple(level.detach() for level in self._features[key]) for key in keys]
        if not (self.trained and torch.is_grad_enabled()):
            return own
        number = self._given.total()
        self._given[frozenset(keys)] += 1
        levels = [x for f in own for x in f]
        flat = iter(_HandOut.apply(self._start, self, number, tuple(keys), *levels))
        return [tuple(next(flat) for _ in f) for f in own]

    def nothing(self) -> Tensor:
        """0 that requires a gradient, as features do: FSDP2 reduces the first layer's gradients in the same order on
        ranks with media and without, only if inputs of the layer require gradients on all of them.
        """
        self._refuse_released()
        return 0 * self._start

    def backward(self, ranks: Any = None) -> None:
        """The tower's one backward. `ranks`: a process group, whose mean the gradients become.

        Raises: ModelError where a micro-batch was left out, or the weights changed.
        """
        if not self.trained:
            return
        sums = self.totals()
        pairs = [
            (level, total.to(level.dtype))
            for key, levels in self._features.items()
            for level, total in zip(levels, sums[key], strict=True)
            if total is not None and level.requires_grad
        ]
        self.release()
        tower_backward(self.tower, pairs, ranks)

    def totals(self) -> dict[str, list[Tensor | None]]:
        """Sum of the gradients for each level of each medium, in float32 at least; None: nothing.

        Raises: ModelError where a micro-batch was left out, or the weights changed.
        """
        self._refuse_forgotten()
        self._check(self.tower)
        return self._sums

    def release(self) -> None:
        """Let go of features, graph and sums."""
        self._features, self._sums, self._released = {}, {}, True

    def _add(self, number: int, keys: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        self._refuse_released()
        self._returned.add(number)
        flat = iter(gradients)
        for key in keys:
            sums = self._sums[key]
            for level, total in enumerate(sums):
                gradient = next(flat)
                if gradient is None:
                    continue
                if total is None:
                    wide = torch.promote_types(gradient.dtype, torch.float32)
                    sums[level] = gradient.to(wide, copy=True)
                else:
                    total.add_(gradient)

    def _refuse_released(self) -> None:
        if self._released:
            raise ModelError(
                "encode_once: its block has ended, so the features and the tower's backward are gone. "
                "Fix: run each pack's forward and backward within the block"
            )

    def _check(self, tower: Tower) -> None:
        why = None
        if any(a is not b for a, b in zip(tower.modules, self.tower.modules, strict=True)):
            why = "the features are of another model", "encode_once for each model"
        elif tower.how() != self._how:
            why = (
                "autocast, precision, attention, hooks or adapters are not as they were when media were encoded",
                "enter encode_once in the same state as the passes, so within attach(model)",
            )
        elif _trained(tower) != self._trained:
            why = "requires_grad of the tower changed since media were encoded", "set it before"
        elif self._digest is not None and tower.digest() != self._digest:
            why = "the tower's weights changed since media were encoded", "step after the block"
        if why is not None:
            raise ModelError(f"encode_once: {why[0]}. Fix: {why[1]}")

    def _refuse_forgotten(self) -> None:
        why = None
        packs, given = self._packs.total(), self._given.total()
        missing = (self._packs - self._given).total()
        if missing:
            why = f"{packs - missing} of {packs} packs with media had a forward"
        elif len(self._returned) < given:
            why = f"{len(self._returned)} of {given} forwards had a backward"
        if why is not None:
            raise ModelError(
                f"encode_once: {why}, so the tower's gradients are incomplete. "
                "Fix: run each pack's forward and backward within the block, or leave the pack out of encode_once"
            )


class _HandOut(torch.autograd.Function):
    """start, whose features, number of the forward, keys, levels -> levels; the backward adds to the sums."""

    @staticmethod
    def forward(
        ctx: Any,
        start: Tensor,
        owner: SummedFeatures,
        number: int,
        keys: tuple[str, ...],
        *levels: Tensor,
    ) -> Any:
        ctx.owner, ctx.number, ctx.keys = owner, number, keys
        ctx.set_materialize_grads(False)
        return tuple(level.view_as(level) for level in levels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.owner._add(ctx.number, ctx.keys, gradients)
        return (None,) * (4 + len(gradients))


def tower_backward(tower: Tower, pairs: Sequence[tuple[Tensor, Tensor]], ranks: Any = None) -> None:
    """The backward from outputs of the tower, with the gradient of each. `ranks`: as `SummedFeatures.backward`."""
    outputs, totals = [p[0] for p in pairs], [p[1] for p in pairs]
    if ranks is None:
        if pairs:
            torch.autograd.backward(outputs, totals)
        return
    trained = [p for p in tower.parameters() if p.requires_grad]
    found = (
        torch.autograd.grad(outputs, trained, totals, allow_unused=True)
        if pairs
        else [None] * len(trained)
    )
    _add_mean(trained, found, ranks)


def _trained(tower: Tower) -> list[bool]:
    return [p.requires_grad for p in tower.parameters()]


def _add_mean(
    trained: Sequence[torch.nn.Parameter], found: Sequence[Tensor | None], ranks: Any
) -> None:
    """Add the ranks' mean gradient to each parameter's, as DistributedDataParallel does. Every rank takes part."""
    size = distributed.get_world_size(ranks)
    own = [
        torch.zeros_like(p) if g is None else g / size for p, g in zip(trained, found, strict=True)
    ]
    for work in [distributed.all_reduce(g, group=ranks, async_op=True) for g in own]:
        work.wait()
    for parameter, gradient in zip(trained, own, strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
