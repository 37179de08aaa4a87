"""The policies by name."""

from __future__ import annotations

from typing import Any

from mmpack.errors import ArgumentError
from mmpack.video.policies import (
    qwen_vl_utils,
    transformers_glm4v,
    transformers_glm46v,
    transformers_qwen2_vl,
    transformers_qwen3_vl,
    transformers_uniform,
    vllm,
)
from mmpack.video.policies.base import Policy

POLICIES: dict[str, Policy] = {
    module.POLICY.name: module.POLICY
    for module in (
        qwen_vl_utils,
        transformers_qwen2_vl,
        transformers_qwen3_vl,
        transformers_glm4v,
        transformers_glm46v,
        transformers_uniform,
        vllm,
    )
}


def policy_of(name: Any) -> Policy:
    """The policy called `name`. Raises: ArgumentError."""
    if not isinstance(name, str) or name not in POLICIES:
        raise ArgumentError(
            f"sample: policy {name!r:.60} is unknown. Fix: use one of {', '.join(POLICIES)}"
        )
    return POLICIES[name]
