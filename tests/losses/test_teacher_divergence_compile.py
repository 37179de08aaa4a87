"""The kernel of the divergence from a teacher is compiled for each target, and fits its shared memory."""

import pytest

from tests.support.offline_compile import compiled_size, each_target

pytestmark = pytest.mark.compile

SIGNATURE = {
    **dict.fromkeys(("logprobs", "teacher", "slopes"), "*fp32"),
    "offsets": "*i64",
    **dict.fromkeys(("values", "masses"), "*fp64"),
    **dict.fromkeys(("count", "num_entries"), "i32"),
    **dict.fromkeys(("least", "least_rest", "beta", "log_beta", "log_rest"), "fp64"),
}


@each_target
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("tail", ["bucket", "renormalize", "ignore"])
def test_divergence(target, kind, tail):
    from mmpack.losses.distillation import triton as m

    constants = {"KIND": kind, "TAIL": tail, "LANES": m.LANES}
    for dtype in ("fp32", "bf16"):
        signature = SIGNATURE | {"logprobs": f"*{dtype}"}
        assert compiled_size(m.divergence_kernel, signature, constants, target, num_warps=1) > 0
