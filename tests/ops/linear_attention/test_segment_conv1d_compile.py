"""The convolution's kernels compiled for every target."""

import pytest
from support.offline_compile import compiled, compiled_size, each_target

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


def of_backward(word: str, weight: bool):
    """The kernel, and what it is compiled for."""
    from mmpack.ops.linear_attention import triton as k

    signature = dict.fromkeys((*INPUTS, "to_x_ptr"), f"*{word}") | ROWS | {"partial_ptr": "*fp32"}
    options = {"BIAS": True, "WEIGHT": weight, "ROWS": k.BACKWARD_ROWS, "EARLY": k.UNROLL}
    options |= KIND | {"UNROLL": k.UNROLL, "BLOCK_COLS": k.BLOCK_COLS}
    return k.conv1d_backward_kernel, signature, options


@each_target
@pytest.mark.parametrize("word", ["bf16", "fp32"])
def test_backward(target, word):
    from mmpack.ops.linear_attention import triton as k

    assert compiled_size(*of_backward(word, weight=True), target, num_warps=k.WARPS)

    signature = dict.fromkeys((*INPUTS, "to_x_ptr"), f"*{word}") | ROWS
    far = dict.fromkeys(("rows_ptr", "offsets_ptr", "readers_ptr"), "*i32")
    options = KIND | {"BIAS": True, "READERS": k.FAR_READERS, "BLOCK_COLS": k.FAR_COLS}
    assert compiled_size(k.far_kernel, signature | far, options, target, num_warps=k.WARPS)


@pytest.mark.parametrize("weight", [True, False])
def test_rounding_is_not_left_to_the_compiler(weight):
    """It has no product and sum to fuse: so gradients of x have the same bits whether the weight is trained."""
    from mmpack.ops.linear_attention import triton as k

    fused, apart = (
        compiled(*of_backward("fp32", weight), "sm_90", num_warps=k.WARPS, enable_fp_fusion=fusion)
        for fusion in (True, False)
    )
    counts = [made.asm["ptx"].count("fma.rn.f32") for made in (fused, apart)]
    assert counts[0] == counts[1] > 0
