"""Selected log-probabilities of hidden states [T, H] and an output weight [V, H]: logits never exist.

Read selected.py (the public function and its op), call.py (the record of a call), torch.py (the plain version), then
triton.py (the order of the kernels), tiles.py, forward_kernel.py, blocks.py, backward_kernels.py, product_kernels.py.
shards.py joins ranks that the vocabulary is split over.
"""

from mmpack.ops.backend import Op

_HALVES = ("bfloat16", "float16")
_WHY = "its kernels take bf16 and fp16, not {dtype}"
LINEAR_SELECTED_LOGPROBS = Op("linear_selected_logprobs", __name__, only=_HALVES, why=_WHY)
