"""What to log of a step: losses, plans, batches and reports as one flat dict of floats, for any tracker (numpy)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any

from mmpack.errors import ArgumentError, kind_of
from mmpack.parity.report import ParityReport
from mmpack.planning.planned import Plan

COUNT, SHARE = "tokens", "ess"  # the metrics of a loss that are not means over its tokens


def metrics(**parts: Any) -> dict[str, float]:
    """A flat dict of floats; names are `part/what`, what is absent has none.

    A part may be

    - a `PolicyLoss` or `DistillationLoss`, or a list of one optimizer step's, one per micro-batch: `loss` is their sum,
      which is the step's where they were given its totals; `tokens` their sum; `ess` that of all their weights; all
      else the mean over all their tokens, as if the step had been one micro-batch;
    - a `Plan`: the numbers of its `stats`, `total_tokens`, `total_samples`;
    - a `PackedBatch` or `PaddedBatch`, or a list of one step's: sums of their `stats`;
    - a `ParityReport`: `ok` (1 or 0), `compared`, `findings`, `causes/NAME`, `missing/SIDE`;
    - a `ProbeReport`: `ok`, `modules`, `parted` (modules that part), `worst` (the largest error over its bound);
    - what counts itself in numbers: `FeatureStore` and `PrefixIndex` (their `stats`), `MmpackGRPO.mmpack_stats`;
    - a number, or a tensor of one;
    - a mapping of names to parts: one more slash.

    All are of this process. Tensors are read together, once.

    Raises: ArgumentError for anything else, for a list that is empty or mixed, and for a name twice.

    Example:
        >>> import mmpack as mp
        >>> report = mp.ParityReport(ok=True, compared=2, require=())
        >>> found = mp.metrics(lr=1e-4, train={"parity": report})
        >>> found["lr"], found["train/parity/ok"], found["train/parity/compared"]
        (0.0001, 1.0, 2.0)
    """
    out: dict[str, float] = {}
    for name, value in _together(list(_flat(parts, ""))):
        if name in out:
            raise ArgumentError(
                f"metrics: {name!r} occurs twice. Fix: give the parts other names, without slashes"
            )
        out[name] = value
    return out


class _Losses:
    """A step's losses, until their tensors are read: rows of names and values, one per micro-batch."""

    def __init__(self, losses: Sequence[Any]):
        self.rows = [{"loss": x.loss, **x.metrics} for x in losses]

    def merged(self, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Metrics of the step: by the part of a name before its last slash, whose `tokens` are the weights."""
        out: dict[str, float] = {}
        for name in dict.fromkeys(name for row in rows for name in row):
            head, slash, what = name.rpartition("/")
            having = [row for row in rows if name in row]
            values = [row[name] for row in having]
            if what in (COUNT, "loss"):
                out[name] = math.fsum(values)
                continue
            counts = [row[head + slash + COUNT] for row in having]
            total = math.fsum(counts)
            if what == SHARE:
                # a micro-batch of n weights: their sum is n·mean, that of their squares n·mean² / ess
                means = [row.get("correction", row["ratio"]) for row in having]
                each = list(zip(counts, means, values, strict=True))
                sums = math.fsum(n * m for n, m, _ in each)
                squares = math.fsum(n * m * m / ess for n, m, ess in each if ess)
                out[name] = sums**2 / (total * squares) if total * squares else 0.0
            else:
                weighed = zip(values, counts, strict=True)
                out[name] = math.fsum(x * n for x, n in weighed if n) / total if total else 0.0
        return out


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Names with numbers, tensors or `_Losses`."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(part, f"{name}/{key}" if name else str(key))
        return
    several = list(value) if isinstance(value, list | tuple) else [value]
    kinds = {_kind(x) for x in several}
    if len(kinds) != 1 or (len(several) > 1 and not kinds <= {"loss", "batch"}) or None in kinds:
        what = kind_of(value) if value is not several else "an empty list"
        raise ArgumentError(
            f"metrics: {name!r} is {what}, which has no numbers to log. "
            "Fix: pass losses, a plan, batches, a report, stats, a number, or a mapping of these"
        )
    kind = kinds.pop()
    if kind == "number":
        yield name, several[0]
    elif kind == "loss":
        yield name, _Losses(several)
    elif kind == "batch":
        for key in dict.fromkeys(k for batch in several for k in batch.stats):
            yield f"{name}/{key}", sum(batch.stats.get(key, 0) for batch in several)
    else:
        for key, number in _numbers(_described(several[0])):
            yield f"{name}/{key}", number


def _kind(value: Any) -> str | None:
    if isinstance(value, Real) or (hasattr(value, "numel") and value.numel() == 1):
        return "number"
    if hasattr(value, "loss") and isinstance(getattr(value, "metrics", None), Mapping):
        return "loss"
    if hasattr(value, "cu_loss") or hasattr(value, "loss_mask"):
        return "batch"
    known = isinstance(value, Plan | ParityReport) or hasattr(value, "blind")
    counted = is_dataclass(value) or is_dataclass(getattr(value, "stats", None))
    return "other" if known or (counted and _all_numbers(_described(value))) else None


def _described(value: Any) -> dict[str, Any]:
    if isinstance(value, Plan):
        totals = {"total_tokens": value.total_tokens, "total_samples": value.total_samples}
        return value.stats | totals
    if isinstance(value, ParityReport):
        counts = {"ok": int(value.ok), "compared": value.compared}
        return counts | {
            "findings": value.total_findings,
            "causes": value.causes,
            "missing": value.missing,
        }
    if hasattr(value, "blind"):  # a ProbeReport, whose module needs torch
        return {
            "ok": int(value.ok),
            "modules": len(value.modules),
            "parted": sum(row.parts for row in value.modules),
            "worst": max((row.all.worst for row in value.modules), default=0.0),
        }
    counted = value if is_dataclass(value) else value.stats
    return {f.name: getattr(counted, f.name) for f in fields(counted)}


def _numbers(stats: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The numbers of stats of ours: lists, texts and what is None say nothing that a tracker draws."""
    for key, value in stats.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}/{name}", number) for name, number in _numbers(value))
        elif isinstance(value, Real) and not isinstance(value, bool):
            yield key, value


def _all_numbers(stats: Mapping[str, Any]) -> bool:
    return len(list(_numbers(stats))) == len(stats) > 0


def _together(flat: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, float]]:
    """Floats, all tensors read at once: a GPU is waited for one time."""
    tensors: list[Any] = []
    for _, value in flat:
        rows = value.rows if isinstance(value, _Losses) else [{"": value}]
        tensors += [x for row in rows for x in row.values() if hasattr(x, "detach")]
    read = iter(_read(tensors))

    def number(value: Any) -> float:
        return next(read) if hasattr(value, "detach") else float(value)

    for name, value in flat:
        if isinstance(value, _Losses):
            rows = [{key: number(x) for key, x in row.items()} for row in value.rows]
            yield from ((f"{name}/{key}", x) for key, x in value.merged(rows).items())
        else:
            yield name, number(value)


def _read(tensors: Sequence[Any]) -> list[float]:
    if not tensors:
        return []
    import torch

    device = tensors[0].device
    whole = torch.stack([x.detach().reshape(()).float().to(device) for x in tensors])
    return [float(x) for x in whole.tolist()]
