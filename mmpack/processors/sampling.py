"""The policy that a wrapped processor samples videos by: its name and settings, out of the video processor's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mmpack.families import Family
from mmpack.video.info import VideoInfo
from mmpack.video.policies.base import Policy
from mmpack.video.sample import policy_of, sample

_OF_TRANSFORMERS = {"single": "transformers_qwen2_vl", "frames": "transformers_qwen3_vl"}
_SIZES = ("patch_size", "temporal_patch_size", "merge_size", "max_video_tokens")
_COUNTS = ("fps", "num_frames")


def resolved_sampling(
    policy: str | None, given: Mapping[str, Any], video_processor: Any, family: Family
) -> dict[str, Any]:
    """`processor["video"]["sampling"]`: the policy's name, and its settings to the last.

    `given` goes before what the video processor has; None: transformers' policy of the family.
    Raises: ArgumentError for settings that the policy doesn't know, or that fit no clip.
    """
    chosen = policy_of(policy or _OF_TRANSFORMERS[family.video_layout])
    own = _own_settings(chosen, video_processor, family)
    if any(name in given for name in _COUNTS):
        own = {k: v for k, v in own.items() if k not in (*_COUNTS, "do_sample_frames")}
    settings = own | dict(given)
    return sample(_clip_for(settings), policy=chosen.name, **settings).processor_settings()


def resolved(sampling: Mapping[str, Any]) -> tuple[Policy, Any]:
    """The policy, and its settings as an object, of what `resolved_sampling` returned or a trace recorded."""
    values = dict(sampling)
    policy = policy_of(str(values.pop("policy", None)))
    return policy, policy.resolve(values)


def _own_settings(policy: Policy, video_processor: Any, family: Family) -> dict[str, Any]:
    size = video_processor.size
    out: dict[str, Any] = {
        "model": family.name,
        "min_pixels": size["shortest_edge"],
        "max_pixels": size["longest_edge"],
        "cap_pixels_per_frame": bool(getattr(video_processor, "cap_pixels_per_frame", None)),
        "transformers": _rules_of(video_processor),
    }
    out |= {name: getattr(video_processor, name, None) for name in _SIZES}
    if not out["cap_pixels_per_frame"]:
        del out["max_video_tokens"]
    if policy.name in _OF_TRANSFORMERS.values():
        sampled = bool(video_processor.do_sample_frames)
        if sampled or family.video_layout == "frames":
            out["do_sample_frames"] = sampled
        rates = _COUNTS if sampled else ()
        for name in (*rates, "min_frames", "max_frames"):
            out[name] = getattr(video_processor, name, None)
    known = {f.name for f in fields(policy.settings)}
    return {k: v for k, v in out.items() if k in known and v is not None}


def _rules_of(video_processor: Any) -> str:
    """Which of transformers' rules: those of the release that the video processor is of."""
    if type(video_processor).__module__.partition(".")[0] != "transformers":
        return "5.15"
    import transformers

    major, minor = (int(n) for n in transformers.__version__.split(".")[:2])
    return "5.15" if (major, minor) >= (5, 15) else "5.8"


def _clip_for(settings: Mapping[str, Any]) -> VideoInfo:
    """A clip long enough for what is asked: settings are completed by asking for a plan."""

    def most(*names: str) -> float:
        given = [settings.get(name) for name in names]
        return max((v for v in given if isinstance(v, int | float) and math.isfinite(v)), default=0)

    fps = settings.get("fps")
    slow = 8 / fps if isinstance(fps, int | float) and 0 < fps < math.inf else 0
    seconds = math.ceil(8 + 8 * slow + 2 * most("video_start", "video_end"))
    frames = 8 * seconds + int(2 * most("nframes", "num_frames"))
    return VideoInfo(256, 256, 0, "", 8.0, frames, None, False, frames / 8, "")
