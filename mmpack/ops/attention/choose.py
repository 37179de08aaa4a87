"""Which attention runs: chosen by device, dtype, head size, installed packages and measured cost, never by trying.

MMPACK_ATTENTION=auto|sdpa|flex|flex_flash|varlen|flash_attn|flash_attn_4; a named one that can't run is an error.
`auto` takes the cheapest that can run, for half precision on CUDA devices; elsewhere sdpa, which is the oracle.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Container
from dataclasses import dataclass

import torch

from mmpack.errors import BackendError, installed_version
from mmpack.ops.attention.attention_plan import AttentionPlan

HALF = (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32, torch.float64)


@dataclass(frozen=True)
class Backend:
    """What an implementation needs, and what it costs.

    Costs are nanoseconds on one H200 for one layer of 28 heads over 4 × 128, bf16, forward and backward: a fit to the
    12 packs of benchmarks/attention.py, off by 11 % at most, that picks the fastest for each. Only ratios count.
    """

    package: str  # by its name in the package index
    capability: tuple[int, int] = (8, 0)  # of the CUDA device
    dtypes: tuple[torch.dtype, ...] = HALF
    head_dims: Container[int] = range(8, 257, 8)
    deterministic: bool = True  # under torch.use_deterministic_algorithms
    # Nanoseconds per item of the plan.
    row: float = 0.0
    pair: float = 0.0  # of a query and a key that it sees
    gathered: float = 0.0  # key of a shared pack
    full_block: float = 0.0
    mixed_block: float = 0.0

    def cost(self, plan: AttentionPlan) -> float:
        """Nanoseconds for the plan's pack, as measured on the H200 above."""
        gathered = 0 if plan.key_rows is None else len(plan.key_rows)
        by_pair = self.pair * plan.pairs + self.gathered * gathered
        by_block = self.full_block * plan.full_blocks + self.mixed_block * plan.mixed_blocks
        return self.row * plan.rows + by_pair + by_block


BACKENDS = {
    "flash_attn_4": Backend(
        "flash-attn-4", (9, 0), head_dims=range(8, 129, 8), row=40.2, pair=0.0739, gathered=10.2
    ),
    "flex_flash": Backend(
        "flash-attn-4",
        (9, 0),
        head_dims=range(16, 129, 8),
        deterministic=False,
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
}
NAMES = ("sdpa", *BACKENDS)
# Asked when imported: torch.compile can't trace it.
INSTALLED = {b.package: installed_version(b.package) is not None for b in BACKENDS.values()}


def choices(
    plan: AttentionPlan,
    device: torch.device,
    head_dim: int,
    dropout: float = 0.0,
    without: Collection[str] = (),
) -> dict[torch.dtype, str]:
    """The backend for queries of each dtype: the cheapest, or the one of MMPACK_ATTENTION for dtypes that it can take.

    `without`: backends that `auto` leaves out.

    Raises BackendError where the named one is unknown or can't run here with any dtype.
    """
    name = wanted()
    if name == "auto":
        return {d: _cheapest(plan, device, d, head_dim, dropout, without) for d in DTYPES}
    able = [d for d in DTYPES if why_not(name, device, d, head_dim, dropout) is None]
    if not able:
        demand(name, device, DTYPES[0], head_dim, dropout)
    return dict.fromkeys(able, name)


def settings(head_dim: int, dropout: float) -> tuple[str, int, bool, bool]:
    """What `choices` depends on besides plan and device. torch.compile reads MMPACK_ATTENTION when it traces."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return os.environ.get("MMPACK_ATTENTION") or "auto", head_dim, dropout > 0, deterministic


def wanted() -> str:
    """What MMPACK_ATTENTION says: `auto` or a backend. Raises BackendError for anything else."""
    name = os.environ.get("MMPACK_ATTENTION") or "auto"
    if name != "auto":
        _refuse_unknown(name)
    return name


def demand(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float = 0.0
) -> None:
    """Raise BackendError where the backend, which was asked for, can't run for queries of this kind."""
    _refuse_unknown(name)
    reason = why_not(name, device, dtype, head_dim, dropout)
    if reason is not None:
        raise BackendError(
            f"attention: {name} was asked for, and {reason}. Fix: MMPACK_ATTENTION=auto"
        )


def why_not(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float = 0.0
) -> str | None:
    """Why the backend can't run for queries of this kind; None where it can."""
    if name == "sdpa":
        return None
    needs = BACKENDS[name]
    if not INSTALLED[needs.package]:
        return f"{needs.package} is not installed"
    if device.type != "cuda" or torch.version.hip:
        return f"{name} needs a CUDA device, not {'ROCm' if torch.version.hip else device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < needs.capability:
        return "{} needs compute capability {}.{}, the device has {}.{}".format(
            name, *needs.capability, *capability
        )
    if dtype not in needs.dtypes:
        return f"{name} can't take {dtype}"
    if head_dim not in needs.head_dims:
        return f"{name} can't take heads of {head_dim}"
    if dropout:
        return f"{name} has no dropout"
    if torch.are_deterministic_algorithms_enabled() and not needs.deterministic:
        return f"{name} has no deterministic backward"
    return None


def explain(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128
) -> dict[str, str | None]:
    """For each backend why it can't run on `device`, None where it can."""
    return {name: why_not(name, device, dtype, head_dim) for name in NAMES}


def report(device: torch.device) -> tuple[str, str | None, str]:
    """`attention`, what runs on `device` (None: it would raise), and why; `ops.backend.report` has the other ops."""
    reasons = explain(device)
    try:
        name = wanted()
        if name != "auto":
            demand(name, device, HALF[0], 128)
            return "attention", name, f"MMPACK_ATTENTION={name}"
    except BackendError as error:
        return "attention", None, str(error)
    able = ", ".join(name for name, reason in reasons.items() if reason is None)
    others = "; ".join(dict.fromkeys(reason for reason in reasons.values() if reason is not None))
    return "attention", able, others or "the cheapest for each batch"


def _refuse_unknown(name: str) -> None:
    if name not in NAMES:
        raise BackendError(
            f"attention: {name!r} is no backend. Fix: MMPACK_ATTENTION=auto, or one of {', '.join(NAMES)}"
        )


def _cheapest(
    plan: AttentionPlan,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    dropout: float,
    without: Collection[str],
) -> str:
    if dtype not in HALF:
        return "sdpa"  # float32 and float64 are asked for to be exact
    best, least = "sdpa", math.inf
    for name, backend in BACKENDS.items():  # torch.compile can't trace min by a key
        able = name not in without and why_not(name, device, dtype, head_dim, dropout) is None
        if able and backend.cost(plan) < least:
            best, least = name, backend.cost(plan)
    return best
