"""Whether a peer computes the step; a wrong step's speed is of no interest.

The oracle is each sample by itself in more digits: float32 for a bf16 model, float64 for a float32 one. A peer's error
is held to that of the padded peer, which runs transformers' own code in the model's dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.step.job import Job
from benchmarks.step.kinds import parts_of_weight
from benchmarks.step.padded import padded
from benchmarks.step.peers import Peer
from benchmarks.step.ranks import local, summed, whole
from mmpack.adapters.transformers.modules import decoder_layers, tower_blocks
from mmpack.contracts import TOLERANCES, parameter_gradient_bound

CHECKED = 3  # samples of a group: they share a prefix, and fit where a whole padded group does not
_TABLES = ("embed_tokens.weight", "lm_head.weight")  # of all ids: too large to keep


@dataclass(frozen=True)
class Result:
    """Of some samples of one group: logprobs [N], the watched gradients on the CPU, and the norm of all gradients.

    Watched gradients are whole on every rank.
    """

    logprobs: torch.Tensor | None
    gradients: dict[str, torch.Tensor]
    norm: float


@dataclass(frozen=True)
class Distance:
    """From the oracle. `gradients`: relative Frobenius norm; `kinds`: the same of each kind of weight, by name.

    `norm`: relative. `logprobs`: RMS in nats.
    """

    gradients: float
    norm: float
    logprobs: float | None
    kinds: dict[str, float]

    def beyond(self, padded: Distance, dtype: torch.dtype) -> list[str]:
        """What is no finite number, or further off than 1.5 × the padded peer's error (of a kind 3 ×) and its floor."""
        half = dtype.itemsize == 2
        bound = parameter_gradient_bound(padded.gradients, half=half)
        off = {"gradients": (self.gradients, bound), "norm": (self.norm, bound)}
        if self.logprobs is not None:
            assert padded.logprobs is not None
            share = TOLERANCES["parameter_gradient_vs_separate"].value
            nats = max(share * padded.logprobs, TOLERANCES["layouts"].value)
            off["logprobs"] = (self.logprobs, nats)
        for kind, error in self.kinds.items():
            of_kind = parameter_gradient_bound(
                padded.kinds.get(kind, 0.0), half=half, share="parameter_gradient_of_a_kind"
            )
            off[kind] = (error, of_kind)
        # a comparison with NaN is false
        return [name for name, (error, most) in off.items() if not error <= most < math.inf]


def oracle(exact: Any, job: Job) -> Result:
    """The result of some samples on each rank, each by itself, by `exact`, the model in more digits."""
    return _result(exact, job, [[i] for i in _members(job)], padded)


def result(model: Any, job: Job, peer: Peer) -> Result:
    """The peer's result of the same samples."""
    return _result(model, job, [_members(job)], peer.forward)


def distance(found: Result, want: Result) -> Distance:
    """How far `found` is from `want`, over all ranks. A weight without a gradient has one of zeros."""
    away: dict[str, float] = {}
    size: dict[str, float] = {}
    for name in dict.fromkeys([*want.gradients, *found.gradients]):
        there = [r.gradients[name].float() for r in (found, want) if name in r.gradients]
        own, other = (
            parts_of_weight(name, there[at] if name in r.gradients else torch.zeros_like(there[0]))
            for at, r in ((0, found), (-1, want))
        )
        for kind, part in own.items():
            away[kind] = away.get(kind, 0.0) + _square(part - other[kind])
            size[kind] = size.get(kind, 0.0) + _square(other[kind])
    wrong, count = 0.0, 0.0
    if found.logprobs is not None and want.logprobs is not None:
        wrong = float((found.logprobs - want.logprobs).square().sum())
        count = float(len(want.logprobs))
    wrong, count = summed([wrong, count])
    return Distance(
        _relative(sum(away.values()), sum(size.values())),
        _relative((found.norm - want.norm) ** 2, want.norm**2),
        math.sqrt(wrong / count) if count else None,
        {kind: _relative(away[kind], size[kind]) for kind in away},
    )


def _square(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _relative(away: float, size: float) -> float:
    """Of sums of squares; anything is infinitely far from nothing."""
    if size == 0:
        return 0.0 if away == 0 else math.inf
    return math.sqrt(away / size)


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
    squares = sum(map(_square, own.values()))
    watched = {
        n: whole(p.grad).cpu()
        for n, p in model.named_parameters()
        if p.grad is not None and _watched(n, model)
    }
    model.zero_grad(set_to_none=True)
    (squares,) = summed([squares])
    return Result(torch.cat(logprobs) if logprobs else None, watched, math.sqrt(squares))


def _watched(name: str, model: Any) -> bool:
    """Everything but the embedding and head tables and the middle layers: all gradients take the model's memory."""
    parts = {"layers": decoder_layers(model), "blocks": tower_blocks(model)}
    for part, of in parts.items():
        if f".{part}." in name:
            return any(f".{part}.{at}." in name for at in (0, len(of) - 1))
    return not name.endswith(_TABLES)
