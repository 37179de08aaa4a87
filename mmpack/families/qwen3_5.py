"""Qwen3.5: Qwen3-VL's layout with ids of its own, no deepstack; linear attention in most layers.

A linear-attention layer hands its state from row to row: it runs segment by segment, a branch from its parent's state.
"""

from dataclasses import replace

from mmpack.families.qwen3_vl import QWEN3_VL

QWEN3_5 = replace(
    QWEN3_VL,
    name="qwen3_5",
    model_types=("qwen3_5",),
    image_token_id=248056,
    video_token_id=248057,
    vision_start_id=248053,
    vision_end_id=248054,
    pad_token_id=248044,
    turn_ids=(248045,),
    vocab_size=248_320,
    linear_attention=True,
    full_attention_share=0.25,
)
