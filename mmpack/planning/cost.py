"""Seconds that a micro-batch's forward and backward take, from what it holds; and whether sharing prefixes pays.

A rate for each thing that is counted: from a model's config and a device's speeds (`cost_model`), or fitted to measured
steps (planning/calibration.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from mmpack.errors import ArgumentError, PlanError, check_number, one_line
from mmpack.families import Family
from mmpack.families.kinds import LINEAR_SIZES, REFERENCE
from mmpack.files import replaced
from mmpack.planning.counts import Counts, Spans
from mmpack.planning.flops import model_flops
from mmpack.schema.saved import read_saved

Cost = Callable[[int, int, int], float]  # (rows, pairs, patches) -> cost, additive over samples

FORMAT = "mmpack.cost.1"
MAX_FILE = 2**20  # bytes
# A product's backward is two products; attention's is five to its forward's two, since it makes the scores again.
PRODUCTS, ATTENTION = 3.0, 3.5
HEAD = 4.0  # the head makes its logits twice


class Speeds(NamedTuple):
    """A device's FLOPs a second of matrix products, of the decoder's attention and of the tower's; and seconds that
    are no FLOPs: a row a number of width in attention, a byte of a gathered key and value, a row and a wave of linear
    attention, by entries of the state."""

    products: float
    attention: float
    tower: float
    width: float
    byte: float
    state: float
    wave: float


# Products at cuBLAS's rate. Attention: the fit of "varlen" in ops/attention/choose.py, for 28 heads of 128 and 4 of
# keys (0.1452 ns a pair, 54.4 a row, 18.2 a gathered key of 2,048 bytes) and 16 of 80 in a tower (0.0737 ns).
# FlashAttention-4 gathers for half as much. Linear attention: 32 heads of 128 by flash-linear-attention, forward and
# backward, took 7.1 ms for 15,249 rows of plain packs (466 ns a row), and 6.6 ms for a prefix of 1,200 and 8 branches,
# 6,849 rows: each wave after the first keeps few cores busy.
H200 = Speeds(
    products=700e12,
    attention=ATTENTION * 4 * 3584 / 0.1452e-9,
    tower=ATTENTION * 4 * 1280 / 0.0737e-9,
    width=54.4e-9 / 3584,
    byte=18.2e-9 / 2048,
    state=466e-9 / (32 * 128 * 128),
    wave=3.4e-3,
)


@dataclass(frozen=True)
class CostModel:
    """Seconds of a micro-batch, forward and backward: the sum of a rate for each of its `Counts`.

    `spans`: how far windows reach, by which pairs are counted. `error`: mean of the relative errors of the steps that
    the rates were fitted to, each predicted from the others; None: they were not, and only ratios of seconds say
    something.

    Example:
        >>> from mmpack.planning import CostModel, Counts
        >>> cost = CostModel(row=1e-6, patch=2e-7)
        >>> round(cost.seconds(Counts(rows=1000, patches=500)), 9)
        0.0011
    """

    row: float = 0.0
    pair: float = 0.0
    window_pair: float = 0.0
    key: float = 0.0
    wave: float = 0.0
    loss_token: float = 0.0
    patch: float = 0.0
    frame_pair: float = 0.0
    tile_pair: float = 0.0
    audio_frame: float = 0.0
    batch: float = 0.0
    spans: Spans = Spans()
    error: float | None = None

    def __post_init__(self) -> None:
        for name in RATES:
            check_number("CostModel", name, getattr(self, name), least=0)

    @property
    def calibrated(self) -> bool:
        return self.error is not None

    def seconds(self, counts: Counts) -> float:
        return float(sum(rate * n for rate, n in zip(self._rates, counts, strict=True)))

    def sharing_pays(self, plain: Counts, shared: Counts) -> bool:
        """Whether a micro-batch takes less time with its prefixes shared.

        Of a micro-batch as a whole: where one prefix is shared, all keys are gathered, so the next one costs nothing.
        """
        return self.seconds(shared) < self.seconds(plain)

    def save(self, path: str | Path) -> None:
        """Write the rates as JSON, whole or not at all. Raises PlanError where that can't be written."""
        document = {"format": FORMAT, **dataclasses.asdict(self), "spans": self.spans._asdict()}
        with replaced(Path(path), "CostModel.save", PlanError) as file:
            file.write(json.dumps(document, indent=2).encode() + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read what `save` wrote. Raises PlanError for a file that is none."""
        where = f"CostModel.load: {path}"
        fix = "name a file that CostModel.save wrote"
        document = read_saved(path, MAX_FILE, where, PlanError, fix)
        if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
            raise PlanError(
                f"{where} is not a cost file of format {FORMAT!r}. Fix: calibrate again"
            )
        try:
            return cls(**{**document, "spans": Spans(**document["spans"])})
        except (KeyError, TypeError, ArgumentError) as error:
            raise PlanError(
                f"{where} is damaged ({type(error).__name__}: {one_line(str(error))[:200]}). Fix: calibrate again"
            ) from None

    @property
    def _rates(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in RATES)


# in the order of `Counts`
RATES = tuple(f.name for f in dataclasses.fields(CostModel))[: len(Counts._fields)]


def cost_model(config: Any, speeds: Speeds = H200) -> CostModel:
    """The cost of a model's micro-batches, from its config and a device's speeds.

    Args: `config`: of transformers, or the dict of its config.json: attention by path (full layers by pairs, windowed
    ones by pairs within the window), linear attention by rows and waves, MLPs and the experts that a row takes, the
    tower by patches and by pairs within its windows and frames, the head by loss tokens. Norms, activations,
    optimizer and communication are not in it, and nothing is recomputed: `calibrate` fits it to measured steps.
    Raises ArgumentError for a config that lacks a size.
    """
    flops = model_flops(config)
    tower = flops.tower
    return CostModel(
        row=PRODUCTS * flops.row / speeds.products
        + speeds.width * flops.queries
        + speeds.state * flops.states,
        pair=ATTENTION * flops.pair / speeds.attention,
        window_pair=ATTENTION * flops.window_pair / speeds.attention,
        key=speeds.byte * flops.key,
        wave=speeds.wave * flops.linear_layers,
        loss_token=HEAD * flops.loss_token / speeds.products,
        patch=PRODUCTS * tower.patch / speeds.products + speeds.width * tower.width,
        frame_pair=ATTENTION * tower.frame_pair / speeds.tower,
        tile_pair=ATTENTION * tower.tile_pair / speeds.tower,
        audio_frame=PRODUCTS * tower.audio_frame / speeds.products,
        spans=flops.spans,
    )


def family_cost(family: Family | None) -> CostModel:
    """Where no config is known: that of a model as large as Qwen2.5-VL-7B with layers of the family's kinds."""
    linear = family is not None and family.linear_attention
    return _reference(family.full_attention_share if linear and family is not None else 1.0)


@lru_cache
def _reference(full_share: float) -> CostModel:
    every = round(1 / full_share)
    hybrid = LINEAR_SIZES | {"full_attention_interval": every} if every > 1 else {}
    return cost_model(REFERENCE | hybrid)


def sharing_of(share_prefix: bool | str, family: Family | None, what: str) -> bool | str:
    """`share_prefix`, checked; "auto" is False for a family whose rows can't be shared. Raises ArgumentError."""
    if isinstance(share_prefix, str) and share_prefix != "auto":
        raise ArgumentError(
            f'{what}: share_prefix is {share_prefix!r:.60}. Fix: pass True, False or "auto"'
        )
    if share_prefix == "auto" and family is not None and family.sharing != "tree":
        return False
    return share_prefix
