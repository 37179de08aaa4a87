"""Healthy pairs, drawn by seeds: one model run in two ways that differ by rounding only."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support.models import small_model, with_pixels
from support.samples import make_sample

from mmpack.adapters.transformers.probe import probe_side
from mmpack.families import get_family
from mmpack.schema.sample import Sample

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "qwen3_vl_moe")
LAYOUTS = ("packed", "shared", "padded", "padded_right", "alone")
# of a, of b; half of the pairs are of float32
DTYPES = (
    (torch.float32, torch.float32),
    (torch.float32, torch.float32),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float32),
)
KINDS = ("mixed", "text", "many pictures", "video", "prompts shared")


@dataclass(frozen=True)
class Pair:
    """Two sides, their samples, and what they are in words."""

    sides: tuple[Any, Any]
    samples: list[Sample]
    words: str


def draw_pair(seed: int) -> Pair:
    """Each family, dtype, layout, attention and kind of sample comes with every other sooner or later."""
    rng = np.random.default_rng([seed, 77])

    def pick(things: Any) -> Any:
        return things[int(rng.integers(len(things)))]

    family, dtypes = FAMILIES[seed % len(FAMILIES)], DTYPES[seed % len(DTYPES)]
    if family == "qwen3_vl_moe":
        dtypes = DTYPES[
            0
        ]  # a router that rounds another way takes other experts; float64 has no products of them
    factor, kind = pick([1, 2, 4]), pick(KINDS)
    model = _model(family, factor)
    chosen = []
    for dtype in dtypes:
        layout, attention = pick(LAYOUTS), pick(["sdpa", "eager"])
        if dtype == torch.float64:
            attention = (
                "sdpa"  # eager casts float64's mask to float32: padding becomes NaN, and spreads
            )
        own = layout in ("packed", "shared") or bool(attention == "sdpa" and rng.integers(2))
        size = pick([None, None, 2])
        chosen.append((layout, dtype, attention, own, size))
    samples = draw_samples(family, rng, kind)
    sides = [_side(model, *options) for options in chosen]
    words = [f"{x[0]} {str(x[1])[6:]} {x[2]} attached={x[3]} batches={x[4]}" for x in chosen]
    return Pair((sides[0], sides[1]), samples, f"{family} ×{factor}, {kind}: " + " | ".join(words))


def draw_samples(family: str, rng: np.random.Generator, kind: str) -> list[Sample]:
    """Three to five samples of a kind."""
    about = get_family(family)
    tiles = about.pixel_layout == "tiles"
    grids = [(1, 4, 4), (2, 4, 4)] if tiles else [(1, 4, 6), (1, 8, 4), (1, 12, 10)]
    film = ("video", (3, 4, 4)) if about.video_token_id else ("image", (3, 4, 4))

    def text(high: int) -> tuple[str, Any]:
        return "text", rng.integers(0, 151_643, int(rng.integers(2, high)))

    def response() -> tuple[str, Any]:
        return "response", rng.integers(0, 151_643, int(rng.integers(2, 6)))

    def image() -> tuple[Any, ...]:
        return "image", grids[int(rng.integers(len(grids)))]

    def one(i: int) -> list[tuple[Any, ...]]:
        if kind == "text" or (kind == "mixed" and i % 3 == 2):
            return [text(40), response(), text(4), response()]
        if kind == "many pictures":
            return [text(6), *(x for _ in range(6) for x in (image(), text(3))), response()]
        if kind == "video":
            return [text(6), (*film, f"film {i}"), text(6), image(), response()]
        return [text(12), image(), text(5), response(), image(), text(3), response()]

    count = int(rng.integers(3, 6))
    if kind == "prompts shared":
        prompt = [text(12), (*image(), "of all"), text(6)]
        parts = [[*prompt, response()] for _ in range(count)]
    else:
        parts = [one(i) for i in range(count)]
    made = [make_sample(p, f"s{i}", family=family) for i, p in enumerate(parts)]
    return with_pixels(made)


def _side(
    model: Any, layout: str, dtype: torch.dtype, attention: str, own: bool, size: int | None
) -> Any:
    if attention != "sdpa":
        model = copy.deepcopy(model)
        model.set_attn_implementation(attention)
    return probe_side(model, layout=layout, dtype=dtype, attached=own, samples_per_batch=size)


@functools.lru_cache(maxsize=6)
def _model(family: str, factor: float) -> Any:
    return small_model(family, factor)
