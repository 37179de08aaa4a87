"""The product's kernels compile for each target, within its shared memory."""

import pytest
from support.offline_compile import compiled_size, each_target

pytest.importorskip("triton")
from mmpack.ops.products import tiles
from mmpack.ops.products import triton as kernels

pytestmark = pytest.mark.compile

MENUS = {
    "sm_90": (*tiles.HOPPER, tiles.HOPPER_FEW),
    "sm_80": (*tiles.AMPERE, tiles.AMPERE_FEW),
    "gfx942": tiles.CDNA3,
}


@each_target
@pytest.mark.parametrize(("by_depth", "out"), [((False, False), "bf16"), ((True, True), "fp32")])
def test_products_of_half_precision(target, by_depth, out):
    for shape in MENUS[target]:
        rows, columns, depth, group, warps, stages = shape
        a = [depth, rows] if by_depth[0] else [rows, depth]
        b = [depth, columns] if by_depth[1] else [columns, depth]
        signature = {
            "a_desc": f"tensordesc<bf16{a}>",
            "b_desc": f"tensordesc<bf16{b}>",
            "out_desc": f"tensordesc<{out}[{rows}, {columns // 2}]>",
            "bias_ptr": "*bf16",
            "num_rows": "i32",
            "num_columns": "i32",
            "depth": "i32",
        }
        constants = {
            "A_BY_DEPTH": by_depth[0],
            "B_BY_DEPTH": by_depth[1],
            "PROGRAMS": 0 if tiles.is_few(shape) else 132,
            "ROWS": rows,
            "COLUMNS": columns,
            "DEPTH": depth,
            "GROUP": group,
        }
        size = compiled_size(
            kernels.product_kernel, signature, constants, target, num_warps=warps, num_stages=stages
        )
        assert size > 0, shape


@each_target
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_products_of_float32_and_batches(target, precision):
    if target == "gfx942" and precision == "tf32":
        pytest.skip("torch has no such setting there")
    strides = ("batch", "row", "depth"), ("batch", "depth", "column"), ("batch", "row", "column")
    signature = {"a_ptr": "*fp32", "b_ptr": "*fp32", "out_ptr": "*fp32", "bias_ptr": "*fp32"}
    signature |= dict.fromkeys(("num_rows", "num_columns", "depth"), "i32")
    for name, dims in zip(("a", "b", "out"), strides, strict=True):
        signature |= {f"{name}_{d}": "i32" for d in dims}
    constants = {
        "PRECISION": precision,
        "ROWS": kernels.ROWS,
        "COLUMNS": kernels.COLUMNS,
        "DEPTH": kernels.DEPTH,
    }
    assert compiled_size(
        kernels.general_kernel, signature, constants, target, num_warps=4, num_stages=2
    )
