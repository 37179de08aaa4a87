"""The kernels of fixed blocks, row sums and RMSNorm compile for each target, within its shared memory."""

import pytest
from support.offline_compile import compiled_size, each_target

pytest.importorskip("triton")
from mmpack.ops.attention.fixed_blocks import kernels
from mmpack.ops.attention.fixed_blocks import triton as launches
from mmpack.ops.norms import triton as norms

pytestmark = pytest.mark.compile

FLOATS = ("q_ptr", "k_ptr", "v_ptr", "grad_ptr", "out_ptr", "to_q_ptr", "to_k_ptr", "to_v_ptr")
CASES = [("bf16", 128, launches.HALF), ("bf16", 256, launches.WIDE), ("fp32", 128, launches.FULL)]


def types_of(kernel, dtype, constants):
    found = {}
    for name in kernel.arg_names:
        if name in constants:
            continue
        if name in FLOATS:
            found[name] = f"*{dtype}"
        elif name in ("lse_ptr", "delta_ptr"):
            found[name] = "*fp32"
        else:
            found[name] = "*i32" if name.endswith("_ptr") else "i32"
    return found | ({"scale": "fp32"} if "scale" in kernel.arg_names else {})


@each_target
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("dtype", "size", "passes"), CASES, ids=["half", "wide", "full"])
def test_attention(target, causal, dtype, size, passes):
    shared = {"CAUSAL": causal, "GROUPS": 7, "PRECISION": "ieee", "SIZE": size}
    for name, kernel in (
        ("forward", kernels.forward_kernel),
        ("to_keys", kernels.keys_kernel),
        ("to_queries", kernels.queries_kernel),
    ):
        blocks = getattr(passes, name)
        constants = shared | {"QUERIES": blocks.queries, "KEYS": blocks.keys}
        options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
        signature = types_of(kernel, dtype, constants)
        assert compiled_size(kernel, signature, constants, target, **options), name
    constants = {"ROWS": launches.DELTA_ROWS, "SIZE": size}
    signature = types_of(kernels.delta_kernel, dtype, constants)
    assert compiled_size(kernels.delta_kernel, signature, constants, target)


@each_target
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_norms(target, dtype):
    pointers = ("x_ptr", "weight_ptr", "out_ptr", "grad_ptr", "to_x_ptr")
    for kernel, constants in (
        (norms.row_sum_kernel, {"BLOCK": 4096}),
        (norms.rms_norm_kernel, {"BLOCK": 4096}),
        (
            norms.rms_norm_backward_kernel,
            {"WEIGHT": True, "BLOCK": 4096, "WHOLE": True},
        ),
        (
            norms.rms_norm_backward_kernel,
            {"WEIGHT": True, "BLOCK": 8192, "WHOLE": False},
        ),
    ):
        kinds = dict.fromkeys(("scale", "share", "eps"), "fp32") | {"partial_ptr": "*fp32"}
        kinds |= dict.fromkeys(pointers, f"*{dtype}") | {"width": "i32", "rows": "i32"}
        signature = {n: kinds[n] for n in kernel.arg_names if n not in constants}
        assert compiled_size(kernel, signature, constants, target, num_warps=8)
