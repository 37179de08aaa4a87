"""Fused linear selected logprob on one GPU: mmpack and its peers, each in a process of its own, beside cuBLAS.

    python benchmarks/linear_selected_logprobs.py [--shapes N,H,V ...] [--peers trl verl ...] [--packages FOLDER]

A peer is imported if it is installed, or from FOLDER if that holds its package (an unpacked wheel will do); one that
can't be loaded is named with the reason. Ratios are to cuBLAS's bare product, which runs in turn with the op: both then
meet one clock, but an op that leaves the card cool leaves its product faster; between peers compare ms. FLOPs of the
forward are those of one product, 2 · N · H · V; of the backward two more, three where probabilities are computed again.
"cuBLAS, the same chunks" is no peer but the limit: bare products in the blocks and chunks that mmpack recomputes in, on
operands like the real ones, with nothing between them. `statistics`, `logit_gradient`, `products`: what our kernels
take of one step by the profiler, in cuBLAS's products.
Everything is bf16. Errors are of logprobs against float64 on the same inputs, 512 rows. `memory_bytes` is what a
forward, or a forward and backward, holds at most beyond inputs and gradients. T: rows of the batch that the N are
40 % of; peers then run on all T rows, as they are called, and mmpack on its N.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from mmpack.contracts import TOLERANCES, linear_logprob_bound
from mmpack.ops.logprobs.linear.blocks import plan_blocks
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.linear.tiles import tiles_of

NAME = "linear_selected_logprobs"
VOCAB = 151_936
PARTS = ("statistics", "logit_gradient", "products")  # of the kernels' names
LIMIT = "cuBLAS, the same chunks"
CUBLAS_ROWS = 16_384  # of one product, whose output is kept for that long
# N, H, V, T: the heads of Qwen2.5-VL-7B, -3B and Qwen3-VL-8B. T = 0: N rows and no others.
SHAPES = (
    (13_107, 3584, VOCAB, 0),
    (13_107, 3584, VOCAB, 32_768),
    (1024, 3584, VOCAB, 0),
    (131_072, 3584, VOCAB, 0),
    (13_107, 2048, VOCAB, 0),
    (13_107, 4096, VOCAB, 0),
)
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    options = gpu.arguments(
        NAME,
        shapes={"nargs": "*", "default": [",".join(map(str, s)) for s in SHAPES]},
        peers={"nargs": "*", "default": [*IMPLEMENTATIONS]},
        packages={"type": Path, "default": None},
        one={"help": "internal: whom to measure, in this process"},
    )
    if options.packages:
        sys.path.insert(0, str(options.packages))
    if options.one:
        for shape in options.shapes:
            print(json.dumps(measure(options.one, shape)), flush=True)
            torch.cuda.empty_cache()
        return
    check_contract()
    rows = []
    for name in options.peers:
        command = [sys.executable, __file__, "--one", name, "--shapes", *options.shapes]
        if options.packages:
            command += ["--packages", str(options.packages)]
        done = subprocess.run(command, capture_output=True, text=True)
        rows += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode:
            rows.append({"name": name, "did_not_run": done.stderr.strip()[-300:]})
        print(name, done.returncode, file=sys.stderr, flush=True)  # a sitting takes minutes
    floors = {"copy_bytes_per_second": gpu.copy_bytes_per_second()}
    gpu.write(options.out, NAME, floors, rows)


def check_contract() -> None:
    """Values and gradients of both modes against float64, on a shape that takes a second."""
    count, width, vocab = 700, 512, 20_011
    hidden, weight, targets = inputs(count, width, vocab)
    up = torch.randn(count, device="cuda")
    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    z = wide[0] @ wide[1].T
    full = z.log_softmax(-1)
    expected = full.gather(1, targets[:, None])[:, 0]
    entropy = -(full.exp() * full).sum(-1)
    expected.backward(up.double())
    bound = linear_logprob_bound(float(z.detach().abs().max()))
    for budget in (0, 1 << 40):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        lp, h = linear_selected_logprobs(*leaves, targets, entropy=True, memory_budget=budget)
        gpu.require(bool((lp - expected).abs().max() <= bound), "logprobs")
        gpu.require(bool((h - entropy).abs().max() <= bound), "entropies")
        lp.backward(up)
        for got, want in zip(leaves, wide, strict=True):
            error = (got.grad - want.grad).norm() / want.grad.norm()
            gpu.require(bool(error <= TOLERANCES["gradient_bf16"].value), "gradients")
        some = torch.randperm(count, device="cuda")[:129]
        alone = linear_selected_logprobs(hidden[some], weight, targets[some])
        gpu.require(torch.equal(alone, lp.detach()[some]), "equal bits in another batch")


def inputs(count: int, width: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets; logits are of the size that a model's are."""
    torch.manual_seed(0)
    hidden = torch.randn(count, width, device="cuda").bfloat16()
    weight = (torch.randn(vocab, width, device="cuda") * 0.05).bfloat16()
    return hidden, weight, torch.randint(0, vocab, (count,), device="cuda")


