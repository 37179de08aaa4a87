"""transformers: packed and shared batches through its own models, and its rollouts as samples.

Run with transformers 5.6.2, 5.9.0, 5.12.1, 5.15.0, 5.19.0, 5.24.0.
"""

from mmpack.errors import needs

with needs("hf", __name__):
    import torch  # noqa: F401
    import transformers  # noqa: F401

from mmpack.adapters.transformers.attention import attach, detach
from mmpack.adapters.transformers.checkpointing import checkpoint_layers
from mmpack.adapters.transformers.collator import SampleCollator
from mmpack.adapters.transformers.compile import compile_layers
from mmpack.adapters.transformers.encode_once import encode_once
from mmpack.adapters.transformers.generate import rollout
from mmpack.adapters.transformers.inputs import model_inputs
from mmpack.adapters.transformers.logprobs import packed_listed_logprobs, packed_logprobs
from mmpack.adapters.transformers.prefix import prefix_logprobs
from mmpack.adapters.transformers.ranks import encode_together, in_step
from mmpack.adapters.transformers.routes import record_routes

__all__ = [
    "SampleCollator",
    "attach",
    "checkpoint_layers",
    "compile_layers",
    "detach",
    "encode_once",
    "encode_together",
    "in_step",
    "model_inputs",
    "packed_listed_logprobs",
    "packed_logprobs",
    "prefix_logprobs",
    "record_routes",
    "rollout",
]
