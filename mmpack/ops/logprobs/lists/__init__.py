"""Selected log-probabilities over the ids of a ragged list per loss token; the rest of the vocabulary is not touched.

Read call.py (the records), hidden.py (from hidden states; its op) and logits.py (from logits), products.py (the whole
head is multiplied instead), torch.py (the plain version), then triton.py, list_kernels.py and sum_kernels.py.
`selected_logprobs` and `linear_selected_logprobs` come here where they are given `support`.
"""

from mmpack.ops.backend import Op

_WHY = "the kernels compute in float32, not in float64"
SUPPORT_LOGPROBS = Op("support_logprobs", __name__, never=("float64",), why=_WHY)
