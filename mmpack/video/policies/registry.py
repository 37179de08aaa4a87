"""The table of policies: which frames each upstream takes, and in which size it hands them to the processor."""

from __future__ import annotations

from typing import Any

from mmpack.errors import ArgumentError
from mmpack.video.policies import rules
from mmpack.video.policies.base import Policy

_COUNTED = {"do_sample_frames": True, "fps": None, "num_frames": None}
_LIMITED = {"min_frames": 4, "max_frames": 768}
_OF_UTILS = (
    *("image_patch_size", "fps", "nframes", "min_frames", "max_frames", "frame_min_pixels"),
    *("frame_max_pixels", "total_pixels", "resized_width", "resized_height", "video_start"),
    *("video_end", "do_resize"),
)
_OF_VLLM = ("loader", "fps", "num_frames", "min_frames", "max_frames", "max_duration")

_ROWS = (
    # 0.0.14: `fetch_video`. Its readers decord, torchcodec and torchvision (gone in torchvision 0.28) take the same
    # frames; torchvision's start and end do not.
    Policy(
        name="qwen_vl_utils",
        rule=rules.even_count,
        own=dict.fromkeys(_OF_UTILS),
        either=("fps", "nframes"),
        default={"fps": 2.0},
        complete=rules.complete_utils,
        load=rules.utils_load,
    ),
    # Qwen2VLVideoProcessor: every frame, unless told how many
    Policy(
        name="transformers_qwen2_vl",
        rule=rules.steps,
        own=_COUNTED | {"do_sample_frames": None} | _LIMITED,
        either=("fps", "num_frames"),
        complete=rules.complete_steps,
    ),
    # Qwen3VLVideoProcessor
    Policy(
        name="transformers_qwen3_vl",
        rule=rules.spread,
        own={"model": "qwen3_vl"} | _COUNTED | _LIMITED,
        either=("fps", "num_frames"),
        default={"fps": 2.0},
    ),
    # Glm4vVideoProcessor
    Policy(
        name="transformers_glm4v",
        rule=rules.in_time,
        own={"model": "glm4v", "do_sample_frames": True, "fps": None, "max_duration": 300},
        either=("fps",),
        default={"fps": 2.0},
        budget=False,
    ),
    # Glm46VVideoProcessor
    Policy(
        name="transformers_glm46v",
        rule=rules.by_length,
        own={"model": "glm46v", "do_sample_frames": True},
        budget=False,
    ),
    # BaseVideoProcessor, as Gemma 4 has it
    Policy(
        name="transformers_uniform",
        rule=rules.uniform,
        own={"model": "gemma4"} | _COUNTED,
        either=("fps", "num_frames"),
        default={"num_frames": 32},
        budget=False,
    ),
    # 0.32: its loader of video bytes
    Policy(
        name="vllm",
        rule=rules.as_loaded,
        own=dict.fromkeys(_OF_VLLM),
        reader="opencv",
        complete=rules.complete_loader,
        engine=True,
    ),
)
POLICIES: dict[str, Policy] = {policy.name: policy for policy in _ROWS}


def policy_of(name: Any) -> Policy:
    """The policy called `name`. Raises: ArgumentError."""
    if not isinstance(name, str) or name not in POLICIES:
        raise ArgumentError(
            f"sample: policy {name!r:.60} is unknown. Fix: use one of {', '.join(POLICIES)}"
        )
    return POLICIES[name]
