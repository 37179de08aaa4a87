"""What every run of the chain is compared with: the model, its problem, the reference and the exact values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from chain.compare import Bounds, Equal, Row, bounds_of, compare
from chain.job.options import DTYPES, Options, shape_of
from chain.job.samples import draw
from chain.passes.axes import (
    OWN_ATTENTION,
    padded_alone,
    reference,
    within_mode,
)
from chain.passes.exact import exact_copy, exact_logprobs, plain_logprobs
from chain.passes.problem import KL_COEF, Problem, make_problem
from chain.passes.run import Way, run
from chain.record import Record

from benchmarks.step.models import random_model
from mmpack.schema.sample import Sample


@dataclass
class Prepared:
    """A model and what every run on it is compared with.

    `alone`: rows of the reference itself beside transformers' own attention and torch's head, in the same dtype:
    what the reference is off is allowed to every run, so it is held to them first. `own`: the reference of runs whose
    attention is transformers' own; None where none is asked for, and within the invariant mode, which refuses these.
    """

    model: Any
    problem: Problem
    reference: Record
    own: Record | None
    exact: Record
    bounds: Bounds
    uncached: list[Sample]  # the same samples of a processor that keeps nothing
    alone: list[Row]

    def rows(self, axis: str, value: str, record: Record, equal: Equal) -> list[Row]:
        partial = axis == "prefix_cache"
        beside = self.own if (axis, value) in OWN_ATTENTION else self.reference
        assert beside is not None
        return compare(axis, value, record, beside, self.exact, equal, self.bounds, partial=partial)


def prepare(options: Options, device: torch.device) -> Prepared:
    """The model in evaluation mode, the problem, the reference, and the exact values of a wider copy."""
    dtype = DTYPES[options.dtype]
    shape = shape_of(options)
    model = random_model(shape, device, dtype).eval()
    samples, uncached, companions = draw(shape.family, options.size, options.seed)
    # float64 costs little where the model is tiny, and a GPU's float32 is wide enough beside bfloat16
    wide = exact_copy(model, torch.float64 if options.size == "tiny" else torch.float32)
    blank = torch.zeros(sum(s.num_loss_tokens for s in samples), device=device)
    problem = make_problem(samples, companions, blank, options.seed)
    with torch.no_grad():
        logprobs = [exact_logprobs(wide, part.batch) for part in padded_alone(wide, problem)]
    problem = make_problem(samples, companions, torch.cat(logprobs), options.seed)
    exact = run(
        wide, problem, padded_alone(wide, problem), Way(attached=False, logprobs=exact_logprobs)
    )
    del wide
    bounds = bounds_of(exact, problem.advantages, KL_COEF, dtype)
    # some modules note things in their first forward, and kernels are chosen
    take = within_mode(reference) if options.invariant else reference
    take(model, problem)
    attached = take(model, problem)
    rectangles = padded_alone(model, problem)
    plain = run(model, problem, rectangles, Way(attached=False, logprobs=plain_logprobs))
    rows = compare("alone", "attached", attached, plain, exact, Equal(), bounds)
    asked = {axis for axis, _ in OWN_ATTENTION} & set(options.axes)
    own = None
    if asked and not options.invariant:
        own = run(model, problem, rectangles, Way(attached=False))
    return Prepared(model, problem, attached, own, exact, bounds, uncached, rows)
