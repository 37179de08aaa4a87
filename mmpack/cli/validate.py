"""`mmpack validate TRACE`: every broken rule of a trace."""

from __future__ import annotations

from collections import Counter

from mmpack.cli.output import JsonOption, OutOption, TraceArgument, emit
from mmpack.cli.problems import problem_document
from mmpack.progress import tracked

KEPT = 100  # problems, on the screen and in the JSON document; all are counted


def command(trace: TraceArgument, as_json: JsonOption = False, out: OutOption = None) -> int:
    """Check every sample of a trace against the rules. Exits 1 if one is broken, or there is none."""
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
    lines = [f"{found}: {samples} samples, {total} broken rules"]
    if not samples:
        lines.append(f"{trace} holds no sample. Fix: see why its writer wrote none")
    lines += [f"{p.code} {p}" for p in kept]
    if total > KEPT:
        lines.append(f"and {total - KEPT} more")
    emit(document, lines, as_json, out)
    return 0 if document["ok"] else 1
