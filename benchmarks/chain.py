"""`python -m chain` at real widths: all layouts on one GPU.

    python benchmarks/chain.py [--models qwen2.5-vl ...] [--at-once N] [--keep DIR] [--out FILE]

Each run is a process of its own, plain and within `mmpack.invariant`: side by side, one on each GPU that there is, or
`--at-once`, in turn on the GPUs. A model that is not asked for keeps its rows of the file: each run names its device
and versions. `--keep`: every row of each run, as the command gives them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu
import torch

NAME = "chain"
ROOT = Path(__file__).resolve().parents[1]
MODELS = {"qwen2.5-vl": "Qwen2.5-VL", "qwen3-vl": "Qwen3-VL"}
RUNS = "runs"  # the section of their counts
WHERE = ("device", "torch", "transformers")  # of each run
Row = dict[str, Any]


class Run(NamedTuple):
    """One call of the command."""

    model: str
    invariant: bool
    size: str = "layer"
    dtype: str = "bfloat16"
    device: str = "cuda"

    @property
    def name(self) -> str:
        """A section of the report."""
        return MODELS[self.model] + (", invariant" if self.invariant else "")

    def command(self, out: Path) -> list[str]:
        return [
            sys.executable, "-m", "chain", "--model", self.model, "--size", self.size,
            "--dtype", self.dtype, "--device", self.device, "--out", str(out),
            *["--invariant"] * self.invariant,
        ]  # fmt: skip


def main() -> None:
    options = gpu.arguments(
        NAME,
        models={"nargs": "*", "default": [*MODELS], "choices": [*MODELS]},
        at_once={"type": at_least_one, "help": "runs side by side; one for each GPU"},
        keep={"type": Path, "help": "a folder for every row of each run"},
    )
    cards = torch.cuda.device_count()
    if not cards:
        sys.exit("chain: there is no GPU here. Fix: run it on a machine with one")
    with tempfile.TemporaryDirectory() as folder:
        keep = options.keep or Path(folder)
        keep.mkdir(parents=True, exist_ok=True)
        runs = [Run(model, mode) for model in options.models for mode in (False, True)]
        rows = measured(runs, keep, options.at_once or cards, cards)
        gpu.write(options.out, NAME, {}, merged(options.out, rows))


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} runs. Fix: pass 1 or more")
    return number


def merged(path: Path, rows: list[Row]) -> list[Row]:
    """These rows, and what the file has of other sections: counts of all runs first.

    Runs that don't name where they ran have it from the head of the file, which the next one replaces.
    """
    report = json.loads(path.read_text()) if path.exists() else {"rows": []}
    head = {
        n: v for n, v in (report | report.get("versions", {})).items() if n in (*WHERE, "command")
    }
    new = {row.get("run", row["section"]) for row in rows}
    before = [r for r in report["rows"] if r.get("run", r["section"]) not in new]
    before = [
        r | {n: v for n, v in head.items() if n not in r} if "run" in r else r for r in before
    ]
    return sorted(before + rows, key=lambda row: row["section"] != RUNS)


def measured(runs: list[Run], folder: Path, at_once: int, cards: int) -> list[Row]:
    """Rows of all runs, in their order; at most `at_once` at a time, slot by slot on the GPUs."""
    waiting, going, done = list(enumerate(runs)), {}, {}
    free = [slot % cards for slot in range(at_once)]
    while waiting or going:
        while waiting and free:
            number, run = waiting.pop(0)
            card = free.pop(0)
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])
            }
            environment["CUDA_VISIBLE_DEVICES"] = str(card)
            out, log = folder / f"{number}.json", folder / f"{number}.log"
            out.unlink(missing_ok=True)  # of an earlier call
            with log.open("w") as file:
                process = subprocess.Popen(
                    run.command(out.resolve()), cwd=ROOT, env=environment,
                    stdout=subprocess.DEVNULL, stderr=file,
                )  # fmt: skip
            going[number] = (process, card, out, log, time.perf_counter())
        for number, (process, card, out, log, begun) in [*going.items()]:
            if process.poll() is None:
                continue
            del going[number]
            free.append(card)
            seconds = time.perf_counter() - begun
            done[number] = rows_of(runs[number], process.returncode, out, log.read_text(), seconds)
            said = f"{runs[number].name}: exit code {process.returncode} after {seconds:.0f} s"
            print(said, file=sys.stderr, flush=True)
        time.sleep(0.2)
    return [row for number in sorted(done) for row in done[number]]


def rows_of(run: Run, code: int, out: Path, log: str, seconds: float) -> list[Row]:
    """What a run found; the end of what it said where it found nothing. 1 is a code of a whole run, too."""
    if code not in (0, 1) or not out.exists():
        return [
            {"section": RUNS, "run": run.name, "name": run.name, "did_not_run": log.strip()[-1500:]}
        ]
    document = json.loads(out.read_text())
    counts = counted(document["rows"])
    ran = {name: document["setting"][name] for name in WHERE}
    first = {"section": RUNS, "run": run.name, **ran, **counts, "seconds": seconds}
    first["command"] = gpu.command()
    return [first, *({"section": run.name, **row} for row in by_stage(document["rows"]))]


def counted(rows: Iterable[Row]) -> Row:
    """How many rows are what."""
    ran = list(rows)
    equal = sum(row["equal"] for row in ran)
    beyond = sum(not row["within"] for row in ran)
    return {
        "rows": len(ran),
        "equal": equal,
        "bounded": len(ran) - equal - beyond,
        "beyond": beyond,
    }


def by_stage(rows: Iterable[Row]) -> list[Row]:
    """A row of each stage, pass and kind of weight, with a column of each axis: `equal`, or the worst of its values.

    `diff` is from the reference, `ulps` are of the largest value, `of bound` is the error's share of what is allowed.
    """
    cells: dict[tuple[str, str, str], dict[str, list[Row]]] = {}
    axes: dict[str, None] = {}
    for row in rows:
        axes.setdefault(row["axis"])
        key = (row["stage"], row["direction"], row["kind"])
        cells.setdefault(key, {}).setdefault(row["axis"], []).append(row)
    return [
        {"stage": stage, "pass": way, "kind": kind or None}
        | {axis: _cell(found.get(axis, [])) for axis in axes}
        for (stage, way, kind), found in cells.items()
    ]


def _cell(rows: list[Row]) -> Any:
    if not rows:
        return None
    if all(row["equal"] for row in rows):
        return "equal"
    shares = [row["error"] / row["allowed"] for row in rows if row["allowed"]]
    return {
        "diff": max(row["max_difference"] for row in rows),
        "ulps": max(row["peak_ulps"] for row in rows),
        **({"of bound": max(shares)} if shares else {}),
    }


if __name__ == "__main__":
    main()
