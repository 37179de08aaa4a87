"""Selected log-probabilities of logits [T, V] at loss rows.

Read selected.py (the public function and its op), call.py (the record of a call), torch.py (the plain version), then
triton.py. arguments, row_groups, softmax, gradients and autograd also serve linear_logprobs.
"""

from mmpack.ops.backend import Op

_WHY = "the kernels compute in float32, not in float64"
SELECTED_LOGPROBS = Op("selected_logprobs", __name__, never=("float64",), why=_WHY)
