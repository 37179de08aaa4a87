"""Gathers of packing, and the merge of vision rows: times against the copy of the same run, and against torch's own.

T = 32,768 rows of H = 3,584 bf16 (Qwen2.5-VL-7B's), half of them vision rows, each medium shared by 8 samples, three
deepstack levels (Qwen3-VL's). Bytes: each value read once that is read at all, each output written once. `of_floor` is
against the bandwidth of a copy of gigabytes, `of_this_copy` against a copy of as many bytes, timed as the op is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gpu
import torch
import triton
from torch import Tensor

from mmpack.ops.embeddings.merge import VisionRows, merge_embeddings
from mmpack.ops.rows.gather import gather_rows
from mmpack.ops.rows.inverse import inverse_index

TOKENS, WIDTH, LEVELS, SHARED = 32_768, 3_584, 3, 8
MEDIUM = 1_024  # tokens of one


@triton.jit
def _nothing():
    pass


def main() -> None:
    out = gpu.arguments("gather_rows").out
    torch.manual_seed(0)
    floors = {
        "copy_bytes_per_second": gpu.copy_bytes_per_second(),
        "empty_launch_ms": gpu.milliseconds(gpu.graphed(lambda: _nothing[(1,)]()), repeats=51),
    }
    rows: list[dict[str, Any]] = []

    def measure(
        name: str, size: int, calls: dict[str, Callable[[], Any]], waits: Sequence[str] = ()
    ) -> None:
        floor = max(size / floors["copy_bytes_per_second"] * 1e3, floors["empty_launch_ms"])
        source, target = (
            torch.empty(size // 2, dtype=torch.uint8, device="cuda") for _ in range(2)
        )
        calls = {"copy of as many bytes": lambda: target.copy_(source), **calls}
        times: list[float] = []
        for who, call in calls.items():
            # What waits for the GPU can't be in a graph.
            timed, how = (call, "eager") if who in waits else (gpu.graphed(call), "graph")
            times.append(gpu.milliseconds(timed, repeats=31, warmups=5))
            row: dict[str, Any] = {"case": name, "who": who, "timed": how, "ms": times[-1]}
            row |= {"bytes": size, "flops": 0, "floor_ms": floor, "of_floor": floor / times[-1]}
            row |= {"of_this_copy": times[0] / times[-1]}
            row |= {"extra_bytes": gpu.peak_bytes(call), "host_us": gpu.host_microseconds(call)}
            rows.append(row)

    gathers(measure)
    unpacked(measure)
    merges(measure)
    gpu.write(out, "gather_rows", floors, rows)


def gathers(measure: Callable[..., None]) -> None:
    """Rows of samples to rows of a pack: hidden states, ids, positions, patches."""
    index = torch.randperm(2 * TOKENS, device="cuda")[:TOKENS].int()
    cases: dict[str, tuple[Tensor, int]] = {
        "gather [32768, 3584] bf16": (_random(2 * TOKENS, WIDTH), WIDTH * 2),
        "gather [32768, 1176] fp32 (patches)": (_random(2 * TOKENS, 1_176).float(), 1_176 * 4),
        "gather [32768] int64 (ids)": (torch.randint(9**9, (2 * TOKENS,), device="cuda"), 8),
        "gather [32768, 4] int64 (positions)": (
            torch.randint(9**9, (2 * TOKENS, 4), device="cuda"),
            32,
        ),
    }
    for name, (x, size) in cases.items():
        gpu.require(torch.equal(gather_rows(x, index), x[index]), name)
        measure(
            name,
            TOKENS * (2 * size + 4),
            {
                "mmpack": lambda x=x: gather_rows(x, index),
                "torch index_select": lambda x=x: x.index_select(0, index),
            },
        )


def unpacked(measure: Callable[..., None]) -> None:
    """The backward of unpacking a shared pack: 2,048 rows of a prompt in 8 samples, 14,336 rows in one."""
    shared, own = 2 * MEDIUM, TOKENS // 2 - 2 * MEDIUM
    prompt = torch.arange(shared, device="cuda").repeat(SHARED)
    index = torch.cat([prompt, torch.arange(shared, shared + own, device="cuda")]).int()
    count, rows = len(index), shared + own
    x, weight = _random(rows, WIDTH).requires_grad_(), _random(count, WIDTH)
    inverse = inverse_index(index, rows)
    expected = _exact_sum(weight, index, rows)
    made = torch.ops.mmpack.sum_rows(weight, index, *inverse, rows)
    gpu.require(torch.equal(made, expected), "backward of unpacking")
    long, zeros = index.long(), torch.zeros_like(x)

    def in_deterministic_mode() -> Tensor:
        torch.use_deterministic_algorithms(True)
        try:
            return torch.index_add(zeros, 0, index, weight)
        finally:
            torch.use_deterministic_algorithms(False)

    measure(
        "unpack's backward, 16384 rows of 30720",
        (count + rows) * WIDTH * 2 + 4 * count,
        {
            "mmpack": lambda: torch.ops.mmpack.sum_rows(weight, index, *inverse, rows),
            "mmpack, inverse not given": lambda: torch.ops.mmpack.sum_rows(
                weight, index, None, None, rows
            ),
            "torch index_add (atomics)": lambda: torch.index_add(zeros, 0, index, weight),
            "torch index_add (deterministic mode)": in_deterministic_mode,
            "torch index_put accumulate": lambda: torch.index_put(zeros, (long,), weight, True),
        },
    )


def merges(measure: Callable[..., None]) -> None:
    """Half of the rows are vision rows; as transformers does it: features repeated, masked_scatter, rows by mask."""
    media = TOKENS // 2 // MEDIUM // SHARED
    gap = TOKENS // 2 // (media * SHARED)
    source = torch.full((TOKENS,), -1)
    for run in range(media * SHARED):  # the samples of one prompt one after the other
        start, first = run * (gap + MEDIUM) + gap, run // SHARED * MEDIUM
        source[start : start + MEDIUM] = torch.arange(first, first + MEDIUM)
    rows = (source >= 0).nonzero()[:, 0]
    index = source[rows].int()
    parts = source.int(), rows.int(), index, *inverse_index(index, media * MEDIUM)
    vision = VisionRows(*(p.cuda() for p in parts))
    mask = vision.source >= 0
    embeddings = _random(TOKENS, WIDTH).requires_grad_()
    features = _random(media * MEDIUM, WIDTH).requires_grad_()
    deep = [_random(media * MEDIUM, WIDTH).requires_grad_() for _ in range(LEVELS)]

    def repeated(x: Tensor) -> Tensor:
        return torch.cat([piece for piece in x.split(MEDIUM) for _ in range(SHARED)])

    def theirs(deep: list[Tensor]) -> list[Tensor]:
        where = mask[:, None].expand_as(embeddings)
        return [embeddings.masked_scatter(where, repeated(features)), *map(repeated, deep)]

    def ours(deep: list[Tensor]) -> list[Tensor]:
        merged, taken = merge_embeddings(embeddings, features, vision, deep)
        return [merged, *taken]

    row, features_bytes = WIDTH * 2, media * MEDIUM * WIDTH * 2
    for levels in ([], deep):
        name = f"[32768, 3584] bf16, {len(levels)} levels"
        inputs = [embeddings, features, *levels]
        outputs, expected = ours(levels), theirs(levels)
        gpu.require(all(map(torch.equal, outputs, expected)), f"merge {name}")
        weights = [torch.randn_like(x) for x in outputs]
        grads = torch.autograd.grad(outputs, inputs, weights, retain_graph=True)
        gpu.require(torch.equal(grads[0], torch.where(mask[:, None], 0, weights[0])), "embeddings")
        for grad, weight in zip(grads[1:], [weights[0][mask], *weights[1:]], strict=True):
            exact = _exact_sum(weight, vision.features, media * MEDIUM)
            gpu.require(torch.equal(grad, exact), f"gradient of the features, {name}")

        vision_rows = len(vision.rows) * len(levels)
        with torch.no_grad():
            measure(
                f"merge {name}",
                # text rows and each medium once read, all rows written
                (TOKENS // 2 + TOKENS + vision_rows) * row + (1 + len(levels)) * features_bytes,
                {
                    "mmpack": lambda levels=levels: ours(levels),
                    "transformers: cat, masked_scatter": lambda levels=levels: theirs(levels),
                },
            )

        measure(
            f"merge's backward {name}",
            (2 * TOKENS + vision_rows) * row + (1 + len(levels)) * features_bytes,
            {
                "mmpack": lambda weights=weights: torch.ops.mmpack.unmerge_embeddings(
                    weights[0], weights[1:], *vision, TOKENS, media * MEDIUM
                ),
                "transformers: autograd": lambda made=expected, inputs=inputs, weights=weights: (
                    torch.autograd.grad(made, inputs, weights, retain_graph=True)
                ),
            },
            waits=["transformers: autograd"],
        )


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _exact_sum(weight: Tensor, index: Tensor, rows: int) -> Tensor:
    """In float32 by torch on the CPU, in order of the index."""
    total = torch.zeros(rows, weight.shape[1])
    return total.index_add_(0, index.cpu(), weight.float().cpu()).to(weight.device, weight.dtype)


if __name__ == "__main__":
    main()
