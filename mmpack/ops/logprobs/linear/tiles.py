"""What all kernels of linear_selected_logprobs share: shapes of tiles, their order, logits from products.

Logits count in units of log 2.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOWEST = tl.constexpr(-1e30)  # stands for -inf where it is multiplied with a probability of 0


class Tiles(NamedTuple):
    """Shape of a product's tile: rows × columns × depth; `group` rows of tiles share columns in the cache."""

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int


HOPPER = Tiles(128, 256, 64, 16, 8, 3)
AMPERE = Tiles(128, 256, 32, 16, 8, 3)  # 72 KB of shared memory
CDNA3 = Tiles(128, 128, 64, 16, 8, 2)  # 32 KB of the 64 KB of LDS
ON_CPU = Tiles(32, 64, 32, 2, 4, 1)


def tiles_of(device: torch.device) -> Tiles:
    if device.type == "cpu":
        return ON_CPU
    if torch.version.hip:
        return CDNA3
    # Others have less shared memory than HOPPER takes.
    return HOPPER if torch.cuda.get_device_capability(device)[0] in (9, 10) else AMPERE


def programs_of(device: torch.device) -> int:
    """Programs of a persistent grid: one per multiprocessor."""
    return (
        2
        if device.type == "cpu"
        else torch.cuda.get_device_properties(device).multi_processor_count
    )


def aligned(x: Tensor) -> Tensor:
    """x [R, C] as bulk copies read it: rows contiguous and 16-byte aligned; if it isn't, a copy with padded rows."""
    per_row = 16 // x.element_size()
    if x.stride(1) == 1 and x.stride(0) % per_row == 0 and x.data_ptr() % 16 == 0:
        return x
    padded = x.new_empty(x.shape[0], -(-x.shape[1] // per_row) * per_row)
    return padded[:, : x.shape[1]].copy_(x)


def shape_arguments(tiles: Tiles) -> dict[str, Any]:
    return {
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "DEPTH": tiles.depth,
        "GROUP": tiles.group,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


@triton.jit
def place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile: GROUP rows of tiles go through the columns together."""
    in_group = GROUP * tiles_n
    first = tile // in_group * GROUP
    size = min(tiles_m - first, GROUP)
    return first + tile % in_group % size, tile % in_group // size


@triton.jit
def dot(a, b, total):
    """total + a · b. The interpreter's own product misreads bf16, and its bits depend on a row's place."""
    if INTERPRETED:
        return total + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    return tl.dot(a, b, total)


@triton.jit
def cap(z, softcap):
    """softcap · tanh(z / softcap)."""
    return softcap - 2.0 * softcap / (tl.exp2(z * (2.0 * LOG2_E / softcap)) + 1.0)


@triton.jit
def scaled_logits(z, bias_ptr, columns, vocab, scale, softcap, SOFTCAP: tl.constexpr):
    """Products z [rows, columns] to logits in units of log 2 (LOWEST for -inf and beyond V), and before the scale."""
    if bias_ptr is not None:
        z += tl.load(bias_ptr + columns, mask=columns < vocab, other=0.0).to(tl.float32)[None, :]
    if SOFTCAP:
        z = cap(z, softcap)
    scaled = z * scale + tl.where(columns < vocab, 0.0, LOWEST)[None, :]
    if bias_ptr is not None:
        scaled = tl.where(scaled < LOWEST, LOWEST, scaled)
    return scaled, z
