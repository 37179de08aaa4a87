"""`sample`: which frames of a video, by the name of a policy, as one plan for the rollout and the trainer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mmpack.errors import ArgumentError
from mmpack.families import get_family
from mmpack.video.plan import FramePlan
from mmpack.video.policies import qwen_vl_utils, transformers_qwen2_vl, transformers_qwen3_vl, vllm
from mmpack.video.policies.base import ASSUMED_FPS, Policy, written_timestamps

if TYPE_CHECKING:
    from mmpack.schema.media import Medium
    from mmpack.video.info import VideoInfo

POLICIES: dict[str, Policy] = {
    module.POLICY.name: module.POLICY
    for module in (qwen_vl_utils, transformers_qwen2_vl, transformers_qwen3_vl, vllm)
}


def sample(info_or_source: Any, *, policy: str, **settings: Any) -> FramePlan:
    """The plan that `policy` makes of a video.

    Args:
        info_or_source: a VideoInfo, or a video's bytes or path (then the container is read, nothing is decoded).
        policy: a name of `POLICIES`: `qwen_vl_utils`, `transformers_qwen2_vl`, `transformers_qwen3_vl`, `vllm`.
        settings: of the policy, under upstream's names; `docs/video.md` lists them.

    Returns: indices and times as upstream has them; a clip's real times beside them where the container has them.
    Raises: ArgumentError for an unknown policy or setting, and wherever upstream raises.
    """
    chosen = policy_of(policy)
    resolved = chosen.resolve(settings)
    info = _info(info_or_source)
    if info.total_frames < 1:
        raise chosen.error("the video has no frames", "check the file")
    return chosen.choose(info, resolved)


def policy_of(name: str) -> Policy:
    """The policy called `name`. Raises: ArgumentError."""
    if name not in POLICIES:
        raise ArgumentError(
            f"sample: policy {name!r:.60} is unknown. Fix: use one of {', '.join(POLICIES)}"
        )
    return POLICIES[name]


def recorded(medium: Medium, sampling: dict[str, Any]) -> FramePlan:
    """See `FramePlan.from_medium`."""
    for name in ("frame_indices", "frame_timestamps", "total_frames", "size", "decoded_size"):
        if getattr(medium, name) is None:
            raise ArgumentError(
                f"FramePlan: {medium.media_id!r:.60} has no {name}. Fix: record plan.medium_fields()"
            )
    assert medium.frame_indices is not None and medium.frame_timestamps is not None
    assert medium.total_frames is not None and medium.size and medium.decoded_size
    values = dict(sampling)
    policy = policy_of(str(values.pop("policy", None)))
    settings = policy.resolve(values)
    t, h, w = medium.grid_thw
    family = get_family(settings.model)
    fps = ASSUMED_FPS if medium.fps is None else medium.fps
    return FramePlan(
        policy=policy.name,
        settings=values,
        indices=tuple(int(i) for i in medium.frame_indices),
        timestamps=tuple(medium.frame_timestamps),
        fps=fps,
        fps_assumed=medium.fps is None,
        total_frames=medium.total_frames,
        counted_frames=counted_frames(medium.total_frames, fps, settings),
        source_size=medium.decoded_size,
        loaded_size=medium.size,
        size=(w * settings.patch_size, h * settings.patch_size),
        grid_thw=(t, h, w),
        second_per_grid_ts=medium.second_per_grid_ts,
        patch_timestamps=written_timestamps(
            family, medium.frame_timestamps, settings.temporal_patch_size
        ),
    )


def counted_frames(total: int, fps: float, settings: Any) -> int:
    """How many of the file's `total` frames a policy of these resolved settings counts. Raises: ArgumentError."""
    if not isinstance(settings, qwen_vl_utils.Settings):
        return total
    first, last = qwen_vl_utils.frame_range(total, fps, settings)
    return last - first + 1


def _info(given: Any) -> VideoInfo:
    if isinstance(given, bytes | bytearray | memoryview | str | os.PathLike):
        from mmpack.video.info import probe

        return probe(given)
    info: VideoInfo = given
    return info
