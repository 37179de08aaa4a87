"""Seconds and bytes of whole steps, and the rate of this device's matrix product."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.step.job import Job
from benchmarks.step.peers import Peer
from benchmarks.step.ranks import largest, wait_for_all
from benchmarks.step.work import Work


@dataclass(frozen=True)
class Timed:
    """`seconds`: of each step after the first. `peak_bytes`: allocated at most in them, on any rank; None on a CPU."""

    seconds: list[float]
    peak_bytes: int | None
    works: list[Work]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def take_step(model: Any, job: Job, peer: Peer) -> list[Work]:
    """Forward and backward of all micro-batches of this rank."""
    works = []
    for members in peer.bins(job):
        outcome = peer.forward(model, job, members)
        outcome.loss.backward()
        works.append(outcome.work)
    return works


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Wall time of one call, the device idle before and after it, and all ranks with it."""
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def timed_steps(model: Any, job: Job, peer: Peer, repeats: int) -> Timed:
    """`repeats` steps; the gradients of the one before are dropped outside of the time."""
    cuda = job.device.type == "cuda"
    model.zero_grad(set_to_none=True)
    free()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds, works = [], list[Work]()

    def step() -> None:
        nonlocal works
        works = take_step(model, job, peer)

    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        seconds.append(seconds_of(step, job.device))
    peak = int(largest(torch.cuda.max_memory_allocated())) if cuda else None
    return Timed(seconds, peak, works)


def free() -> None:
    """Give memory back that nothing holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def product_rate(model: Any, job: Job) -> float:
    """FLOP/s of the bare product [rows, H] · [H, intermediate] in the model's dtype, the median of some."""
    text = model.config.get_text_config()
    make = {"device": job.device, "dtype": model.lm_head.weight.dtype}
    rows = min(job.max_rows, job.tokens)
    a = torch.randn(rows, text.hidden_size, **make)
    b = torch.randn(text.intermediate_size, text.hidden_size, **make)
    out = torch.empty(rows, text.intermediate_size, **make)
    times, calls = [], 20

    def some() -> None:
        for _ in range(calls):
            torch.mm(a, b.T, out=out)

    for _ in range(6):
        times.append(seconds_of(some, job.device) / calls)
    return 2 * rows * text.hidden_size * text.intermediate_size / statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    wait_for_all()
