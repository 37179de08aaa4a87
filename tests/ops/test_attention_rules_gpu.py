"""Windows and two-way blocks on a GPU: each backend against sdpa in fp32, its bits, and that nothing waits."""

import numpy as np
import pytest
import torch
from support.attention import draw, gradients

from mmpack.contracts import TOLERANCES
from mmpack.ops.attention import TREE, plan_attention, plan_of_rule, resolve, tree_attention
from mmpack.ops.attention.rule import path_of

pytestmark = pytest.mark.gpu
BACKENDS = [name for name, backend in TREE.backends.items() if backend.windows]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def pack_of(device="cuda"):
    """A prompt with a block of 256, three branches (one with two blocks), a plain sample, padding."""
    until = np.concatenate(
        [np.full(700, 1650), np.full(300, 1000), np.full(500, 1500), np.full(150, 1650)]
        + [np.full(400, 2050), np.arange(2051, 2101)]
    )
    start = np.arange(2100)
    for first, stop in ((200, 456), (1100, 1356), (1400, 1464), (1700, 1956)):
        start[first:stop] = first
    padding = np.arange(2100) >= 2050
    plan = plan_attention(until.astype(np.int32), padding, start.astype(np.int32)).to(device)
    arrays = (torch.from_numpy(x.astype(np.int32)).to(device) for x in (until, start))
    return *arrays, plan, torch.from_numpy(~padding).to(device)


def skip_unless(backend, dim, plan):
    reason = TREE.why_not(backend, torch.device("cuda"), torch.bfloat16, dim, 0.0, plan)
    if reason is not None:
        pytest.skip(reason)


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@each_backend
@pytest.mark.parametrize(
    ("window", "two_way"), [(100, True), (512, True), (512, False), (None, True)]
)
@pytest.mark.parametrize("dim", [64, 256])
def test_values_and_gradients(backend, window, two_way, dim):
    until, start, plan, rows = pack_of()
    own = plan_of_rule(plan, window, two_way)
    skip_unless(backend, dim, own)
    rule = {"visible_from": start if two_way else None, "window": window}
    q, k, v, grad = draw(1, 8, 4, len(until), dim, torch.bfloat16, "cuda")
    grad = grad * rows[:, None, None]
    exact = [x.float() for x in (q, k, v, grad)]
    expected = gradients(lambda *x: tree_attention(*x, until, own, backend="sdpa", **rule), *exact)
    found = gradients(
        lambda *x: tree_attention(*x, until, own, backend=backend, **rule), q, k, v, grad
    )
    bound = TOLERANCES["gradient_bf16"].value
    assert relative(found[0][:, rows], expected[0][:, rows]) <= bound
    for name, a, b in zip(["dq", "dk", "dv"], found[1:], expected[1:], strict=True):
        assert a.isfinite().all() and relative(a, b) <= bound, name


@each_backend
def test_same_bits_on_request(backend):
    torch.use_deterministic_algorithms(True)
    try:
        until, start, plan, _ = pack_of()
        own = plan_of_rule(plan, 100, True)
        skip_unless(backend, 128, own)
        q, k, v, grad = draw(1, 8, 4, len(until), 128, torch.bfloat16, "cuda")

        def attend(*x):
            return tree_attention(*x, until, own, backend=backend, visible_from=start, window=100)

        first, second = (gradients(attend, q, k, v, grad) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_plan_of_a_rule_waits_for_nothing():
    until, start, plan, _ = pack_of()
    torch.cuda.set_sync_debug_mode("error")
    try:
        own = plan_of_rule(plan, 100, True)
        resolve(own, until, 128, visible_from=start)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert own.path.tolist() == path_of(until.cpu().numpy()).tolist()
    assert own.blocks.rows.device.type == "cuda" and own.cu_seqlens_k.device.type == "cuda"
