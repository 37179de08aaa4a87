"""`mmpack validate TRACE`: every broken rule of a trace."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from mmpack.cli.output import Result, problem_document
from mmpack.parity.report import counted
from mmpack.progress import tracked

KEPT = 100  # problems, on the screen and in the JSON document; all are counted


def command(traces: list[Path]) -> Result:
    """Check every sample of a trace against the rules. Exits 1 if a rule is broken, or if there are no samples.

    Each trace is checked separately; with several, the JSON document has one entry per trace.

    Args:
        traces [TRACE]: Traces: .jsonl, .jsonl.zst or .parquet files.

    Examples:
        mmpack validate rollout.jsonl
    """
    found = {str(trace): _checked(trace) for trace in traces}
    ok = all(document["ok"] for document, _ in found.values())
    if len(found) == 1:
        ((document, lines),) = found.values()
    else:
        document = {"ok": ok, "traces": {name: one for name, (one, _) in found.items()}}
        lines = [f"{name}: {line}" for name, (_, said) in found.items() for line in said]
    return Result(document, lines, 0 if ok else 1)


def _checked(trace: Path) -> tuple[dict[str, Any], list[str]]:
    """The JSON document of one trace, and the lines for people."""
    from mmpack.schema.rules import Problem, Trajectories, problems_of
    from mmpack.schema.trace import read_trace

    samples = 0
    codes: Counter[str] = Counter()
    kept: list[Problem] = []
    seen = Trajectories()
    reader = read_trace(trace)
    whole = trace.stat().st_size > 0  # else there is nothing to decompress either
    for sample in tracked(reader if whole else (), "validating"):
        samples += 1
        for problem in problems_of(sample, seen=seen):
            codes[problem.code] += 1
            if len(kept) < KEPT:
                kept.append(problem)
    total = codes.total()
    document = {
        "ok": samples > 0 and not total,
        "samples": samples,
        "total_problems": total,
        "codes": dict(sorted(codes.items())),
        "problems": [problem_document(p) for p in kept],
    }
    found = "BROKEN" if total else "OK" if samples else "EMPTY"
    lines = [f"{found}: {counted(samples, 'sample')}, {counted(total, 'broken rule')}"]
    if not samples:
        lines.append(f"{trace} holds no samples. Fix: check why its writer wrote none")
    lines += [f"{p.code} {p}" for p in kept]
    if total > KEPT:
        lines.append(f"and {total - KEPT} more")
    return document, lines
