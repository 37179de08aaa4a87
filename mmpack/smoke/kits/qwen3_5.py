"""Qwen3.5: three layers of linear attention and one of full attention; 33 M parameters, for its vocabulary."""

from mmpack.smoke.kits.base import Kit
from mmpack.smoke.kits.parts import NARROW, TEXT, TOWER, rope, whole

TEXT_CONFIG = (
    TEXT
    | {"vocab_size": 248_320, "num_hidden_layers": 4}
    | {"bos_token_id": 248044, "eos_token_id": 248046, "pad_token_id": 248044}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | rope(1e7, [2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25)
)
KIT = Kit(
    family="qwen3_5",
    model_class="Qwen3_5ForConditionalGeneration",
    config_class="Qwen3_5Config",
    config=whole(TEXT_CONFIG, TOWER),
    narrow=NARROW,
)
