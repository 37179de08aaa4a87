"""Products whose bits do not depend on how many rows there are; see `product`."""

from mmpack.ops.backend import Kernel, Op

PRODUCT = Op(
    "product",
    "mmpack.ops.products",
    (
        Kernel(
            "triton", only=("bfloat16", "float16", "float32"), why="the kernel can't take {dtype}"
        ),
    ),
)
