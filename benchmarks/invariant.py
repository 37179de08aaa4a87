"""The batch-invariant mode on one GPU: its products beside cuBLAS's, norms beside torch's, attention, a training step.

    python benchmarks/invariant.py [--sections products norms ...] [--out FILE]

Each section runs in a process of its own, so that an error in one leaves the others; it is named then. Everything is
bf16 unless a row says else. `equal` columns are bits: of rows computed alone and among many. Times are of the GPU; a
product and cuBLAS's run in turn, so that both meet one clock.
`tiles`: times of one product by every tile, and whether the tile gives the same bits as the first.
`step`: layers of Qwen2.5-VL-7B at their real sizes with random weights, forward and backward, plain and in the mode.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu
import numpy as np
import torch
from torch import Tensor

from mmpack import invariant
from mmpack.ops.attention import TREE, plan_attention, tree_attention
from mmpack.ops.norms.rms import rms_norm
from mmpack.ops.products.product import multiply

NAME = "invariant"
# (K, N): QKV, output, gate and up, down of Qwen2.5-VL-7B; QKV of its tower, its merger
PRODUCTS = [(3584, 4608), (3584, 3584), (3584, 37888), (18944, 3584), (1280, 3840), (5120, 3584)]
ROWS = (1, 17, 1024, 32768)
HEADS, KV_HEADS, DIM = 28, 4, 128
Row = dict[str, Any]


def main() -> None:
    options = gpu.arguments(
        NAME,
        sections={"nargs": "*", "default": [*SECTIONS]},
        one={"help": "internal: the section to measure, in this process"},
    )
    if options.one:
        for row in SECTIONS[options.one]():
            print(json.dumps(row), flush=True)
        return
    rows: list[Row] = []
    for section in options.sections:
        command = [sys.executable, __file__, "--one", section]
        done = subprocess.run(command, capture_output=True, text=True)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        rows += [{"section": section} | row for row in found]  # a row may name another
        if done.returncode:
            rows.append({"section": section, "did_not_run": done.stderr.strip()[-1500:]})
        print(section, done.returncode, len(found), file=sys.stderr, flush=True)
        gpu.write(options.out, NAME, {}, rows)
    floors = {"copy_bytes_per_second": gpu.copy_bytes_per_second()}
    gpu.write(options.out, NAME, floors, rows)


def products() -> Iterator[Row]:
    """X · Wᵀ of every number of rows; dY · W and dYᵀ · X of the largest."""
    for depth, columns in PRODUCTS:
        most = max(ROWS)
        x, w = randn(most, depth), randn(columns, depth) * depth**-0.5
        whole, whole_cublas = multiply(x, w.T, None, x.dtype), torch.mm(x, w.T)
        off = relative(whole[:512], x[:512].double() @ w.double().T)
        gpu.require(off <= 5e-3, f"product {depth} × {columns} is off by {off:.1e}")
        for rows in ROWS:
            part = x[-rows:]
            found = multiply(part, w.T, None, x.dtype)
            yield {
                "product": "X · Wᵀ",
                "M": rows,
                "K": depth,
                "N": columns,
                **beside(part, w.T),
                "equal": torch.equal(found, whole[-rows:]),
                "cublas_equal": torch.equal(part @ w.T, whole_cublas[-rows:]),
            }
        back = randn(most, columns)
        to_x = multiply(back, w, None, x.dtype)
        yield {
            "product": "dY · W",
            "M": most,
            "K": columns,
            "N": depth,
            **beside(back, w),
            "equal": all(
                torch.equal(multiply(back[-r:], w, None, x.dtype), to_x[-r:]) for r in ROWS
            ),
            "cublas_equal": all(torch.equal(back[-r:] @ w, (back @ w)[-r:]) for r in ROWS),
        }
        yield {
            "product": "dYᵀ · X",
            "M": columns,
            "K": most,
            "N": depth,
            **beside(back.T, x),
        }
        del x, w, whole, whole_cublas, back, to_x


def float32() -> Iterator[Row]:
    """float32 products, by torch's setting."""
    for allowed in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        x, w = randn(4096, 3584, torch.float32), randn(3584, 3584, torch.float32)
        whole = multiply(x, w.T, None, x.dtype)
        yield {
            "product": "X · Wᵀ",
            "dtype": "tf32" if allowed else "float32",
            "M": 4096,
            "K": 3584,
            "N": 3584,
            **beside(x, w.T),
            "equal": all(
                torch.equal(multiply(x[-r:], w.T, None, x.dtype), whole[-r:]) for r in (1, 17, 1000)
            ),
            "error": relative(whole[:512], x[:512].double() @ w.double().T),
        }


