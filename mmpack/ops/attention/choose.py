"""Which attention runs: chosen by device, dtype, head size, installed packages and measured cost, never by trying.

`TREE` chooses for packed rows, by
MMPACK_ATTENTION=auto|sdpa|flex|flex_flash|varlen|flash_attn|flash_attn_4|fixed_blocks; `SEQUENCES` for towers, by
MMPACK_TOWER_ATTENTION, which has no flex_flash. A named one that can't run is an error.
`auto` takes the cheapest that can run, for half precision on CUDA devices; elsewhere sdpa, which is the oracle.
`fixed_blocks` is slower, and its bits do not depend on what a sequence is packed with: `mmpack.invariant` names it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmpack.errors import BackendError, installed_version
from mmpack.ops import invariance
from mmpack.ops.attention.attention_plan import AttentionPlan
from mmpack.ops.attention.sequence_plan import SequencePlan

HALF = (torch.bfloat16, torch.float16)
# Heads whose dq FlashAttention-4 4.0.0b36 gets wrong on compute capability 9.x: one kernel of its backward rounds them
# up to 16, the others to 32. Source: github.com/Dao-AILab/flash-attention, pull request 2896.
ROUNDED_TWO_WAYS = [size for size in range(8, 129, 8) if 0 < size % 32 <= 16]
DTYPES = (*HALF, torch.float32, torch.float64)
FLEX = ("flex", "flex_flash")  # by FlexAttention, whose masks are made anew for each pack
INVARIANT = "fixed_blocks"  # under mmpack.invariant
Plan = AttentionPlan | SequencePlan


@dataclass(frozen=True)
class Backend:
    """What an implementation needs, and what it costs; of equal costs the first of its table runs."""

    package: str  # by its name in the package index
    capability: tuple[int, int] = (8, 0)  # of the CUDA device
    dtypes: tuple[torch.dtype, ...] = HALF
    head_dims: Container[int] = range(8, 257, 8)
    deterministic: bool = True  # under torch.use_deterministic_algorithms
    only_named: bool = False  # auto leaves it
    anywhere: bool = False  # has a plain version: runs on any device
    lse: bool = True  # gives log-sum-exp
    windows: bool = True  # keeps to a window along the path
    wrong_on_9: Container[int] = ()  # head sizes, on compute capability 9.x
    # Nanoseconds per item of the plan.
    row: float = 0.0
    padded_row: float = 0.0  # more, where `varlen.right_size` pads heads
    pair: float = 0.0  # of a query and a key that it sees
    sequence: float = 0.0
    gathered: float = 0.0  # key of a shared pack
    full_block: float = 0.0
    mixed_block: float = 0.0

    def cost(self, plan: Plan, padded: bool = False) -> float:
        """Nanoseconds for the plan, as measured; only ratios count. `padded`: its heads are."""
        by_pair = self.pair * plan.pairs + self.gathered * plan.gathered
        by_pair += self.sequence * plan.sequences
        by_block = self.full_block * plan.full_blocks + self.mixed_block * plan.mixed_blocks
        row = self.row + self.padded_row * padded
        return row * plan.rows + by_pair + by_block


# Asked when imported: torch.compile can't trace it.
INSTALLED = {
    package: installed_version(package) is not None
    for package in ("torch", "triton", "flash-attn", "flash-attn-4")
}


@dataclass(frozen=True)
class Chooser:
    """The backends of one kind of attention other than sdpa, and the variable that may name one."""

    what: str  # is chosen for, in errors and reports
    variable: str  # of the environment
    head_dim: int  # that `explain` and `report` ask about
    backends: dict[str, Backend]

    @property
    def names(self) -> tuple[str, ...]:
        return ("sdpa", *self.backends)

    def choices(
        self,
        plan: Plan,
        device: torch.device,
        head_dim: int,
        dropout: float = 0.0,
        without: Collection[str] = (),
    ) -> dict[torch.dtype, str]:
        """The backend for queries of each dtype: the cheapest, or the named one for dtypes that it can take.

        `without`: backends that `auto` leaves out.

        Raises BackendError where the named one is unknown or can't run here with any dtype.
        """
        name, asked = self.wanted(), (head_dim, dropout, plan)
        if name == "auto":
            return {d: self._cheapest(without, plan, device, d, *asked) for d in DTYPES}
        able = [d for d in DTYPES if self.why_not(name, device, d, *asked) is None]
        if not able:
            self.demand(name, device, DTYPES[0], *asked)
        return dict.fromkeys(able, name)

    def resolve(
        self,
        plan: Plan,
        device: torch.device,
        head_dim: int,
        dropout: float,
        without: Collection[str] = (),
    ) -> Collection[str]:
        """Fill in the plan's choice and move it to `device`; returns what is newly chosen.

        Does nothing if the plan was resolved under the same settings.
        """
        settings = self.settings(head_dim, dropout)
        if plan.device != device:
            vars(plan).update(vars(plan.to(device)))
        if plan.chosen_under == settings:
            return ()
        plan.choice = self.choices(plan, device, head_dim, dropout, without)
        plan.chosen_under = settings
        return plan.choice.values()

    def picked(self, plan: Plan, query: Tensor, dropout: float, asked: str | None) -> str:
        """The backend asked for, or that of the resolved plan. Raises BackendError where it can't run."""
        chosen = (plan.choice or {}).get(query.dtype)
        name = asked or chosen or self.wanted()
        if name != chosen:
            self.demand(name, query.device, query.dtype, query.shape[-1], dropout, plan)
        return name

    def settings(self, head_dim: int, dropout: float) -> tuple[str, int, bool, bool]:
        """What `choices` depends on in addition to plan and device. torch.compile reads the variable when it traces."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        return self._asked(), head_dim, dropout > 0, deterministic

    def wanted(self) -> str:
        """What the variable says: `auto` or a backend. Raises BackendError for anything else."""
        name = self._asked()
        if name != "auto":
            self._refuse_unknown(name)
        return name

    def _asked(self) -> str:
        """By the variable; where bits must not depend on the batch, the one backend of which that is so."""
        if invariance.is_on():
            return INVARIANT
        return os.environ.get(self.variable) or "auto"

    def demand(self, name: str, *asked: Any) -> None:
        """Raise BackendError where the backend can't do what is asked for: arguments as of `why_not`."""
        self._refuse_unknown(name)
        reason = self.why_not(name, *asked)
        if reason is not None:
            said, fix = f"{name} was requested, but", f"set {self.variable}=auto"
            if name == INVARIANT and invariance.is_on():
                said, fix = f"batch_invariant runs {name} alone, and", "leave batch_invariant"
            raise BackendError(f"{self.what}: {said} {reason}. Fix: {fix}")

    def why_not(
        self,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        dropout: float = 0.0,
        plan: Plan | None = None,
    ) -> str | None:
        """Why the backend can't run for these queries, or this plan; None where it can."""
        if name == "sdpa":
            return None
        needs = self.backends[name]
        if not INSTALLED[needs.package]:
            return f"{needs.package} is not installed"
        if not needs.anywhere and (device.type != "cuda" or torch.version.hip):
            return f"{name} needs a CUDA device, not {'ROCm' if torch.version.hip else device.type}"
        capability = (
            needs.capability if needs.anywhere else torch.cuda.get_device_capability(device)
        )
        if capability < needs.capability:
            return "{} needs compute capability {}.{}, the device has {}.{}".format(
                name, *needs.capability, *capability
            )
        if dtype not in needs.dtypes:
            return f"{name} can't take {dtype}"
        if head_dim not in needs.head_dims:
            return f"{name} can't take heads of {head_dim}"
        if capability[0] == 9 and head_dim in needs.wrong_on_9:
            return f"{name} gives a wrong dq for heads of {head_dim} on compute capability 9.x"
        if dropout:
            return f"{name} has no dropout"
        if plan is not None and plan.windowed and not needs.windows:
            return (
                f"{name} keeps to no sliding window, which the model has and a path is longer than"
            )
        if torch.are_deterministic_algorithms_enabled() and not needs.deterministic:
            return f"{name} has no deterministic backward"
        return None

    def explain(
        self, device: torch.device, dtype: torch.dtype = torch.bfloat16, head_dim: int | None = None
    ) -> dict[str, str | None]:
        """For each backend why it can't run on `device`, None where it can."""
        size = head_dim or self.head_dim
        return {name: self.why_not(name, device, dtype, size) for name in self.names}

    def report(self, device: torch.device) -> tuple[str, str | None, str]:
        """`what`, what auto takes on `device` (None: it would raise), and why; other ops: `ops.backend.report`."""
        reasons = self.explain(device)
        try:
            name = self.wanted()
            if name != "auto":
                self.demand(name, device, HALF[0], self.head_dim)
                return self.what, name, f"{self.variable}={name}"
        except BackendError as error:
            return self.what, None, str(error)
        named = {name for name, backend in self.backends.items() if backend.only_named}
        able = ", ".join(n for n, reason in reasons.items() if reason is None and n not in named)
        others = "; ".join(
            dict.fromkeys(reason for reason in reasons.values() if reason is not None)
        )
        return self.what, able, others or "the cheapest for each batch"

    def _refuse_unknown(self, name: str) -> None:
        if name not in self.names:
            raise BackendError(
                f"{self.what}: {name!r} is not a backend. "
                f"Fix: set {self.variable}=auto, or one of {', '.join(self.names)}"
            )

    def _cheapest(self, without: Collection[str], plan: Plan, *asked: Any) -> str:
        device, dtype, head_dim, *_ = asked
        if dtype not in HALF:
            return "sdpa"  # float32 and float64 are asked for to be exact
        best, least = "sdpa", math.inf
        for name, backend in self.backends.items():  # torch.compile can't trace min by a key
            if name in without or backend.only_named or self.why_not(name, *asked) is not None:
                continue
            padded = backend.padded_row > 0 and head_dim in ROUNDED_TWO_WAYS
            padded = padded and torch.cuda.get_device_capability(device)[0] == 9
            cost = backend.cost(plan, padded)
            if cost < least:
                best, least = name, cost
        return best


