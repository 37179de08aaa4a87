"""Attention of packs whose samples share a prompt: every backend that can run, beside padded sdpa.

One layer, bf16, heads 28 over 4 × 128 as in Qwen2.5-VL-7B. Times are of the GPU, forward and forward + backward.
`chosen`: the cheapest by cost of all that is installed; `chosen_of_torch`: of those that come with torch.
"""

from __future__ import annotations

import statistics
from typing import Any

import gpu
import numpy as np
import torch

from mmpack.ops.attention import TREE, AttentionPlan, plan_attention, resolve, tree_attention
from mmpack.ops.rows.gather import gather_rows

HEADS, KV_HEADS, DIM = 28, 4, 128
SHAPES: dict[str, tuple[int, list[int], int]] = {  # rows of the prompt, of each response, groups
    "1,200 · 8 × 1,024 · 4": (1200, [1024] * 8, 4),
    "1,200 · 300–1,500 · 4": (1200, [300, 500, 700, 900, 1100, 1300, 1500, 400], 4),
    "4,096 · 8 × 512 · 2": (4096, [512] * 8, 2),
    "300 · 16 × 200 · 8": (300, [200] * 16, 8),
    "8,192 · 4 × 4,096 · 1": (8192, [4096] * 4, 1),
    "16,000 · 8 × 100 · 1": (16000, [100] * 8, 1),
}
TORCHS = ("varlen", "flex")
BOUND = 5e-3  # relative Frobenius norm of the difference to fp32


def main() -> None:
    options = gpu.arguments("attention", shapes={"type": int, "default": len(SHAPES)})
    able = [n for n in TREE.backends if TREE.explain(torch.device("cuda"))[n] is None]
    for name in able:
        off = worst_error(name)
        print(f"{name}: relative error {off:.1e}", flush=True)
        gpu.require(off <= BOUND, f"{name} is off by {off:.1e}, allowed {BOUND:.1e}")
    rows = []
    for name, shape in list(SHAPES.items())[: options.shapes]:
        rows += [padded(name, *shape)]
        for layout, until in (("plain", plain(*shape)), ("shared", shared(*shape))):
            rows += measured(name, layout, until, able)
            print(rows[-1], flush=True)
    gpu.write(
        options.out, "attention", {"copy_bytes_per_second": gpu.copy_bytes_per_second()}, rows
    )


def measured(name: str, layout: str, until: np.ndarray, able: list[str]) -> list[dict[str, Any]]:
    """One row per backend, for one pack."""
    seen, plan = on_gpu(until)
    resolve(plan, seen, DIM)
    cheapest = min(TORCHS, key=lambda b: TREE.backends[b].cost(plan))
    rows = []
    for backend in able:
        common = {
            "shape": name,
            "layout": layout,
            "tokens": plan.rows,
            "backend": backend,
            "predicted_ms": TREE.backends[backend].cost(plan) / 1e6,
            "chosen": backend == plan.choice[torch.bfloat16],
            "chosen_of_torch": backend == cheapest,
        }
        times = timed(
            plan.rows, lambda q, k, v, b=backend: tree_attention(q, k, v, seen, plan, backend=b)
        )
        flops = 4 * plan.pairs * HEADS * DIM
        rows.append(common | times | {"forward_flops": flops})
    for names in (able, TORCHS):
        best = min(r["forward_backward_ms"] for r in rows if r["backend"] in names)
        key = "over_best" if names is able else "over_best_of_torch"
        for row in rows:
            if row["backend"] in names:
                row[key] = row["forward_backward_ms"] / best
    rows[-1] |= {
        "pairs": plan.pairs,
        "gathered": 0 if plan.key_rows is None else len(plan.key_rows),
        "full_blocks": plan.full_blocks,
        "mixed_blocks": plan.mixed_blocks,
        "gather_ms": gather(plan),
    }
    return rows