def tiles() -> Iterator[Row]:
    """Every tile of the device: whether it gives the same bits, and what it takes."""
    from mmpack.ops.products import triton as kernels
    from mmpack.ops.products.tiles import all_tiles, tiles_for

    for depth, columns in PRODUCTS:
        for rows in ROWS:
            x, w = randn(rows, depth), randn(columns, depth) * depth**-0.5
            calls, bits = {}, {}
            for shape in all_tiles(x.device):
                name = "×".join(map(str, (shape.rows, shape.columns, shape.depth)))

                def call(shape: Any = shape, x: Tensor = x, w: Tensor = w) -> Tensor:
                    return kernels.product(x, w.T, None, x.dtype, shape)

                calls[name], bits[name] = call, call()
            first = next(iter(bits.values()))
            times = gpu.in_turn([*calls.values()], 5 if rows > 10_000 else 11)
            chosen = tiles_for(rows, columns, x.device)
            yield {
                "M": rows,
                "K": depth,
                "N": columns,
                "chosen": "×".join(map(str, chosen[:3])),
                "equal": {name: torch.equal(first, made) for name, made in bits.items()},
                "ms": {n: float(f"{t:.4g}") for n, t in zip(calls, times, strict=True)},
            }


def norms() -> Iterator[Row]:
    """RMSNorm in one kernel beside transformers' steps and torch's own; row sums beside torch's."""
    for rows, width in ((1, 3584), (1024, 3584), (32768, 3584), (32768 * 28, 128)):
        x, w, up = randn(rows, width), randn(width), randn(rows, width)

        def written(x: Tensor, w: Tensor) -> Tensor:
            wide = x.float()
            scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            return w * (wide * scale).to(x.dtype)

        def torchs(x: Tensor, w: Tensor) -> Tensor:
            return torch.nn.functional.rms_norm(x, (x.shape[-1],), w, 1e-6)

        calls = {"": rms_norm, "written_": written, "torch_": torchs}
        row: Row = {"op": "rms_norm", "M": rows, "N": width}
        with torch.no_grad():
            times = gpu.in_turn([functools.partial(c, x, w) for c in calls.values()])
            row |= {f"{n}forward_ms": t for n, t in zip(calls, times, strict=True)}
            some = slice(rows // 3, rows // 3 + 17)
            for name, call in calls.items():
                row[f"{name}equal"] = torch.equal(call(x[some], w), call(x, w)[some])
        leaves = x.requires_grad_(), w.requires_grad_()

        def both(call: Callable[..., Tensor], leaves: Any = leaves, up: Tensor = up) -> None:
            torch.autograd.grad(call(*leaves), leaves, up)

        times = gpu.in_turn([functools.partial(both, c) for c in calls.values()])
        yield row | {f"{n}both_ms": t for n, t in zip(calls, times, strict=True)}


def own() -> Iterator[Row]:
    """What of torch's own gives a row the same bits among 1, 17 and 5000 rows, outside of the mode and in it."""
    for width in (128, 1280, 3584, 3585):
        x, w = randn(5000, width), randn(width)
        for name, call in {
            "mean": lambda x: x.float().mean(-1),
            "sum": lambda x: x.float().sum(-1),
            "sum_bf16": lambda x: x.sum(-1),
            "var": lambda x: x.float().var(-1),
            "softmax": lambda x: x.softmax(-1),
            "log_softmax": lambda x: x.float().log_softmax(-1),
            "layer_norm": lambda x, w=w: torch.nn.functional.layer_norm(x, (x.shape[-1],), w, w),
            "layer_norm_gradient": lambda x, w=w: gradient(
                lambda x: torch.nn.functional.layer_norm(x, (x.shape[-1],), w, w), x
            ),
            "silu_product": lambda x: torch.nn.functional.silu(x) * x,
            "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        }.items():
            row: Row = {"op": name, "N": width, "dtype": "bfloat16"}
            for mode in ("plain", "mode"):
                context = (
                    invariant.batch_invariant() if mode == "mode" else contextlib.nullcontext()
                )
                with context:
                    whole = call(x)
                    parts = ((0, 1), (4, 5), (1000, 1017), (2001, 2018), (0, 2500))
                    row[f"{mode}_equal"] = all(
                        torch.equal(call(x[a:b]), whole[a:b]) for a, b in parts
                    )
            yield row


def gradient(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    out = call(x)
    return torch.autograd.grad(out, x, x.detach())[0]


def attention() -> Iterator[Row]:
    """Every backend: times, and whether a sequence has the same bits alone, packed and behind a shared prefix."""
    lengths = [1200, 37, 2048, 4096, 700, 3000, 129, 3500]
    able = [
        n for n in TREE.names if TREE.why_not(n, torch.device("cuda"), torch.bfloat16, DIM) is None
    ]
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        for backend in able:
            if TREE.why_not(backend, torch.device("cuda"), torch.bfloat16, DIM) is not None:
                continue
            row: Row = {"backend": backend, "deterministic": deterministic}
            try:
                row |= attended(backend, lengths)
            except Exception as error:  # a peer that can't, or has no memory: say so and go on
                row["did_not_run"] = f"{type(error).__name__}: {error}"[:300]
            yield row
            torch.cuda.empty_cache()


def attended(backend: str, lengths: list[int]) -> Row:
    total = sum(lengths)
    q, k, v, up = (
        randn(1, total, h, DIM).transpose(1, 2) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    ends = np.cumsum(lengths)

    def run(rows: Tensor, until: np.ndarray) -> list[Tensor]:
        seen = torch.from_numpy(until.astype(np.int32)).cuda()
        plan = plan_attention(until, np.zeros(len(until), bool))
        leaves = [x[:, :, rows].detach().requires_grad_() for x in (q, k, v)]
        out = tree_attention(*leaves, seen, plan, backend=backend)
        grads = torch.autograd.grad(out, leaves, up[:, :, rows].transpose(1, 2))
        return [out.detach()[0], *(g[0].transpose(0, 1) for g in grads)]

    everything = torch.arange(total, device="cuda")
    until = np.repeat(ends, lengths)
    packed = run(everything, until)
    equal = [True] * 4
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        alone = run(everything[start:stop], np.full(stop - start, stop - start))
        equal = [
            e and torch.equal(a, p[start:stop])
            for e, a, p in zip(equal, alone, packed, strict=True)
        ]
    # a prompt of 1200 and branches: each beside the branch with its prompt, alone
    branches = [37, 700, 129, 2000]
    ends = 1200 + np.cumsum(branches)
    shared = run(
        everything[: ends[-1]], np.append(np.full(1200, ends[-1]), np.repeat(ends, branches))
    )
    same = True
    for count, stop in zip(branches, ends, strict=True):
        rows = torch.cat([everything[:1200], everything[stop - count : stop]])
        alone = run(rows, np.full(len(rows), len(rows)))
        same = same and torch.equal(alone[0], shared[0][rows])
    seen = torch.from_numpy(until.astype(np.int32)).cuda()
    plan = plan_attention(until, np.zeros(total, bool))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    grad = up.transpose(1, 2)

    def both() -> None:
        torch.autograd.grad(tree_attention(*leaves, seen, plan, backend=backend), leaves, grad)

    def forward() -> None:
        with torch.no_grad():
            tree_attention(*leaves, seen, plan, backend=backend)

    forward_ms, both_ms = gpu.in_turn([forward], 7)[0], gpu.in_turn([both], 7)[0]
    return {
        "tokens": total,
        "forward_equal": equal[0],
        "to_queries_equal": equal[1],
        "to_keys_equal": equal[2],
        "to_values_equal": equal[3],
        "shared_forward_equal": same,
        "forward_ms": forward_ms,
        "both_ms": both_ms,
        "forward_tflop_per_s": 4 * plan.pairs * HEADS * DIM / forward_ms / 1e9,
    }


def step() -> Iterator[Row]:
    """Two layers and the tower's first blocks: times, and the bits of four layouts, without the mode and in it."""
    import dataclasses

    import mmpack as mp
    from benchmarks.step.models import MODELS, random_model
    from benchmarks.step.workloads import WORKLOADS, draw
    from mmpack.adapters.transformers import attach, packed_logprobs

    shape = MODELS["qwen2.5-vl-7b"]
    cut = dataclasses.replace(
        shape,
        text=shape.text | {"num_hidden_layers": 2},
        vision=shape.vision | {"depth": 8, "fullatt_block_indexes": [7]},
    )
    device = torch.device("cuda")
    model = random_model(cut, device, torch.bfloat16).train()
    load = dataclasses.replace(
        WORKLOADS["geo"], prompts=2, responses=3, longest=900, side=448, prompt=500
    )
    samples, _ = draw(load, "qwen2_5_vl", torch.bfloat16)
    hidden: list[Tensor] = []

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        hidden.append(kwargs.get("inputs_embeds", args[0] if args else None))

    def run(batch: Any) -> tuple[list[Tensor], Tensor, Any]:
        """Logprobs by sample, and the gradient to the text model's input, by packed or padded row."""
        hidden.clear()
        model.zero_grad(set_to_none=True)
        out = packed_logprobs(model, batch)
        embeds = hidden[-1]
        weights = (1 + (batch.loss_targets % 7).float()) / 1000
        (grad,) = torch.autograd.grad((out * weights).sum(), embeds)
        return list(batch.unpack_loss(out.detach())), grad.reshape(-1, grad.shape[-1]), batch

    handle = model.model.language_model.register_forward_pre_hook(keep, with_kwargs=True)
    layouts = {
        "packed": mp.pack(samples),
        "shared": mp.pack(samples, share_prefix=True),
        "left": mp.pad(samples, side="left"),
        "right": mp.pad(samples, side="right"),
    }
    layouts = {n: b.to(device) for n, b in layouts.items()}
    with attach(model):
        for mode in ("plain", "mode"):
            context = (
                invariant.batch_invariant(model) if mode == "mode" else contextlib.nullcontext()
            )
            with context:
                alone = [run(mp.pack([s]).to(device)) for s in samples]
                for name, batch in layouts.items():
                    values, grad, _ = run(batch)
                    row: Row = {
                        "mode": mode,
                        "layout": name,
                        "tokens": int(batch.input_ids.numel()),
                    }
                    pairs = list(zip(values, (a[0][0] for a in alone), strict=True))
                    row["logprobs_equal"] = all(torch.equal(a, b) for a, b in pairs)
                    row["max_difference"] = max(float((a - b).abs().max()) for a, b in pairs)
                    if name == "packed":
                        whole = torch.cat([a[1] for a in alone])
                        row["gradients_equal"] = torch.equal(grad, whole)
                        row["gradient_difference"] = relative(grad, whole)
                    yield row
        handle.remove()
        big, _ = draw(
            dataclasses.replace(WORKLOADS["geo"], prompts=2, responses=6),
            "qwen2_5_vl",
            torch.bfloat16,
        )
        for name, batch in (
            ("packed", mp.pack(big).to(device)),
            ("shared", mp.pack(big, share_prefix=True).to(device)),
            ("one short sample", mp.pack(big[:1]).to(device)),
        ):
            times: dict[str, float] = {}
            for mode in ("plain", "mode", "mode without the model's norms"):
                chosen = model if mode == "mode" else None
                context = (
                    contextlib.nullcontext()
                    if mode == "plain"
                    else invariant.batch_invariant(chosen)
                )
                with context:

                    def both(batch: Any = batch) -> None:
                        model.zero_grad(set_to_none=True)
                        packed_logprobs(model, batch).sum().backward()

                    times[mode] = timed(both)
            yield {
                "section": "step times",
                "timed": name,
                "tokens": int(batch.input_ids.numel()),
                **{f"{mode} ms": t for mode, t in times.items()},
                "over_plain": times["mode"] / times["plain"],
            }


def timed(call: Callable[[], None]) -> float:
    """Median of 5 in ms, the host's time included."""
    times = []
    for _ in range(8):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[3:])


def beside(a: Tensor, b: Tensor) -> Row:
    """Ours and cuBLAS's, in turn; what the host takes for one call of each."""
    flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
    repeats = 7 if flops > 1e12 else 15
    ours, cublas = gpu.in_turn(
        [lambda: multiply(a, b, None, a.dtype), lambda: torch.mm(a, b)], repeats
    )
    row = {"ms": ours, "cublas_ms": cublas, "x_cublas": ours / cublas}
    row |= {"tflop_per_s": flops / ours / 1e9, "cublas_tflop_per_s": flops / cublas / 1e9}
    if flops < 1e11:
        row["host_us"] = gpu.host_microseconds(lambda: multiply(a, b, None, a.dtype))
        row["cublas_host_us"] = gpu.host_microseconds(lambda: torch.mm(a, b))
    return row


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def randn(*shape: Any) -> Tensor:
    """Random numbers on the GPU; bf16, or the dtype that stands last."""
    *sizes, dtype = shape if isinstance(shape[-1], torch.dtype) else (*shape, torch.bfloat16)
    return torch.randn(sizes, device="cuda").to(dtype)


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "tiles": tiles,
    "products": products,
    "norms": norms,
    "own": own,
    "attention": attention,
    "step": step,
    "float32": float32,
}

if __name__ == "__main__":
    main()
