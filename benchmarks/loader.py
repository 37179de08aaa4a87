"""Host time of a step's data: packing, the way to the device, and how much of both PackLoader hides.

64 samples of 4,096 tokens, 16 prompts with one 896 × 896 picture each (4,096 patches), four responses of 2,000 tokens
each, shared prefixes; pixels as float32 (308 MB) and as uint8. `pack` and `to` are of all samples in one batch. The
loop takes them as micro-batches of 32,768 rows, each with 0.3 s of fake work on the device, whose end the host waits
for (as where a loss is read): by hand (plan, pack, `.to`) and through PackLoader. `exposed_ms` is what a loop takes
beyond the work, `first_ms` the wait for the first batch of all, which nothing can hide. `hidden` is the share of the
hand's exposed time that the loader's lacks, `hidden_after_first` without that wait. Without a GPU the work is a sleep,
rows are printed and nothing is written.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import gpu
import numpy as np
import torch

import mmpack as mp
from mmpack.adapters.torch import PackLoader
from mmpack.families import get_family
from mmpack.layout.fingerprint import cache_key
from mmpack.ops.patches.normalize import normalize_bytes
from mmpack.packing.pixels import as_floats, float_pixels
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, ModalitySpan

PROMPTS, RESPONSES, LENGTH, ANSWER, SIDE = 16, 4, 4096, 2000, 64
MAX_TOKENS, WORK_SECONDS, EPOCHS, REPEATS = 32_768, 0.3, 2, 5
FAMILY = get_family("qwen2_5_vl")
BATCH, LOOP = "all samples in one batch", "a loop"  # sections
SETTINGS = {
    "image": {
        "backend": "torchvision",
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
}
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def main() -> None:
    arguments = gpu.arguments("loader")
    torch.manual_seed(0)
    as_bytes = some_samples()
    floats = with_floats(as_bytes)
    one, other = (mp.pack(s, share_prefix=True) for s in (floats, as_bytes))
    same = torch.equal(float_pixels(other.to(DEVICE)).cpu(), one.pixel_values)
    gpu.require(same, "uint8 pixels are normalised to the bits of float32 ones")
    rows: list[dict[str, Any]] = []
    for kind, samples in (("float32", floats), ("uint8", as_bytes)):
        rows += host_rows(kind, samples)
    if CUDA:
        rows.append(normalised(other.to(DEVICE)))
    for kind, samples in (("float32", floats), ("uint8", as_bytes)):
        rows += loop_rows(kind, samples)
    if CUDA:
        floors = {"copy_bytes_per_second": gpu.copy_bytes_per_second()}
        gpu.write(arguments.out, "loader", floors, rows)
        return
    for row in rows:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})


def host_rows(kind: str, samples: list[Sample]) -> list[dict[str, Any]]:
    """Packing, and the way to the device, from each kind of memory."""
    batch = mp.pack(samples, share_prefix=True)
    assert batch.pixel_values is not None
    size = batch.pixel_values.numel() * batch.pixel_values.element_size()
    calls: dict[str, Callable[[], Any]] = {
        "plan": lambda: mp.plan(samples, max_tokens=MAX_TOKENS, share_prefix=True),
        "pack": lambda: mp.pack(samples, share_prefix=True),
    }
    if CUDA:
        pinned = batch.pin_memory()
        calls |= {
            "pack, then pin": lambda: mp.pack(samples, share_prefix=True).pin_memory(),
            "pack into pinned memory": lambda: mp.pack(samples, share_prefix=True, pin_memory=True),
            "to the device, pageable": lambda: batch.to(DEVICE),
            "to the device, pinned": lambda: pinned.to(DEVICE, non_blocking=True),
        }
    return [
        {"section": BATCH, "case": kind, "who": who, "ms": seconds(call) * 1e3, "bytes": size}
        for who, call in calls.items()
    ]


def normalised(batch: Any) -> dict[str, Any]:
    """The table's pass over all patches, on the device: a byte read, two written."""
    values, pixels = batch.byte_values["image"], batch.pixel_values
    ms = gpu.milliseconds(lambda: normalize_bytes(pixels, values, torch.bfloat16), ahead=True)
    row = {"section": BATCH, "case": "uint8", "who": "normalise to bfloat16"}
    return row | {"ms": ms, "bytes": 3 * pixels.numel()}


