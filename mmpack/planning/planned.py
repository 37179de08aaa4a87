"""What a plan is: micro-batches as indices of samples, their ranks, and what is left out; a small JSON file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmpack.errors import PlanError, one_line
from mmpack.files import read_bounded, replaced
from mmpack.notebook import Drawn
from mmpack.schema.error_text import safe_repr
from mmpack.schema.rules import Problem
from mmpack.schema.sample import Sample

FORMAT = "mmpack.plan.1"
MAX_FILE = 2**30  # bytes


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
        try:
            document = json.loads(read_bounded(Path(path), MAX_FILE))
        except OSError as error:
            raise PlanError(
                f"{where} can't be read: {error.strerror}. Fix: name a plan file"
            ) from None
        except (ValueError, RecursionError):
            raise PlanError(f"{where} is not JSON. Fix: name a file that Plan.save wrote") from None
        plan = _plan_of(document, where)
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
        raise PlanError(
            f"{where} is not a plan of format {FORMAT!r}. Fix: name a file that Plan.save wrote"
        )
    names = {f.name for f in dataclasses.fields(Plan)}
    values = {name: document[name] for name in names if name in document}
    try:
        values["dropped"] = [
            Dropped(**{**d, "problems": tuple(Problem(**_with_span(p)) for p in d["problems"])})
            for d in document["dropped"]
        ]
        plan = Plan(**values)
        _check(plan)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(
            f"{where} is damaged ({type(error).__name__}: {one_line(str(error))[:200]}). Fix: plan again"
        ) from None
    return plan


def _with_span(problem: dict[str, Any]) -> dict[str, Any]:
    span = problem["span"]
    return problem | {"span": None if span is None else tuple(span)}


def _check(plan: Plan) -> None:
    """Raise ValueError for bins or ranks that can't be a plan's."""
    members = [i for b in plan.bins for i in b]
    if any(type(i) is not int or i < 0 for i in members) or len(set(members)) != len(members):
        raise ValueError("bins are not distinct indices of samples")
    if sorted(b for rank in plan.ranks for b in rank) != list(range(len(plan.bins))):
        raise ValueError("ranks don't list each bin exactly once")
    if len(members) != plan.total_samples or type(plan.total_tokens) is not int:
        raise ValueError("totals don't match the bins")
    lists = (plan.bin_rows, plan.bin_patches, plan.bin_loss_tokens, plan.bin_costs, plan.share)
    if any(len(values) != len(plan.bins) for values in lists):
        raise ValueError("fields per bin differ in length from bins")
