"""The kernel of normalize_bytes, compiled for every target."""

import pytest
from support.offline_compile import compiled_size, each_target


@pytest.mark.compile
@each_target
@pytest.mark.parametrize("out", ["fp32", "bf16", "fp16"])
def test_it_compiles(target, out):
    from mmpack.ops.patches.triton import NORMALIZED, normalize_kernel

    signature = {"rows": "*u8", "values": "*fp32", "out": f"*{out}", "count": "i64"}
    constants = {"PLANE": 392, "BLOCK": NORMALIZED}
    assert compiled_size(normalize_kernel, signature, constants, target)
