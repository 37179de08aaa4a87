"""The projector's last layer and the merge: mmpack's one op beside torch's two, time and memory, on one GPU.

65,536 vision rows (64 pictures of 1,024 tokens, 128 text rows before each), K = 5,120 in front of the layer, H = 3,584
(Qwen2.5-VL-7B's), bf16; by itself, with three deepstack levels
(Qwen3-VL's), and with half as many pictures, each in two samples.
`floor_ms`: cuBLAS's bare products of the same run, in turn with the calls, and a copy of the rows of text; `peak_ms`:
the products' FLOPs at the card's dense bf16 peak, where it is known. `extra_bytes`: the most that is held at a time
beyond inputs, outputs and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu
import torch
from torch import Tensor
from torch.nn.functional import linear

from mmpack import merge_embeddings
from mmpack.contracts import TOLERANCES
from mmpack.ops import Projection, project_and_merge
from mmpack.ops.embeddings.merge import VisionRows
from mmpack.ops.rows.inverse import inverse_index
from mmpack.ops.rows.scatter import scatter_rows

MEDIA, MEDIUM, GAP = 64, 1_024, 128
DEPTH, WIDTH, LEVELS = 5_120, 3_584, 3
CHUNK = 4_608  # rows of a product that stays in the L2 cache
PEAK = {
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}  # dense bf16 FLOPs per second, of the vendor's data sheet
Call = Callable[..., list[Tensor]]


def main() -> None:
    out = gpu.arguments("project_and_merge").out
    torch.manual_seed(0)
    check_contract()
    bandwidth = gpu.copy_bytes_per_second()
    rows: list[dict[str, Any]] = []
    for name, media, levels, times in (
        ("65,536 rows", MEDIA, 0, 1),
        ("65,536 rows, 3 deepstack levels", MEDIA, LEVELS, 1),
        ("32,768 rows, each in two samples", MEDIA // 2, 0, 2),
    ):
        rows += measured(name, media, levels, times, bandwidth)
        torch.cuda.empty_cache()
    gpu.write(out, "project_and_merge", {"copy_bytes_per_second": bandwidth}, rows)


def mmpack(embeddings: Tensor, layers: list[Projection], vision: VisionRows) -> list[Tensor]:
    merged, taken = project_and_merge(embeddings, layers[0], vision, layers[1:])
    return [merged, *taken]


def mmpacks_merge(embeddings: Tensor, layers: list[Projection], vision: VisionRows) -> list[Tensor]:
    features, *deep = (linear(*p) for p in layers)
    merged, taken = merge_embeddings(embeddings, features, vision, deep)
    return [merged, *taken]


def transformers(embeddings: Tensor, layers: list[Projection], vision: VisionRows) -> list[Tensor]:
    """As its models do it: features of each run one after the other, masked_scatter."""
    features, *deep = (linear(*p) for p in layers)
    if len(vision.features) > len(features):
        features, *deep = (x[vision.features] for x in (features, *deep))
    mask = (vision.source >= 0)[:, None].expand_as(embeddings)
    return [embeddings.masked_scatter(mask, features), *deep]


def index_put(embeddings: Tensor, layers: list[Projection], vision: VisionRows) -> list[Tensor]:
    features, *deep = (linear(*p) for p in layers)
    if len(vision.features) > len(features):
        features, *deep = (x[vision.features] for x in (features, *deep))
    return [embeddings.index_put((vision.rows,), features), *deep]


CALLS: dict[str, Call] = {
    "mmpack": mmpack,
    "torch linear, merge_embeddings": mmpacks_merge,
    "torch linear, index_put": index_put,
    "torch linear, masked_scatter": transformers,
}


def measured(
    name: str, media: int, levels: int, times: int, bandwidth: float
) -> list[dict[str, Any]]:
    vision = rows_of(media, times)
    count, total = media * MEDIUM, len(vision.source)
    embeddings = random(total, WIDTH).requires_grad_()
    layers = [layer(count) for _ in range(1 + levels)]
    leaves = [embeddings, *(x for p in layers for x in p)]
    up = [random(total, WIDTH), *(random(len(vision.rows), WIDTH) for _ in range(levels))]

    def forward(call: Call) -> list[Tensor]:
        with torch.no_grad():
            return call(embeddings, layers, vision)

    def both(call: Call) -> list[Tensor]:
        made = call(embeddings, layers, vision)
        return [*made, *torch.autograd.grad(made, leaves, up)]

    flops = 2 * count * DEPTH * WIDTH * (1 + levels)
    text_bytes = 2 * 2 * (total - len(vision.rows)) * WIDTH
    rows = []
    for what, run, products in (("forward", forward, 1), ("forward and backward", both, 3)):
        calls = [lambda c=c: run(c) for c in CALLS.values()]  # noqa: B023
        if products == 1 and times == 1 and levels == 0:
            calls.append(lambda: in_chunks(embeddings, layers[0], vision))
        bare = bare_products(count, 1 + levels, products == 3)
        *taken, floor = gpu.in_turn([*calls, bare])
        del bare
        floor += (1 if products == 1 else 2) * text_bytes / bandwidth * 1e3
        for who, call, ms in zip(
            [*CALLS, "cuBLAS in chunks, scatter_rows"], calls, taken, strict=False
        ):
            kept = sum(x.numel() * x.element_size() for x in call())
            row: dict[str, Any] = {"case": name, "what": what, "who": who, "ms": ms}
            row |= {"flops": products * flops, "floor_ms": floor, "of_floor": floor / ms}
            peak = next((v for k, v in PEAK.items() if gpu.machine()["device"].startswith(k)), None)
            if peak:
                row["peak_ms"] = products * flops / peak * 1e3
            row["extra_bytes"] = gpu.peak_bytes(call) - kept
            rows.append(row)
    return rows


def in_chunks(embeddings: Tensor, p: Projection, vision: VisionRows) -> list[Tensor]:
    """No implementation of ours, but the limit of one: a product that the L2 cache holds, then its rows."""
    with torch.no_grad():
        merged = embeddings.clone()
        assert p.bias is not None
        for start in range(0, len(p.inputs), CHUNK):
            made = torch.addmm(p.bias, p.inputs[start : start + CHUNK], p.weight.T)
            scatter_rows(merged, vision.rows[start : start + CHUNK], made)
        return [merged]


def bare_products(count: int, layers: int, backward: bool) -> Callable[[], None]:
    """cuBLAS's products of a forward, or of a forward and backward, with nothing between them."""
    x, weight, grad = random(count, DEPTH), random(WIDTH, DEPTH), random(count, WIDTH)
    out, to_x, to_weight = (torch.empty_like(t) for t in (grad, x, weight))

    def run() -> None:
        for _ in range(layers):
            torch.mm(x, weight.T, out=out)
            if backward:
                torch.mm(grad, weight, out=to_x)
                torch.mm(grad.T, x, out=to_weight)

    return run


