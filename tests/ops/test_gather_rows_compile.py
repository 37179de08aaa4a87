"""Kernels of gather, scatter and merge, compiled for every target; where rows allow it, 16 bytes at a time."""

import pytest
from support.offline_compile import compiled_size, each_target

pytestmark = pytest.mark.compile


@each_target
@pytest.mark.parametrize(
    ("word", "unit"), [("i64", 2), ("i64", 1), ("i32", 1), ("i16", 1), ("i8", 1)]
)
@pytest.mark.parametrize("index", ["i32", "i64"])
def test_gather(target, word, unit, index):
    from mmpack.ops.rows.triton import gather_kernel

    signature = {"x": f"*{word}", "index": f"*{index}", "out": f"*{word}"}
    signature |= {"count": "i32", "units": "i32"}
    for shape in ({"BLOCK_ROWS": 1, "BLOCK_COLS": 1024}, {"BLOCK_ROWS": 512, "BLOCK_COLS": 2}):
        assert compiled_size(gather_kernel, signature, {"UNIT": unit} | shape, target)


@each_target
@pytest.mark.parametrize(("word", "unit"), [("i64", 2), ("i64", 1), ("i16", 1), ("i8", 1)])
@pytest.mark.parametrize("index", ["i32", "i64"])
def test_scatter(target, word, unit, index):
    from mmpack.ops.rows.triton import scatter_kernel

    signature = {"values": f"*{word}", "index": f"*{index}", "out": f"*{word}"}
    signature |= {"count": "i32", "units": "i32"}
    for shape in ({"BLOCK_ROWS": 1, "BLOCK_COLS": 1024}, {"BLOCK_ROWS": 512, "BLOCK_COLS": 2}):
        assert compiled_size(scatter_kernel, signature, {"UNIT": unit} | shape, target)


@each_target
@pytest.mark.parametrize(
    ("value", "total"), [("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")]
)
def test_sum(target, value, total):
    import triton.language as tl

    from mmpack.ops.rows.triton import sum_kernel

    signature = {"values": f"*{value}", "order": "*i32", "offsets": "*i32", "out": f"*{value}"}
    signature |= {"num_rows": "i32", "units": "i32"}
    add = {"fp32": tl.float32, "fp64": tl.float64}[total]
    for shape in (
        {"UNIT": 2, "BLOCK_ROWS": 1, "BLOCK_COLS": 1024, "AT_ONCE": 4},
        {"UNIT": 1, "BLOCK_ROWS": 512, "BLOCK_COLS": 2, "AT_ONCE": 1},
    ):
        assert compiled_size(sum_kernel, signature, {"SUM": add} | shape, target)


@each_target
@pytest.mark.parametrize("levels", [0, 3])
def test_merge_and_unmerge(target, levels):
    import triton.language as tl

    from mmpack.ops.embeddings.triton import merge_kernel, unmerge_kernel

    def signature(word, names, counts):
        lists = ("levels", "taken", "grad_levels", "to_levels")
        indices = ("source", "index", "vision", "order", "offsets")
        kinds = {
            name: (f"*{word}",) * levels
            if name in lists
            else "*i32"
            if name in indices
            else f"*{word}"
            for name in names.split()
        }
        return kinds | dict.fromkeys(counts.split(), "i32")

    shape = {"LEVELS": levels, "BLOCK_ROWS": 1, "BLOCK_COLS": 1024}
    merge = signature(
        "i64",
        "embeddings features levels source index merged taken",
        "num_tokens num_vision units",
    )
    assert compiled_size(merge_kernel, merge, {"UNIT": 2} | shape, target)
    unmerge = signature(
        "bf16",
        "grad grad_levels source vision order offsets to_embeddings to_features to_levels",
        "num_tokens num_features units",
    )
    more = {"UNIT": 8, "SUM": tl.float32, "AT_ONCE": 4}
    assert compiled_size(unmerge_kernel, unmerge, more | shape, target)
