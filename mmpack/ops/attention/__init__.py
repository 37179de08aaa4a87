"""Attention of packed rows by `visible_until`, and of a vision tower within sequences: kernels and one chooser."""

from mmpack.ops.attention.attention_plan import AttentionPlan, plan_attention
from mmpack.ops.attention.choose import SEQUENCES, TREE
from mmpack.ops.attention.lse import merge_attention
from mmpack.ops.attention.plan_of_rule import plan_of_rule
from mmpack.ops.attention.sequence_attention import resolve_sequences, sequence_attention
from mmpack.ops.attention.sequence_plan import SequencePlan, plan_sequences, plan_tiles
from mmpack.ops.attention.tree_attention import resolve, tree_attention

__all__ = [
    "SEQUENCES",
    "TREE",
    "AttentionPlan",
    "SequencePlan",
    "merge_attention",
    "plan_attention",
    "plan_of_rule",
    "plan_sequences",
    "plan_tiles",
    "resolve",
    "resolve_sequences",
    "sequence_attention",
    "tree_attention",
]
