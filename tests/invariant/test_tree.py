"""Products over ranks and their tree: the same bits on 1, 2 and 4 processes (gloo), forward and backward."""

import pytest
import torch
from support.ranks import spawned
from torch import distributed

from mmpack import invariant
from mmpack.errors import ArgumentError
from mmpack.invariant.parallel import tree_sum

K, N, INNER = 64, 40, 96


def draw(*sizes, seed):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def mlp(rank, ranks, group, dtype):
    """Two layers, the first split by columns, the second by rows, as Megatron does: value and every gradient."""
    x, up = draw(3, 11, K, seed=0), draw(3, 11, N, seed=1)
    first, second = draw(INNER, K, seed=2) / 8, draw(N, INNER, seed=3) / 8
    biases = draw(INNER, seed=4), draw(N, seed=5)
    own = slice(rank * INNER // ranks, (rank + 1) * INNER // ranks)
    leaves = [x, first[own], second[:, own], biases[0][own], biases[1]]
    leaves = [t.to(dtype).clone().requires_grad_() for t in leaves]
    inner = invariant.column_parallel(leaves[0], leaves[1], leaves[3], group=group)
    out = invariant.row_parallel(inner.relu(), leaves[2], leaves[4], group=group)
    out.backward(up.to(dtype))
    return [out.detach(), *(t.grad for t in leaves)], own


def run(rank, _, folder):
    """Groups of two and of four of these processes, whose imports take longest."""
    for ranks in (2, 4):
        group = distributed.new_group(list(range(ranks)))
        if rank < ranks:
            check(rank, ranks, group, folder)
        if rank < ranks == 2:
            with pytest.raises(ArgumentError, match="parts is 1, with 2 ranks"):
                invariant.row_parallel(torch.ones(1, 4), torch.ones(1, 4), group=group, parts=1)


def check(rank, ranks, group, folder):
    for dtype in (torch.float32, torch.bfloat16):
        (out, to_x, to_first, to_second, to_bias, to_last), own = mlp(rank, ranks, group, dtype)
        wanted = torch.load(f"{folder}/{dtype}.pt")
        assert torch.equal(out, wanted[0]) and torch.equal(to_x, wanted[1])
        off = [(to_first - wanted[2][own]), (to_second - wanted[3][:, own])]
        off += [to_bias - wanted[4][own], to_last - wanted[5]]
        # sums over the same rows in the same order, of a matrix with fewer columns
        assert all(x.abs().max() <= 1e-5 * (1 if dtype == torch.float32 else 1e3) for x in off)
    parts = draw(4, 100, seed=6)
    share = parts.view(ranks, -1, 100)[rank]
    found = invariant.tree_all_reduce(tree_sum(share), group)
    assert torch.equal(found, tree_sum(parts))


def test_ranks_give_the_bits_of_one_process(tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        torch.save(mlp(0, 1, None, dtype)[0], tmp_path / f"{dtype}.pt")
    spawned(run, 4, tmp_path, str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_process_computes_torchs_layers(dtype):
    (found, _), tensors = mlp(0, 1, None, dtype), []
    x, up = draw(3, 11, K, seed=0), draw(3, 11, N, seed=1)
    tensors = [x, draw(INNER, K, seed=2) / 8, draw(N, INNER, seed=3) / 8]
    tensors += [draw(INNER, seed=4), draw(N, seed=5)]
    wide = [t.to(dtype).double().requires_grad_() for t in tensors]
    inner = torch.nn.functional.linear(wide[0], wide[1], wide[3]).relu()
    out = torch.nn.functional.linear(inner, wide[2], wide[4])
    out.backward(up.to(dtype).double())
    bound = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}[dtype]
    for got, want in zip(found, [out, *(t.grad for t in wide)], strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).norm() <= bound * want.norm()


def test_rows_do_not_depend_on_the_batch():
    x, w = draw(131, K, seed=0), draw(N, K, seed=1)
    whole, columns = invariant.row_parallel(x, w), invariant.column_parallel(x, w)
    for a, b in ((0, 1), (7, 24), (60, 131)):
        assert torch.equal(invariant.row_parallel(x[a:b], w), whole[a:b])
        assert torch.equal(invariant.column_parallel(x[a:b], w), columns[a:b])


def test_the_tree_adds_neighbours_first():
    big = torch.tensor([1e8, 1.0, -1e8, 1.0])
    assert tree_sum(big).item() == 0.0  # (1e8 + 1) + (-1e8 + 1) in float32
    assert tree_sum(big.double()).item() == 2.0
    assert torch.equal(invariant.tree_all_reduce(big), big)


X, WEIGHT = torch.ones(2, 8), torch.ones(4, 8)
F8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tree_sum(torch.ones(3, 2)), "a power of two of parts"),
        (lambda: tree_sum([1.0]), "parts is of type list"),
        (lambda: invariant.tree_all_reduce(X, group="world"), "group is of type str"),
        (lambda: invariant.row_parallel(X, WEIGHT, group=1), "group is of type int"),
        (lambda: invariant.row_parallel(X, WEIGHT.T), "of this rank"),
        (lambda: invariant.row_parallel(X, WEIGHT.double()), "one floating dtype"),
        (
            lambda: invariant.row_parallel(X.to(F8), WEIGHT.to(F8)),
            "float8_e4m3fn on cpu. Fix: use one floating dtype of 16 bits",
        ),
        (lambda: invariant.row_parallel(X, WEIGHT, torch.ones(4).half()), "torch.float16 on cpu"),
        (lambda: invariant.row_parallel(X, WEIGHT, torch.ones(3)), "bias has shape"),
        (lambda: invariant.row_parallel(X, WEIGHT, parts=3), "parts is 3"),
        (lambda: invariant.row_parallel(X, WEIGHT, parts=0), "parts is 0"),
        (lambda: invariant.column_parallel(X, WEIGHT), "4 to split"),
        (lambda: invariant.column_parallel(None, WEIGHT), "x is None"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
