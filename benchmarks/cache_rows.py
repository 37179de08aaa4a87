"""KV and features in and out of a cache's rows, against a copy of as many bytes and against torch's own.

A store of 262,144 rows (tokens) of a Qwen2.5-VL-7B: 28 layers, keys and values [4, 128] bf16; 131,072 of them, in
blocks of 16 in random order, are read and written. Features are [3,584] bf16. Bytes: each value read once and written
once, and the index read. `of_floor` is against the bandwidth of a copy of gigabytes, `of_this_copy` against a copy of
as many bytes, timed as the op is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu
import torch
import triton
from torch import Tensor

from mmpack.cache import RowStore
from mmpack.ops.rows.gather import gather_rows
from mmpack.ops.rows.scatter import scatter_rows

ROWS, TAKEN, BLOCK = 262_144, 131_072, 16
LAYERS, HEADS, HEAD_DIM, WIDTH = 28, 4, 128, 3_584


@triton.jit
def _nothing():
    pass


def main() -> None:
    out = gpu.arguments("cache_rows").out
    torch.manual_seed(0)
    floors = {
        "copy_bytes_per_second": gpu.copy_bytes_per_second(),
        "empty_launch_ms": gpu.milliseconds(gpu.graphed(lambda: _nothing[(1,)]()), repeats=51),
    }
    rows: list[dict[str, Any]] = []

    def measure(name: str, size: int, calls: dict[str, Callable[[], Any]]) -> None:
        floor = max(size / floors["copy_bytes_per_second"] * 1e3, floors["empty_launch_ms"])
        source, target = (
            torch.empty(size // 2, dtype=torch.uint8, device="cuda") for _ in range(2)
        )
        calls = {"copy of as many bytes": lambda: target.copy_(source), **calls}
        times: list[float] = []
        for who, call in calls.items():
            times.append(gpu.milliseconds(gpu.graphed(call), repeats=31, warmups=5))
            row: dict[str, Any] = {"case": name, "who": who, "timed": "graph", "ms": times[-1]}
            row |= {"bytes": size, "flops": 0, "floor_ms": floor, "of_floor": floor / times[-1]}
            row |= {"of_this_copy": times[0] / times[-1]}
            row |= {"extra_bytes": gpu.peak_bytes(call), "host_us": gpu.host_microseconds(call, 20)}
            rows.append(row)

    one_tensor(measure, "keys of a layer, [4, 128] bf16", (HEADS, HEAD_DIM))
    one_tensor(measure, "keys and values of a layer, [2, 4, 128] bf16", (2, HEADS, HEAD_DIM))
    one_tensor(measure, "features, [3584] bf16", (WIDTH,))
    all_layers(measure)
    gpu.write(out, "cache_rows", floors, rows)


def one_tensor(measure: Callable[..., None], name: str, shape: tuple[int, ...]) -> None:
    index = _blocks()
    long = index.long()
    store, values = _random(ROWS, *shape), _random(TAKEN, *shape)
    gpu.require(_same(gather_rows(store, index), store[long]), f"read {name}")
    expected = store.index_copy(0, long, values)
    scatter_rows(store, index, values)
    gpu.require(_same(store, expected), f"write {name}")
    gpu.require(_same(gather_rows(store, index), values), f"read again {name}")
    del expected
    size = TAKEN * (2 * values[0].numel() * 2 + 4)
    measure(
        f"read {name}",
        size,
        {
            "mmpack": lambda: gather_rows(store, index),
            "torch index_select": lambda: store.index_select(0, index),
        },
    )
    measure(
        f"write {name}",
        size,
        {
            "mmpack": lambda: scatter_rows(store, index, values),
            "torch index_copy_": lambda: store.index_copy_(0, long, values),
        },
    )


def all_layers(measure: Callable[..., None]) -> None:
    """A RowStore's own read and write: one launch per layer's keys or values."""
    index = _blocks()
    long = index.long()
    store = RowStore(ROWS)
    values = [_random(TAKEN, HEADS, HEAD_DIM) for _ in range(2 * LAYERS)]
    store.write(index, values)
    gpu.require(all(map(_same, store.read(index), values)), "all layers")
    size = 2 * LAYERS * TAKEN * (2 * HEADS * HEAD_DIM * 2 + 4)
    measure(
        "read all layers",
        size,
        {
            "mmpack": lambda: store.read(index),
            "torch index_select": lambda: [t.index_select(0, index) for t in store.tensors],
        },
    )
    measure(
        "write all layers",
        size,
        {
            "mmpack": lambda: store.write(index, values),
            "torch index_copy_": lambda: [
                t.index_copy_(0, long, v) for t, v in zip(store.tensors, values, strict=True)
            ],
        },
    )


def _blocks() -> Tensor:
    """int32 [TAKEN]: rows of blocks in random order."""
    chosen = torch.randperm(ROWS // BLOCK)[: TAKEN // BLOCK, None]
    return (chosen * BLOCK + torch.arange(BLOCK)).reshape(-1).int().cuda()


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


if __name__ == "__main__":
    main()
