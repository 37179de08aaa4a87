"""A step of distillation from a teacher's top ids on one GPU: the fused op, full logits, and the sampled id alone.

    python benchmarks/teachers.py [--shapes N,H,V ...] [--lengths K ...] [--teachers COUNT ...]

A step is the head's forward, `distillation_loss` (forward KL, `bucket`) and the backward to hidden states and head, in
bf16. `both_ms` is that of `linear_listed_logprobs`. Beside it, run in turn: `sampled_ms`, `linear_selected_logprobs`
of the sampled id with a sum as its loss, so `x_sampled` is what K further ids cost; `logits_ms`, all logits and
`torch.log_softmax` in float32 of all of them, then a gather (as verl's `forward_kl_topk` and TRL's top-k losses do);
`chunked_ms`, all logits, then `logsumexp` of 4,096 rows at a time and a gather (verl's `use_chunked_topk`). None: out
of memory. `memory_bytes` and `…_memory` are what each step holds at most beyond its gradients. `divergence_ms` is
`teacher_divergence` alone, forward and backward, and its floor the bytes of its entries at the rate of a copy. Ids are
drawn uniformly, so that nearly every row of the head comes from memory. Errors are against float64, 256 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu
import torch
from torch import Tensor

import mmpack as mp
from mmpack.contracts import TOLERANCES, linear_logprob_bound
from mmpack.ops.logprobs.support import ScoredSupport

NAME = "teachers"
VOCAB = 152_064
SHAPES = ((13_107, 3584, VOCAB),)
LENGTHS = (1, 64, 256)
CHECKED = 256
CHUNK = 4096


def main() -> None:
    options = gpu.arguments(
        NAME,
        shapes={"nargs": "*", "default": [",".join(map(str, s)) for s in SHAPES]},
        lengths={"nargs": "*", "type": int, "default": LENGTHS},
        teachers={"nargs": "*", "type": int, "default": [1, 3]},
    )
    check_contract()
    rate = gpu.copy_bytes_per_second()
    rows = []
    for shape in options.shapes:
        count, width, vocab = (int(x) for x in shape.split(","))
        for length in options.lengths:
            for teachers in options.teachers:
                rows.append(measure(count, width, vocab, length, teachers, rate))
                print(rows[-1], file=sys.stderr, flush=True)
    gpu.write(options.out, NAME, {"copy_bytes_per_second": rate}, rows)


def check_contract() -> None:
    """Values, gradients and bits against float64, on a shape that takes a second."""
    count, width, vocab = 700, 512, 20_011
    hidden, weight, targets = factors(count, width, vocab)
    teachers = draw(count, vocab, 40, 2)
    found = [step(hidden, weight, targets, teachers) for _ in range(2)]
    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    full = (wide[0] @ wide[1].T).log_softmax(-1)
    peak = float((hidden.double() @ weight.double().T).abs().max())
    wanted = {n: full[tokens_of(own), own.ids] for n, own in teachers.items()}
    loss = mp.distillation_loss(wanted, teachers, cu_loss(count)).loss
    loss.backward()
    lists, *grads = found[0]
    for name, values in lists.items():
        error = (values - wanted[name]).abs().max()
        gpu.require(bool(error <= linear_logprob_bound(peak)), "logprobs")
    for got, leaf in zip(grads, wide, strict=True):
        error = (got - leaf.grad).norm() / leaf.grad.norm()
        gpu.require(bool(error <= TOLERANCES["gradient_bf16"].value), "gradients")
    same = (torch.equal(a, b) for a, b in zip(found[0][1:], found[1][1:], strict=True))
    gpu.require(all(same), "equal bits in another run")


def measure(
    count: int, width: int, vocab: int, length: int, number: int, rate: float
) -> dict[str, Any]:
    hidden, weight, targets = factors(count, width, vocab)
    teachers = draw(count, vocab, length, number)
    entries = sum(len(own.ids) for own in teachers.values())
    report: dict[str, Any] = {"N": count, "H": width, "V": vocab, "K": length, "teachers": number}
    report |= errors(hidden, weight, targets, teachers)
    hidden.requires_grad_()
    weight.requires_grad_()
    cu = cu_loss(count)

    def fresh(run: Callable[[], Tensor]) -> Callable[[], None]:
        def once() -> None:
            hidden.grad = weight.grad = None
            run().backward()

        return once

    def fused() -> Tensor:
        lists = mp.ops.linear_listed_logprobs(hidden, weight, targets, teachers).lists
        return mp.distillation_loss(lists, teachers, cu).loss

    def sampled() -> Tensor:
        found: Tensor = mp.linear_selected_logprobs(hidden, weight, targets)
        return found.sum()

    def logits() -> Tensor:
        full = torch.log_softmax((hidden @ weight.T).float(), -1)
        lists = {n: full[tokens_of(own), own.ids] for n, own in teachers.items()}
        return mp.distillation_loss(lists, teachers, cu).loss

    def chunked() -> Tensor:
        z = hidden @ weight.T
        sums = torch.cat([part.float().logsumexp(-1) for part in z.split(CHUNK)])
        lists = {}
        for name, own in teachers.items():
            tokens = tokens_of(own)
            lists[name] = z[tokens, own.ids].float() - sums[tokens]
        return mp.distillation_loss(lists, teachers, cu).loss

    steps = {"both": fused, "sampled": sampled, "logits": logits, "chunked": chunked}
    calls = {name: fresh(run) for name, run in steps.items()}
    memory = {name: peak(call, [hidden, weight]) for name, call in calls.items()}
    able = [name for name, held in memory.items() if held is not None]
    times = dict(zip(able, gpu.in_turn([calls[name] for name in able], 5), strict=True))
    hidden.grad = weight.grad = None
    with torch.no_grad():
        forwards = gpu.in_turn(
            [
                lambda: mp.ops.linear_listed_logprobs(hidden, weight, targets, teachers),
                lambda: mp.linear_selected_logprobs(hidden, weight, targets),
            ],
            5,
        )
    first = next(iter(teachers.values()))
    leaf = first.logprobs.clone().requires_grad_()

    def divergence() -> None:
        leaf.grad = None
        mp.losses.teacher_divergence(leaf, first).sum().backward()

    alone = gpu.milliseconds(divergence, ahead=True)
    # Read: both logprobs; written: derivatives. Backward: those again, and the gradient.
    moved = len(first.ids) * (4 + 4 + 4 + 4 + 4)
    report |= {"M": entries, "forward_ms": forwards[0], "sampled_forward_ms": forwards[1]}
    report |= {f"{name}_ms": times.get(name) for name in steps}
    report |= {
        "x_sampled": times["both"] / times["sampled"],
        "x_logits": times["logits"] / times["both"] if "logits" in times else None,
        "x_chunked": times["chunked"] / times["both"] if "chunked" in times else None,
        "memory_bytes": memory["both"],
        **{f"{name}_memory": held for name, held in memory.items() if name != "both"},
        "divergence_ms": alone,
        "divergence_floor_ms": moved / rate * 1e3,
        "host_us": gpu.host_microseconds(calls["both"], calls=20),
    }
    return report


def peak(call: Callable[[], None], leaves: list[Tensor]) -> int | None:
    """What a step holds beyond its gradients; None where the GPU has not as much."""
    try:
        call()
        for leaf in leaves:
            leaf.grad = None
        return gpu.peak_bytes(call) - sum(leaf.nbytes for leaf in leaves)
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


def factors(count: int, width: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and weight in bf16, logits of the size that a model's are; sampled ids."""
    torch.manual_seed(0)
    hidden = torch.randn(count, width, device="cuda").bfloat16()
    weight = torch.randn(vocab, width, device="cuda").mul_(0.05).bfloat16()
    return hidden, weight, torch.randint(0, vocab, (count,), device="cuda")


