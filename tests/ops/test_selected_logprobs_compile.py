"""Every variant of the selected_logprobs kernels is compiled for each target."""

import pytest
from support.offline_compile import compiled_size, each_target

pytestmark = pytest.mark.compile

STRIDES = {
    "row_stride": "i64",
    "column_stride": "i32",
    "vocab": "i32",
    "parts": "i32",
    "temperature": "*fp64",
}
STATISTICS = {"logprobs": "*fp32", "maximum": "*fp32", "log_total": "*fp32"}
ROWS = {
    "no rows": ({}, ["rows", "order", "offsets", "slot_of_row"]),
    "distinct rows": ({"rows": "*i32", "slot_of_row": "*i32"}, ["order", "offsets"]),
    "repeated rows": (
        {"rows": "*i64", "slot_of_row": "*i32", "order": "*i64", "offsets": "*i64"},
        [],
    ),
}


def split(kernel, signature, missing, **constants):
    """Signature and constants of those arguments that `kernel` has."""
    constants |= dict.fromkeys(missing)
    signature = {k: v for k, v in signature.items() if k in kernel.arg_names and k not in constants}
    return signature, {k: v for k, v in constants.items() if k in kernel.arg_names}


@each_target
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("dtype", "entropy"), [("bf16", True), ("bf16", False), ("fp32", True), ("fp16", False)]
)
def test_compiles(target, rows, dtype, entropy):
    from mmpack.ops.logprobs import triton as k

    pointers, missing = ROWS[rows]
    tokens = k.TOKENS if rows == "repeated rows" else 1
    warps = 2 if target.startswith("gfx") else 4
    common = STRIDES | STATISTICS | pointers | {"logits": f"*{dtype}", "targets": "*i64"}
    forward = split(
        k.forward_kernel,
        common | {"entropies": "*fp32"},
        missing + ["entropies"] * (not entropy),
        LANES=k.LANES,
        DEPTH=k.DEPTH,
        TOKENS=tokens,
    )
    assert compiled_size(k.forward_kernel, *forward, target, num_warps=warps) > 0

    gradients = {"grad_logprobs": "*fp32", "grad_entropies": "*fp32", "entropies": "*fp32"}
    outs = {"out": f"*{dtype}", "out_row_stride": "i64", "out_column_stride": "i32"}
    for compact in (False, True):
        backward = split(
            k.backward_kernel,
            common | gradients | outs,
            missing + ["slot_of_row" if compact else "rows"] + ["grad_entropies"] * (not entropy),
            BLOCK=k.BLOCK,
            TOKENS=tokens,
        )
        assert compiled_size(k.backward_kernel, *backward, target, num_warps=warps) > 0
