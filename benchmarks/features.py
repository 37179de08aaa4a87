"""What kept features save: a step with and without a `FeatureStore`, and with and without `encode_once`.

A frozen tower: old and reference logprobs, then two epochs of forward and backward, over micro-batches. A trained
one: one forward and backward of each micro-batch. Prompts of one picture; a prompt's samples lie in two micro-batches.
The figures are medians of seconds a step, patches that the tower ran, and ratios; before, both ways must agree.

Without a GPU the model is small, rows are printed and nothing is written.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import gpu
import numpy as np
import torch

import mmpack as mp
from benchmarks.step.models import MODELS as SHAPES
from benchmarks.step.models import Shape, random_model
from mmpack.adapters.transformers import attach, encode_once, packed_logprobs
from mmpack.adapters.transformers.tower import tower_and_projector
from mmpack.cache import FeatureStore
from mmpack.families import get_family
from mmpack.layout.fingerprint import cache_key
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, ModalitySpan

FAMILY = get_family("qwen2_5_vl")
ROPE = {"rope_type": "default", "rope_theta": 1e6}
SMALL = Shape(
    FAMILY.name,
    "Qwen2_5_VL",
    {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    | {"num_attention_heads": 4, "num_key_value_heads": 2}
    | {"rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}},
    {"depth": 4, "hidden_size": 128, "num_heads": 4, "intermediate_size": 256}
    | {"out_hidden_size": 128, "fullatt_block_indexes": [3], "window_size": 112},
)
# a model's shape; side of a picture in patches, tokens of a prompt's text and of a response
MODELS: dict[str, tuple[Shape, tuple[int, int, int]]] = {
    "small": (SMALL, (32, 64, 16)),
    "3b": (SHAPES["qwen2.5-vl-3b"], (64, 176, 900)),
    "7b": (SHAPES["qwen2.5-vl-7b"], (64, 176, 900)),
}


def main() -> None:
    cuda = torch.cuda.is_available()
    args = gpu.arguments(
        "features",
        model={"choices": MODELS, "default": "3b" if cuda else "small"},
        prompts={"type": int, "default": 2},
        repeats={"type": int, "default": 3},
    )
    device = torch.device("cuda" if cuda else "cpu")
    model = build(args.model, device)
    packs = [p.to(device) for p in make_packs(args.model, args.prompts)]
    of_all = {
        "model": f"Qwen2.5-VL, {args.model}",
        "micro_batches": len(packs),
        "patches_a_micro_batch": packs[0].stats["patches"],
    }
    rows = [of_all | way(model, packs, args.repeats) for way in (frozen, trained)]
    if cuda:
        gpu.write(args.out, "features", {}, rows)
        return
    for row in rows:
        print(json.dumps(row))


def frozen(model: Any, packs: list[mp.PackedBatch], repeats: int) -> dict[str, Any]:
    """Old, reference and two epochs; the reference is the policy itself, whose tower is equal."""
    for parameter in tower_and_projector(model).parameters():
        parameter.requires_grad_(False)

    def step(features: FeatureStore | None) -> list[torch.Tensor]:
        out = []
        with torch.no_grad():
            for _ in ("old", "reference"):
                out += [packed_logprobs(model, p, features=features) for p in packs]
        for _ in range(2):
            for pack in packs:
                packed_logprobs(model, pack, features=features).sum().backward()
        return out

    def kept() -> list[torch.Tensor]:
        return step(FeatureStore(2**32))  # a new one: nothing of the step before

    return row("frozen tower: old, reference, 2 epochs", model, lambda: step(None), kept, repeats)


def trained(model: Any, packs: list[mp.PackedBatch], repeats: int) -> dict[str, Any]:
    """One epoch, gradients of all weights."""
    for parameter in tower_and_projector(model).parameters():
        parameter.requires_grad_(True)

    def each() -> list[torch.Tensor]:
        out = []
        for pack in packs:
            out.append(packed_logprobs(model, pack))
            out[-1].sum().backward()
        return [x.detach() for x in out]

    def once() -> list[torch.Tensor]:
        out = []
        with encode_once(model, packs) as features:
            for pack in packs:
                out.append(packed_logprobs(model, pack, features=features))
                out[-1].sum().backward()
        return [x.detach() for x in out]

    return row(f"trained tower: {len(packs)} micro-batches", model, each, once, repeats)


def row(
    name: str, model: Any, each: Callable[[], Any], once: Callable[[], Any], repeats: int
) -> dict[str, Any]:
    """Both ways in turn, after one run of each, which must agree."""
    with attach(model), Ran(model) as ran:
        found, patches = [], []
        for way in (each, once):
            model.zero_grad(set_to_none=True)
            before = sum(ran)
            found.append(way())
            patches.append(sum(ran) - before)
        off = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))
        # chunks differ, so bits may: the bound of two layouts, or rounding of bf16
        bound = 1e-5 if found[0][0].device.type == "cpu" else 0.3
        if not off <= bound:
            raise SystemExit(f"{name}: logprobs differ by {off}, more than {bound}")
        seconds: list[list[float]] = [[], []]
        for _ in range(repeats):
            for way, own in zip((each, once), seconds, strict=True):
                model.zero_grad(set_to_none=True)
                synchronize(model)
                start = time.perf_counter()
                way()
                synchronize(model)
                own.append(time.perf_counter() - start)
    medians = [statistics.median(own) for own in seconds]
    return {
        "step": name,
        "seconds_each_pass": medians[0],
        "seconds_kept": medians[1],
        "ratio": medians[0] / medians[1],
        "patches_each_pass": patches[0],
        "patches_kept": patches[1],
        "largest_difference_nats": off,
    }


class Ran:
    """Patches of each forward of the tower, within the block."""

    def __init__(self, model: Any):
        self.tower, self.seen = model.model.visual, list[int]()

    def __enter__(self) -> list[int]:
        self.hook = self.tower.register_forward_pre_hook(
            lambda _, args: self.seen.append(len(args[0]))
        )
        return self.seen

    def __exit__(self, *error: object) -> None:
        self.hook.remove()


def synchronize(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def build(name: str, device: torch.device) -> Any:
    """Random weights of the shape; on a GPU bf16, and gradient checkpointing of all layers."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(MODELS[name][0], device, dtype)
    if device.type == "cuda":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    return model


