"""The kernels of patch packing, compiled for every target: both patch sizes, both orders of channels, every change."""

import math

import pytest
from support.offline_compile import compiled_size, each_target

pytestmark = pytest.mark.compile

TABLES = {"patches": "*i64", "blocks": "*i32"}


def shape(patch, last, value, merge=2, temporal=2):
    unit = math.gcd(4, patch) if value == "u8" else 1
    sizes = {"PATCH": patch, "MERGE": merge, "TEMPORAL": temporal, "LAST": last, "UNIT": unit}
    return sizes | {"ITEMS": 1 << (temporal * patch**2 // unit - 1).bit_length()}


def words(value, unit):
    """Bytes are read as words of `unit` bytes."""
    return {1: value, 2: "i16", 4: "i32"}[unit]


@each_target
@pytest.mark.parametrize(("patch", "last"), [(14, True), (16, False)])
@pytest.mark.parametrize(
    ("value", "made", "change"),
    [
        ("u8", "fp32", "normalise"),
        ("u8", "bf16", "normalise"),
        ("u8", "fp32", "rescale"),
        ("u8", "u8", "copy"),
        ("bf16", "bf16", "copy"),
        ("fp64", "fp64", "copy"),
    ],
)
def test_pack(target, patch, last, value, made, change):
    from mmpack.ops.patches.triton import pack_kernel

    numbers = [f"{name}_{c}" for name in ("mean", "std", "inverse") for c in range(3)]
    constants = shape(patch, last, value) | {"CHANGE": change, "REPEAT": value != "bf16"}
    constants["BYTES"] = made == "bf16"
    constants["SEVERAL"] = last
    signature = {"frames": f"*{words(value, constants['UNIT'])}", "out": f"*{made}"}
    signature |= {"shifts": "*i64"} | TABLES
    signature |= dict.fromkeys([*numbers, "scale"], "fp32")
    assert compiled_size(pack_kernel, signature, constants, target)


@each_target
@pytest.mark.parametrize(
    ("value", "patch", "merge", "temporal"),
    [("u8", 14, 2, 2), ("fp32", 16, 2, 2), ("bf16", 14, 2, 2), ("fp64", 14, 1, 1)],
)
def test_unpack(target, value, patch, merge, temporal):
    import triton.language as tl

    from mmpack.ops.patches.triton import unpack_kernel

    wide = tl.float64 if value == "fp64" else tl.float32
    for total, last in ((value != "u8", True), (False, False)):
        constants = shape(patch, last, value, merge, temporal) | {"TOTAL": total, "SUM": wide}
        kind = words(value, constants["UNIT"])
        signature = {"rows": f"*{kind}", "out": f"*{kind}"} | TABLES
        assert compiled_size(unpack_kernel, signature, constants, target)
