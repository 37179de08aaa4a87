"""Linear attention of packs whose samples share a prompt: each layout's convolution and delta rule, on one GPU.

One layer of Qwen3.5's shape: 16 heads of queries and keys, 32 of values, 128 dimensions each, 8,192 channels and 4 taps
of the convolution, bf16. `plain`: each sample with a prompt of its own; `shared`: each prompt once. Times are of the
GPU, the host ahead.
`floor_ms`: for the convolution its inputs read and outputs written once at the bandwidth of a copy of the same run, in
turn with the call; for the delta rule the products of its chunks at the card's dense bf16 peak, where that is known.
`peak_bytes`: the most memory that the call holds, with what the backward reads.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import gpu
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from mmpack.errors import BackendError
from mmpack.ops.linear_attention import (
    SegmentPlan,
    plan_segments,
    segment_conv1d,
    segment_delta_rule,
)
from mmpack.ops.linear_attention.choose import choose
from mmpack.ops.linear_attention.chunk_plan import CHUNK

HEADS, VALUE_HEADS, DIM, TAPS = 16, 32, 128, 4
CHANNELS = DIM * (2 * HEADS + VALUE_HEADS)
SHAPES: dict[str, tuple[int, list[int], int]] = {  # rows of the prompt, of each response, groups
    "1,200 · 8 × 300–1,500 · 1": (1200, [300, 500, 700, 900, 1100, 1300, 1500, 400], 1),
    "1,200 · 8 × 1,024 · 4": (1200, [1024] * 8, 4),
    "300 · 16 × 200 · 8": (300, [200] * 16, 8),
    "8,192 · 4 × 4,096 · 1": (8192, [4096] * 4, 1),
}
BOUND = 5e-3  # relative Frobenius norm of the difference to float32 or better
PEAK = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12}  # dense bf16 FLOPs per second
Call = Callable[[], Any]


def main() -> None:
    options = gpu.arguments("linear_attention", shapes={"type": int, "default": len(SHAPES)})
    torch.manual_seed(0)
    rule = able_rule()
    check_contract(rule)
    bandwidth = gpu.copy_bytes_per_second()
    rows: list[dict[str, Any]] = []
    for name, shape in list(SHAPES.items())[: options.shapes]:
        for layout, plan in (("plain", plain(*shape)), ("shared", shared(*shape))):
            common = {"shape": name, "layout": layout, "tokens": plan.rows}
            common |= {"waves": len(plan.waves)}
            rows += [common | row for row in of_the_convolution(plan, bandwidth, layout)]
            if rule:
                rows += [common | row for row in of_the_rule(plan)]
            torch.cuda.empty_cache()
    gpu.write(options.out, "linear_attention", {"copy_bytes_per_second": bandwidth}, rows)


def able_rule() -> bool:
    """Whether FLA runs here with its backward; what it lacks is printed."""
    try:
        return choose(torch.device("cuda"), torch.bfloat16, DIM) == "fla"
    except BackendError as error:
        print(error, flush=True)
        return False


def of_the_convolution(plan: SegmentPlan, bandwidth: float, layout: str) -> list[dict[str, Any]]:
    x = random(plan.rows, CHANNELS).requires_grad_()
    weight = random(CHANNELS, TAPS).requires_grad_()
    up = random(plan.rows, CHANNELS)

    def torchs() -> Tensor:
        """One convolution over the whole pack, across its samples: no layer of ours, but what one costs."""
        wide = conv1d(x.T[None], weight[:, None], padding=TAPS - 1, groups=CHANNELS)
        return silu(wide[0, :, : plan.rows].T)

    calls: dict[str, Callable[[], Tensor]] = {
        "mmpack": lambda: segment_conv1d(x, weight, plan=plan)
    }
    if layout == "plain":
        calls["torch conv1d across samples"] = torchs
        if flas := fla_convolution():
            lengths = torch.from_numpy(plan.offsets)
            on_gpu = lengths.cuda()
            calls["FLA"] = lambda: flas(
                x[None], weight, activation="silu", cu_seqlens=on_gpu, cu_seqlens_cpu=lengths
            )[0][0]
    out = []
    for what, moved in (("forward", 2), ("forward and backward", 5)):
        for who, call in calls.items():
            run = no_grad(call) if what == "forward" else both(call, [x, weight], up)
            floor = moved * x.numel() * x.element_size() / bandwidth * 1e3
            out.append(measured("segment_conv1d", what, who, run, floor))
    return out


def fla_convolution() -> Call | None:
    """flash-linear-attention's, if it is installed; it takes only plain packs."""
    if importlib.util.find_spec("fla") is None:
        return None
    found: Call = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    return found


