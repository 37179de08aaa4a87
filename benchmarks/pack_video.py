"""Packing of clips into patches: times against the copy of the same run, torch's permute and transformers' processors.

1,000 clips of 32 uint8 frames of four sizes (224 × 224 pixels each, about), as one buffer and as a tensor each, for
Qwen2.5-VL's patches (14) and Qwen3-VL's (16). Bytes: each value of the frames read once, each of the rows written once.
`of_floor` is against the bandwidth of a copy of gigabytes that runs in turn with the call: after a pause, the first
tens of milliseconds of either are slower. transformers' processor (resize off; from torchvision) runs where torchvision
is installed, on as many clips as its temporary tensors leave room for, and is scaled to all.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import gpu
import torch
from torch import Tensor

from mmpack.families import get_family
from mmpack.ops.patches.pack import pack_video, unpack_video
from mmpack.ops.patches.tables import patch_tables
from mmpack.video import normalization
from mmpack.video.patches import plan_patches, token_view

CLIPS, FRAMES, PART = 1_000, 32, 100
BACKENDS = {"Triton": "triton"}
SIDES = {
    14: [(224, 224), (196, 252), (280, 168), (140, 336)],
    16: [(224, 224), (192, 256), (288, 160), (128, 384)],
}
PIXELS = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def main() -> None:
    out = gpu.arguments("pack_video").out
    torch.manual_seed(0)
    floors = {"copy_bytes_per_second": gpu.copy_bytes_per_second()}
    copy = gpu.copy()
    rows: list[dict[str, Any]] = []

    def measure(case: str, who: str, size: int, call: Callable[[], Any], scale: float = 1) -> None:
        extra = gpu.peak_bytes(call)
        turns = {"repeats": 7, "warmups": 6} if "mmpack" in who else {"repeats": 3, "warmups": 2}
        taken, copied = gpu.in_turn([call, copy], **turns)
        floor, ms = size / (2 * gpu.COPIED) * copied, taken * scale
        row = {"case": case, "who": who, "ms": ms, "bytes": size, "flops": 0}
        row |= {"of_floor": floor / ms, "extra_bytes": int(extra * scale)}
        rows.append(row | {"host_us": gpu.host_microseconds(call, calls=2) * scale})

    for name in ("qwen2_5_vl", "qwen3_vl"):
        for order in ("last", "first"):
            packed(name, order, measure)
    gpu.write(out, "pack_video", floors, rows)


def packed(name: str, order: str, measure: Callable[..., None]) -> None:
    """All cases of one family and one order of channels."""
    family = get_family(name)
    sides = [SIDES[family.patch_size][i % 4] for i in range(CLIPS)]
    shapes = [(FRAMES, h, w, 3) if order == "last" else (FRAMES, 3, h, w) for h, w in sides]
    plan = plan_patches(shapes, family)
    tables = patch_tables(plan, "cuda")
    values = int(plan.value_offsets[-1])
    buffer = torch.randint(256, (values,), dtype=torch.uint8, device="cuda")
    counts = (plan.value_offsets[1:] - plan.value_offsets[:-1]).tolist()
    clips = [x.view(s) for x, s in zip(buffer.split(counts), shapes, strict=True)]
    change = normalization(PIXELS)
    case = f"{name}, channels {order}"

    def agree(made: Tensor, n: int, how: dict[str, Any]) -> None:
        stops = plan.row_offsets
        for i in range(n):
            wanted = by_permute(clips[i], family, how)
            gpu.require(torch.equal(made[stops[i] : stops[i + 1]], wanted), f"{case} {how}")

    kinds: list[tuple[str, dict[str, Any], int]] = [
        ("uint8 to float32, normalised", change, 4),
        ("uint8 to bfloat16, normalised", change | {"dtype": torch.bfloat16}, 2),
        ("uint8", {}, 1),
    ]
    for label, how, width in kinds:
        size = values * (1 + width)
        for who in BACKENDS:
            with backend(who):
                agree(pack_video(buffer, tables, **how), 8, how)
                call = lambda how=how: pack_video(buffer, tables, **how)  # noqa: E731
                measure(f"{case}, {label}", f"mmpack, {who}", size, call)
                if order == "last" and width == 4:
                    copies = [c.clone() for c in clips]
                    call = lambda how=how, copies=copies: pack_video(copies, tables, **how)  # noqa: E731
                    measure(f"{case}, {label}, a tensor a clip", f"mmpack, {who}", size, call)
                    del copies, call
        measure(
            f"{case}, {label}",
            "torch: permute, contiguous",
            size,
            lambda how=how: [by_permute(c, family, how) for c in clips],
        )
        if order == "first" and width == 4 and importlib.util.find_spec("torchvision"):
            theirs = upstream(name)
            call = lambda theirs=theirs: theirs(videos=clips[:PART], return_tensors="pt")  # noqa: E731
            gpu.require(
                torch.equal(
                    call()["pixel_values_videos"],
                    pack_video(buffer, tables, **how)[: plan.row_offsets[PART]],
                ),
                f"{case}: the rows of transformers' processor",
            )
            measure(f"{case}, {label}", "transformers", size, call, CLIPS / PART)
    rows = pack_video(buffer, tables)
    for who in BACKENDS:
        with backend(who):
            gpu.require(
                all(map(torch.equal, unpack_video(rows, tables)[:8], clips[:8])), f"{case}: back"
            )
            call = lambda: unpack_video(rows, tables)  # noqa: E731
            measure(f"{case}, uint8, back to frames", f"mmpack, {who}", 2 * values, call)


@contextlib.contextmanager
def backend(who: str) -> Iterator[None]:
    os.environ["MMPACK_BACKEND"] = BACKENDS[who]
    try:
        yield
    finally:
        os.environ["MMPACK_BACKEND"] = "auto"


def by_permute(clip: Tensor, family: Any, how: dict[str, Any]) -> Tensor:
    """One clip by torch alone, as transformers computes it."""
    if how:
        mean, std = (torch.tensor(how[k], device=clip.device) * 255.0 for k in ("mean", "std"))
        shape = (3,) if clip.shape[-1] == 3 else (3, 1, 1)
        clip = (clip.to(torch.float32) - mean.view(shape)).div_(std.view(shape))
        clip = clip.to(how.get("dtype", torch.float32))
    return token_view(clip, family).reshape(-1, family.patch_dim)


def upstream(name: str) -> Any:
    """transformers' video processor, resizing off, normalising as `PIXELS`."""
    import transformers

    kind = {"qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor"}[name]
    more = {"do_resize": False, "do_sample_frames": False, "do_convert_rgb": False}
    return getattr(transformers, kind)(**PIXELS, **more)


if __name__ == "__main__":
    main()