def make_packs(name: str, prompts: int) -> list[mp.PackedBatch]:
    """Two samples of each prompt to a pack, two packs of each prompt; pixels are drawn."""
    side, prompt, response = MODELS[name][1]
    rng = np.random.default_rng(0)
    packs = []
    for p in range(prompts):
        grid = (1, side, side)
        content = f"{p:064x}"
        medium = Medium(
            media_id=f"m{p}",
            modality="image",
            cache_key=cache_key(content, grid, {}),
            grid_thw=grid,
            num_tokens=FAMILY.vision_tokens(grid),
            content_hash=content,
            size=(side * FAMILY.patch_size,) * 2,
        )
        pixels = rng.standard_normal((side * side, FAMILY.patch_dim), dtype=np.float32)
        medium.pixel_values = torch.from_numpy(pixels)
        start = [FAMILY.vision_start_id, *[FAMILY.image_token_id] * medium.num_tokens]
        asked = [*start, FAMILY.vision_end_id, *rng.integers(0, 150_000, prompt)]
        for half in range(2):
            samples = [
                Sample(
                    sample_id=f"{p}.{half}.{k}",
                    group_id=str(p),
                    family=FAMILY.name,
                    input_ids=np.array([*asked, *rng.integers(0, 150_000, response)]),
                    media=[medium],
                    modality_spans=[ModalitySpan(1, 1 + medium.num_tokens, "image", 0)],
                    loss_spans=[LossSpan(len(asked), len(asked) + response, "response")],
                )
                for k in range(2)
            ]
            packs.append(mp.pack(samples, share_prefix=True))
    return packs


if __name__ == "__main__":
    main()
