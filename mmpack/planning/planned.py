"""What a plan is: micro-batches as indices of samples, their ranks, and what is left out; a small JSON file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmpack.errors import PlanError, one_line
from mmpack.files import replaced
from mmpack.notebook import Drawn
from mmpack.planning.stats import STATS
from mmpack.schema.codes import RULES
from mmpack.schema.error_text import safe_repr
from mmpack.schema.rules import Problem
from mmpack.schema.sample import Sample
from mmpack.schema.saved import built, read_saved
from mmpack.schema.specs import INT_MAX

FORMAT = "mmpack.plan.1"
MAX_FILE = 2**30  # bytes
FIX = "name a file that Plan.save wrote"


@dataclass(frozen=True)
class Dropped:
    """A sample that is in no bin, and why: broken rules, a budget that it alone exceeds (MM405), its age (MM409)."""

    index: int
    sample_id: str
    group_id: str
    problems: tuple[Problem, ...]

    @property
    def reason(self) -> str:
        return "; ".join(map(str, self.problems))


@dataclass(frozen=True)
class Plan(Drawn):
    """Micro-batches and who runs them.

    `bins`: indices into the samples of each micro-batch, ascending; bins in order of their first
    sample. `ranks`: the bins of each rank, the costliest first; every rank has the same number. The
    last bins are empty where samples are fewer than bins: there a rank runs an `idle_batch`. `total_tokens` (loss
    tokens) and `total_samples` count what is in the bins; they are the totals that `policy_loss` takes. `stats`: see
    `planning/stats.py`; with `memory` also
    max_tokens_grad, max_tokens_no_grad and their ratio no_grad_ratio. `bin_rows`, `bin_patches`, `bin_loss_tokens`: of
    each bin, as budgets count them: shared rows and media once. `bin_costs`: seconds, or what a `cost` of the caller's
    gave. `share`: whether each bin's prefixes are shared, for `mp.pack`.
    `deferred`: indices of samples that `defer_tail` leaves for a later plan. `fingerprint`: of the
    samples that were planned: ids, groups, lengths and loss tokens, in order.
    """

    bins: list[list[int]]
    ranks: list[list[int]]
    total_tokens: int
    total_samples: int
    dropped: list[Dropped]
    stats: dict[str, Any]
    bin_rows: list[int] = field(default_factory=list)
    bin_patches: list[int] = field(default_factory=list)
    bin_loss_tokens: list[int] = field(default_factory=list)
    bin_costs: list[float] = field(default_factory=list)
    share: list[bool] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)
    fingerprint: str = ""

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all. Raises PlanError where that can't be written."""
        document = {"format": FORMAT, **dataclasses.asdict(self)}
        with replaced(Path(path), "Plan.save", PlanError) as file:
            file.write(json.dumps(document).encode() + b"\n")

    @classmethod
    def load(cls, path: str | Path, samples: Sequence[Sample] | None = None) -> Plan:
        """Read what `save` wrote.

        Args: `samples`: what it is used with; an error, if these are not the planned ones in their order.
        Raises: PlanError for a file that is no plan, or is of other samples.
        """
        where = f"Plan.load: {path}"
        plan = _plan_of(read_saved(path, MAX_FILE, where, PlanError, FIX), where)
        if samples is not None and fingerprint_of(samples) != plan.fingerprint:
            raise PlanError(
                f"{where} was made of other samples, or of these in another order. "
                "Fix: pass the samples that were planned"
            )
        return plan

    def __repr__(self) -> str:
        parts = {
            "bins": safe_repr(lambda: str(len(self.bins))),
            "ranks": safe_repr(lambda: str(len(self.ranks))),
            "samples": safe_repr(lambda: str(self.total_samples)),
            "loss_tokens": safe_repr(lambda: str(self.total_tokens)),
            "dropped": safe_repr(lambda: str(len(self.dropped))),
            "fill": safe_repr(lambda: f"{self.stats['fill']:.3f}"),
            "balance": safe_repr(lambda: f"{self.stats['balance']:.3f}"),
        }
        return f"Plan({', '.join(f'{name}={text}' for name, text in parts.items())})"


def fingerprint_of(samples: Sequence[Sample]) -> str:
    """sha256 in hex over ids, groups, lengths and loss tokens of samples, in their order."""
    digest = hashlib.sha256()
    for s in samples:
        try:
            row = [s.sample_id, s.group_id, len(s), s.num_loss_tokens]
        except (TypeError, AttributeError):  # fields that are not what a trace gives: in no bin
            row = [str(s.__dict__.get("sample_id")) if isinstance(s, Sample) else ""]
        digest.update(json.dumps(row, default=str).encode() + b"\n")
    return digest.hexdigest()


def _plan_of(document: Any, where: str) -> Plan:
    """The plan of a parsed file. Raises PlanError."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanError(f"{where} is not a plan of format {FORMAT!r}. Fix: {FIX}")
    try:
        plan: Plan = built(Plan, document)
        _check(plan)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"{where} is damaged ({type(error).__name__}: {one_line(str(error))[:200]}). Fix: plan again"
        ) from None
    return plan


def _check(plan: Plan) -> None:
    """Raise ValueError or TypeError for what can't be a plan's: bins, ranks, counts, figures."""
    members = [i for b in plan.bins for i in b]
    if any(i < 0 for i in members) or len(set(members)) != len(members):
        raise ValueError("bins are not distinct indices of samples")
    if sorted(b for rank in plan.ranks for b in rank) != list(range(len(plan.bins))):
        raise ValueError("ranks don't list each bin exactly once")
    if len(members) != plan.total_samples:
        raise ValueError("totals don't match the bins")
    lists = (plan.bin_rows, plan.bin_patches, plan.bin_loss_tokens, plan.bin_costs, plan.share)
    if any(len(values) != len(plan.bins) for values in lists):
        raise ValueError("fields per bin differ in length from bins")
    if any(problem.code not in RULES for left_out in plan.dropped for problem in left_out.problems):
        raise ValueError("a sample is dropped by an unknown rule")
    counts = [plan.total_tokens, *plan.bin_rows, *plan.bin_patches, *plan.bin_loss_tokens]
    figures = list(plan.bin_costs)
    for name, value in plan.stats.items():
        found = built(STATS[name], value) if name in STATS else value
        several = found.values() if isinstance(found, dict) else found
        given = several if isinstance(several, Collection) else (found,)
        counts += [x for x in given if type(x) is int]
        figures += [x for x in given if type(x) is float]
    if min(counts, default=0) < 0 or sum(counts) > INT_MAX:
        raise ValueError("a count is negative or too large")
    if not math.isfinite(sum(figures)) or min(figures, default=0.0) < 0:
        raise ValueError("a cost or a figure is negative or not finite")
