"""How long `compare` takes, as a multiple of merely reading both files: `python benchmarks/parity_speed.py FOLDER`.

Makes its own traces in FOLDER (once), reads and compares them in turn in one process: CPU seconds of the process,
medians of the runs, and the median of each run's ratio. Every sample has prompt, pictures and response of its own:
nothing is shared that could be done once. `kind`: only the fields that a trace must have, or every one. No GPU.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import on_host
import pyarrow.parquet as pq

import mmpack as mp
from mmpack.families import get_family
from mmpack.layout.fingerprint import cache_key, fingerprint

FAMILY = "qwen2_5_vl"
KINDS, FORMATS = ("required", "full"), ("parquet", "jsonl")
PROCESSOR = {
    "tokenizer": {"vocab": "ab" * 32, "special": {"<|image_pad|>": 151655, "<|im_end|>": 151645}},
    "chat_template": "cd" * 32,
    "image": {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "mean": [0.48145466, 0.4578275, 0.40821073],
        "std": [0.26862954, 0.26130258, 0.27577711],
        "resample": 3,
    },
    "position_rule": "grid",
    "tokens_per_second": 2.0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=on_host.RESULTS / "parity_speed.json")
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--unlike", type=float, default=0.0, help="share of samples that differ")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--format", choices=FORMATS, action="append")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for suffix in args.format or FORMATS:
        for kind in args.kind or KINDS:
            rows.append(measured(args, kind, suffix))
            print(json.dumps(rows[-1]), flush=True)
    on_host.write(args.out, "parity_speed", rows, ("numpy", "pyarrow"))


def measured(args: argparse.Namespace, kind: str, suffix: str) -> dict[str, Any]:
    """Seconds of `compare` beside those of the faster reader."""
    paths = _traces(args, kind, suffix)
    report = mp.compare(*paths)
    assert report.compared == args.samples
    assert (report.total_findings == 0) == (args.unlike == 0)
    seconds = _timed(_readers(paths, suffix), args.repeats)
    compare = seconds.pop("compare")
    reader = min(seconds, key=lambda name: statistics.median(seconds[name]))
    ratios = [c / r for c, r in zip(compare, seconds[reader], strict=True)]
    return {
        "format": suffix,
        "kind": kind,
        "samples": args.samples,
        "tokens": args.tokens,
        "images": args.images,
        "unlike": args.unlike,
        "bytes": sum(p.stat().st_size for p in paths),
        "reader": reader,
        "reader_seconds": statistics.median(seconds[reader]),
        "compare_seconds": statistics.median(compare),
        "x_reading": statistics.median(ratios),
        "us_each": 1e6 * statistics.median(compare) / args.samples,
    }


def _readers(paths: list[Path], suffix: str) -> dict[str, Callable[[], Any]]:
    """What is timed; the last is `compare`, the others read both files and do nothing else."""
    compare = {"compare": lambda: mp.compare(*paths)}
    if suffix == "jsonl":
        return {"json.loads": lambda: [_read_lines(p) for p in paths]} | compare
    return {
        "read_table": lambda: [pq.read_table(p) for p in paths],
        "iter_batches": lambda: [_read_batches(p) for p in paths],
    } | compare


def _read_batches(path: Path) -> None:
    with pq.ParquetFile(path) as reader:
        for _ in reader.iter_batches():
            pass


def _read_lines(path: Path) -> None:
    with path.open() as file:
        for line in file:
            json.loads(line)


def _timed(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """CPU seconds, of all threads."""
    out: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.process_time()
            call()
            out[name].append(time.process_time() - start)
    return out


# ---- traces --------------------------------------------------------------------------------------


def _traces(args: argparse.Namespace, kind: str, suffix: str) -> list[Path]:
    shape = f"{kind}-{args.samples}-{args.tokens}-{args.images}"
    names = [f"{shape}-rollout.{suffix}", f"{shape}-train-{args.unlike}.{suffix}"]
    paths = [args.folder / name for name in names]
    if not paths[0].exists():
        mp.write_trace(paths[0], _samples(args, kind == "full", 0.0))
    if not paths[1].exists() and not args.unlike:
        shutil.copyfile(*paths)  # equal samples give equal bytes
    elif not paths[1].exists():
        mp.write_trace(paths[1], _samples(args, kind == "full", args.unlike))
    return paths


def _samples(args: argparse.Namespace, full: bool, unlike: float) -> Iterator[mp.Sample]:
    """Pictures between texts, then a response; token ids are distributed as words are (Zipf)."""
    family = get_family(FAMILY)
    rng = np.random.default_rng(0)
    order = rng.permutation(151_000)
    weights = np.cumsum(1 / np.arange(1, len(order) + 1))
    odd = np.random.default_rng(1).random(args.samples) < unlike
    for i in range(args.samples):
        share = args.tokens // (2 * args.images) if args.images else 0  # half are of pictures
        ids = order[np.searchsorted(weights, rng.random(args.tokens) * weights[-1])]
        media, spans, at = [], [], 4
        for k in range(args.images):
            medium = _medium(f"{i}/{k}", share, rng)
            run = slice(at + 1, at + 1 + medium.num_tokens)
            ids[run.start - 1], ids[run], ids[run.stop] = (
                family.vision_start_id,
                family.image_token_id,
                family.vision_end_id,
            )
            media.append(medium)
            spans.append(mp.schema.ModalitySpan(run.start, run.stop, "image", k))
            at = run.stop + 2 + int(rng.integers(1, 20))
        start = int(rng.integers(at, args.tokens - 1))
        if odd[i]:
            ids[start] += 1
        sample = mp.Sample(
            sample_id=f"step-12/prompt-{i}/0",
            group_id=f"step-12/prompt-{i}",
            family=FAMILY,
            input_ids=ids.astype(np.int64),
            media=media,
            modality_spans=spans,
            loss_spans=[mp.LossSpan(start, args.tokens)],
        )
        if full:
            _complete(sample, rng)
        yield sample


def _medium(name: str, tokens: int, rng: np.random.Generator) -> mp.Medium:
    """A picture of about `tokens` * 0.5 to 0.9 tokens."""
    h = int(rng.integers(10, 2 * int(tokens**0.5)))
    w = max(int(tokens * rng.uniform(0.5, 0.9) / h), 1)
    grid = (1, 2 * h, 2 * w)
    content = hashlib.sha256(name.encode()).hexdigest()
    return mp.Medium(
        media_id=f"images/{name}.png",
        modality="image",
        cache_key=cache_key(content, grid, PROCESSOR["image"]),
        grid_thw=grid,
        num_tokens=h * w,
        content_hash=content,
        size=(28 * w, 28 * h),
        decoded_size=(28 * w + 3, 28 * h + 5),
        mode="RGB",
    )


def _complete(sample: mp.Sample, rng: np.random.Generator) -> None:
    """Positions, mask, settings, logprobs and what a rollout records beside."""
    grids = np.array([m.grid_thw for m in sample.media]).reshape(-1, 3)
    sample.position_ids, _ = mp.mrope_positions(
        sample.input_ids, family=FAMILY, image_grid_thw=grids
    )
    sample.attention_mask = np.ones(len(sample), dtype=np.int8)
    sample.processor = copy.deepcopy(PROCESSOR)
    sample.processor_fingerprint = fingerprint(PROCESSOR)
    sample.rollout_logprobs = -rng.exponential(size=sample.num_loss_tokens).astype(np.float32)
    sample.sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "logprobs": "processed"}
    sample.finish_reason = "stop"
    sample.rewards = [mp.Score("exact", float(rng.integers(0, 2)))]


if __name__ == "__main__":
    main()
