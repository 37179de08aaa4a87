"""Qwen3-Omni's thinker: experts, deepstack features, and audio. A second is 13 positions, as an audio has tokens.

A video's sound lies between its placeholders token by token, by time. The tower reads 100 feature frames at a time.
"""

from dataclasses import replace

from mmpack.families.base import Audio
from mmpack.families.qwen2_5_omni import QWEN2_5_OMNI

assert QWEN2_5_OMNI.video is not None
QWEN3_OMNI_MOE = replace(
    QWEN2_5_OMNI,
    name="qwen3_omni_moe",
    model_types=("qwen3_omni_moe_thinker",),
    processors=("Qwen3OmniMoeProcessor",),
    patch_size=16,
    tokens_per_second=13.0,
    video=replace(
        QWEN2_5_OMNI.video,
        area=(128 * 32 * 32, 768 * 32 * 32),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    ),
    audio=Audio(
        token_id=151675,
        start_id=151669,
        end_id=151670,
        chunk_frames=100,
        halvings=("up", "up", "up"),
        interleaving="time",
        options=(("padding", True), ("truncation", False)),
        cuts_times=False,
        padding_shows=True,
    ),
)
