"""The divergence from a teacher in plain torch and float64: what the kernel is to compute."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmpack.losses.distillation.call import LEAST_REST, Columns, Options
from mmpack.ops.segments import segment_sum


def divergence(columns: Columns, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Divergences [N] and masses [2, N] (policy, teacher), float64; derivatives [M] of a token's own divergence."""
    tokens, bounds = columns.tokens, columns.bounds
    raw, teacher = columns.logprobs.double(), columns.teacher.double()
    masses = torch.stack([segment_sum(x.exp(), bounds) for x in (raw, teacher)])
    a, b = raw.clamp(min=options.least), teacher.clamp(min=options.least)
    if options.tail == "renormalize":
        a, b = (x - _log_sum(x, tokens, bounds)[tokens] for x in (a, b))
    values, slopes = pointwise(a, b, options)
    values = segment_sum(values, bounds)
    if options.tail == "renormalize":
        slopes = slopes - a.exp() * segment_sum(slopes, bounds)[tokens]
    elif options.tail == "bucket":
        rest, rest_teacher = (1 - segment_sum(x.exp(), bounds) for x in (a, b))
        floored = rest <= LEAST_REST
        rest, rest_teacher = (x.clamp(min=LEAST_REST) for x in (rest, rest_teacher))
        value, slope = pointwise(rest.log(), rest_teacher.log(), options)
        values = values + torch.where(bounds.diff() > 0, value, 0.0)
        slopes = slopes - a.exp() * torch.where(floored, 0.0, slope / rest)[tokens]
    slopes = torch.where(raw < options.least, 0.0, slopes)
    return values, masses, slopes.to(torch.promote_types(columns.logprobs.dtype, torch.float32))


def pointwise(a: Tensor, b: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """The term of an id with log-probabilities a (policy) and b (teacher), and its derivative to a."""
    p, q = a.exp(), b.exp()
    if options.kind == "forward_kl":
        return _times(q, b - a), -q
    if options.kind == "reverse_kl":
        value = _times(p, a - b)
        return value, value + p
    beta = options.beta
    middle = _log_add(a + math.log1p(-beta), b + math.log(beta))
    own = (1 - beta) * _times(p, a - middle)
    return own + beta * _times(q, b - middle), own


def _log_add(x: Tensor, y: Tensor) -> Tensor:
    """log(exp x + exp y). torch.logaddexp rounds otherwise behind the last full vector."""
    return torch.maximum(x, y) + (x - y).abs().neg().exp().log1p()


def _times(p: Tensor, x: Tensor) -> Tensor:
    """p · x, and 0 where p is 0, whatever x is."""
    return torch.where(p == 0, 0.0, p * x)


def _log_sum(x: Tensor, tokens: Tensor, bounds: Tensor) -> Tensor:
    """Log of the sum of exp over each list, [N]."""
    top = x.new_full((len(bounds) - 1,), -torch.inf).scatter_reduce_(0, tokens, x, "amax")
    return top + segment_sum((x - top[tokens]).exp(), bounds).log()
