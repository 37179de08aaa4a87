"""Log-probabilities at loss rows: `selected_logprobs` of logits [T, V] and `linear_selected_logprobs` of hidden states.

Of logits, read selected.py (the public function and its op), call.py (the record of a call), torch.py (the plain
version), then triton.py. `linear/` has the same files for hidden states, `lists/` those of both where `support` is
given; `listed.py` scores lists of ids through the two ops, and `sharded.py` logits that are split over ranks. What all
of them share: arguments, row_groups, softmax, gradients, and autograd, which defines their ops.
"""

from mmpack.ops.backend import Op

_WHY = "the kernels compute in float32, not in float64"
SELECTED_LOGPROBS = Op("selected_logprobs", __name__, never=("float64",), why=_WHY)
