"""What the first steps of a process cost: in a fresh process with empty caches of kernels, then in ones with full ones.

Each process imports, makes a model of real widths (random weights, bf16) and takes four steps, forward and backward, on
packs of other lengths each: with eager layers, then with compiled ones, and then with `compile_ahead` before them, on a
pack of made-up responses. Printed per process: seconds of each part, and what was compiled or loaded in it. Without a
GPU, with Liger's layers or a profile nothing is written.

usage: first_step.py [--size 3b] [--layers 4] [--compile | --no-compile] [--liger] [--profile]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START = time.perf_counter()
STEPS = 4
KINDS = ("eager", "compiled")  # of layers
RESULT = Path(__file__).parent / "results" / "first_step.json"
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash_attn_4",
    "CUDA_CACHE_PATH": "cuda",
}


def main() -> None:
    options = parsed()
    if options.child:
        return run(options)
    kinds = ("eager", "compiled") if options.compile is None else (KINDS[options.compile],)
    states = {"eager": ("empty", "full"), "compiled": ("empty", "full", "ahead")}
    every = [(layers, state) for layers in kinds for state in states[layers]]
    rows: list[dict[str, Any]] = []
    for layers in kinds:
        with tempfile.TemporaryDirectory() as folder:
            caches = {name: str(Path(folder) / part) for name, part in CACHES.items()}
            for state in states[layers]:
                rows.append(process(layers, state, caches, Path(folder)))
                write(options, rows, [not_reached(*other) for other in every[len(rows) :]])


def not_reached(layers: str, state: str) -> dict[str, Any]:
    """The row of a process that did not start yet: it stays if the run is cut off."""
    name = f"{layers} layers, caches {caches_of(state)}"
    return {"name": name, "did_not_run": "the run ended before it"}


def caches_of(state: str) -> str:
    return "full, compiled ahead" if state == "ahead" else state


def process(layers: str, state: str, caches: dict[str, str], folder: Path) -> dict[str, Any]:
    """One process with these caches, whose parts are printed as they come; its row."""
    begun = time.perf_counter()
    compiled = "--compile" if layers == "compiled" else "--no-compile"
    command = [sys.executable, __file__, *sys.argv[1:], compiled, "--child", state]
    parts = []
    with subprocess.Popen(
        command, env=os.environ | caches, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                parts.append(json.loads(line))
    whole = time.perf_counter() - begun
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    report("process", layers=layers, state=state, seconds=round(whole, 2), cache_mb=size >> 20)
    if child.returncode:
        sys.exit(f"first_step: the process with {layers} layers ended with {child.returncode}")
    return row_of(layers, state, parts)


def row_of(layers: str, state: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What the first step of a process took more than the others, by the parts that it printed."""
    first, *others = [part for part in parts if part["part"].startswith("step ")]
    usual = statistics.median(part["seconds"] for part in others)
    row = {
        "layers": layers,
        "caches": caches_of(state),
        "first_seconds": first["seconds"],
        "others_seconds": usual,
        "more_seconds": first["seconds"] - usual,
        "kernels_compiled": first["triton_compiled"],
        "graphs": int(first["more"].get("stats unique_graphs", 0)),
        "compiler_seconds": first["more"].get("s of entire_frame_compile"),
        "backend_seconds": first["more"].get("s of backend_compile"),
    }
    ahead = [part for part in parts if part["part"] == "ahead"]
    return row | ({"ahead_seconds": ahead[0]["seconds"]} if ahead else {})


