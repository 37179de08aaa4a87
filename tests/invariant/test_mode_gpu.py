"""The mode's ops on a GPU: products of any tile, norms, sums, attention, at sizes where cuBLAS and torch split."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from mmpack import invariant
from mmpack.ops.norms.rms import rms_norm
from mmpack.ops.products.product import product
from mmpack.ops.products.tiles import all_tiles

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
PARTS = [(0, 1), (4, 5), (700, 717), (100, 1124), (1999, 2000)]
SHAPES = [(3584, 4608), (18944, 3584), (1280, 3840), (200, 72), (57, 33)]


def draw(*sizes, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*sizes, device=DEVICE, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_products(depth, columns, dtype, no_tf32):
    x, w, bias = (
        draw(2000, depth, dtype=dtype),
        draw(columns, depth, dtype=dtype),
        draw(columns, dtype=dtype),
    )
    w *= depth**-0.5
    whole = product(x, w.T, bias)
    expected = x.double() @ w.double().T + bias.double()
    error = (whole.double() - expected).norm() / expected.norm()
    # of float32 the error of a sum of K terms in order, as a random walk
    own = 2**-24 * depth**0.5
    assert (
        error <= {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: max(own, 1e-6)}[dtype]
    )
    for a, b in PARTS:
        assert torch.equal(product(x[a:b], w.T, bias), whole[a:b]), (a, b)
        assert torch.equal(product(x[a:b].clone(), w.T, bias), whole[a:b]), (a, b)
    back = draw(2000, columns, dtype=dtype, seed=1)
    to_x = product(back, w)
    assert (to_x.double() - back.double() @ w.double()).norm() <= 4e-3 * to_x.double().norm()
    for a, b in PARTS:
        assert torch.equal(product(back[a:b], w), to_x[a:b]), (a, b)
    to_w = product(back.T, x)
    expected = back.double().T @ x.double()
    assert (to_w.double() - expected).norm() <= 4e-3 * expected.norm()


@pytest.mark.parametrize(("depth", "columns"), SHAPES)
@pytest.mark.parametrize("rows", [1, 17, 64, 65, 1024, 5000])
def test_every_tile_gives_the_same_bits(depth, columns, rows):
    from mmpack.ops.products import triton as kernels

    x, w = draw(rows, depth), draw(columns, depth, seed=1)
    made = [kernels.product(x, w.T, None, torch.float32, t) for t in all_tiles(x.device)]
    assert all(torch.equal(made[0], other) for other in made[1:])


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


@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention(size, dtype, no_tf32):
    """Against float64, and each sequence by itself: values and gradients."""
    import numpy as np

    from mmpack.ops.attention import plan_attention, tree_attention

    lengths = [300, 1, 64, 700, 129]
    total, heads, kv_heads = sum(lengths), 4, 2
    ends = np.cumsum(lengths)
    q = draw(1, total, heads, size, dtype=dtype).transpose(1, 2)
    k, v = (draw(1, total, kv_heads, size, dtype=dtype, seed=s).transpose(1, 2) for s in (1, 2))
    up = draw(1, total, heads, size, dtype=dtype, seed=3)

    def run(rows, until, backend="fixed_blocks", wide=False):
        plan = plan_attention(until, np.zeros(len(until), bool))
        seen = torch.from_numpy(until.astype(np.int32)).to(DEVICE)
        leaves = [x[:, :, rows].double() if wide else x[:, :, rows] for x in (q, k, v)]
        leaves = [x.clone().requires_grad_() for x in leaves]
        out = tree_attention(*leaves, seen, plan, backend=backend)
        grads = torch.autograd.grad(out, leaves, up[:, rows].to(out.dtype))
        return [out.detach()[0], *(g[0].transpose(0, 1) for g in grads)]

    until = np.repeat(ends, lengths)
    everything = slice(0, total)
    packed = run(everything, until)
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for found, want in zip(packed, run(everything, until, "sdpa", wide=True), strict=True):
        assert (found.double() - want).norm() <= bound * want.norm()
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        found = run(slice(start, stop), np.full(stop - start, stop - start))
        for one, whole in zip(found, packed, strict=True):
            assert torch.equal(one, whole[start:stop])
    # one prompt, branches that start anywhere in a block
    branches = [1, 100, 700]
    ends = 300 + np.cumsum(branches)
    shared = run(slice(0, ends[-1]), np.append(np.full(300, ends[-1]), np.repeat(ends, branches)))
    for count, stop in zip(branches, ends, strict=True):
        rows = torch.cat([torch.arange(300), torch.arange(stop - count, stop)]).to(DEVICE)
        found = run(rows, np.full(len(rows), len(rows)))
        assert torch.equal(found[0], shared[0][rows])
        assert torch.equal(found[1][300:], shared[1][rows][300:])


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
