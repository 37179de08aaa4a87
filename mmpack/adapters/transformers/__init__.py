"""transformers: packed and shared batches through its own models, and its rollouts as samples."""

from mmpack.adapters.transformers.attention import attach, is_attached
from mmpack.adapters.transformers.generate import rollout
from mmpack.adapters.transformers.inputs import model_inputs
from mmpack.adapters.transformers.logprobs import packed_logprobs
from mmpack.adapters.transformers.tiny import tiny_qwen2_5_vl

__all__ = ["attach", "is_attached", "model_inputs", "packed_logprobs", "rollout", "tiny_qwen2_5_vl"]