def padded(name: str, prompt: int, responses: list[int], groups: int) -> dict[str, Any]:
    """Rectangles of whole samples by torch's sdpa, as trainers pad them."""
    width, lines = prompt + max(responses), len(responses) * groups

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.view(lines, -1, width, DIM) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        return out.view(1, HEADS, -1, DIM).transpose(1, 2)

    shape = {"shape": name, "layout": "padded", "tokens": lines * width, "backend": "torch sdpa"}
    return shape | timed(lines * width, sdpa, transposed=False)


def timed(tokens: int, attend: Any, transposed: bool = True) -> dict[str, float]:
    q, k, v, grad = inputs(tokens, transposed)

    def both() -> None:
        q.grad = k.grad = v.grad = None
        attend(q, k, v).backward(grad)

    both_ms = milliseconds(both)
    with torch.no_grad():
        forward_ms = milliseconds(lambda: attend(q, k, v))
    memory = gpu.peak_bytes(both)
    return {"forward_ms": forward_ms, "forward_backward_ms": both_ms, "peak_bytes": memory}


def milliseconds(call: Any) -> float:
    """Median of 7; the GPU sleeps first, so that the host is ahead of it as in a model, and is not timed."""
    times = []
    for _ in range(10):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(6_000_000)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[3:])


def gather(plan: AttentionPlan) -> float:
    """Only the gathers of keys and values and the sums of their gradients, as one CUDA graph: time of the GPU."""
    if plan.key_rows is None:
        return 0.0
    _, k, v, _ = inputs(plan.rows)
    rows = [x.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for x in (k, v)]
    grad = torch.randn(len(plan.key_rows), KV_HEADS, DIM, device="cuda", dtype=k.dtype)

    def both() -> None:
        for x in rows:
            out = gather_rows(x, plan.key_rows, inverse=plan.key_inverse)
            torch.autograd.grad(out, x, grad)

    return gpu.milliseconds(gpu.graphed(both))


def worst_error(backend: str) -> float:
    """Of the output and the gradients, against sdpa in fp32 on the same bf16 numbers."""
    seen, plan = on_gpu(shared(1200, [300, 500, 129, 1], 2))
    inputs_ = inputs(plan.rows)
    results = []
    for name, dtype in ((backend, torch.bfloat16), ("sdpa", torch.float32)):
        *leaves, grad = (x.detach().to(dtype) for x in inputs_)
        for x in leaves:
            x.requires_grad_()
        out = tree_attention(*leaves, seen, plan, backend=name)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    pairs = zip(*results, strict=True)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)


def inputs(tokens: int, transposed: bool = True) -> list[torch.Tensor]:
    """q, k, v [1, heads, tokens, d], in memory [tokens, heads, d] as models make them; a gradient of the output."""
    torch.manual_seed(0)
    made = []
    for heads in (HEADS, KV_HEADS, KV_HEADS):
        shape = (1, tokens, heads, DIM) if transposed else (1, heads, tokens, DIM)
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        made.append((x.transpose(1, 2) if transposed else x).requires_grad_())
    return [*made, torch.randn(1, tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)]


def on_gpu(until: np.ndarray) -> tuple[torch.Tensor, AttentionPlan]:
    plan = plan_attention(until, np.zeros(len(until), dtype=bool))
    return torch.from_numpy(until.astype(np.int32)).cuda(), plan.to("cuda")


def shared(prompt: int, responses: list[int], groups: int) -> np.ndarray:
    """visible_until of groups of responses below their prompt."""
    one = [np.full(prompt, prompt + sum(responses))]
    one += [np.full(r, prompt + sum(responses[: i + 1])) for i, r in enumerate(responses)]
    line = np.concatenate(one)
    return np.concatenate([line + g * len(line) for g in range(groups)])


def plain(prompt: int, responses: list[int], groups: int) -> np.ndarray:
    """The same samples, each with a prompt of its own."""
    lengths = np.array([prompt + r for r in responses] * groups)
    return np.repeat(np.cumsum(lengths), lengths)


if __name__ == "__main__":
    main()
