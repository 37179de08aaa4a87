"""Qwen3.5 with experts: the layout of Qwen3.5."""

from dataclasses import replace

from mmpack.families.qwen3_5 import QWEN3_5

QWEN3_5_MOE = replace(QWEN3_5, name="qwen3_5_moe", model_types=("qwen3_5_moe",))
