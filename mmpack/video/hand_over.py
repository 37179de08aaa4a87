"""A plan for a model's processor: metadata and keywords by which transformers and vLLM keep its frames and times.

The frames go along as uint8 [n, h, w, 3] of `plan.indices` in `plan.loaded_size`. vLLM takes
`(frames, hf_metadata(plan) | {"do_sample_frames": False})` in `multi_modal_data["video"]`, and `hf_kwargs(plan)` as
`mm_processor_kwargs`.
"""

from __future__ import annotations

from typing import Any

from mmpack.families import get_family
from mmpack.video.frame_plan import FramePlan


def hf_metadata(plan: FramePlan) -> dict[str, Any]:
    """Fields of transformers' VideoMetadata: its `second_per_grid_ts` and its timestamps are then the plan's.

    `fps` is None where the container had none and the model's seconds come from it: transformers then assumes 24.
    """
    guessed = plan.settings["temporal_patch_size"] / plan.fps
    unknown = plan.fps_assumed and plan.second_per_grid_ts == guessed
    return {
        "total_num_frames": plan.counted_frames,
        "fps": None if unknown else plan.fps,
        "width": plan.loaded_size[0],
        "height": plan.loaded_size[1],
        "duration": plan.counted_frames / plan.fps,
        "video_backend": "mmpack",
        "frames_indices": list(plan.indices),
    }


def hf_kwargs(plan: FramePlan) -> dict[str, Any]:
    """Keyword arguments of a video processor's call: nothing is sampled again, and the size becomes the plan's."""
    settings = plan.settings
    out: dict[str, Any] = {"do_sample_frames": False, "do_resize": plan.size != plan.loaded_size}
    video = get_family(settings["model"]).video
    if video is not None and video.resize == "budget":
        token = settings["patch_size"] * settings["merge_size"]
        return out | {"max_soft_tokens": settings["max_pixels"] // token**2}
    out["size"] = {"shortest_edge": settings["min_pixels"], "longest_edge": settings["max_pixels"]}
    if settings["cap_pixels_per_frame"]:
        out["cap_pixels_per_frame"] = True
    return out
