"""Qwen3-VL with experts: the layout of Qwen3-VL."""

from dataclasses import replace

from mmpack.families.qwen3_vl import QWEN3_VL

QWEN3_VL_MOE = replace(QWEN3_VL, name="qwen3_vl_moe", model_types=("qwen3_vl_moe",))
