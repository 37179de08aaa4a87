"""Sampled frames to patches [t·h·w, patch_dim], as transformers' own video processors make them, bit for bit.

transformers' own need torchvision, whose resize of a tensor is torch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmpack.errors import ArgumentError, require
from mmpack.families import Family, get_family
from mmpack.processors.sampling import resolved, resolved_sampling
from mmpack.video.pixel_settings import normalization
from mmpack.video.policies.processor import processed_size

if TYPE_CHECKING:
    import torch

BICUBIC = 3  # Pillow's number


class FrameProcessor:
    """Called as transformers' video processors are, for frames that are sampled already.

    `settings`: in place of released checkpoints', by the names of preprocessor_config.json; others are not read.
    """

    def __init__(self, family: str | Family, **settings: Any):
        self.family = get_family(family)
        self.settings = _released(self.family)
        self.settings |= {k: v for k, v in settings.items() if k in self.settings}

    def __getattr__(self, name: str) -> Any:
        settings = self.__dict__.get("settings", {})
        if name not in settings:
            raise AttributeError(f"FrameProcessor has no attribute {name!r}")
        return settings[name]

    def to_dict(self) -> dict[str, Any]:
        """Settings, as transformers' have them."""
        return dict(self.settings)

    def __call__(
        self,
        videos: Any,
        *,
        do_sample_frames: bool = False,
        do_resize: bool | None = None,
        size: dict[str, int] | None = None,
        max_soft_tokens: int | None = None,
        cap_pixels_per_frame: bool | None = None,
        do_rescale: bool | None = None,
        do_normalize: bool | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """`pixel_values_videos` float32 [rows, patch_dim], `video_grid_thw` int64 [n, 3]; or lines, as Gemma 4's has.

        `videos`: a list of frames [n, 3, h, w], uint8 or float32 of 0 to 255. The others go before the settings.
        Frames that are neither rescaled nor normalised keep their dtype.
        Raises: ArgumentError.
        """
        torch = require("torch", "torch", "FrameProcessor")
        # a processor is made without torch
        from mmpack.ops.patches.pack import pack_video
        from mmpack.video.patches import plan_patches

        if do_sample_frames:
            raise ArgumentError(
                "FrameProcessor: do_sample_frames is on, but it takes frames already sampled. "
                "Fix: call mp.video.sample and mp.video.decode, then pass do_sample_frames=False"
            )
        frames = [torch.as_tensor(video) for video in videos]
        if self.do_resize if do_resize is None else do_resize:
            known = {
                "size": size,
                "max_soft_tokens": max_soft_tokens,
                "cap_pixels_per_frame": cap_pixels_per_frame,
            }
            given = {k: v for k, v in known.items() if v is not None}
            rules = FrameProcessor(self.family, **self.settings | given)
            frames = [resized(f, rules._size_of(f)) for f in frames]
        plan = plan_patches([f.shape for f in frames], self.family)
        switches = {"do_rescale": do_rescale, "do_normalize": do_normalize}
        given = {k: v for k, v in switches.items() if v is not None}
        changes = normalization(self.settings | given)
        rows = [pack_video(f, self.family, **changes) for f in frames]
        if self.family.pixel_layout == "padded":
            most = self.max_soft_tokens if max_soft_tokens is None else max_soft_tokens
            return self._lines(torch.cat(rows), plan.grids.tolist(), most)
        return {
            "pixel_values_videos": torch.cat(rows),
            "video_grid_thw": torch.from_numpy(plan.grids),
        }

    def _lines(self, rows: torch.Tensor, grids: list[list[int]], most: int) -> dict[str, Any]:
        """Frames as lines of patches, of all videos, as long as the budget."""
        from mmpack.ops.patches.lines import lines_of

        token = self.pooling_kernel_size**2
        sizes = [(h, w) for t, h, w in grids for _ in range(t)]
        values, places = lines_of(rows, sizes, most * token)
        return {
            "pixel_values_videos": values,
            "video_position_ids": places,
            "num_frames_per_video": [t for t, _, _ in grids],
            "num_soft_tokens_per_video": [h * w // token for _, h, w in grids],
        }

    def _size_of(self, frames: torch.Tensor) -> tuple[int, int]:
        """(width, height) after the resize."""
        count, _, height, width = frames.shape
        policy, settings = resolved(resolved_sampling(None, {}, self, self.family))
        return processed_size(policy, settings, count, (width, height))


def resized(frames: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """[n, 3, h, w], uint8 or float, to `size` (width, height), as torchvision's v2 does: bicubic, antialiased.

    uint8 stays so, by torch's integer weights; float is neither rounded nor clipped.
    """
    if tuple(frames.shape[:1:-1]) == tuple(size):
        return frames
    from torch.nn.functional import interpolate

    out: torch.Tensor = interpolate(
        frames, size[::-1], mode="bicubic", align_corners=False, antialias=True
    )
    return out


def resized_by_utils(frames: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """uint8 as qwen-vl-utils resizes it, by torchvision's first interface: in float32, clipped, rounded to uint8."""
    if tuple(frames.shape[:1:-1]) == tuple(size):
        return frames
    return resized(frames.float(), size).clamp_(0, 255).round_().byte()


def _released(family: Family) -> dict[str, Any]:
    video = family.video
    if video is None:
        raise ArgumentError(
            f"FrameProcessor: {family.name} takes a video as images. Fix: pass one image per frame"
        )
    low, high = video.area
    sizes = {
        "size": {"shortest_edge": low, "longest_edge": high},
        "patch_size": family.patch_size,
        "temporal_patch_size": family.temporal_patch_size,
        "merge_size": family.spatial_merge_size,
    }
    if video.resize == "budget":
        token = family.patch_size * family.spatial_merge_size
        sizes = {
            "max_soft_tokens": high // token**2,
            "patch_size": family.patch_size,
            "pooling_kernel_size": family.spatial_merge_size,
        }
    budget = {"cap_pixels_per_frame": None, "max_video_tokens": video.max_video_tokens}
    return {
        "do_resize": True,
        "resample": BICUBIC,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(video.mean),
        "image_std": list(video.std),
        "do_convert_rgb": True,
        **dict(video.sampling),
        **({} if video.max_video_tokens is None else budget),
        **sizes,
    }
