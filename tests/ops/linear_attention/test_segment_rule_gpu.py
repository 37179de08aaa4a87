"""Linear attention on a GPU: FLA in waves beside our chunks and beside plain packs, and the plain path there."""

import numpy as np
import pytest
import torch
from support.linear_attention import (
    OFFSETS,
    PARENTS,
    inputs,
    rows_of,
    rule_alone,
    values_and_gradients,
)

from mmpack.errors import BackendError
from mmpack.ops.linear_attention import plan_segments, segment_delta_rule
from mmpack.ops.linear_attention.choose import choose

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("untuned")]
BOUND = 1e-2  # relative Frobenius norm, of FLA's rounding within


@pytest.fixture
def fla():
    try:
        choose(torch.device("cuda"), torch.bfloat16, asked="fla")
    except BackendError as error:
        pytest.skip(str(error))


def plan_of(offsets, parents):
    return plan_segments(np.array(offsets), np.array(parents)).to("cuda")


def relative(found, wanted):
    return [
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(found, wanted, strict=True)
    ]


def drawn(rows, heads, dims, dtype):
    tensors = [x.cuda() for x in inputs(rows, heads, dims)]
    # decays stay in float32, as models compute them
    return [x if i == 3 else x.to(dtype) for i, x in enumerate(tensors)]


def upstream_of(rows, heads, dims):
    made = torch.Generator().manual_seed(1)
    return torch.randn(rows, heads[1], dims[1], generator=made).cuda()


@pytest.mark.parametrize("dims", [(128, 128), (64, 128)])
def test_fla_in_waves_beside_our_chunks(fla, dims):
    heads = (2, 4)
    tensors, up = drawn(222, heads, dims, torch.bfloat16), upstream_of(222, heads, dims)
    plan = plan_of(OFFSETS, PARENTS)
    found = values_and_gradients(lambda x: segment_delta_rule(*x, plan, backend="fla"), tensors, up)
    wanted = values_and_gradients(
        lambda x: segment_delta_rule(*x, plan, backend="torch"), [x.double() for x in tensors], up
    )
    assert max(relative(found, wanted)) <= BOUND


def test_a_tree_beside_plain_packs(fla):
    """Each path as a sample of its own: outputs of its rows, and gradients summed over the paths that share them."""
    heads, dims = (2, 4), (128, 128)
    offsets, parents = [0, 300, 420, 425, 600], [-1, 0, 1, 0]
    tensors, plan = drawn(600, heads, dims, torch.bfloat16), plan_of(offsets, parents)
    paths = [torch.tensor(rows_of(offsets, parents)[g]).cuda() for g in (2, 3)]
    plain = plan_of(np.cumsum([0, *map(len, paths)]), [-1, -1])
    rows = torch.cat(paths)
    first = torch.zeros(600, dtype=torch.long, device="cuda").scatter_(
        0, rows.flip(0), torch.arange(len(rows), device="cuda").flip(0)
    )
    up = upstream_of(600, heads, dims)
    shared = values_and_gradients(lambda x: segment_delta_rule(*x, plan), tensors, up)
    apart = values_and_gradients(
        lambda x: segment_delta_rule(*(y[rows] for y in x), plain)[first], tensors, up
    )
    assert max(relative(shared, apart)) <= BOUND


def test_a_neighbour_changes_nothing(fla):
    heads, dims = (2, 4), (128, 128)
    tensors = drawn(400, heads, dims, torch.bfloat16)
    plan = plan_of([0, 130, 400], [-1, -1])
    with torch.no_grad():
        before = segment_delta_rule(*tensors, plan)
        for x in tensors[:3]:
            x[:130] = torch.randn_like(x[:130])
        after = segment_delta_rule(*tensors, plan)
    assert torch.equal(before[130:], after[130:]) and not torch.equal(before[:130], after[:130])


def test_the_plain_path_in_float32():
    heads, dims = (2, 4), (32, 32)
    tensors = drawn(222, heads, dims, torch.float32)
    found = segment_delta_rule(*tensors, plan_of(OFFSETS, PARENTS))
    wanted = rule_alone([x.cpu() for x in tensors], OFFSETS, PARENTS)
    assert max(relative([found.cpu()], [wanted])) <= 5e-6


def test_no_call_waits_for_the_gpu(fla):
    tensors = drawn(222, (2, 4), (64, 64), torch.bfloat16)
    plan = plan_of(OFFSETS, PARENTS)
    segment_delta_rule(*tensors, plan)  # compiles, and tunes
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        segment_delta_rule(*tensors, plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
