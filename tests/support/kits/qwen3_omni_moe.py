"""Qwen3-Omni's thinker: eight experts, two per token, deepstack, and an audio tower of two layers."""

from functools import partial

from support.kits.base import Kit
from support.kits.omni import AUDIO_TOWER, processor, written
from support.kits.parts import EXPERTS, HALF, whole

from mmpack.demo.tiny_models import DEEP_TOWER
from mmpack.demo.tiny_models import QWEN3_TEXT as TEXT_CONFIG

KIT = Kit(
    family="qwen3_omni_moe",
    heavy=True,
    model_class="Qwen3OmniMoeThinkerForConditionalGeneration",
    config_class="Qwen3OmniMoeThinkerConfig",
    config=whole(
        TEXT_CONFIG | EXPERTS,
        DEEP_TOWER,
        audio_config=AUDIO_TOWER | {"downsample_hidden_size": 16},
        image_token_id=151655,
        video_token_id=151656,
        audio_token_id=151675,
        audio_start_token_id=151669,
        vision_start_token_id=151652,
        position_id_per_seconds=13,
    ),
    narrow={
        "text_config": HALF,
        "vision_config": {"out_hidden_size": 64},
        "audio_config": {"output_dim": 64},
    },
    processor=partial(processor, "qwen3_omni_moe"),
    audio=(150, 1, 1),
    written=written,
    # float32's rounding moves experts' weights
    spread=2.0,
    # else its merger's `mlp.0` stands for every module named `0`, so for whole layers of the audio tower
    lora_by_name=True,
    lacks={
        "trl": "TRL can't call its processor's chat template",
        "verl": "verl 0.9's transformers lacks this model",
    },
)