def measure(name: str, shape: str) -> dict[str, Any]:
    count, width, vocab, batch = (int(x) for x in shape.split(","))
    make, package = IMPLEMENTATIONS[name]
    rows = None
    ours = name.startswith("mmpack")
    if batch:
        rows = torch.linspace(0, batch - 1, count, device="cuda").long()
    call = make(rows if ours else None)
    hidden, weight, targets = inputs(batch or count, width, vocab)
    if ours and rows is not None:
        targets = targets[rows]
    up = torch.randn(len(targets), device="cuda") / count

    # Of some of the rows where there are many: its output is that large.
    some = min(count, CUBLAS_ROWS)
    out = torch.empty(some, vocab, device="cuda", dtype=torch.bfloat16)
    compact = hidden if rows is None else hidden[rows]

    def product() -> None:
        torch.mm(compact[:some], weight.T, out=out)

    report: dict[str, Any] = {"name": " ".join(filter(None, (name, version(package))))}
    report |= {"N": count, "H": width, "V": vocab, "T": batch or None, "dtype": "bfloat16"}
    repeats = 11 if count < 20_000 else 3
    with torch.no_grad():
        got = call(hidden, weight, targets)
        if len(got) > 1 and name != LIMIT:
            got = got if rows is None or ours else got[rows]
            report |= errors(got, compact, weight, targets, rows, ours)
        del got
        forward_memory = gpu.peak_bytes(lambda: call(hidden, weight, targets))
        forward = gpu.in_turn([lambda: call(hidden, weight, targets), product], repeats)
    compact = compact.detach().clone()
    hidden.requires_grad_()
    weight.requires_grad_()

    def step() -> None:
        hidden.grad = weight.grad = None
        lp = call(hidden, weight, targets)
        lp.backward(up[: len(lp)].to(lp.dtype))

    def bare() -> None:
        with torch.no_grad():
            product()

    step()
    hidden.grad = weight.grad = None
    gradients = 2 * (hidden.numel() + weight.numel())
    memory = gpu.peak_bytes(step) - gradients
    both = gpu.in_turn([step, bare], repeats)
    forward_ratio, both_ratio = (taken / (one * count / some) for taken, one in (forward, both))
    flops = 2 * some * width * vocab
    return report | {
        "cublas_ms": both[1] * count / some,
        "cublas_tflop_per_s": flops / both[1] / 1e9,
        "forward_ms": forward[0],
        "forward_x_cublas": forward_ratio,
        "both_ms": both[0],
        "both_x_cublas": both_ratio,
        "forward_memory_bytes": forward_memory,
        "memory_bytes": memory,
        "memory_share_of_logits": memory / (2 * count * vocab),
        **(parts(step, both[1] * count / some) if ours else {}),
    }