def loop_rows(kind: str, samples: list[Sample]) -> list[dict[str, Any]]:
    """Loops of EPOCHS steps, each over all samples."""
    work = device_work()

    def by_hand() -> list[float]:
        worked = []
        for _ in range(EPOCHS):
            for members in mp.plan(samples, max_tokens=MAX_TOKENS, share_prefix=True).bins:
                batch = mp.pack([samples[i] for i in members], share_prefix=True).to(DEVICE)
                worked.append(work(batch))
        return worked

    def loaded(prefetch: int) -> list[float]:
        options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "share_prefix": True}
        worked, begun = [], time.perf_counter()
        with PackLoader(
            steps=[samples] * EPOCHS, device=DEVICE, prefetch=prefetch, **options
        ) as loader:
            for step in loader:
                for batch in step:
                    first.append(time.perf_counter() - begun)
                    worked.append(work(batch))
        return worked

    first: list[float] = []
    rows: list[dict[str, Any]] = []
    calls = {"by hand": by_hand, "PackLoader": lambda: loaded(1)}
    for who, call in calls.items():
        call()  # pinned and device memory are kept from here on
        first.clear()
        start = time.perf_counter()
        worked = call()
        taken = time.perf_counter() - start
        rows.append({"section": LOOP, "case": kind, "who": who, "ms": taken * 1e3})
        rows[-1] |= {"batches": len(worked), "exposed_ms": (taken - sum(worked)) * 1e3}
    hand, loader = (row["exposed_ms"] for row in rows)
    waited = first[0] * 1e3
    rows[-1] |= {"first_ms": waited, "hidden": 1 - loader / hand}
    rows[-1]["hidden_after_first"] = 1 - (loader - waited) / hand
    return rows


def device_work() -> Callable[[Any], float]:
    """Waits until the device has worked on a batch, for about WORK_SECONDS; gives the seconds that it did."""
    if not CUDA:
        return slept
    cycles = 100_000_000
    ms = gpu.milliseconds(lambda: torch.cuda._sleep(cycles), repeats=3, warmups=1)
    wanted = int(cycles * WORK_SECONDS * 1e3 / ms)

    def work(batch: Any) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(wanted)
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3  # the clock follows the load: no two sleeps are alike

    return work


def slept(batch: Any) -> float:
    start = time.perf_counter()
    time.sleep(WORK_SECONDS)
    return time.perf_counter() - start


def seconds(call: Callable[[], Any]) -> float:
    """Median time of a call, until the device has done with it."""
    taken = []
    for turn in range(REPEATS + 1):
        start = time.perf_counter()
        kept = call()
        if CUDA:
            torch.cuda.synchronize()
        if turn:
            taken.append(time.perf_counter() - start)
        del kept
    return statistics.median(taken)


def some_samples() -> list[Sample]:
    """Pixels as bytes. Responses of one prompt share it, picture included."""
    rng = np.random.default_rng(0)
    tokens = SIDE**2 // FAMILY.spatial_merge_size**2
    out = []
    for prompt in range(PROMPTS):
        pixels = rng.integers(0, 256, (SIDE**2, FAMILY.patch_dim), dtype=np.uint8)
        content = f"{prompt:064x}"
        grid = (1, SIDE, SIDE)
        text = rng.integers(0, 150_000, LENGTH - ANSWER - tokens - 2)
        image = [FAMILY.image_token_id] * tokens
        head = np.array([*text, FAMILY.vision_start_id, *image, FAMILY.vision_end_id])
        first = len(text) + 1
        for k in range(RESPONSES):
            medium = Medium(
                media_id=f"p{prompt}",
                modality="image",
                cache_key=cache_key(content, grid, SETTINGS["image"]),
                grid_thw=grid,
                num_tokens=tokens,
                content_hash=content,
            )
            medium.pixel_values = pixels
            answer = rng.integers(0, 150_000, ANSWER)
            sample = Sample(
                sample_id=f"s{prompt}/{k}",
                group_id=f"g{prompt}",
                family=FAMILY.name,
                input_ids=np.concatenate([head, answer]).astype(np.int64),
                media=[medium],
                modality_spans=[ModalitySpan(first, first + tokens, "image", 0)],
                loss_spans=[LossSpan(LENGTH - ANSWER, LENGTH)],
            )
            sample.rollout_logprobs = -rng.exponential(size=ANSWER).astype(np.float32)
            sample.processor = SETTINGS
            out.append(sample)
    return out


def with_floats(samples: list[Sample]) -> list[Sample]:
    """The same with the pixels that the processor makes of the bytes."""
    made: dict[str, np.ndarray] = {}
    out = []
    for sample in samples:
        copy = Sample.from_dict(sample.to_dict())
        for old, medium in zip(sample.media, copy.media, strict=True):
            key = medium.cache_key
            if key not in made:
                made[key] = as_floats(old.pixel_values, "image", SETTINGS).numpy()
            medium.pixel_values = made[key]
        out.append(copy)
    return out


if __name__ == "__main__":
    main()
