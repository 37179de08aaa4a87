"""Sums of a last dimension, and RMSNorm, whose bits do not depend on how many rows there are; see `rows` and `rms`."""

from mmpack.ops.backend import Op

_FLOATS = ("bfloat16", "float16", "float32")
_WHY = "the kernel can't take {dtype}"
ROW_SUM = Op("row_sum", __name__, only=_FLOATS, why=_WHY)
RMS_NORM = Op("rms_norm", __name__, only=_FLOATS, why=_WHY)
