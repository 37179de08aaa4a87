"""The mode's ops on a GPU: products of any tile, norms, sums, attention, at sizes where cuBLAS and torch split."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from mmpack import invariant
from mmpack.ops.norms.rms import rms_norm

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
PARTS = [(0, 1), (4, 5), (700, 717), (100, 1124), (1999, 2000)]


def draw(*sizes, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*sizes, device=DEVICE, generator=generator).to(dtype)


@pytest.mark.parametrize("width", [64, 128, 1280, 3584, 3585, 10_001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows(width, dtype):
    x, w, up = (
        draw(2000, width, dtype=dtype),
        draw(width, dtype=dtype),
        draw(2000, width, dtype=dtype, seed=1),
    )

    def norm(a=0, b=None):
        leaves = x[a:b].clone().requires_grad_(), w.clone().requires_grad_()
        out = rms_norm(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, up[a:b])

    out, to_x, to_w = norm()
    wide = x.double().requires_grad_(), w.double().requires_grad_()
    expected = F.rms_norm(wide[0], (width,), wide[1], 1e-6)
    expected.backward(up.double())
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for found, want in ((out, expected), (to_x, wide[0].grad), (to_w, wide[1].grad)):
        assert (found.double() - want).norm() <= bound * want.norm()
    for a, b in PARTS:
        one, to_one, _ = norm(a, b)
        assert torch.equal(one, out[a:b]) and torch.equal(to_one, to_x[a:b])
    with invariant.batch_invariant():
        for call in (
            lambda x: x.sum(-1),
            lambda x: x.float().mean(-1),
            lambda x: x.softmax(-1),
            lambda x: x.float().log_softmax(-1),
            lambda x: x.float().var(-1),
            lambda x: F.layer_norm(x, (width,), w, w),
        ):
            whole = call(x)
            for a, b in PARTS:
                assert torch.equal(call(x[a:b]), whole[a:b]), (a, b)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_parts_of_one_device_as_ranks(ranks):
    """What ranks compute, by hand: each its blocks of K, then the tree over them."""
    from mmpack.invariant.parallel import _summed, tree_sum

    x, w = draw(100, 3584), draw(512, 3584, seed=1)
    whole = invariant.row_parallel(x, w)
    share = 3584 // ranks
    cuts = [slice(i * share, (i + 1) * share) for i in range(ranks)]
    parts = [_summed(x[:, c], w.T[c], 8 // ranks) for c in cuts]
    assert torch.equal(tree_sum(torch.stack(parts)).to(x.dtype), whole)
    columns = [invariant.column_parallel(x, part) for part in w.split(512 // ranks)]
    assert torch.equal(torch.cat(columns, 1), invariant.column_parallel(x, w))


def test_gradient_threads_are_in_the_mode():
    """A backward on a GPU runs in a thread of its own."""
    w = draw(3584, 3584) * 3584**-0.5

    def gradient(rows):
        x = draw(2000, 3584)[rows].requires_grad_()
        (F.linear(F.linear(x, w), w).float() ** 2).sum().backward()
        return x.grad

    with invariant.batch_invariant():
        whole = gradient(slice(None))
        for a, b in itertools.islice(PARTS, 3):
            assert torch.equal(gradient(slice(a, b)), whole[a:b])
