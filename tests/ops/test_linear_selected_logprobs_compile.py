"""Every variant of the linear_selected_logprobs kernels is compiled for each target, and fits its shared memory."""

import pytest

from tests.support.offline_compile import compiled_size, each_target

pytestmark = pytest.mark.compile


def tiles_for(target):
    from mmpack.ops.logprobs.linear import tiles as k

    return {"sm_80": k.AMPERE, "sm_90": k.HOPPER, "gfx942": k.CDNA3}[target]


def compile_product(kernel, target, signature, **constants):
    tiles = tiles_for(target)
    constants |= {"PROGRAMS": 132, "GROUP": tiles.group}
    constants |= {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth}
    ints = {name: "i32" for name in kernel.arg_names if name not in signature | constants}
    size = compiled_size(
        kernel, signature | ints, constants, target, num_warps=tiles.warps, num_stages=tiles.stages
    )
    assert size > 0


def block(target, rows, columns, dtype="bf16"):
    """A tensor descriptor; `rows` and `columns` name sizes of the target's tile."""
    tiles = tiles_for(target)
    return f"tensordesc<{dtype}[{getattr(tiles, rows)}, {getattr(tiles, columns)}]>"


SCALES = {"scale": "fp32", "softcap": "fp32"}


@each_target
@pytest.mark.parametrize(
    ("dtype", "store", "extras"),
    [("bf16", False, False), ("bf16", True, True), ("fp16", False, True), ("fp16", True, False)],
)
def test_statistics(target, dtype, store, extras):
    from mmpack.ops.logprobs.linear.forward_kernel import statistics_kernel

    signature = SCALES | {
        "x_desc": block(target, "rows", "depth", dtype),
        "weight_desc": block(target, "columns", "depth", dtype),
        **dict.fromkeys(("maximum_ptr", "total_ptr", "weighted_ptr"), "*fp32"),
    }
    constants = {"ENTROPY": extras, "STORE": store, "SOFTCAP": extras}
    if store:
        signature["stored_desc"] = block(target, "rows", "columns", dtype)
    else:
        constants["stored_desc"] = None
    if extras:
        signature["bias_ptr"] = f"*{dtype}"
    else:
        constants["bias_ptr"] = None
    compile_product(statistics_kernel, target, signature, **constants)


@each_target
@pytest.mark.parametrize(("dtype", "extras"), [("bf16", False), ("fp16", True)])
def test_logit_gradient(target, dtype, extras):
    from mmpack.ops.logprobs.linear.backward_kernels import logit_gradient_kernel

    signature = SCALES | {
        "x_desc": block(target, "rows", "depth", dtype),
        "weight_desc": block(target, "columns", "depth", dtype),
        "grad_desc": block(target, "rows", "columns", dtype),
        "live_ptr": "*i32",
        **dict.fromkeys(("log_total_ptr", "along_ptr"), "*fp32"),
    }
    constants = {"SOFTCAP": extras}
    if extras:
        signature |= {"bias_ptr": f"*{dtype}", "slope_ptr": "*fp32"}
    else:
        constants |= {"bias_ptr": None, "slope_ptr": None}
    compile_product(logit_gradient_kernel, target, signature, **constants)


@each_target
@pytest.mark.parametrize(
    ("dtype", "wanted", "add"),
    [
        ("bf16", "both", True),
        ("fp16", "both", False),
        ("bf16", "hidden", False),
        ("bf16", "weight", True),
    ],
)
def test_products(target, dtype, wanted, add):
    from mmpack.ops.logprobs.linear.product_kernels import products_kernel

    tiles = tiles_for(target)
    half = f"[{tiles.rows}, {tiles.columns // 2}]"
    signature = {
        "grad_by_row": block(target, "rows", "depth", dtype),
        "weight_desc": block(target, "depth", "columns", dtype),
        "grad_by_column": block(target, "depth", "rows", dtype),
        "x_desc": block(target, "depth", "columns", dtype),
        "live_ptr": "*i32",
    }
    constants = {"ADD": add, "REDUCE": target == "sm_90"}
    outs = {"total_desc": ("hidden", "fp32"), "grad_weight_desc": ("weight", dtype)}
    for name, (which, kind) in outs.items():
        if wanted in ("both", which):
            signature[name] = f"tensordesc<{kind}{half}>"
        else:
            constants[name] = None
    compile_product(products_kernel, target, signature, **constants)


@each_target
@pytest.mark.parametrize("extras", [False, True])
def test_small_kernels(target, extras):
    from mmpack.ops.logprobs.linear import backward_kernels as backward
    from mmpack.ops.logprobs.linear import forward_kernel as forward
    from mmpack.ops.logprobs.linear import product_kernels as products

    tiles = tiles_for(target)
    pointers = {
        "*bf16": ("x_ptr", "weight_ptr", "grad_ptr", "stored_ptr", "out_ptr", "hidden_ptr"),
        "*i64": ("slot_ptr", "column_ptr", "order_ptr", "row_ptr"),
        "*i32": ("live_ptr",),
        "fp32": ("softcap", "to_cap"),
    }
    kinds = {name: kind for kind, names in pointers.items() for name in names}
    launched = {
        forward.merge_kernel: {"ROWS": 32, "TILES": 64},
        forward.target_kernel: {"TOKENS": min(tiles.rows, 64), "DEPTH": 2 * tiles.depth},
        backward.stored_logit_gradient_kernel: {
            "ROWS": 32,
            "TILE_ROWS": tiles.rows,
            "COLUMNS": tiles.columns,
        },
        backward.set_targets_kernel: {"TOKENS": 256},
        backward.column_sums_kernel: {"ROWS": 64, "COLUMNS": 64},
        products.gather_rows_kernel: {"COLUMNS": 1024},
        products.scatter_rows_kernel: {"COLUMNS": 1024},
    }
    for kernel, sizes in launched.items():
        names = kernel.arg_names
        constants = sizes | {name: extras for name in ("ENTROPY", "SOFTCAP") if name in names}
        signature = {}
        for name in names:
            if name in constants:
                continue
            if name in ("bias_ptr", "slope_ptr") and not extras:
                constants[name] = None
            else:
                default = "*fp32" if name.endswith("_ptr") else "i32"
                signature[name] = kinds.get(name, default)
        stages = tiles.stages if kernel is forward.target_kernel else 2
        assert compiled_size(kernel, signature, constants, target, num_warps=4, num_stages=stages)
