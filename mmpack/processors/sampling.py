"""The policy that a wrapped processor samples videos by: its name and settings, out of the video processor's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmpack.errors import ArgumentError
from mmpack.families import Family
from mmpack.versions import sampling_rules
from mmpack.video.policies.base import Policy
from mmpack.video.policies.registry import policy_of

_SIZES = ("patch_size", "temporal_patch_size", "merge_size", "max_video_tokens")
_COUNTS = ("fps", "num_frames")
_LIMITS = ("min_frames", "max_frames", "max_duration")


def resolved_sampling(
    policy: str | None, given: Mapping[str, Any], video_processor: Any, family: Family
) -> dict[str, Any]:
    """`processor["video"]["sampling"]`: the policy's name, and its settings to the last.

    `given` goes before what the video processor has; None: transformers' policy of the family.
    Raises: ArgumentError for settings that the policy doesn't know, that exclude each other, or that are another
    model's.
    """
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"wrap_processor: video_settings is {type(given).__name__}. "
            'Fix: pass an object such as {"fps": 2.0, "max_frames": 64}'
        )
    chosen = policy_of(family.video_policies[0] if policy is None else policy)
    own = _own_settings(chosen, video_processor, family)
    if any(name in given for name in _COUNTS):
        own = {k: v for k, v in own.items() if k not in (*_COUNTS, "do_sample_frames")}
    settings = chosen.resolve(own | dict(given))
    for name, mine in (
        ("model", family.name),
        ("patch_size", family.patch_size),
        ("temporal_patch_size", family.temporal_patch_size),
        ("merge_size", family.spatial_merge_size),
    ):
        found = getattr(settings, name)
        if found != mine:
            owner = "video_settings" if name in given else "the video processor"
            raise ArgumentError(
                f"wrap_processor: {name} of {owner} is {found!r:.40}, {family.name} has {mine!r}. "
                "Fix: use this family's settings"
            )
    return {"policy": chosen.name, **settings.to_dict()}


def resolved(sampling: Mapping[str, Any]) -> tuple[Policy, Any]:
    """The policy, and its settings as an object, of what `resolved_sampling` returned or a trace recorded."""
    values = dict(sampling)
    policy = policy_of(values.pop("policy", None))
    return policy, policy.resolve(values)


def _own_settings(policy: Policy, video_processor: Any, family: Family) -> dict[str, Any]:
    out: dict[str, Any] = {
        "model": family.name,
        **_limits(video_processor, family),
        "cap_pixels_per_frame": bool(getattr(video_processor, "cap_pixels_per_frame", None)),
        "transformers": sampling_rules(video_processor),
    }
    sizes = {name: getattr(video_processor, name, None) for name in _SIZES}
    out = sizes | out
    if not out["cap_pixels_per_frame"]:
        del out["max_video_tokens"]
    if policy.name == family.video_policies[0]:
        sampled = bool(video_processor.do_sample_frames)
        if sampled or family.video_layout == "frames":
            out["do_sample_frames"] = sampled
        rates = _COUNTS if sampled else ()
        for name in (*rates, *_LIMITS):
            out[name] = getattr(video_processor, name, None)
    return {k: v for k, v in out.items() if k in policy.kinds and v is not None}


def _limits(video_processor: Any, family: Family) -> dict[str, Any]:
    """Pixels of a resized medium, and patches along a token's side where the processor has a name of its own for it."""
    if family.video is not None and family.video.resize == "budget":
        merge = video_processor.pooling_kernel_size
        token = (video_processor.patch_size * merge) ** 2
        return {"max_pixels": video_processor.max_soft_tokens * token, "merge_size": merge}
    size = video_processor.size
    return {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
