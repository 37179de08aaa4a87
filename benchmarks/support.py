"""Logprobs over the ids that the sampler kept, on one GPU: gathered rows of the head beside the op over all ids.

    python benchmarks/support.py [--shapes N,H,V ...] [--dtypes bfloat16 ...] [--lengths MEAN ...]

Lists are drawn as rollouts have them: a mean of 8 ids, a median of 2, and a tail that ends at 1,024. `ids` says from
where: `uniform` over V, so that nearly every row of the head comes from memory, or `zipf`, where few ids are in many
lists, their rows stay in the cache, and runs of one id are long. `full_ms` is `linear_selected_logprobs` without
support, run in turn with the op, and `x_faster` that over `both_ms`. `floor_ms` are the gathered bytes at the
bandwidth of a copy in the same run: the lists' rows of the head, forward and for the gradient to hidden, a row of
hidden per id for the gradient to the head, and both gradients written once. Rows that the cache still holds are
counted too, so an op may be below its floor. `lists of …`: lists of one length by both ways of
`mmpack/ops/logprobs/lists/products.py`, whose `BFLOAT16` they check. Errors are of logprobs and entropies against
float64 on the same inputs, 512 tokens. `memory_bytes` is what a step holds at most beyond its gradients. Without
support float32 has no kernels: name a small shape with it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu
import torch
from torch import Tensor

from mmpack.contracts import TOLERANCES, linear_logprob_bound
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.lists import hidden as op
from mmpack.ops.logprobs.support import Support

NAME = "support"
VOCAB = 152_064
SHAPES = ((13_107, 3584, VOCAB), (131_072, 3584, VOCAB))
MEAN, MEDIAN, LONGEST = 8, 2, 1024
LENGTHS = (64, 256, 512, 1024, 1536, 2048)  # about V / 123, where the routes part
LENGTHS_TOKENS = 4096
CHECKED = 512


def main() -> None:
    options = gpu.arguments(
        NAME,
        shapes={"nargs": "*", "default": [",".join(map(str, s)) for s in SHAPES]},
        dtypes={"nargs": "*", "default": ["bfloat16"]},
        lengths={"nargs": "*", "type": int, "default": LENGTHS},
    )
    check_contract()
    rate = gpu.copy_bytes_per_second()
    rows = []
    for shape in options.shapes:
        count, width, vocab = (int(x) for x in shape.split(","))
        for dtype in options.dtypes:
            for ids in ("uniform", "zipf"):
                row = measure(count, width, vocab, getattr(torch, dtype), ids, rate)
                rows.append({"section": "beside the full op"} | row)
                print(rows[-1], file=sys.stderr, flush=True)
    for length in options.lengths:
        row = routes(LENGTHS_TOKENS, 3584, VOCAB, length)
        rows.append({"section": "gathered rows and products"} | row)
        print(rows[-1], file=sys.stderr, flush=True)
    gpu.write(options.out, NAME, {"copy_bytes_per_second": rate}, rows)


def check_contract() -> None:
    """Values, gradients and bits against float64 of both routes, on a shape that takes a second."""
    count, width, vocab = 700, 512, 20_011
    for dtype in (torch.bfloat16, torch.float32):
        hidden, weight = factors(count, width, vocab, dtype)
        support, targets = draw(count, vocab, "zipf")
        up = torch.randn(count, device="cuda")
        wide = [x.double().requires_grad_() for x in (hidden, weight)]
        expected, entropy, peak = over_lists(wide[0], wide[1], targets, support)
        expected.backward(up.double())
        bound = linear_logprob_bound(peak)
        limit = 1e-5 if dtype == torch.float32 else TOLERANCES["gradient_bf16"].value
        for whole in (False, True):
            with route(whole):
                found = [step(hidden, weight, targets, support, up) for _ in range(2)]
            lp, h, *grads = found[0]
            gpu.require(bool((lp - expected).abs().max() <= bound), "logprobs")
            gpu.require(bool((h - entropy).abs().max() <= bound), "entropies")
            for got, leaf in zip(grads, wide, strict=True):
                error = (got - leaf.grad).norm() / leaf.grad.norm()
                gpu.require(bool(error <= limit), "gradients")
            same = (torch.equal(a, b) for a, b in zip(*found, strict=True))
            gpu.require(all(same), "equal bits in another run")


def measure(
    count: int, width: int, vocab: int, dtype: torch.dtype, ids: str, rate: float
) -> dict[str, Any]:
    hidden, weight = factors(count, width, vocab, dtype)
    support, targets = draw(count, vocab, ids)
    up = torch.randn(count, device="cuda") / count
    entries, size = len(support.ids), dtype.itemsize
    gathered = entries * width * size
    forward_bytes = gathered + hidden.nbytes
    bytes_moved = forward_bytes + 2 * gathered + hidden.nbytes + weight.nbytes
    report: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "ids": ids}
    report |= {"N": count, "H": width, "V": vocab, "M": entries}
    report |= errors(hidden, weight, targets, support)

    def forward(given: Support | None) -> Callable[[], Any]:
        return lambda: linear_selected_logprobs(
            hidden, weight, targets, entropy=True, support=given
        )

    # float32 has no kernels without support, and takes seconds.
    repeats = 3 if count > 20_000 or dtype == torch.float32 else 7
    with torch.no_grad():
        once = gpu.in_turn([forward(support), forward(None)], repeats)
    hidden.requires_grad_()
    weight.requires_grad_()

    def both(given: Support | None) -> Callable[[], None]:
        def run() -> None:
            hidden.grad = weight.grad = None
            lp, _ = linear_selected_logprobs(hidden, weight, targets, entropy=True, support=given)
            lp.backward(up)

        return run

    both(support)()
    hidden.grad = weight.grad = None
    memory = gpu.peak_bytes(both(support)) - hidden.nbytes - weight.nbytes
    steps = gpu.in_turn([both(support), both(None)], repeats)
    report |= {
        "forward_ms": once[0],
        "forward_floor_ms": forward_bytes / rate * 1e3,
        "full_forward_ms": once[1],
        "forward_x_faster": once[1] / once[0],
        "both_ms": steps[0],
        "floor_ms": bytes_moved / rate * 1e3,
        "of_floor": bytes_moved / rate * 1e3 / steps[0],
        "full_ms": steps[1],
        "x_faster": steps[1] / steps[0],
        "bytes": bytes_moved,
        "memory_bytes": memory,
        "host_us": gpu.host_microseconds(both(support), calls=20),
    }
    return report


def routes(count: int, width: int, vocab: int, length: int) -> dict[str, Any]:
    """A step with lists of one length by either way, and which one is chosen."""
    hidden, weight = factors(count, width, vocab, torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()
    starts = torch.randint(0, vocab - 8 * length, (count, 1), device="cuda")
    ids = starts + 8 * torch.arange(length, device="cuda")
    offsets = length * torch.arange(count + 1, device="cuda")
    support, targets = Support(offsets, ids.flatten()), ids[:, length // 2].contiguous()
    up = torch.randn(count, device="cuda") / count

    def run(whole: bool | None) -> Callable[[], None]:
        def once() -> None:
            hidden.grad = weight.grad = None
            with route(whole):
                linear_selected_logprobs(hidden, weight, targets, support=support).backward(up)

        return once

    def full() -> None:
        hidden.grad = weight.grad = None
        linear_selected_logprobs(hidden, weight, targets).backward(up)

    gather, products, without = gpu.in_turn([run(False), run(True), full], 5)
    chosen = op.by_products(count, count * length, vocab, hidden.device, torch.bfloat16)
    report = {"dtype": "bfloat16", "ids": f"lists of {length}", "N": count, "H": width, "V": vocab}
    return report | {
        "M": count * length,
        "gather_ms": gather,
        "products_ms": products,
        "full_ms": without,
        "chosen": "products" if chosen else "gather",
    }


@contextmanager
def route(whole: bool | None) -> Iterator[None]:
    """Products with the whole head, or gathered rows, in place of what is chosen."""
    before = op.by_products
    if whole is not None:
        op.by_products = lambda *_: whole  # type: ignore[assignment]
    try:
        yield
    finally:
        op.by_products = before


def factors(count: int, width: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Hidden states and weight; logits are of the size that a model's are."""
    torch.manual_seed(0)
    hidden = torch.randn(count, width, device="cuda").to(dtype)
    weight = torch.randn(vocab, width, device="cuda").mul_(0.05).to(dtype)
    return hidden, weight


