"""Charts of the pages of docs/performance: one question each, answered from the rows of a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from charts import chain, heads, host, layers, learn, losses, ranks, rows, steps
from charts.draw import Chart

# By the name of a report; `step` has rows of another kind (step.py).
CHARTS: dict[str, Callable[[dict[str, Any]], Chart]] = {
    "attention": layers.attention,
    "cache_rows": rows.cache,
    "chain": chain.chain,
    "cost_model": host.cost_model,
    "encode_together": ranks.together,
    "features": steps.features,
    "first_step": steps.first_step,
    "gather_rows": rows.gathers,
    "host": host.host,
    "invariant": layers.invariant,
    "learn": learn.learn,
    "linear_attention": layers.linear_attention,
    "linear_selected_logprobs": heads.fused,
    "linear_selected_logprobs_ranks": heads.ranks,
    "loader": steps.loader,
    "media_by_reference": host.media,
    "megatron_step": ranks.megatron,
    "pack_video": rows.patches,
    "parity_speed": host.parity,
    "policy_loss": losses.policy,
    "project_and_merge": layers.projection,
    "ray_rows": host.ray_rows,
    "returns": losses.returns,
    "rewards": losses.rewards,
    "scale": host.scale,
    "selected_logprobs": heads.of_logits,
    "sequence_parallel": ranks.sequence_parallel,
    "support": heads.kept_ids,
    "teachers": heads.teachers,
    "tower_attention": steps.towers,
    "video_decode": host.video,
}
