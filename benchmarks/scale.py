"""What a sample costs on the host, part by part: `python benchmarks/scale.py`. scale.md reckons with the rows.

CPU time of the process, the best of some runs, with one thread; bytes of files as they are. A sample has 1,024 tokens,
one picture, and every field that a rollout fills; no two are alike. `--page` writes scale.md's table from the rows,
`--check` says whether it is there. No GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import on_host
import parity_speed
from host import lengths
from host import makespan as largest_over_mean

import mmpack as mp
from mmpack.blobs import SharedBlobs
from mmpack.planning.balance import balance
from mmpack.planning.bfd import best_fit_decreasing

RESULTS = on_host.RESULTS / "scale.json"
STEPS = RESULTS.with_name("step.json")
PAGE = Path(__file__).with_suffix(".md")
BEGIN, END = "<!-- figures: benchmarks/scale.py -->\n", "<!-- /figures -->\n"
RUNS = 3
RANKS, EACH, POOL = (
    1024,
    32,
    64,
)  # the step of benchmarks/scale.md: ranks, samples on each, ranks that plan together
STEP, ALL = RANKS * EACH, 10**9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--page", action="store_true", help="write the table of benchmarks/scale.md"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if it is another")
    args = parser.parse_args()
    if not (args.page or args.check):
        rows = [row for group in (plans, traces, blobs, letters) for row in group()]
        on_host.write(RESULTS, "scale", rows, ("numpy", "torch", "pyarrow"), one_core=True)
        return 0
    found = PAGE.read_text(encoding="utf-8")
    wanted = with_table(found, json.loads(RESULTS.read_text(encoding="utf-8"))["rows"])
    if args.page:
        PAGE.write_text(wanted, encoding="utf-8")
    elif found != wanted:
        print(
            "benchmarks/scale.md is not what its results give. Fix: python benchmarks/scale.py --page"
        )
        return 1
    return 0


# ---- measuring -----------------------------------------------------------------------------------


def cpu_ms(call: Callable[[], Any]) -> float:
    """The least CPU milliseconds of some runs."""
    found = []
    for _ in range(RUNS):
        start = time.process_time()
        call()
        found.append(1e3 * (time.process_time() - start))
    return min(found)


def row(what: str, count: int, ms: float, nbytes: int | None = None) -> dict[str, Any]:
    """`us_each`, `bytes_each`: of one of `count`."""
    made = {"what": what, "count": count, "ms": ms, "us_each": 1e3 * ms / count}
    print(json.dumps(made), flush=True)
    return made | ({} if nbytes is None else {"bytes_each": nbytes / count})


def samples(count: int) -> list[mp.Sample]:
    shape = argparse.Namespace(samples=count, tokens=1024, images=1)
    return list(parity_speed._samples(shape, True, 0.0))


def plans() -> Iterator[dict[str, Any]]:
    given = samples(8192)
    for count in (1024, 8192):
        some = given[:count]
        ms = cpu_ms(lambda s=some: mp.plan(s, max_tokens=16_384, ranks=len(s) // EACH))
        yield row(f"plan, {count // EACH} ranks", count, ms)
    many = lengths(STEP, 16_384)
    yield row("bins", STEP, cpu_ms(lambda: best_fit_decreasing(many, 16_384)))
    costs = 24_576 * many + many**2
    for equal in (False, True):
        name = f"balance, {'equal' if equal else 'free'} counts"
        ms = cpu_ms(lambda e=equal: balance(costs, RANKS, e))
        yield row(name, STEP, ms) | {"largest_over_mean": makespan(costs, RANKS, equal)}
    pools = costs.reshape(RANKS // POOL, -1)
    loads = [makespan(pool, POOL, False) * pool.sum() for pool in pools]
    ms = cpu_ms(lambda: balance(pools[0], POOL, False))
    found = row(f"balance, a pool of {POOL} ranks", len(pools[0]), ms)
    yield found | {"largest_over_mean": float(max(loads) * len(pools) / costs.sum())}
    yield row("pack", EACH, cpu_ms(lambda: mp.pack(given[:EACH])))


def makespan(costs: np.ndarray, ranks: int, equal: bool) -> float:
    return largest_over_mean(costs, balance(costs, ranks, equal), ranks)


def traces() -> Iterator[dict[str, Any]]:
    count = 1024
    given = samples(count)
    with tempfile.TemporaryDirectory() as folder:
        for suffix in ("jsonl", "parquet"):
            a, b = (Path(folder) / f"{side}.{suffix}" for side in "ab")
            ms = cpu_ms(lambda a=a: mp.write_trace(a, given))
            yield row(f"write {suffix}", count, ms, a.stat().st_size)
            yield row(f"read {suffix}", count, cpu_ms(lambda a=a: list(mp.read_trace(a))))
            b.write_bytes(a.read_bytes())
            report = mp.compare(a, b)
            if report.compared != count or report.total_findings:
                sys.exit("equal traces compare as unlike, nothing is measured")
            yield row(f"compare {suffix}", count, cpu_ms(lambda a=a, b=b: mp.compare(a, b)))


def blobs() -> Iterator[dict[str, Any]]:
    """Pictures of 1,024 patches as bytes, 1.15 MiB."""
    count = 64
    keys = [f"{i:064x}" for i in range(count)]
    pixels = np.random.default_rng(0).integers(0, 256, (1024, 1176), np.uint8)
    with SharedBlobs(2 * count * pixels.nbytes) as store:

        def put() -> None:
            store.release()
            store.remove(keys)
            for key in keys:
                store.put(key, pixels)

        put_ms = cpu_ms(put)
        size = sum(f.stat().st_size for f in store.folder.glob("??/*"))
        yield row("put a medium", count, put_ms, size)
        yield row("read a medium", count, cpu_ms(lambda: [store[key].shape for key in keys]))


def letters() -> Iterator[dict[str, Any]]:
    count = 256
    dead = [
        mp.schema.DeadLetter("MM402", "too long", f"samples[{i}]", s)
        for i, s in enumerate(samples(count))
    ]
    with tempfile.TemporaryDirectory() as folder:
        paths = iter(Path(folder) / f"{k}.jsonl" for k in range(RUNS))
        ms = cpu_ms(lambda: mp.schema.DeadLetters(next(paths)).add(dead))
        yield row("dead letter", count, ms, (Path(folder) / "0.jsonl").stat().st_size)


# ---- reckoning -----------------------------------------------------------------------------------


def with_table(page: str, rows: list[dict[str, Any]]) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + begin + "\n".join(table(rows)) + "\n" + end + after


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Of each part what is measured, and what a step and all samples take at that rate, with the numbers."""
    found = {r["what"]: r for r in rows}
    lines = [
        f"| part | measured | a step of {STEP:,} samples on {RANKS:,} ranks | a billion samples |",
        "| --- | --- | --- | --- |",
    ]

    def line(part: str, what: str, each: str, share: int = 1, rest: str = "") -> None:
        us = found[what]["us_each"]
        shown = f"{us:.3g} µs" if us < 1000 else f"{us:,.0f} µs"
        of = f" / {share:,}" if share > 1 else ""
        step = f"{shown} × {STEP:,}{of} = {seconds(us * STEP / share / 1e6)}"
        whole = f"{shown} × 10⁹{of} = {seconds(us * ALL / share / 1e6)}"
        lines.append(f"| {part} | {shown} {each} | {step}{rest} | {whole} |")

    line("`mp.plan`, in each process", f"plan, {8192 // EACH} ranks", "a sample")
    line("of it, bins", "bins", "a sample")
    line("of it, balance", "balance, free counts", "a bin, if each sample is one")
    line("`mp.pack`, without pixels", "pack", "a sample", RANKS)
    for suffix, name in (("jsonl", "JSON Lines"), ("parquet", "Parquet")):
        line(f"{name}, written", f"write {suffix}", "a sample", RANKS)
        line(f"{name}, read", f"read {suffix}", "a sample", RANKS)
        line(f"{name}, `mp.compare`", f"compare {suffix}", "a pair", RANKS)
    line("a medium into shared memory", "put a medium", "a medium", RANKS)
    line("a medium out of it", "read a medium", "a medium", RANKS)
    for what, part in (("write jsonl", "JSON Lines"), ("write parquet", "Parquet")):
        each = found[what]["bytes_each"]
        lines.append(
            f"| {part}, bytes | {each:,.0f} a sample | {each:,.0f} × {STEP:,} = {size(each * STEP)} "
            f"| {each:,.0f} × 10⁹ = {size(each * ALL)} |"
        )
    each = found["dead letter"]["bytes_each"]
    lines.append(
        f"| dead letters, of one sample in a thousand | {each:,.0f} bytes, {found['dead letter']['us_each']:.3g} µs "
        f"| {each:,.0f} × {STEP:,} / 1,000 = {size(each * STEP / 1000)} | {each:,.0f} × 10⁶ = {size(each * 1e6)} |"
    )
    return [*lines, "", *pools_of(found)]


