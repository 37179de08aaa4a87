"""Products whose bits do not depend on how many rows there are; see `product`."""

from mmpack.ops.backend import Op

_FLOATS = ("bfloat16", "float16", "float32")
PRODUCT = Op("product", __name__, only=_FLOATS, why="the kernel can't take {dtype}")