# The same bits in any batch, at a price: mmpack.invariant names it.
FIXED = Backend(
    "torch",
    dtypes=DTYPES,
    head_dims=range(1, 257),
    only_named=True,
    anywhere=True,
    windows=False,
    row=54.4,
    pair=0.25,
)
TREE = Chooser(
    "attention",
    "MMPACK_ATTENTION",
    128,
    # Costs of one layer of 28 heads over 4 × 128 on one H200, bf16, forward and backward: a fit to the 12 packs of
    # benchmarks/attention.py, off by 11 % at most, that picks the fastest for each.
    {
        "flash_attn_4": Backend(
            "flash-attn-4",
            (9, 0),
            head_dims=range(8, 129, 8),
            wrong_on_9=ROUNDED_TWO_WAYS,  # padded, no pack was timed
            row=40.2,
            pair=0.0739,
            gathered=10.2,
        ),
        "flex_flash": Backend(
            "flash-attn-4",
            (9, 0),
            head_dims=range(16, 129, 8),
            wrong_on_9=ROUNDED_TWO_WAYS,
            deterministic=False,
            lse=False,
            row=33.0,
            full_block=1279,
            mixed_block=3009,
        ),
        # FlashAttention-2 is torch's too: its costs are those measured there.
        "flash_attn": Backend("flash-attn", row=54.4, pair=0.1452, gathered=18.2),
        "varlen": Backend("torch", row=54.4, pair=0.1452, gathered=18.2),
        "flex": Backend(
            "triton",
            dtypes=(*HALF, torch.float32),
            head_dims=range(16, 257),
            row=5.4,
            full_block=2532,
            mixed_block=6341,
        ),
        INVARIANT: FIXED,
    },
)
SEQUENCES = Chooser(
    "tower attention",
    "MMPACK_TOWER_ATTENTION",
    80,
    # Costs of one layer of 16 heads on one H200, bf16, forward and backward, by benchmarks/tower_attention.py.
    {
        "flash_attn_4": Backend(
            "flash-attn-4",
            (9, 0),
            head_dims=range(8, 129, 8),
            row=16.3,
            padded_row=14.0,
            pair=0.0383,
            sequence=4800,
        ),
        # FlashAttention-2 is torch's too: its costs are those measured there.
        "flash_attn": Backend("flash-attn", row=23.4, pair=0.0737),
        "varlen": Backend("torch", row=23.4, pair=0.0737),
        "flex": Backend(
            "triton", dtypes=(*HALF, torch.float32), head_dims=range(16, 257), only_named=True
        ),
        INVARIANT: FIXED,
    },
)
