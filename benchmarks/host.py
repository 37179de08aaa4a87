"""What the host does for a step, beside peers, two programs in turn: `python benchmarks/host.py`.

Bins and balance, prefix forests, positions, packs. A figure is CPU time of the process, the best of some runs, with one
thread; compare ratios. `x_faster` is the peer's time over ours, `floor` what it is held to: with one below its floor
the exit status is 1. `aim_x` and `aim_ms` are what it is to reach, with all of the work. Peers: TRL's `_pack_bfd`,
verl's `karmarkar_karp`, transformers' `get_rope_index`, and one copy, by numpy, or one sha256 of the same bytes. A peer
that is not installed has a row that says so. No GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import on_host
import torch

import mmpack as mp
from mmpack.families import get_family
from mmpack.layout.batch_positions import batch_positions
from mmpack.layout.forest import build_forest
from mmpack.planning.balance import balance
from mmpack.planning.bfd import best_fit_decreasing

PACKAGES = ("numpy", "torch", "transformers", "trl", "verl")
FAMILY = get_family("qwen2_5_vl")
SHORT = 1 / 8  # of the work, with --quick


class Case(NamedTuple):
    """Two programs on the same input, and what their ratio is held to."""

    what: str
    peer: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    floor: float
    more: tuple[tuple[str, float], ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=on_host.RESULTS / "host.json")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="an eighth of the work; no file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = list(measured(args.runs, SHORT if args.quick else 1.0))
    for row in rows:
        print(json.dumps(row), flush=True)
    if not args.quick:
        packages = [p for p in PACKAGES if installed(p)]
        on_host.write(args.out, "host", rows, packages, one_core=True)
    missed = [row for row in rows if row.get("x_faster", row.get("floor", 0)) < row.get("floor", 0)]
    for row in missed:
        print(f"{row['what']}: {row['x_faster']:.3g} x {row['peer']}, below {row['floor']:.3g}")
    return int(bool(missed))


def measured(runs: int, share: float) -> Iterator[dict[str, Any]]:
    """A row of each case; one that did not run says why."""
    for group in (bins, parts, forests, positions, packs):
        for case in group(share):
            if isinstance(case, dict):
                yield case
                continue
            ours, theirs = in_turn(case.ours, case.theirs, runs)
            row = {"what": case.what, "peer": case.peer, "ms": ours, "peer_ms": theirs}
            more = {k: v for k, v in case.more if share == 1 or not k.startswith("aim")}
            yield row | {"x_faster": theirs / ours, "floor": case.floor} | more


def in_turn(ours: Callable[[], Any], theirs: Callable[[], Any], runs: int) -> tuple[float, float]:
    """The least CPU milliseconds of each; a slow peer runs fewer times."""
    best = [float("inf")] * 2
    for number in range(runs):
        for k, call in enumerate((ours, theirs)):
            if number > 1 and best[k] > 1000:
                continue
            start = time.process_time()
            call()
            best[k] = min(best[k], 1e3 * (time.process_time() - start))
    return best[0], best[1]


def lengths(count: int, most: int) -> np.ndarray:
    """Lengths of rollouts: lognormal, a median of 665."""
    drawn = np.random.default_rng(0).lognormal(6.5, 0.8, count)
    return drawn.astype(np.int64).clip(16, most)


# ---- bins and balance ----------------------------------------------------------------------------


def bins(share: float) -> Iterator[Case | dict[str, Any]]:
    if not installed("trl"):
        yield lacks("trl", "best-fit-decreasing")
        return
    import pyarrow as pa
    from trl.data_utils import _pack_bfd

    count, most = int(50_000 * share), 4096
    sizes = lengths(count, most)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    ids = pa.array(np.zeros(offsets[-1], np.int32))
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(offsets), ids)})
    trl = lambda: _pack_bfd(table, most)  # noqa: E731
    used = len(best_fit_decreasing(sizes, most))
    full = (("aim_x", 20), ("full", float(sizes.sum() / (used * most))))

    yield Case(
        f"best-fit-decreasing, {count:,}",
        "TRL",
        lambda: best_fit_decreasing(sizes, most),
        trl,
        20,
        full,
    )
    many = lengths(20 * count, most)
    yield Case(
        f"best-fit-decreasing, {20 * count:,}",
        f"TRL, {count:,}",
        lambda: best_fit_decreasing(many, most),
        trl,
        1,
        (("aim_ms", 1000),),
    )
    rng = np.random.default_rng(1)
    three = np.stack([sizes, 4 * rng.integers(0, 1024, count), 1 + sizes // 3], axis=1)
    yield Case(
        f"three budgets, {count:,}",
        f"TRL, one budget, {count:,}",
        lambda: best_fit_decreasing(three, [4 * most, 16_384, 8192]),
        trl,
        1,
        (("aim_ms", 500),),
    )


def parts(share: float) -> Iterator[Case | dict[str, Any]]:
    if not installed("verl"):
        yield lacks("verl", "balance")
        return
    from verl.utils.seqlen_balancing import karmarkar_karp

    free = ((1024, 32), (4096, 256)) if share == 1 else ((1024, 32),)
    equal = (*free, (32_768, 1024)) if share == 1 else free
    for equal_counts, shapes in ((False, free), (True, equal)):
        for count, ranks in shapes:
            tokens = lengths(count, 16_384)
            costs = 24_576 * tokens + tokens**2  # as verl weighs them
            listed = costs.tolist()
            ours = lambda c=costs, r=ranks, e=equal_counts: balance(c, r, e)  # noqa: E731
            theirs = lambda c=listed, r=ranks, e=equal_counts: karmarkar_karp(c, r, e)  # noqa: E731
            yield Case(
                f"balance {count:,} on {ranks:,}, {'equal' if equal_counts else 'free'} counts",
                "verl",
                ours,
                theirs,
                1 if equal_counts else 10,
                (
                    *[("aim_x", 1)] * equal_counts,
                    *[("aim_ms", 1000)] * (ranks == 1024),
                    ("largest_over_mean", makespan(costs, ours(), ranks)),
                    ("peer_largest_over_mean", makespan(costs, theirs(), ranks)),
                ),
            )


def makespan(costs: np.ndarray, found: list[list[int]], ranks: int) -> float:
    return float(max(costs[part].sum() for part in found) / (costs.sum() / ranks))


# ---- samples -------------------------------------------------------------------------------------


def forests(share: float) -> Iterator[Case]:
    """Groups of 8 that share a prompt of 1,200: answers of 300 to 1,000 tokens, and 10,000 samples of 4,096 each."""
    for groups, shortest, longest in ((1024, 300, 1000), (1250, 2896, 2897)):
        samples = grouped(int(groups * share), shortest, longest)
        tokens = sum(map(len, samples))
        yield Case(
            f"prefix forest, {len(samples):,} samples in groups of 8, {tokens / 1e6:.1f} M tokens",
            "sha256 of the ids",
            lambda s=samples: build_forest(s),
            lambda s=samples: [hashlib.sha256(one.input_ids).digest() for one in s],
            0.3,
            (("aim_ms", 1000),),
        )


def grouped(groups: int, shortest: int, longest: int) -> list[mp.Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for g in range(groups):
        prompt = rng.integers(0, 150_000, 1200)
        for k in range(8):
            answer = rng.integers(0, 150_000, rng.integers(shortest, longest))
            ids = np.concatenate([prompt, answer])
            spans = [mp.LossSpan(len(prompt), len(ids))]
            samples.append(mp.Sample(f"{g}/{k}", str(g), FAMILY.name, ids, [], [], spans))
    return samples


def rollout(
    count: int, tokens: int = 4096, pictures: int = 6, pixels: bool = False
) -> list[mp.Sample]:
    """Samples of `tokens` with `pictures` of 64 to 600 tokens each, all different, then a response."""
    rng = np.random.default_rng(0)
    out = []
    for b in range(count):
        ids = rng.integers(0, 150_000, tokens)
        media, spans, at = [], [], 40
        for k in range(pictures):
            h, w = (int(x) for x in rng.integers(8, 24, 2))
            run = slice(at + 1, at + 1 + h * w)
            ids[at], ids[run] = FAMILY.vision_start_id, FAMILY.image_token_id
            ids[run.stop] = FAMILY.vision_end_id
            key = hashlib.sha256(f"{b}/{k}".encode()).hexdigest()
            medium = mp.Medium(f"{b}/{k}", "image", key, (1, 2 * h, 2 * w), h * w, content_hash=key)
            if pixels:
                medium.pixel_values = rng.random((4 * h * w, FAMILY.patch_dim), np.float32)
            media.append(medium)
            spans.append(mp.schema.ModalitySpan(run.start, run.stop, "image", k))
            at = run.stop + 1 + int(rng.integers(5, 30))
        out.append(
            mp.Sample(
                *(f"{b // 8}/{b % 8}", f"{b // 8}", FAMILY.name, ids, media, spans),
                loss_spans=[mp.LossSpan(at, tokens)],
                rollout_logprobs=np.zeros(tokens - at, np.float32),
            )
        )
    return out


def positions(share: float) -> Iterator[Case]:
    samples = rollout(int(64 * share))
    upstream = rope_index(samples)
    grids = [[m.grid_thw for m in s.media] for s in samples]
    given = list(zip(samples, grids, strict=True))

    def one_by_one() -> np.ndarray:
        found = [
            mp.mrope_positions(s.input_ids, FAMILY, image_grid_thw=g, tokens_per_second=2)[0]
            for s, g in given
        ]
        return np.stack(found, axis=1)

    together = batch_positions(samples, FAMILY).reshape(3, len(samples), -1)
    want = upstream().numpy()
    if not (np.array_equal(one_by_one(), want) and np.array_equal(together, want)):
        sys.exit("positions differ from transformers', nothing is measured")
    what = f"mRoPE positions, {len(samples)} x 4,096 tokens, 6 pictures each"
    yield Case(
        f"{what}, together",
        "transformers",
        lambda: batch_positions(samples, FAMILY),
        upstream,
        8,
        (("aim_x", 10),),
    )
    yield Case(f"{what}, one by one", "transformers", one_by_one, upstream, 5)
    yield Case(
        f"pack {len(samples)} x 4,096",
        "transformers' positions alone",
        lambda: mp.pack(samples),
        upstream,
        1,
        (("aim_ms", 30),),
    )


def rope_index(samples: list[mp.Sample]) -> Callable[[], torch.Tensor]:
    """transformers' `get_rope_index` of these samples; no weights are made."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    with torch.device("meta"):
        model = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
        torch.nn.Module.__init__(model)
    model.config = Qwen2_5_VLConfig()
    ids = torch.from_numpy(np.stack([s.input_ids for s in samples]))
    kinds = (ids == FAMILY.image_token_id).int()
    grids = torch.tensor([m.grid_thw for s in samples for m in s.media])
    return lambda: model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)[0]


def packs(share: float) -> Iterator[Case]:
    samples = rollout(max(int(16 * share), 2), pixels=True)
    held = [m.pixel_values for s in samples for m in s.media]
    whole = torch.from_numpy(np.concatenate(held))
    megabytes = whole.nbytes / 2**20
    given = f"pack {len(samples)} x 4,096 with {megabytes:.0f} MiB of pixels"
    for what in (given, f"{given}, read-only as Arrow's and Ray's"):
        if not torch.equal(mp.pack(samples).pixel_values, whole):
            sys.exit("pixels differ, nothing is measured")
        yield Case(
            what,
            "one copy of them",
            lambda: mp.pack(samples),
            lambda: np.concatenate(held),
            1 / 1.2,
            (("aim_x", 1 / 1.2),),
        )
        for medium in (m for s in samples for m in s.media):
            medium.pixel_values.flags.writeable = False


# ---- what runs, and where ------------------------------------------------------------------------


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def lacks(name: str, what: str) -> dict[str, Any]:
    return {"name": what, "did_not_run": f"{name} is not installed"}


if __name__ == "__main__":
    sys.exit(main())
