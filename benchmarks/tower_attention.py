"""Attention of vision towers: every backend that can run on windows, pictures and tiles, beside sdpa one by one.

One layer, bf16, 16 heads. Times are of the GPU, forward and forward + backward; `host_us`: launching one forward.
`one by one` is what transformers does under sdpa: a call for each window or picture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu
import torch
from torch.nn.functional import scaled_dot_product_attention

from mmpack.ops.attention import SEQUENCES, plan_sequences, resolve_sequences, sequence_attention

HEADS = 16
PEER = "one by one"
BOUND = 5e-3  # relative Frobenius norm of the difference to fp32


def windows(height: int, width: int, side: int = 8) -> list[int]:
    """Patches of each window of one picture of [height, width] patches, cut at its edges."""
    return [
        min(side, height - y) * min(side, width - x)
        for y in range(0, height, side)
        for x in range(0, width, side)
    ]


SHAPES: dict[str, tuple[int, list[int]]] = {  # size of a head, lengths
    "Qwen2.5-VL, windows: 4 × 64 × 64 patches": (80, windows(64, 64) * 4),
    "Qwen2.5-VL, windows: 4 × 46 × 62 patches": (80, windows(46, 62) * 4),
    "Qwen2.5-VL, full: 4 × 4,096": (80, [4096] * 4),
    "Qwen2.5-VL, full: 8 sizes": (80, [256, 1024, 4096, 2852, 640, 5184, 1600, 732]),
    "Qwen3-VL: 4 × 3,136": (72, [3136] * 4),
    "Qwen3-VL: video, 32 × 576": (72, [576] * 32),
    "InternVL: 16 tiles of 1,025": (64, [1025] * 16),
}


def main() -> None:
    options = gpu.arguments("tower_attention", shapes={"type": int, "default": len(SHAPES)})
    shapes = list(SHAPES.items())[: options.shapes]
    rows = []
    for name, (dim, lengths) in shapes:
        reasons = SEQUENCES.explain(torch.device("cuda"), head_dim=dim)
        able = [n for n in SEQUENCES.names if reasons[n] is None]
        for backend in able:
            off = worst_error(backend, dim, lengths)
            print(f"{name}, {backend}: relative error {off:.1e}", flush=True)
            gpu.require(off <= BOUND, f"{backend} is off by {off:.1e}, allowed {BOUND:.1e}")
        rows += measured(name, dim, lengths, able)
    gpu.write(
        options.out, "tower_attention", {"copy_bytes_per_second": gpu.copy_bytes_per_second()}, rows
    )


def measured(name: str, dim: int, lengths: list[int], able: list[str]) -> list[dict[str, Any]]:
    """One row per backend and one of the peer, timed in turn."""
    plan = plan_sequences(lengths).to("cuda")
    resolve_sequences(plan, torch.device("cuda"), dim)
    calls = {PEER: one_by_one(lengths)} | {n: attention(lengths, n) for n in able}
    q, k, v, grad = inputs(plan.rows, dim)

    def both(attend: Callable[..., torch.Tensor]) -> Callable[[], None]:
        def call() -> None:
            torch.autograd.grad(attend(q, k, v), (q, k, v), grad)

        return call

    def forward(attend: Callable[..., torch.Tensor]) -> Callable[[], None]:
        def call() -> None:
            with torch.no_grad():
                attend(q, k, v)

        return call

    forwards = gpu.in_turn([forward(c) for c in calls.values()])
    boths = gpu.in_turn([both(c) for c in calls.values()])
    rows = []
    for (backend, call), forward_ms, both_ms in zip(calls.items(), forwards, boths, strict=True):
        rows.append(
            {
                "shape": name,
                "patches": plan.rows,
                "sequences": plan.sequences,
                "backend": backend,
                "chosen": plan.choice is not None and backend == plan.choice[torch.bfloat16],
                "forward_ms": forward_ms,
                "forward_backward_ms": both_ms,
                "of_one_by_one": both_ms / boths[0],
                "host_us": gpu.host_microseconds(forward(call), calls=20),
                "peak_bytes": gpu.peak_bytes(both(call)),
                "forward_flops": 4 * plan.pairs * HEADS * dim,
            }
        )
        print(rows[-1], flush=True)
    return rows


def attention(lengths: list[int], backend: str) -> Callable[..., torch.Tensor]:
    plan = plan_sequences(lengths).to("cuda")
    return lambda q, k, v: sequence_attention(q, k, v, plan, backend=backend)


def one_by_one(lengths: list[int]) -> Callable[..., torch.Tensor]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pieces = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
        out = [
            scaled_dot_product_attention(*piece).transpose(1, 2).contiguous() for piece in pieces
        ]
        return torch.cat(out, dim=1)

    return attend


def worst_error(backend: str, dim: int, lengths: list[int]) -> float:
    """Of the output and the gradients, against one by one in fp32 on the same bf16 numbers."""
    results = []
    ways = ((attention(lengths, backend), torch.bfloat16), (one_by_one(lengths), torch.float32))
    for attend, dtype in ways:
        *leaves, grad = (x.detach().to(dtype) for x in inputs(sum(lengths), dim))
        for x in leaves:
            x.requires_grad_()
        out = attend(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    pairs = zip(*results, strict=True)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)


def inputs(rows: int, dim: int) -> list[torch.Tensor]:
    """q, k, v [1, heads, rows, d] as towers make them (v a part of one product's output); a gradient of the output."""
    torch.manual_seed(0)
    qkv = torch.randn(rows, 3, HEADS, dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.unbind(1)
    made = [x.transpose(0, 1)[None].detach().requires_grad_() for x in (q.clone(), k.clone(), v)]
    return [*made, torch.randn(1, rows, HEADS, dim, device="cuda", dtype=torch.bfloat16)]


if __name__ == "__main__":
    main()