def of_the_rule(plan: SegmentPlan) -> list[dict[str, Any]]:
    leaves = inputs(plan.rows, torch.bfloat16)
    up = random(plan.rows, VALUE_HEADS, DIM)

    def call() -> Tensor:
        return segment_delta_rule(*leaves, plan, backend="fla")

    device = gpu.machine()["device"]
    peak = next((v for name, v in PEAK.items() if device.startswith(name)), None)
    out = []
    for what, products in (("forward", 1), ("forward and backward", 3)):
        run = no_grad(call) if what == "forward" else both(call, leaves, up)
        floor = None if peak is None else products * rule_flops(plan.rows) / peak * 1e3
        out.append(measured("segment_delta_rule", what, "mmpack, by FLA", run, floor))
    return out


def rule_flops(rows: int) -> int:
    """Of a forward's products, a chunk's: q·k, k·k, both sides of the system, outputs, and three with the state."""
    return 2 * rows * VALUE_HEADS * DIM * (5 * CHUNK + 3 * DIM)


def measured(op: str, what: str, who: str, run: Call, floor: float | None) -> dict[str, Any]:
    [taken] = gpu.in_turn([run])
    row: dict[str, Any] = {"op": op, "what": what, "who": who, "ms": taken}
    if floor is not None:
        row |= {"floor_ms": floor, "of_floor": floor / taken}
    return row | {"peak_bytes": gpu.peak_bytes(run)}


def no_grad(call: Callable[[], Tensor]) -> Call:
    def run() -> Tensor:
        with torch.no_grad():
            return call()

    return run


def both(call: Callable[[], Tensor], leaves: list[Tensor], up: Tensor) -> Call:
    return lambda: torch.autograd.grad(call(), leaves, up)


def check_contract(rule: bool) -> None:
    """Values and gradients in bf16, beside the same numbers in plain torch and float32 or float64."""
    plan = shared(200, [300, 65, 1], 2)
    x, weight, up = random(plan.rows, CHANNELS), random(CHANNELS, TAPS), random(plan.rows, CHANNELS)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weight)]
        out = segment_conv1d(*leaves, plan=plan)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, up.to(dtype))])
    worst("segment_conv1d", *results)
    if not rule:
        return
    results = []
    up = random(plan.rows, VALUE_HEADS, DIM)
    for name, dtype in (("fla", torch.bfloat16), ("torch", torch.float32)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs(plan.rows, torch.bfloat16)]
        out = segment_delta_rule(*leaves, plan, backend=name)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, up.to(dtype))])
    worst("segment_delta_rule", *results, bound=4 * BOUND)  # FLA rounds within: not ours to hold


def worst(op: str, found: list[Tensor], wanted: list[Tensor], bound: float = BOUND) -> None:
    pairs = zip(found, wanted, strict=True)
    off = max(float((a.to(b.dtype) - b).norm() / b.norm()) for a, b in pairs)
    print(f"{op}: relative error {off:.1e}", flush=True)
    gpu.require(off <= bound, f"{op} is off by {off:.1e}, allowed {bound:.1e}")


def inputs(rows: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, g, beta; the same in each call."""
    torch.manual_seed(1)
    q, k, v = (random(rows, h, DIM) for h in (HEADS, HEADS, VALUE_HEADS))
    decay = -0.1 * torch.rand(rows, VALUE_HEADS, device="cuda")
    beta = torch.rand(rows, VALUE_HEADS, device="cuda")
    made = [q, k, v, decay, beta.to(dtype)]
    return [x.requires_grad_() for x in made]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def shared(prompt: int, responses: list[int], groups: int) -> SegmentPlan:
    lengths = [prompt, *responses] * groups
    first = np.repeat(np.arange(groups) * (1 + len(responses)), 1 + len(responses))
    parents = np.where(np.arange(len(lengths)) == first, -1, first)
    return plan_segments(np.append(0, np.cumsum(lengths)), parents).to("cuda")


def plain(prompt: int, responses: list[int], groups: int) -> SegmentPlan:
    lengths = np.array([prompt + r for r in responses] * groups)
    roots = np.full(len(lengths), -1)
    return plan_segments(np.append(0, np.cumsum(lengths)), roots).to("cuda")


if __name__ == "__main__":
    main()
