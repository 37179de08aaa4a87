"""Qwen2.5-Omni's thinker: Qwen2.5-VL that hears. A second is 25 positions, also of a video's temporal patches.

A video's sound lies between its placeholders, in chunks of two seconds. The tower reads 200 feature frames at a time.
"""

from dataclasses import replace

from mmpack.families.base import Audio
from mmpack.families.qwen2_5_vl import QWEN2_5_VL

assert QWEN2_5_VL.video is not None
QWEN2_5_OMNI = replace(
    QWEN2_5_VL,
    name="qwen2_5_omni",
    model_types=("qwen2_5_omni_thinker",),
    processors=("Qwen2_5OmniProcessor",),
    position_rules=("seconds",),
    tokens_per_second=25.0,
    coordinates=None,
    # its processor hands these sizes to its video processor at each call
    video=replace(
        QWEN2_5_VL.video,
        policies=("transformers_qwen2_vl",),
        area=(128 * 28 * 28, 768 * 28 * 28),
        max_video_tokens=None,
    ),
    # before, the towers stand beside the text model
    oldest_transformers="5.23",
    audio=Audio(
        token_id=151646,
        start_id=151647,
        end_id=151648,
        chunk_frames=200,
        halvings=("up", "down"),
        interleaving="chunks",
        options=(("padding", "max_length"),),
        joint_markers=True,
    ),
)
