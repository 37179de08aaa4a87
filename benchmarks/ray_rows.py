"""Tiny samples through Ray Data's actor, against a plain loop: rows a second, and the memory of all processes.

    .venv-together/bin/python benchmarks/ray_rows.py [--rows 30000 300000] [--out FILE]

A row is a short message and a short answer; what is timed is from rows to samples in this process, pictures aside.
Memory is the proportional set size (PSS) of this process and its children, Ray's store among them, sampled each second,
above what it was when the run began, before Ray did: the largest of the run, and of each tenth of it. What is bounded
stays level. The plain loop takes the first number of rows, Ray each of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import on_host
import psutil
import ray

import mmpack as mp
from mmpack.adapters.arrow import from_table
from mmpack.adapters.process_rows import ProcessRows
from mmpack.adapters.ray import map_samples, to_samples
from mmpack.demo.qwen_processor import qwen_vl_processor

BATCH = 256
PLAIN, RAY = "a plain loop in this process", "Ray Data"


def row(i: int) -> dict[str, Any]:
    """Eight answers to each question."""
    question = f"What is {i // 8} and {i // 8 % 7}?"
    return {
        "messages": [{"role": "user", "content": [{"type": "text", "text": question}]}],
        "response_ids": [(i * k) % 1000 for k in range(1, 9)],
        "sample_id": f"s{i}",
        "group_id": f"g{i // 8}",
    }


def plain(rows: int, function: ProcessRows) -> int:
    """The same function over the same batches, in this process."""
    count = 0
    for start in range(0, rows, BATCH):
        given = [row(i) for i in range(start, min(start + BATCH, rows))]
        table = function({name: [r[name] for r in given] for name in given[0]})
        count += len(from_table(table))
    return count


def through_ray(rows: int, function: ProcessRows, actors: int) -> int:
    dataset = ray.data.range(rows).map(lambda r: row(r["id"]))
    made = map_samples(dataset, function, concurrency=actors, batch_size=BATCH)
    return sum(1 for _ in to_samples(made, batch_size=BATCH))


class Memory:
    """PSS of this process and its children while the block runs, in MiB above its beginning."""

    def __enter__(self) -> Memory:
        self._stop, self._begin = threading.Event(), _pss()
        self.found = [0.0]
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            self.found.append(_pss() - self._begin)

    def tenths(self) -> list[int]:
        """The largest of each tenth of the run."""
        return [round(max(part)) for part in np.array_split(self.found, 10) if len(part)]


def _processes() -> Iterator[psutil.Process]:
    own = psutil.Process()
    yield own
    yield from own.children(recursive=True)


def _pss() -> float:
    total = 0
    for process in _processes():
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has ended
            continue
    return total / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[30_000, 300_000])
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--store-mib", type=int, default=200)
    parser.add_argument("--out", type=Path, default=on_host.RESULTS / "ray_rows.json")
    parser.add_argument("--child", choices=(PLAIN, RAY), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        row = measured(options.child, options.rows[0], options.actors, options.store_mib)
        return print(json.dumps(row), flush=True)
    runs = [(PLAIN, options.rows[0]), *((RAY, count) for count in options.rows)]
    rows = [in_a_process(*run) for run in runs]
    of_all = {"actors": options.actors, "store_mib": options.store_mib}
    on_host.write(options.out, "ray_rows", [of_all | row for row in rows], ("numpy", "ray"))


def in_a_process(who: str, count: int) -> dict[str, Any]:
    """A run's row; a process of its own, since what an earlier run left would count as its memory."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child", who, "--rows", str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    line = done.stdout.splitlines()[-1]
    print(line, flush=True)
    row: dict[str, Any] = json.loads(line)
    return row


def measured(who: str, rows: int, actors: int, store_mib: int) -> dict[str, Any]:
    function = ProcessRows(mp.wrap_processor(qwen_vl_processor()))
    plain(BATCH, function)  # imports
    with Memory() as memory:
        if who == RAY:
            ray.init(
                num_cpus=actors + 1,
                object_store_memory=store_mib * 2**20,
                include_dashboard=False,
                log_to_driver=False,
            )
            ray.data.DataContext.get_current().enable_progress_bars = False
            through_ray(BATCH, function, actors)  # starts workers
        began = time.perf_counter()
        count = plain(rows, function) if who == PLAIN else through_ray(rows, function, actors)
        seconds = time.perf_counter() - began
    if count != rows:
        raise SystemExit(f"{who}: {count} samples of {rows} rows")
    row = {"who": who, "rows": rows, "seconds": seconds, "rows_per_second": count / seconds}
    row |= {"peak_mib": round(max(memory.found)), "peak_mib_by_tenth": memory.tenths()}
    return row


if __name__ == "__main__":
    main()
