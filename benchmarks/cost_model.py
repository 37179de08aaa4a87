"""The cost model beside real steps: micro-batches of many sizes and kinds, timed on one GPU, and `calibrate` of them.

    python benchmarks/cost_model.py [--model qwen2.5-vl-3b] [--out FILE]
    python benchmarks/cost_model.py --tiny   # on a CPU: that it runs

A row is a micro-batch: forward, loss and backward, the median of some after one that is not counted. `base`: what
`cost_model` says before anything was measured, over what was measured. `left_out`: the same where the row was predicted
from the others. `share`: for samples timed in both layouts, whether the cost calls the faster one cheaper.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

import gpu
import numpy as np
import torch

import mmpack as mp
from benchmarks.step import timing
from benchmarks.step.models import MODELS, build
from benchmarks.step.workloads import WORKLOADS, draw, tiny
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.planning import CostModel, calibrate, cost_model
from mmpack.planning.counts import counts_of_batch
from mmpack.versions import takes_encoded_media

REPEATS = 3
# of each workload, samples of one micro-batch: whole groups, parts of some, single ones
PARTS = {
    "geo": [range(32), range(8), [0, 1, 8, 9], [3]],
    "pictures": [range(24), [0, 8, 16]],
    "video": [range(16), range(4), [0]],
    "long": [range(8), [0, 1], [0]],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="qwen2.5-vl-3b", choices=list(MODELS))
    parser.add_argument("--out", type=Path, default=gpu.RESULTS / "cost_model.json")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny else "cuda")
    model = build(options.model, device, None, options.tiny)
    if not takes_encoded_media(model):
        sys.exit(
            "cost_model.py: transformers before 5.19 encodes media again for each run, which counts don't say"
        )
    attach(model)
    base = cost_model(model.config)
    rows = measured(model, options.model, base, device, options.tiny)
    found = calibrate([(row["counts"], row["seconds"]) for row in rows], base)
    for row, error, left_out in zip(rows, found.errors, found.left_out, strict=True):
        counts = row.pop("counts")
        row |= {"rows": counts.rows, "patches": counts.patches}
        row |= {"base": base.seconds(counts) / row["seconds"], "fitted": 1 + error}
        row |= {"left_out": None if left_out is None else 1 + left_out}
        row["predicted"] = found.cost.seconds(counts)
    summary = {
        "model": options.model,
        "factors": found.factors,
        "left_out_error": found.error,
        "left_out_worst": found.worst,
        "share": shares(rows),
    }
    print("\n".join(found.lines()), flush=True)
    if options.tiny:
        return
    timed = [{"section": "Micro-batches", **row} for row in rows]
    gpu.write(options.out, "cost_model", {}, [{"section": "Fit", **summary}, *timed])


def measured(
    model: Any, name: str, base: CostModel, device: torch.device, small: bool
) -> list[dict[str, Any]]:
    rows = []
    dtype = model.lm_head.weight.dtype
    for workload, parts in PARTS.items():
        size = tiny(WORKLOADS[workload]) if small else WORKLOADS[workload]
        samples, _ = draw(size, MODELS[name].family, dtype)
        for part in parts:
            chosen = [samples[i] for i in part if i < len(samples)]
            for layout in ("plain", "shared") if len(chosen) > 1 else ("plain",):
                batch = mp.pack(chosen, share_prefix=layout == "shared")
                counts = counts_of_batch(batch, base.spans)
                rows.append(
                    {
                        "workload": workload,
                        "samples": len(chosen),
                        "layout": layout,
                        "seconds": seconds(model, batch.to(device), device),
                        "counts": counts,
                    }
                )
                print(workload, len(chosen), layout, f"{rows[-1]['seconds']:.4f} s", flush=True)
    return rows


def seconds(model: Any, batch: Any, device: torch.device) -> float:
    def step() -> None:
        (-packed_logprobs(model, batch).mean()).backward()

    times = []
    for _ in range(1 + REPEATS):
        model.zero_grad(set_to_none=True)
        times.append(timing.seconds_of(step, device))
    return statistics.median(times[1:])


def shares(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Of the pairs whose times differ by more than the noise of 2 %, those that the cost orders as they were."""
    pairs = [
        (a, b)
        for a, b in itertools.pairwise(rows)
        if (a["layout"], b["layout"]) == ("plain", "shared") and a["workload"] == b["workload"]
    ]
    told = [(a, b) for a, b in pairs if abs(np.log(a["seconds"] / b["seconds"])) > 0.02]
    right = sum((a["seconds"] < b["seconds"]) == (a["predicted"] < b["predicted"]) for a, b in told)
    return {"pairs": len(told), "right": right}


if __name__ == "__main__":
    main()