def parts(step: Callable[[], None], product: float) -> dict[str, float]:
    """Of one step, by the profiler: what our kernels take, cuBLAS's product = 1."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    taken = dict.fromkeys((*PARTS, "rest"), 0.0)
    for event in seen.key_averages():
        part = next((p for p in PARTS if p in event.key), "rest")
        taken[part] += event.device_time_total / 1e3 / product
    return taken


def errors(
    got: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor | None, ours: bool
) -> dict[str, float]:
    """Of the first 512 rows; peers that return the negative are turned round."""
    if rows is not None and not ours:
        targets = targets[rows]
    some = slice(0, 512)
    logits = hidden[some].double() @ weight.double().T
    wanted = logits.log_softmax(-1).gather(1, targets[some, None])[:, 0]
    found = got.detach()[some].double()
    difference = (found - wanted).abs()
    if (found + wanted).abs().mean() < difference.mean():
        difference = (found + wanted).abs()
    return {"max_error": float(difference.max()), "mean_error": float(difference.mean())}


def version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def mmpack_recompute(rows: Tensor | None) -> Call:
    return lambda x, w, t: mmpack(x, w, t, rows, None)


def mmpack_budget(rows: Tensor | None) -> Call:
    return lambda x, w, t: mmpack(x, w, t, rows, 2 * len(t) * len(w) // 5)


def mmpack_stored(rows: Tensor | None) -> Call:
    return lambda x, w, t: mmpack(x, w, t, rows, 1 << 40)


def mmpack(x: Tensor, w: Tensor, t: Tensor, rows: Tensor | None, budget: int | None) -> Tensor:
    distinct = {}
    if rows is not None:
        inverse = torch.arange(len(rows), device=rows.device)
        distinct = {"rows_unique": rows, "row_inverse": inverse}
    lp, _ = linear_selected_logprobs(x, w, t, rows, entropy=True, memory_budget=budget, **distinct)
    return lp


def cublas_alone(_: Tensor | None) -> Call:
    """The four products of a forward and a backward that computes again."""

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, t: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            for part in x.split(CUBLAS_ROWS):
                torch.mm(part, w.T)
            return x.new_zeros(len(t), dtype=torch.float32)

        @staticmethod
        def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor, None]:
            x, w = ctx.saved_tensors
            (count, width), vocab = x.shape, len(w)
            tiles = tiles_of(x.device)
            block, columns = plan_blocks(count, width, vocab, (tiles.rows, tiles.columns), False, 0)
            grad_x, grad_w = torch.empty_like(x), torch.empty_like(w)
            grad = x[:block] @ w[:columns].T
            grad.copy_(grad.float().softmax(-1) / count)
            for first in range(0, count, block):
                part = x[first : first + block]
                total = torch.zeros(len(part), width, device=x.device)
                for column in range(0, vocab, columns):
                    chunk = w[column : column + columns]
                    d = grad[: len(part), : len(chunk)]
                    torch.mm(part, chunk.T)
                    torch.addmm(total, d, chunk, out_dtype=torch.float32, out=total)
                    out = grad_w[column : column + columns]
                    if first:
                        out.addmm_(d.T, part)
                    else:
                        torch.mm(d.T, part, out=out)
                grad_x[first : first + block] = total
            return grad_x, grad_w, None

    return lambda x, w, t: Products.apply(x, w, t)


def torch_chunked(_: Tensor | None) -> Call:
    def chunk(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return -torch.nn.functional.cross_entropy((x @ w.T).float(), t, reduction="none")

    def call(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        pieces = zip(x.split(2048), t.split(2048), strict=True)
        return torch.cat([checkpoint(chunk, a, w, b, use_reentrant=False) for a, b in pieces])

    return call


def trl(_: Tensor | None) -> Call:
    utils = types.ModuleType("trl.trainer.utils")
    utils.maybe_gather_lm_head_ctx = lambda *_: contextlib.nullcontext()  # type: ignore[attr-defined]
    bare("trl", "trl.kernels", "trl.trainer")
    sys.modules["trl.trainer.utils"] = utils
    function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    return lambda x, w, t: function.apply(x, w, None, t, 1.0, 8192, None, 1.0, ())[0]


def liger_torch(_: Tensor | None) -> Call:
    """What Liger runs where its CuTe kernels can't: torch in chunks of 512 rows."""
    module = "liger_kernel.ops.fused_linear_scaled_cross_entropy"
    function = importlib.import_module(module)._FusedLinearPPOFallbackFunction
    return lambda x, w, t: function.apply(x, w, t, 1.0, -100, False, None)


def liger_mean(_: Tensor | None) -> Call:
    """Its fused loss in Triton: one number for all rows, and gradients made in the forward."""
    module = "liger_kernel.ops.fused_linear_cross_entropy"
    function = importlib.import_module(module).LigerFusedLinearCrossEntropyFunction
    return lambda x, w, t: function.apply(x, w, t)[0][None]


def liger(_: Tensor | None) -> Call:
    os.environ.setdefault("LIGER_BACKEND", "cutedsl")
    module = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
    function = importlib.import_module(module).LigerFusedScaledCrossEntropySM90Function
    return lambda x, w, t: function.apply(x, w, t, 1.0)


def cut_cross_entropy(_: Tensor | None) -> Call:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda x, w, t: function(x, w, t, reduction="none", filter_eps=None)


def verl(_: Tensor | None) -> Call:
    device = types.ModuleType("verl.utils.device")
    device.__dict__.update(
        get_device_capability=lambda *_: torch.cuda.get_device_capability(),
        get_device_name=lambda: "cuda",
        get_torch_device=lambda: torch.cuda,
        is_cuda_available=True,
    )
    bare("verl", "verl.utils")
    sys.modules["verl.utils.device"] = device
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    return lambda x, w, t: function.linear_cross_entropy(x, w, t, 1.0, "none")[0]


def bare(*packages: str) -> None:
    """Packages whose __init__ is not run: it would import a whole framework for one kernel."""
    for name in packages:
        found = importlib.machinery.PathFinder.find_spec(
            name.rpartition(".")[2],
            sys.modules[name.rpartition(".")[0]].__path__ if "." in name else None,
        )
        if found is None or found.submodule_search_locations is None:
            raise ModuleNotFoundError(f"no package {name}")
        module = types.ModuleType(name)
        module.__path__ = list(found.submodule_search_locations)
        sys.modules[name] = module


IMPLEMENTATIONS: dict[str, tuple[Callable[[Tensor | None], Call], str]] = {
    "mmpack recompute": (mmpack_recompute, "mmpack"),
    "mmpack recompute, a fifth of the logits": (mmpack_budget, "mmpack"),
    "mmpack stored": (mmpack_stored, "mmpack"),
    LIMIT: (cublas_alone, "nvidia-cublas"),
    "trl": (trl, "trl"),
    "liger, CuTe": (liger, "liger-kernel"),
    "liger, torch": (liger_torch, "liger-kernel"),
    "liger, mean of all rows": (liger_mean, "liger-kernel"),
    "verl": (verl, "verl"),
    "cut-cross-entropy": (cut_cross_entropy, "cut-cross-entropy"),
    "torch chunked": (torch_chunked, "torch"),
}

if __name__ == "__main__":
    main()