def draw(count: int, vocab: int, length: int, number: int) -> dict[str, ScoredSupport]:
    """Of each teacher `length` ids per token, rising, with logprobs that fall off as those of top ids do."""
    torch.manual_seed(1)
    step, teachers = vocab // length, {}
    for k in range(number):
        low = torch.arange(length, device="cuda") * step
        ids = low + torch.randint(0, step, (count, length), device="cuda")
        ranks = torch.rand(count, length, device="cuda").argsort(-1)
        logprobs = (-1.5 * (ranks + 1.0).log()).log_softmax(-1) - 0.05
        offsets = torch.arange(count + 1, device="cuda") * length
        teachers[f"teacher {k}"] = ScoredSupport(offsets, ids.flatten(), logprobs.flatten())
    return teachers


def tokens_of(own: ScoredSupport) -> Tensor:
    return torch.repeat_interleave(own.offsets.diff(), output_size=len(own.ids))


def cu_loss(count: int) -> Tensor:
    return torch.tensor([0, count], dtype=torch.int32, device="cuda")


def step(
    hidden: Tensor, weight: Tensor, targets: Tensor, teachers: dict[str, ScoredSupport]
) -> tuple[Any, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    lists = mp.ops.linear_listed_logprobs(*leaves, targets, teachers).lists
    loss = mp.distillation_loss(lists, teachers, cu_loss(len(targets))).loss
    return lists, *torch.autograd.grad(loss, leaves)


def errors(
    hidden: Tensor, weight: Tensor, targets: Tensor, teachers: dict[str, ScoredSupport]
) -> dict[str, float]:
    """Of the first tokens; their softmax a block of the head at a time, which whole takes 4 GB in float64."""
    x = hidden[:CHECKED].double()
    sums = [(x @ part.double().T).logsumexp(-1) for part in weight.split(16_384)]
    total = torch.stack(sums).logsumexp(0)
    few = {n: own[:CHECKED] for n, own in teachers.items()}
    got = mp.ops.linear_listed_logprobs(hidden[:CHECKED], weight, targets[:CHECKED], few).lists
    worst = 0.0
    for name, own in few.items():
        tokens = tokens_of(own)
        want = (x[tokens] * weight[own.ids].double()).sum(-1) - total[tokens]
        worst = max(worst, float((got[name] - want).abs().max()))
    return {"max_error": worst}


if __name__ == "__main__":
    main()
