"""Finds the broken rules (MM1xx to MM3xx of `codes.RULES`) of samples; spans are token indices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mmpack.errors import SchemaError, TraceError
from mmpack.families import FAMILIES
from mmpack.progress import tracked
from mmpack.schema.codes import RULES
from mmpack.schema.error_text import escaped, shown
from mmpack.schema.rules import actions, places
from mmpack.schema.rules.arrays import array_problems, codec_problems, replay_problems
from mmpack.schema.rules.media import medium_problems, placeholder_problems
from mmpack.schema.rules.spans import context_problems, loss_problems, score_problems
from mmpack.schema.rules.trajectories import Trajectories
from mmpack.schema.sample import Sample, shape_faults

CHECKS = (
    *(medium_problems, placeholder_problems, loss_problems, context_problems, places.problems),
    *(actions.problems, array_problems, score_problems, codec_problems, replay_problems),
)


@dataclass(frozen=True)
class Problem:
    """A broken rule: its code, the sample, the field and, if there is one, the span of tokens."""

    code: str
    sample_id: str
    field: str
    message: str
    span: tuple[int, int] | None = None

    @property
    def fix(self) -> str:
        return RULES[self.code].fix

    def __str__(self) -> str:
        where = f"{escaped(self.sample_id)}.{self.field}" if self.field else escaped(self.sample_id)
        return f"{where} {self.message} ({self.code}). Fix: {self.fix}"


def validate(samples: Sample | Iterable[Sample]) -> list[Problem]:
    """All broken rules of `samples`, in order; an empty list if there are none.

    Never raises: what is no sample is a problem too (MM003, at `samples[k]`), and so is a trace that ends in an error.

    Example:
        >>> import numpy as np, mmpack as mp
        >>> ids = np.array([9, 8, 7])
        >>> sample = mp.Sample("a", "p", "qwen2_5_vl", ids, [], [], [mp.LossSpan(1, 5)])
        >>> [(p.code, p.field, p.message) for p in mp.validate(sample)]
        [('MM201', 'loss_spans[0]', '[1, 5) after 0, of 3 tokens')]
    """
    if isinstance(samples, Sample):
        samples = [samples]
    if isinstance(samples, str | bytes):
        return [Problem("MM003", "samples", "", "is a text, expected Samples, as of mp.read_trace")]
    found: list[Problem] = []
    at = 0
    seen = Trajectories()
    try:
        for sample in tracked(samples, "validating"):
            found += problems_of(sample, f"samples[{at}]", seen)
            at += 1
    except Exception as error:  # of the iteration: `problems_of` raises none
        found.append(_unreadable(samples, error, f"samples[{at}]"))
    return found


def check(samples: Sample | Iterable[Sample], what: str = "check") -> None:
    """Raise SchemaError with every broken rule of `samples`; `what` begins its message.

    Example:
        >>> import numpy as np, mmpack as mp
        >>> ids = np.array([9, 8, 7])
        >>> sample = mp.Sample("a", "p", "qwen2_5_vl", ids, [], [], [mp.LossSpan(0, 3)])
        >>> try:
        ...     mp.check(sample)
        ... except mp.SchemaError as error:
        ...     print(error)
        check: a.loss_spans[0] starts at token 0 (MM202). Fix: start at 1: a loss token needs a row before it
    """
    problems = validate(samples)
    if problems:
        raise SchemaError(problems, what)


def problems_of(
    sample: Sample, place: str = "sample", seen: Trajectories | None = None
) -> Iterator[Problem]:
    """The broken rules of one sample. Never raises, and never allocates by what a record claims.

    Fields that are not what `read_trace` returns (possible only in samples built by hand) are the only problems
    then: the rules need right fields. `place` names what has no `sample_id`. `seen`: of the trace so far; with it, the
    rules over the samples of a trajectory are checked too.
    """
    if not isinstance(sample, Sample):
        yield Problem("MM003", place, "", f"is {shown(sample)}, expected a Sample")
        return
    sample, faults = structured(sample)
    known = sample.__dict__.get("sample_id")
    sample_id = known if isinstance(known, str) else place
    for fault in faults:
        yield Problem(fault.code or "MM003", sample_id, fault.where, fault.why)
    if faults:
        return
    yield from rule_problems(sample)
    if seen is not None:
        for code, field, message, span in seen.problems(sample):
            yield Problem(code, sample.sample_id, field, message, span)


def rule_problems(sample: Sample) -> Iterator[Problem]:
    """The broken rules of one sample that has no fault of structure: `structured` gives it."""
    family = FAMILIES[sample.family]
    for check_of in CHECKS:
        for code, field, message, span in check_of(sample, family):
            yield Problem(code, sample.sample_id, field, message, span)


def packing_problems(sample: Sample) -> list[Problem]:
    """Problems of a valid sample that plans and batches would drop a part of in silence."""
    if not (isinstance(sample.codec_ids, list) and sample.codec_ids):
        return []
    message = f"holds {len(sample.codec_ids)} of audio, which no batch carries"
    return [Problem("MM407", sample.sample_id, "codec_ids", message)]


def structured(sample: Sample) -> tuple[Sample, list[TraceError]]:
    """The sample as `read_trace` returns it, and its faults by field: what is no sample of the schema at all.

    It is a copy where a field was, say, a numpy integer. Never raises, and allocates no more than the sample holds.
    """
    faults: list[TraceError] = []
    made = sample.checked("", faults, prefix="")
    if not faults:
        faults += shape_faults(made)
    return made, faults


def _unreadable(samples: Any, error: Exception, place: str) -> Problem:
    if isinstance(error, TraceError) and error.code:
        return Problem(error.code, error.where or place, "", error.why)
    if not isinstance(samples, Iterable):
        return Problem("MM003", "samples", "", f"is {shown(samples)}, expected Samples")
    why = escaped(" ".join(str(error).split())[:80])
    return Problem("MM003", place, "", f"can't be had: {type(error).__name__}: {why}")