def pools_of(found: dict[str, dict[str, Any]]) -> list[str]:
    """How large a step may be that is planned while a rank computes its own, and what pools of ranks cost."""
    [computed] = [
        r["seconds"]
        for r in json.loads(STEPS.read_text(encoding="utf-8"))["rows"]
        if (r["model"], r["workload"], r["peer"], r["ranks"])
        == ("qwen2.5-vl-7b", "geo", "shared-compiled", 1)
        and not r["options"]
    ]
    us = found[f"plan, {8192 // EACH} ranks"]["us_each"]
    most = int(computed * 1e6 / us)
    whole = found["balance, free counts"]["largest_over_mean"]
    parted = found[f"balance, a pool of {POOL} ranks"]["largest_over_mean"]
    pool = POOL * EACH
    items = (
        f"- A rank's {EACH} samples of a 7B model take {computed:.3g} s on an H200 "
        "([step](results/step.md)). "
        f"Planning the samples of all ranks takes longer than that from {computed:.3g} s / {us:.3g} µs = {most:,} "
        f"samples on, which is {most // EACH:,} ranks.",
        f"- If {RANKS // POOL} pools of {POOL} ranks each plan their own {pool:,} samples, a plan takes "
        f"{us:.3g} µs × {pool:,} = {seconds(us * pool / 1e6)}. The slowest of all ranks then has {parted:.6g} times "
        f"the mean cost, against {whole:.6g} times if all are balanced together.",
    )
    return [line for item in items for line in textwrap.wrap(item, 120, subsequent_indent="  ")]


def seconds(value: float) -> str:
    for unit, least in (("days", 2 * 86_400), ("hours", 7200), ("min", 120), ("s", 1)):
        if value >= least:
            return f"{value / {'days': 86_400, 'hours': 3600, 'min': 60, 's': 1}[unit]:.3g} {unit}"
    return f"{1e3 * value:.3g} ms"


def size(value: float) -> str:
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= one:
            return f"{value / one:.3g} {unit}"
    return f"{value / 1e3:.3g} kB"


if __name__ == "__main__":
    sys.exit(main())
