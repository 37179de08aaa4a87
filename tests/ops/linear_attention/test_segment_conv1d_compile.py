"""The convolution's kernels compiled for every target."""

import pytest
from support.offline_compile import compiled_size, each_target

pytestmark = pytest.mark.compile
COUNTS = {"num_rows": "i32", "width": "i32", "stride": "i32"}
ROWS = {"previous_ptr": "*i32"} | COUNTS
INPUTS = ("grad_ptr", "x_ptr", "weight_ptr", "bias_ptr")
KIND = {"TAPS": 4, "SILU": True}


@each_target
@pytest.mark.parametrize("word", ["bf16", "fp32"])
def test_forward(target, word):
    from mmpack.ops.linear_attention import triton as k

    signature = dict.fromkeys((*INPUTS[1:], "out_ptr"), f"*{word}") | ROWS
    options = KIND | {"ROWS": k.ROWS, "UNROLL": k.UNROLL, "BLOCK_COLS": k.BLOCK_COLS}
    for bias in (False, True):
        made = compiled_size(
            k.conv1d_kernel, signature, {"BIAS": bias} | options, target, num_warps=k.WARPS
        )
        assert made


@each_target
@pytest.mark.parametrize("word", ["bf16", "fp32"])
def test_backward(target, word):
    from mmpack.ops.linear_attention import triton as k

    signature = dict.fromkeys((*INPUTS, "to_x_ptr"), f"*{word}") | ROWS
    options = {"BIAS": True, "WEIGHT": True, "ROWS": k.BACKWARD_ROWS, "EARLY": k.UNROLL}
    options |= KIND | {"UNROLL": k.UNROLL, "BLOCK_COLS": k.BLOCK_COLS}
    partial = {"partial_ptr": "*fp32"}
    assert compiled_size(
        k.conv1d_backward_kernel, signature | partial, options, target, num_warps=k.WARPS
    )

    far = dict.fromkeys(("rows_ptr", "offsets_ptr", "readers_ptr"), "*i32")
    options = KIND | {"BIAS": True, "READERS": k.FAR_READERS, "BLOCK_COLS": k.FAR_COLS}
    assert compiled_size(k.far_kernel, signature | far, options, target, num_warps=k.WARPS)
