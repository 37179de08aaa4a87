"""Whether a peer computes the step; a wrong step's speed is of no interest.

The oracle is each sample by itself in more digits: float32 for a bf16 model, float64 for a float32 one. A peer's error
is held to that of the padded peer, which runs transformers' own code in the model's dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from mmpack.adapters.transformers.modules import decoder_layers, tower_blocks
from mmpack.bench.job import Job
from mmpack.bench.padded import padded
from mmpack.bench.peers import Peer
from mmpack.bench.ranks import local, summed
from mmpack.contracts import TOLERANCES

CHECKED = 3  # samples of a group: they share a prefix, and fit where a whole padded group does not


@dataclass(frozen=True)
class Result:
    """Of some samples of one group: logprobs [N], the watched gradients on the CPU, and the norm of all gradients."""

    logprobs: torch.Tensor | None
    gradients: dict[str, torch.Tensor]
    norm: float


@dataclass(frozen=True)
class Distance:
    """From the oracle. `gradients`: relative Frobenius norm. `norm`: relative. `logprobs`: RMS in nats."""

    gradients: float
    norm: float
    logprobs: float | None

    def within(self, padded: Distance, dtype: torch.dtype) -> bool:
        """Within the contract: at most 1.5 × the padded peer's error, or its floor."""
        factor = TOLERANCES["parameter_gradient_vs_separate"].value
        floor = "parameter_gradient_" + ("bf16" if dtype == torch.bfloat16 else "fp32")
        bound = max(factor * padded.gradients, TOLERANCES[floor].value)
        assert padded.logprobs is not None
        nats = max(factor * padded.logprobs, TOLERANCES["layouts"].value)
        return max(self.gradients, self.norm) <= bound and (self.logprobs or 0.0) <= nats


def oracle(exact: Any, job: Job) -> Result:
    """The result of some samples on each rank, each by itself, by `exact`, the model in more digits."""
    return _result(exact, job, [[i] for i in _members(job)], padded)


def result(model: Any, job: Job, peer: Peer) -> Result:
    """The peer's result of the same samples."""
    return _result(model, job, [_members(job)], peer.forward)


def distance(found: Result, want: Result) -> Distance:
    """How far `found` is from `want`, over all ranks."""
    away, size = 0.0, 0.0
    for name, gradient in want.gradients.items():
        away += float((found.gradients[name].float() - gradient.float()).square().sum())
        size += float(gradient.float().square().sum())
    wrong, count = 0.0, 0.0
    if found.logprobs is not None and want.logprobs is not None:
        wrong = float((found.logprobs - want.logprobs).square().sum())
        count = float(len(want.logprobs))
    away, size, wrong, count = summed([away, size, wrong, count])
    return Distance(
        math.sqrt(away / size),
        abs(found.norm - want.norm) / want.norm,
        math.sqrt(wrong / count) if count else None,
    )


def _members(job: Job) -> list[int]:
    groups = job.groups()
    return groups[job.rank % len(groups)][:CHECKED]


def _result(model: Any, job: Job, bins: list[list[int]], forward: Any) -> Result:
    model.zero_grad(set_to_none=True)
    logprobs = []
    for members in bins:
        outcome = forward(model, job, members)
        outcome.loss.backward()
        if outcome.logprobs is not None:
            logprobs.append(outcome.logprobs().float().cpu())
    own = {n: local(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    squares = sum(
        float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in own.values()
    )
    watched = {n: g.cpu() for n, g in own.items() if _watched(n, model)}
    model.zero_grad(set_to_none=True)
    (squares,) = summed([squares])
    return Result(torch.cat(logprobs) if logprobs else None, watched, math.sqrt(squares))


def _watched(name: str, model: Any) -> bool:
    """The first and the last layer of the decoder and of the tower: all gradients would take the model's memory."""
    parts = {"layers": decoder_layers(model), "blocks": tower_blocks(model)}
    places = [f".{part}.{at}." for part, of in parts.items() for at in (0, len(of) - 1)]
    return any(place in name for place in places)