def write(
    options: argparse.Namespace, rows: list[dict[str, Any]], others: list[dict[str, Any]]
) -> None:
    """The report so far, on a GPU, of all layers; elsewhere the last row."""
    import gpu
    import torch

    if (
        not torch.cuda.is_available()
        or options.liger
        or options.profile
        or options.compile is not None
    ):
        print(json.dumps(rows[-1]), flush=True)
        return
    of_all = {"model": f"Qwen2.5-VL, {options.size}", "decoder_layers": options.layers}
    gpu.write(options.out, "first_step", {}, [*(of_all | row for row in rows), *others])


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--size",
        choices=["3b", "7b", "tiny"],
        default="3b",
        help="tiny: fp32, where there is no GPU",
    )
    parser.add_argument("--layers", type=int, default=4, help="of the decoder")
    parser.add_argument("--blocks", type=int, default=4, help="of the tower")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile_layers, or only without; both by default",
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--liger", action="store_true", help="Liger's kernels in the layers")
    parser.add_argument("--tower", default="auto", help="what attach does with the tower")
    parser.add_argument("--checkpoint", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--profile", action="store_true", help="of the host, in the first step")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def report(part: str, **values: Any) -> None:
    print(json.dumps({"part": part} | values), flush=True)


def run(options: argparse.Namespace) -> None:
    import torch
    import transformers  # noqa: F401

    import mmpack as mp
    import mmpack.adapters.transformers
    from mmpack.adapters.transformers.compile_ahead import compile_ahead

    device = "cuda" if torch.cuda.is_available() else "cpu"
    report(
        "import",
        state=options.child,
        seconds=round(time.perf_counter() - START, 2),
        torch=torch.__version__,
    )
    with timed("device", device):
        torch.ones(1, device=device)
    with timed("cuBLAS", device):
        x = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
        x @ x
    with timed("model", device):
        model = made(options, device)
        if options.compile:
            mmpack.adapters.transformers.compile_layers(model)
    seen = Compiled()
    with mmpack.adapters.transformers.attach(model, tower=options.tower):
        if options.child == "ahead":
            with timed("ahead", device):
                made_up = mp.pack(samples(STEPS, options.size), share_prefix=True).to(device)
                compile_ahead(model, made_up, old_logprobs=False)
            seen.take()
        for i in range(STEPS):
            with timed("pack", device):
                batch = mp.pack(samples(i, options.size), share_prefix=True).to(device)
            step(model, batch, i, device, seen, options.profile and i == 0)


def step(model: Any, batch: Any, i: int, device: str, seen: Compiled, profile: bool) -> None:
    import cProfile
    import pstats

    from mmpack.adapters.transformers import packed_logprobs

    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    times = [time.perf_counter()]
    logprobs = packed_logprobs(model, batch)
    wait(device)
    times.append(time.perf_counter())
    logprobs.sum().backward()
    wait(device)
    times.append(time.perf_counter())
    profiler.disable()
    model.zero_grad(set_to_none=True)
    forward, backward = (round(b - a, 3) for a, b in itertools.pairwise(times))
    seconds = round(times[-1] - times[0], 3)
    report(
        f"step {i + 1}",
        rows=batch.num_tokens,
        seconds=seconds,
        forward=forward,
        backward=backward,
        **seen.take(),
    )
    if profile:
        pstats.Stats(profiler, stream=sys.stdout).sort_stats("cumulative").print_stats(60)


def wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def timed(part: str, device: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    wait(device)
    report(part, seconds=round(time.perf_counter() - begun, 3))


class Compiled:
    """What Triton, torch.compile and FlashAttention-4 compiled or loaded since it was asked last."""

    def __init__(self) -> None:
        self.events: list[tuple[str, bool, float]] = []
        self.before: dict[str, float] = {}
        try:
            from triton import knobs
        except ImportError:
            return
        knobs.compilation.listener = self.triton

    def triton(
        self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool
    ) -> None:
        self.events.append((src.name, cache_hit, times.total / 1e6))

    def take(self) -> dict[str, Any]:
        now = self.counted()
        more = {k: round(v - self.before.get(k, 0), 3) for k, v in now.items()}
        self.before = now
        events, self.events = self.events, []
        made = [(name, round(s, 2)) for name, hit, s in events if not hit]
        loaded = [s for _, hit, s in events if hit]
        return {
            "triton_compiled": len(made),
            "triton_seconds": round(sum(s for _, s in made), 2),
            "triton_loaded": len(loaded),
            "triton_load_seconds": round(sum(loaded), 3),
            "longest": sorted(made, key=lambda m: -m[1])[:6],
            "more": {k: v for k, v in more.items() if v},
        }

    def counted(self) -> dict[str, float]:
        from torch._dynamo.utils import calculate_time_spent, counters

        found = {f"{group} {name}": float(counters[group][name]) for group, name in COUNTERS}
        found |= {f"s of {name}": s for name, s in calculate_time_spent().items()}
        interface = sys.modules.get("flash_attn.cute.interface")
        for name in (
            "_flash_attn_fwd",
            "_bwd_preprocess",
            "_flash_attn_bwd",
            "_bwd_postprocess_convert",
        ):
            if interface is not None:
                found[f"fa4 {name}"] = float(len(getattr(interface, name).compile_cache.cache))
        return found


COUNTERS = (
    ("stats", "unique_graphs"),
    ("inductor", "fxgraph_cache_hit"),
    ("inductor", "fxgraph_cache_miss"),
    ("aot_autograd", "autograd_cache_hit"),
    ("aot_autograd", "autograd_cache_miss"),
)


def made(options: argparse.Namespace, device: str) -> Any:
    import torch

    from benchmarks.step.models import MODELS, random_model

    if options.size == "tiny":
        from mmpack.demo.tiny_models import tiny_model

        model = tiny_model("qwen2_5_vl").to(device)
    else:
        shape = MODELS[f"qwen2.5-vl-{options.size}"]
        few = {"depth": options.blocks, "fullatt_block_indexes": [options.blocks - 1]}
        shape = dataclasses.replace(
            shape,
            text=shape.text | {"num_hidden_layers": options.layers},
            vision=shape.vision | few,
        )
        model = random_model(shape, torch.device(device), torch.bfloat16)
    if options.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2_5_vl

        apply_liger_kernel_to_qwen2_5_vl(model=model)
    if options.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def samples(i: int, size: str) -> list[Any]:
    """Of two prompts with a picture, four answers each; other lengths in each step `i`."""
    import hashlib

    import numpy as np

    from mmpack.schema.media import Medium
    from mmpack.schema.sample import Sample
    from mmpack.schema.spans import LossSpan, ModalitySpan

    rng = np.random.default_rng(i)
    side, shortest, longest = (8, 10, 40) if size == "tiny" else (64 + 8 * (i % 2), 300, 900)
    tokens = side * side // 4
    found = []
    for g in range(2):
        key = hashlib.sha256(f"{i}.{g}".encode()).hexdigest()
        pixels = rng.standard_normal((side * side, 1176), dtype=np.float32)
        medium = Medium(
            media_id=f"m{g}", modality="image", cache_key=key, grid_thw=(1, side, side), num_tokens=tokens,
            content_hash=key, size=(side * 14, side * 14), pixel_values=pixels,
        )  # fmt: skip
        picture = [[151652], np.full(tokens, 151655), [151653]]
        prompt = np.concatenate(
            [rng.integers(0, 150000, 30), *picture, rng.integers(0, 150000, 100 + 7 * i)]
        )
        for j in range(4):
            ids = np.concatenate(
                [prompt, rng.integers(0, 150000, int(rng.integers(shortest, longest)))]
            )
            sample = Sample(
                sample_id=f"{g}.{j}", group_id=f"{g}", family="qwen2_5_vl", input_ids=ids.astype(np.int64),
                media=[medium], modality_spans=[ModalitySpan(31, 31 + tokens, "image", 0)],
                loss_spans=[LossSpan(len(prompt), len(ids), "response", 0)],
            )  # fmt: skip
            found.append(sample)
    return found


if __name__ == "__main__":
    main()