def draw(count: int, vocab: int, ids: str) -> tuple[Support, Tensor]:
    """Lists of a lognormal length, and a target of each; an id that is drawn twice is in the list once."""
    torch.manual_seed(1)
    spread = math.sqrt(2 * math.log(MEAN / MEDIAN))
    length = (torch.randn(count) * spread).exp().mul(MEDIAN).round().clamp(1, LONGEST).long()
    tokens = torch.repeat_interleave(torch.arange(count), length)
    if ids == "uniform":
        drawn = torch.randint(0, vocab, tokens.shape)
    else:  # density 1 / rank
        drawn = (float(vocab) ** torch.rand(tokens.shape)).long().clamp_(max=vocab - 1)
    keys = torch.unique(tokens * vocab + drawn)
    tokens, drawn = keys // vocab, keys % vocab
    offsets = torch.searchsorted(tokens, torch.arange(count + 1))
    picked = offsets[:-1] + (torch.rand(count) * offsets.diff()).long()
    return Support(offsets, drawn).to("cuda"), drawn[picked].cuda()


def step(
    hidden: Tensor, weight: Tensor, targets: Tensor, support: Support, up: Tensor
) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    lp, h = linear_selected_logprobs(*leaves, targets, entropy=True, support=support)
    return [lp.detach(), h.detach(), *torch.autograd.grad(lp, leaves, up)]


def over_lists(
    hidden: Tensor, weight: Tensor, targets: Tensor, support: Support
) -> tuple[Tensor, Tensor, float]:
    """Logprobs and entropies by torch's softmax, -inf at ids that are not in the list; and the largest |logit|."""
    z = hidden @ weight.T
    tokens = torch.repeat_interleave(support.offsets.diff())
    left_out = torch.ones_like(z, dtype=torch.bool)
    left_out[tokens, support.ids] = False
    full = z.masked_fill(left_out, -torch.inf).log_softmax(-1)
    entropy = -(full.exp() * full.clamp(min=-1e30)).sum(-1)
    return full.gather(1, targets[:, None])[:, 0], entropy, float(z.detach().abs().max())


def errors(hidden: Tensor, weight: Tensor, targets: Tensor, support: Support) -> dict[str, float]:
    """Of the first tokens."""
    offsets = support.offsets[: CHECKED + 1]
    few = Support(offsets, support.ids[: int(offsets[-1])])
    hidden, targets = hidden[:CHECKED], targets[:CHECKED]
    lp, h = linear_selected_logprobs(hidden, weight, targets, entropy=True, support=few)
    # By the rows of the lists alone: the head in float64 takes 4 GB and more.
    names, place = few.ids.unique(return_inverse=True)
    compact = Support(few.offsets, place)
    found = torch.searchsorted(names, targets)
    want, entropy, _ = over_lists(hidden.double(), weight[names].double(), found, compact)
    return {
        "max_error": float((lp - want).abs().max()),
        "max_error_entropy": float((h - entropy).abs().max()),
    }


if __name__ == "__main__":
    main()
