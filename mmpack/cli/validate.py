"""`mmpack validate TRACE`: every broken rule of a trace."""

from __future__ import annotations

from collections import Counter

from mmpack.cli.output import JsonOption, OutOption, TraceArgument, emit, watched
from mmpack.cli.problems import problem_document

KEPT = 100  # problems, on the screen and in the JSON document; all are counted


def command(trace: TraceArgument, as_json: JsonOption = False, out: OutOption = None) -> int:
    """Check every sample of a trace against the rules. Exits 1 if one is broken."""
    from mmpack.schema.rules import Problem, problems_of
    from mmpack.schema.trace import read_trace

    samples = 0
    codes: Counter[str] = Counter()
    kept: list[Problem] = []
    for sample in watched(read_trace(trace), "validating"):
        samples += 1
        for problem in problems_of(sample):
            codes[problem.code] += 1
            if len(kept) < KEPT:
                kept.append(problem)
    total = codes.total()
    document = {
        "ok": not total,
        "samples": samples,
        "total_problems": total,
        "codes": dict(sorted(codes.items())),
        "problems": [problem_document(p) for p in kept],
    }
    lines = [f"{'BROKEN' if total else 'OK'}: {samples} samples, {total} broken rules"]
    lines += [f"{p.code} {p}" for p in kept]
    if total > KEPT:
        lines.append(f"and {total - KEPT} more")
    emit(document, lines, as_json, out)
    return 1 if total else 0
