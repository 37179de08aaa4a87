"""The kernels of logprobs over kept ids are compiled for each target, and fit its shared memory."""

import pytest

from tests.support.offline_compile import compiled_size, each_target

pytestmark = pytest.mark.compile

KINDS = {
    "*i64": ("ids", "starts", "targets", "rows", "columns", "places", "index", "order", "offsets"),
    "*fp64": ("temperature", "maximum", "log_total", "entropies", "grad_entropies"),
    "fp32": ("softcap",),
    "i32": (
        "count", "num_entries", "num_runs", "width", "vocab", "block_stride", "row_stride",
        "column_stride", "hidden_row_stride", "hidden_column_stride", "weight_row_stride",
        "weight_column_stride", "first_token", "first_column", "num_columns",
    ),
}  # fmt: skip
KIND = {name: kind for kind, names in KINDS.items() for name in names} | {"slot_runs": "*i64"}
HALVES = ("hidden", "weight", "bias", "source", "block")


def compile_kernel(kernel, target, dtype, warps, without=(), **constants):
    constants |= dict.fromkeys(without)
    signature = {}
    for name in kernel.arg_names:
        if name not in constants:
            signature[name] = f"*{dtype}" if name in HALVES else KIND.get(name, "*fp32")
    if "out" in signature and "places" in kernel.arg_names:
        signature["out"] = f"*{dtype}"
    assert compiled_size(kernel, signature, constants, target, num_warps=warps) > 0


@each_target
@pytest.mark.parametrize("extras", [False, True])
def test_lists(target, extras):
    from mmpack.ops.logprobs.lists import list_kernels as k
    from mmpack.ops.logprobs.lists.triton import LANES, LONG_LANES

    compile_kernel(k.statistics_kernel, target, "fp32", 1, ENTROPY=extras, LANES=LANES)
    without = () if extras else ("grad_entropies",)
    compile_kernel(k.slopes_kernel, target, "fp32", 1, without, SOFTCAP=extras, LANES=LANES)
    dtype = "bf16" if extras else "fp32"
    compile_kernel(k.window_kernel, target, dtype, 4, PUT=extras, LANES=LONG_LANES)


@each_target
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("extras", [False, True])
def test_gathers(target, dtype, extras):
    from mmpack.ops.logprobs.lists import sum_kernels as k

    without = () if extras else ("bias",)
    sizes = {"ENTRIES": k.ENTRIES, "DEPTH": k.DEPTH, "SOFTCAP": extras}
    compile_kernel(k.dots_kernel, target, dtype, k.WARPS, without, **sizes)
    absent = ("order",) if extras else ("places",)
    sizes = {"PIECE": k.PIECE, "COLUMNS": k.COLUMNS}
    whole = sizes | {"AT_ONCE": k.AT_ONCE}
    compile_kernel(k.sum_runs_kernel, target, dtype, k.WARPS, absent, **whole)
    without = ("order",) if extras else ()
    compile_kernel(k.sum_pieces_kernel, target, dtype, k.WARPS, without, **whole)
    without = () if extras else ("places",)
    compile_kernel(k.join_pieces_kernel, target, dtype, k.WARPS, without, **sizes)
