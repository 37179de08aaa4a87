"""Every variant of the projection's kernels is compiled for each target, and fits its shared memory."""

import pytest

from tests.ops.test_linear_selected_logprobs_compile import block, compile_product
from tests.support.offline_compile import compiled_size, each_target

pytestmark = pytest.mark.compile


@each_target
@pytest.mark.parametrize("by_depth", [False, True])
@pytest.mark.parametrize(("dtype", "out"), [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32")])
def test_product(target, dtype, out, by_depth):
    from mmpack.ops.projection.triton import project_kernel

    weight = ("depth", "columns") if by_depth else ("columns", "depth")
    signature = {
        "x_desc": block(target, "rows", "depth", dtype),
        "weight_desc": block(target, *weight, dtype),
        "out_ptr": f"*{out}",
    }
    constants = {"BY_DEPTH": by_depth}
    if by_depth:  # the gradient of the inputs
        constants |= {"bias_ptr": None, "target_ptr": None}
    else:
        signature |= {"bias_ptr": f"*{dtype}", "target_ptr": "*i32"}
    compile_product(project_kernel, target, signature, **constants)


@each_target
def test_fill(target):
    from mmpack.ops.projection.triton import fill_kernel

    words = dict.fromkeys(("text", "out"), "*i64")
    indices = {"source": "*i32", "target": "*i32", "count": "i32", "units": "i32"}
    constants = {"UNIT": 2, "BLOCK_ROWS": 1, "BLOCK_COLS": 1024}
    assert compiled_size(fill_kernel, words | indices, constants, target, num_warps=4) > 0
