"""linear_selected_logprobs in float64 or float32 by plain torch, and problems of every size that a seed draws."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Case:
    """Factors [R, H], [V, H], [V], N loss tokens, what comes in from above, and the options."""

    factors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    targets: torch.Tensor
    rows: torch.Tensor
    temperature: float
    softcap: float | None
    entropy: bool
    up: torch.Tensor  # [2, N] to logprobs and entropies
    block_columns: int
    chunk_rows: int


def draw(seed: int, exact: bool = False, dtype: torch.dtype = torch.float32, most: int = 120):
    """|z / temperature| of 1 to some thousands. `exact`: small whole numbers, of which every product is exact."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    width, vocab = r.choice([1, 3, 8, 16, 48, 64, 200]), r.choice([6, 18, 100, 516, 1002])
    num_rows, count = r.randint(1, most), r.randint(1, most)
    temperature = 10 ** r.uniform(-2, 1)
    scale = 10 ** r.uniform(0, 3.2) * temperature / width**0.5
    softcap = None if exact else r.choice([None, None, None, 4.0, 30.0, 50.0])
    if exact:
        power = 2.0 ** round(torch.tensor(scale / 100).log2().item())
        hidden = torch.randint(-15, 16, (num_rows, width), generator=g) / 8
        weight = torch.randint(-40, 41, (vocab, width), generator=g) * power
        bias = torch.randint(-40, 41, (vocab,), generator=g) * power
    else:
        hidden = torch.randn(num_rows, width, generator=g)
        weight = torch.randn(vocab, width, generator=g) * scale
        bias = torch.randn(vocab, generator=g) * scale * r.choice([0, 1])
    hidden, weight, bias = (x.to(dtype) for x in (hidden, weight, bias))
    rows = torch.randint(0, num_rows, (count,), generator=g)
    targets = torch.randint(0, vocab, (count,), generator=g)
    if r.random() < 0.3:  # what greedy sampling takes
        targets = (hidden[rows].float() @ weight.float().T + bias.float()).argmax(-1)
    return Case(
        (hidden, weight, bias),
        targets,
        rows,
        temperature,
        softcap,
        r.random() < 0.5,
        torch.randn(2, count, generator=g),
        r.choice([64, 384, 16384]),
        r.choice([16, 64]),
    )


def ours(p: Case, shard: slice | None = None, **keywords: Any) -> list[torch.Tensor]:
    """Gradients to hidden, weight and bias; with `shard` those of this rank's columns."""
    from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs

    hidden, *of_columns = p.factors
    leaves = [hidden, *(x if shard is None else x[shard] for x in of_columns)]
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = linear_selected_logprobs(
        leaves[0], leaves[1], p.targets, p.rows, leaves[2], p.temperature, p.entropy,
        softcap=p.softcap, **keywords,
    )  # fmt: skip
    (out[0] @ p.up[0] + out[1] @ p.up[1] if p.entropy else out @ p.up[0]).backward()
    return [x.grad for x in leaves]


def by_torch(p: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """The same by autograd in `dtype`."""
    leaves = [x.to(dtype).requires_grad_() for x in p.factors]
    full = _log_softmax(p, *leaves)[1]
    loss = full.gather(1, p.targets[:, None])[:, 0] @ p.up[0].to(dtype)
    if p.entropy:
        loss = loss - (full.exp() * full).sum(-1) @ p.up[1].to(dtype)
    loss.backward()
    return [x.grad for x in leaves]


def sums_of_terms(p: Case) -> tuple[list[torch.Tensor], float]:
    """Of each gradient's entries, what the tokens add without their signs; the largest |z / temperature|. float64.

    A token adds g·(onehot - p) and, of the entropy, -u·p·(log p + H) to its logits; a slope of softcap counts as 1.
    """
    hidden, weight, bias = (x.double() for x in p.factors)
    raw, full = _log_softmax(p, hidden, weight, bias)
    share, up = full.exp(), p.up.double().abs()
    terms = up[0, :, None] * share
    terms.scatter_add_(1, p.targets[:, None], up[0, :, None])
    if p.entropy:
        entropy = -(share * full).sum(-1, keepdim=True)
        terms += up[1, :, None] * share * (1 + (full + entropy).abs())
    terms /= p.temperature
    to_hidden = torch.zeros_like(hidden).index_add_(0, p.rows, terms @ weight.abs())
    sums = [to_hidden, terms.T @ hidden[p.rows].abs(), terms.sum(0)]
    return sums, float(raw.abs().max()) / p.temperature


def _log_softmax(
    p: Case, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits before softcap and temperature, and logprobs, [N, V] each."""
    raw = hidden[p.rows] @ weight.T + bias
    capped = raw if p.softcap is None else p.softcap * torch.tanh(raw / p.softcap)
    return raw, torch.log_softmax(capped / p.temperature, -1)
