"""The convolution's kernels compiled for every target."""

import pytest
from support.offline_compile import compiled_size, each_target

pytestmark = pytest.mark.compile
SHAPE = {"BLOCK_ROWS": 32, "BLOCK_COLS": 128}
COUNTS = {"num_rows": "i32", "width": "i32", "stride": "i32"}


@each_target
@pytest.mark.parametrize("word", ["bf16", "fp32"])
def test_forward(target, word):
    from mmpack.ops.linear_attention.triton import conv1d_kernel

    signature = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), f"*{word}")
    signature |= {"previous_ptr": "*i32"} | COUNTS
    for bias in (False, True):
        options = {"TAPS": 4, "BIAS": bias, "SILU": True} | SHAPE
        assert compiled_size(conv1d_kernel, signature, options, target, num_warps=4)


@each_target
@pytest.mark.parametrize("word", ["bf16", "fp32"])
def test_backward(target, word):
    from mmpack.ops.linear_attention.triton import conv1d_backward_kernel, inner_kernel

    signature = dict.fromkeys(("grad_ptr", "x_ptr", "weight_ptr", "bias_ptr"), f"*{word}")
    signature |= {"previous_ptr": "*i32", "inner_ptr": "*fp32", "partial_ptr": "*fp32"} | COUNTS
    options = {"TAPS": 4, "TAPS_UP": 8, "BIAS": True, "SILU": True, "WEIGHT": True} | SHAPE
    assert compiled_size(inner_kernel, signature, options, target, num_warps=4)

    signature = {"inner_ptr": "*fp32", "weight_ptr": f"*{word}", "to_x_ptr": f"*{word}"}
    signature |= {"order_ptr": "*i32", "offsets_ptr": "*i32"} | COUNTS
    options = {"TAPS": 4} | SHAPE
    assert compiled_size(conv1d_backward_kernel, signature, options, target, num_warps=4)
