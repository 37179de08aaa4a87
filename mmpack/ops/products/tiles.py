"""Shapes of the product's tiles. The order in which K is summed is the same for all of one device.

A tile of another size has other rows and columns around an element, and takes the same steps of K: so the number of
rows may choose among them, and does not change a bit. That is tested on a GPU.
"""

from __future__ import annotations

import functools

import torch

from mmpack.ops.logprobs.linear.tiles import Tiles, programs_of

# What a tile costs per element, the largest one's = 1: smaller tiles read more for each product.
# On one H200, bf16, M = 32,768: benchmarks/invariant.py.
COSTS = {(128, 256): 1.0, (128, 128): 1.1, (64, 256): 1.4, (64, 128): 1.7, (64, 64): 2.9}
HOPPER = tuple(
    Tiles(rows, columns, 64, 16, 8 if rows == 128 else 4, 3 if columns == 256 else 4)
    for rows, columns in COSTS
)
HOPPER_FEW = Tiles(64, 32, 128, 16, 4, 4)  # reading the weight is all: 96 KB, two programs at once
AMPERE = (
    Tiles(128, 256, 32, 16, 8, 3),
    Tiles(128, 128, 32, 16, 8, 3),
    Tiles(64, 128, 32, 16, 4, 4),
)
AMPERE_FEW = Tiles(64, 32, 32, 16, 4, 4)
CDNA3 = (Tiles(128, 128, 64, 16, 8, 2),)
ON_CPU = (Tiles(32, 64, 32, 2, 4, 1),)
ON_CPU_FEW = Tiles(16, 32, 32, 2, 4, 1)
FEW_ROWS = 64  # up to which `FEW` runs


@functools.lru_cache(4096)  # the host would take a third of its time for it
def tiles_for(rows: int, columns: int, device: torch.device) -> Tiles:
    """Tiles of a product [rows, columns]: the least waves over the device, weighed by what a tile costs."""
    menu, few = _menu(device)
    if few is not None and rows <= (few.rows if device.type == "cpu" else FEW_ROWS):
        return few
    if len(menu) == 1:
        return menu[0]
    programs = programs_of(device)

    def cost(tiles: Tiles) -> float:
        count = -(-rows // tiles.rows) * -(-columns // tiles.columns)
        area = tiles.rows * tiles.columns
        return -(-count // programs) * area * COSTS[tiles.rows, tiles.columns]

    return min(menu, key=cost)


def is_few(tiles: Tiles) -> bool:
    """A tile of few rows: its programs run one tile each, several at once on a multiprocessor, to keep memory busy."""
    return tiles in (HOPPER_FEW, AMPERE_FEW, ON_CPU_FEW)


def all_tiles(device: torch.device) -> tuple[Tiles, ...]:
    """Every tile that `tiles_for` may choose on the device."""
    menu, few = _menu(device)
    return menu if few is None else (*menu, few)


@functools.cache
def _menu(device: torch.device) -> tuple[tuple[Tiles, ...], Tiles | None]:
    if device.type == "cpu":
        return ON_CPU, ON_CPU_FEW
    if torch.version.hip:
        return CDNA3, None
    if torch.cuda.get_device_capability(device)[0] in (9, 10):
        return HOPPER, HOPPER_FEW
    return AMPERE, AMPERE_FEW
