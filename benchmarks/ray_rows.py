"""Tiny samples through Ray Data's actor, against a plain loop: rows a second, and the memory of all processes.

    .venv-plane/bin/python benchmarks/ray_rows.py --rows 100000

A row is a short message and a short answer; what is timed is from rows to samples in this process, pictures aside.
Memory is the proportional set size (PSS) of this process and its children, Ray's store among them, sampled each second,
above what it was when the run began: the largest of the run, and of each tenth of it. What is bounded stays level.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

import mmpack as mp
from mmpack.adapters.arrow import from_table
from mmpack.adapters.process_rows import ProcessRows
from mmpack.adapters.ray import map_samples, to_samples
from mmpack.smoke.qwen_processor import qwen_vl_processor

BATCH = 256


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
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--store-mib", type=int, default=200)
    parser.add_argument("--only", choices=("plain loop", "ray"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    processor = mp.wrap_processor(qwen_vl_processor())
    function = ProcessRows(processor)
    ray.init(
        num_cpus=options.actors + 1,
        object_store_memory=options.store_mib * 2**20,
        include_dashboard=False,
        log_to_driver=False,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    through_ray(BATCH, function, options.actors)  # starts workers
    found = {}
    for name, run in (
        ("plain loop", lambda: plain(options.rows, function)),
        ("ray", lambda: through_ray(options.rows, function, options.actors)),
    ):
        if options.only not in (None, name):
            continue
        with Memory() as memory:
            began = time.perf_counter()
            count = run()
            seconds = time.perf_counter() - began
        if count != options.rows:
            raise SystemExit(f"{name}: {count} samples of {options.rows} rows")
        found[name] = {
            "seconds": round(seconds, 1),
            "rows_per_second": round(count / seconds, 1),
            "peak_mib": round(max(memory.found)),
            "peak_mib_by_tenth": memory.tenths(),
        }
        print(name, json.dumps(found[name]), flush=True)
    ray.shutdown()
    if options.out is not None:
        options.out.write_text(json.dumps({"rows": options.rows, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
