"""Both ops of logprobs by torch.log_softmax in float64, problems for them, and their bits in any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs


def from_logits(
    logits: Tensor, targets: Tensor, rows: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs and entropies in float64, and the float64 leaf of the logits."""
    leaf = logits.detach().double().requires_grad_()
    return *_of_logits(leaf[rows] / temperature, targets), leaf


def from_hidden(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    rows: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, list[Tensor], float]:
    """Logprobs, entropies, float64 leaves and the largest finite |logit| after the temperature."""
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    z = leaves[0][rows] @ leaves[1].T + leaves[2]
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    peak = z.detach()[z.detach().isfinite()].abs().max() / temperature
    return *_of_logits(z / temperature, targets), leaves, float(peak)


def linear_problem(
    num_rows: int, width: int, vocab: int, count: int, dtype: torch.dtype, scale: float = 0.5
) -> tuple[Tensor, ...]:
    """hidden, weight, bias, targets, rows with repeats, and the rows that are not read: they hold NaN."""
    hidden = torch.randn(num_rows, width)
    rows = torch.randint(0, num_rows - 10, (count,))
    unread = torch.ones(num_rows, dtype=torch.bool).index_fill(0, rows, False)
    hidden[unread] = torch.nan
    weight, bias = torch.randn(vocab, width) * scale, torch.randn(vocab)
    targets = torch.randint(0, vocab, (count,))
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), targets, rows, unread


def linear_step(
    factors: Iterable[Tensor], targets: Tensor, rows: Tensor, up: Tensor, **options: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """linear_selected_logprobs with `up` [2, N] coming in: logprobs, entropies, gradients to hidden, weight, bias."""
    hidden, weight, bias = (x.clone().requires_grad_() for x in factors)
    lp, h = linear_selected_logprobs(hidden, weight, targets, rows, bias, entropy=True, **options)
    (lp @ up[0] + h @ up[1]).backward()
    return lp.detach(), h.detach(), [x.grad for x in (hidden, weight, bias)]


def assert_same_bits_in_any_batch(
    run: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], order: Tensor, sizes: Iterable[int]
) -> None:
    """`run` scores the rows of an index [n], and returns logprobs [n], entropies [n] and a gradient [T, …].

    `order` is a permutation of all T rows; its first n of each size are run.
    """
    lp, h, grad = run(torch.arange(len(order), device=order.device))
    for size in sizes:
        some = order[:size]
        got = run(some)
        assert torch.equal(got[0], lp[some])
        assert torch.equal(got[1], h[some])
        assert torch.equal(got[2][some], grad[some])


def _of_logits(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    full = torch.log_softmax(z, -1)
    p = full.exp()
    entropy = -torch.where(p > 0, p * full, 0.0).sum(-1)
    return full.gather(1, targets[:, None])[:, 0], entropy
