"""Megatron-Core: packed and shared batches through GPTModel and the VLMs that mbridge and Megatron-Bridge build.

Run with megatron-core 0.16.1, mbridge 0.15.1, megatron-bridge 0.3.1.
"""

from mmpack.errors import needs

with needs("megatron", __name__):
    import megatron.core  # noqa: F401
    import transformers  # noqa: F401

from mmpack.adapters.megatron.attention import attach, detach
from mmpack.adapters.megatron.inputs import model_inputs
from mmpack.adapters.megatron.logprobs import packed_listed_logprobs, packed_logprobs
from mmpack.adapters.megatron.modules import pad_multiple
from mmpack.adapters.megatron.thd import attach_thd

__all__ = [
    "attach",
    "attach_thd",
    "detach",
    "model_inputs",
    "packed_listed_logprobs",
    "packed_logprobs",
    "pad_multiple",
]
