from mmpack.ops.backend import Kernel, Op

_WHY = "the kernels compute in float32, not in float64"
SELECTED_LOGPROBS = Op(
    "selected_logprobs", __name__, (Kernel("triton", never=("float64",), why=_WHY),)
)
