"""Qwen2.5-Omni's thinker: two layers of text, of the vision tower and of the audio tower."""

from functools import partial

from support.kits.base import Kit
from support.kits.omni import AUDIO_TOWER, processor, written
from support.kits.parts import HALF, TEXT, TOWER, rope, whole, without

KIT = Kit(
    family="qwen2_5_omni",
    heavy=True,
    model_class="Qwen2_5OmniThinkerForConditionalGeneration",
    config_class="Qwen2_5OmniThinkerConfig",
    config=whole(
        without(TEXT, "head_dim") | rope(1e6, [4, 6, 6]),
        TOWER | {"fullatt_block_indexes": [1]},
        audio_config=AUDIO_TOWER,
        image_token_index=151655,
        video_token_index=151656,
        audio_token_index=151646,
        vision_start_token_id=151652,
        audio_start_token_id=151647,
        position_id_per_seconds=25,
        seconds_per_chunk=2,
    ),
    narrow={
        "text_config": HALF,
        "vision_config": {"out_hidden_size": 64},
        "audio_config": {"output_dim": 64},
    },
    processor=partial(processor, "qwen2_5_omni"),
    audio=(150, 1, 1),
    written=written,
    lacks={"verl": "verl 0.9's transformers lacks this model"},
)
