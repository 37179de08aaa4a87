"""Attention of packed and padded rows by `visible_until`: one function, six implementations, a chooser by cost."""

from mmpack.ops.attention.attention_plan import AttentionPlan, plan_attention
from mmpack.ops.attention.choose import explain, report
from mmpack.ops.attention.tree_attention import resolve, tree_attention

__all__ = ["AttentionPlan", "explain", "plan_attention", "report", "resolve", "tree_attention"]
