from mmpack.ops.backend import Kernel, Op

_HALVES = ("bfloat16", "float16")
_WHY = "its kernels take bf16 and fp16, not {dtype}"
LINEAR_SELECTED_LOGPROBS = Op(
    "linear_selected_logprobs", __name__, (Kernel("triton", only=_HALVES, why=_WHY),)
)
