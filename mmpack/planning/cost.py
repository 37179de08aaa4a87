"""What a micro-batch costs; a rank's load is the sum over its micro-batches. And whether sharing prefixes pays.

`rows`: packed. `pairs`: the sum of L² over samples, for a tree of depths [a, b) the sum of b² - a².
`patches`: before merging. `keys`: those that the sequences of a shared pack gather, 0 where none has rows above it.
`waves`: depths of the forest; linear attention runs one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmpack.errors import ArgumentError, check_number
from mmpack.families import Family
from mmpack.layout.forest import Forest

Cost = Callable[[int, int, int], float]  # (rows, pairs, patches) -> cost, additive over samples


@dataclass(frozen=True)
class CostModel:
    """cost = linear · rows + quadratic · pairs + patch · patches, any unit.

    Source: a dense transformer of n layers and width d takes 24·n·d² FLOPs per token in its matrix
    products and 2·n·d·L² in attention (Kaplan et al. 2020, "Scaling Laws for Neural Language
    Models", section 2.1). Divided by 2·n·d with n = 32 and d = 4,096 (a 7B model) that is 12·d =
    49,152 per row and 1 per pair. A vision tower of 32 layers and width 1,280 takes 24·32·1,280² FLOPs
    per patch: 4,800 in the same unit.
    """

    linear: float = 49_152.0
    quadratic: float = 1.0
    patch: float = 4_800.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number("CostModel", name, value, least=0)

    def __call__(self, rows: int, pairs: int, patches: int) -> float:
        return self.linear * rows + self.quadratic * pairs + self.patch * patches


class Layout(NamedTuple):
    """What a micro-batch's rows are, in one way of laying them out."""

    rows: int
    pairs: int
    keys: int = 0
    waves: int = 1


@dataclass(frozen=True)
class LayoutCost:
    """Nanoseconds of one decoder layer on an H200, bf16, forward and backward: what sharing saves, and what it adds.

    `row`: matrix products of Qwen2.5-VL-7B's layer, 6 FLOPs for each of 233,046,016 weights at 700 TFLOP/s (cuBLAS's
    rate there), and attention's 54.4. `pair`: 0.1452 for a query and a key that it sees, of which `pairs` counts two.
    `key`: 18.2 for a key that is gathered. Attention's three are the fit of "varlen" in ops/attention/choose.py;
    FlashAttention-4 gathers for half as much. `patch`: as a row, by `CostModel`'s share. Recomputation adds a third to
    each.
    """

    row: float = 6 * 233_046_016 / 700e3 + 54.4
    pair: float = 0.1452 / 2
    key: float = 18.2
    patch: float = 6 * 233_046_016 / 700e3 * (4_800 / 49_152)
    wave: float = 0.0  # each after the first

    def __call__(self, layout: Layout, patches: int = 0) -> float:
        own = self.row * layout.rows + self.pair * layout.pairs + self.key * layout.keys
        return own + self.patch * patches + self.wave * (layout.waves - 1)

    def sharing_pays(self, plain: Layout, shared: Layout) -> bool:
        """Whether a micro-batch takes less time with its prefixes shared.

        Of a micro-batch as a whole: where one prefix is shared, all keys are gathered, so the next one costs nothing.
        """
        return self(shared) < self(plain)


def cost_model(family: Family | None) -> CostModel:
    """`CostModel` for a family's layers: those with linear attention have no quadratic part."""
    return CostModel() if family is None else CostModel(quadratic=family.full_attention_share)


def layout_cost(family: Family | None) -> LayoutCost:
    """`LayoutCost` of a family's layers, on average over those with full and with linear attention.

    Linear attention takes 466 for a row, and 3.4 ms for each wave after the first, which keeps few cores busy: 32 heads
    of 128 by flash-linear-attention on an H200, forward and backward, took 7.1 ms for 15,249 rows of plain packs, and
    6.6 ms for a prefix of 1,200 and 8 branches, 6,849 rows.
    """
    cost = LayoutCost()
    if family is None or not family.linear_attention:
        return cost
    full = family.full_attention_share
    return LayoutCost(
        row=cost.row + (1 - full) * (466 - 54.4),
        pair=full * cost.pair,
        key=full * cost.key,
        wave=(1 - full) * 3.4e6,
    )


def plain_layout(lengths: Collection[int]) -> Layout:
    """Samples one after the other."""
    return Layout(sum(lengths), sum(n * n for n in lengths))


def shared_layout(
    starts: Sequence[int], stops: Sequence[int], leaves: Sequence[bool], waves: int
) -> Layout:
    """A forest of segments, each over depths [start, stop) of its paths; `leaves`: none lies below it.

    Kernels get a sequence for each leaf, whose keys are its path.
    """
    rows = sum(stops) - sum(starts)
    keys = sum(stop for stop, leaf in zip(stops, leaves, strict=True) if leaf)
    pairs = sum(b * b - a * a for a, b in zip(starts, stops, strict=True))
    return Layout(rows, pairs, keys if keys > rows else 0, waves)


def layout_of(forest: Forest) -> Layout:
    """The layout of a forest, shared or plain."""
    starts = forest.segment_depth
    stops = starts + np.diff(forest.segment_offsets)
    leaves = np.ones(len(starts), dtype=bool)
    leaves[forest.segment_parent[forest.segment_parent >= 0]] = False
    waves = max(waves_of(forest.segment_parent.tolist()), default=1)
    return shared_layout(starts.tolist(), stops.tolist(), leaves.tolist(), waves)


def waves_of(parents: Sequence[int]) -> list[int]:
    """Of each segment, from 1: one more than its parent's."""
    waves: list[int] = []
    for parent in parents:
        waves.append(1 if parent < 0 else waves[parent] + 1)
    return waves


def sharing_of(share_prefix: bool | str, family: Family | None, what: str) -> bool | str:
    """`share_prefix`, checked; "auto" is False for a family whose rows can't be shared. Raises ArgumentError."""
    if isinstance(share_prefix, str) and share_prefix != "auto":
        raise ArgumentError(
            f'{what}: share_prefix is {share_prefix!r:.60}. Fix: pass True, False or "auto"'
        )
    if share_prefix == "auto" and family is not None and family.sharing != "tree":
        return False
    return share_prefix