def check_contract() -> None:
    """Values and gradients against float64, and no worse than torch's, on a shape that takes a second."""
    starts = [0, 300, 700]
    source = torch.tensor([-1, *range(700), -1, *range(300), -1], device="cuda").int()
    vision = vision_of(source, starts[-1])
    layers = [
        Projection(random(700, 640), random(512, 640) / 640**0.5, random(512)) for _ in range(2)
    ]
    embeddings = random(len(source), 512)
    up = [random(len(source), 512), random(len(vision.rows), 512)]

    def results(call: Call, dtype: torch.dtype) -> list[Tensor]:
        own = embeddings.to(dtype).requires_grad_()
        cast = [Projection(*(x.to(dtype).requires_grad_() for x in p)) for p in layers]
        made = call(own, cast, vision)
        leaves = [own, *(x for p in cast for x in p)]
        grads = torch.autograd.grad(made, leaves, [u.to(dtype) for u in up])
        return [x.detach() for x in (*made, *grads)]

    exact = results(transformers, torch.float64)
    torchs = results(transformers, torch.bfloat16)
    bound, share = TOLERANCES["gradient_bf16"].value, TOLERANCES["gradient_vs_torch"].value
    errors = []  # relative, ours and torch's
    for ours, theirs, wanted in zip(results(mmpack, torch.bfloat16), torchs, exact, strict=True):
        errors.append([float((x - wanted).norm() / wanted.norm()) for x in (ours, theirs)])
        gpu.require(errors[-1][0] <= bound, f"result {len(errors)} is off by {errors[-1][0]:.1e}")
    off, torchs_off = torch.tensor(errors).norm(dim=0).tolist()
    gpu.require(off <= share * torchs_off, f"off by {off:.1e}, torch by {torchs_off:.1e}")
    alone = results(mmpack, torch.bfloat16)
    again = results(mmpack, torch.bfloat16)
    gpu.require(all(map(torch.equal, alone, again)), "the same bits twice")


def rows_of(media: int, times: int) -> VisionRows:
    """Pictures in turn, `times` over, GAP rows of text before each."""
    text = torch.full((GAP,), -1)
    pieces = [torch.cat([text, torch.arange(MEDIUM) + MEDIUM * m]) for m in range(media)]
    return vision_of(torch.cat(pieces * times).int().cuda(), media * MEDIUM)


def vision_of(source: Tensor, count: int) -> VisionRows:
    rows = (source >= 0).nonzero()[:, 0].int()
    index = source[rows]
    return VisionRows(source, rows, index, *inverse_index(index, count))


def layer(count: int) -> Projection:
    parts = random(count, DEPTH), random(WIDTH, DEPTH) / DEPTH**0.5, random(WIDTH)
    return Projection(*(x.requires_grad_() for x in parts))


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
