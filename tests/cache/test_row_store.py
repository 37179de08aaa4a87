"""RowStore and scatter_rows: bits go in and come out as they were; wrong rows are named."""

import copy
import pickle
import sys
import threading

import numpy as np
import pytest
import torch

from mmpack.cache import PrefixIndex, RowStore
from mmpack.cache.keys import PrefixKeys
from mmpack.errors import ArgumentError
from mmpack.ops.rows.scatter import scatter_rows

KINDS = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def bits(*shape, dtype):
    """Random bits: NaNs with payloads, infinities and negative zeros among them."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    size = torch.empty(0, dtype=dtype).element_size()
    raw = np.random.default_rng(0).integers(0, 256, (*shape[:-1], shape[-1] * size), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_bits_go_in_and_come_out(dtype):
    store = RowStore(50)
    rows = torch.randperm(50)[:33]
    layers = [bits(33, 2, 4, dtype=dtype), bits(33, 3, dtype=dtype), bits(33, 1, 8, dtype=dtype)]
    store.write(rows, layers)
    assert store.bytes_per_row == sum(x[0].nbytes for x in layers)
    order = torch.randperm(33)
    for kind in (torch.int32, torch.int64):
        for got, put in zip(store.read(rows[order].to(kind)), layers, strict=True):
            assert same(got, put[order])
    for got, put in zip(store.read(rows.numpy()), layers, strict=True):
        assert same(got, put)


def test_the_rows_of_an_index_hold_what_was_written_for_them():
    index = PrefixIndex(6 * 4 * 8, bytes_per_token=8, block_size=4)
    store, rng = RowStore(index.num_rows), np.random.default_rng(0)
    for _ in range(200):
        path = tuple(rng.integers(0, 3, rng.integers(1, 5)).tolist())
        keys = PrefixKeys(
            tuple(repr(path[: k + 1]).encode() for k in range(len(path))), 4, 4 * len(path)
        )
        # what a token's KV is follows from all before it
        tokens = [hash((path[: k // 4 + 1], k)) % 2**31 for k in range(4 * len(path))]
        kv = torch.tensor(tokens, dtype=torch.int64)[:, None]
        with index.hold(keys) as hit:
            if hit.tokens:
                assert torch.equal(store.read(hit.rows)[0], kv[: hit.tokens])
        with index.reserve(keys) as new:
            if len(new.rows):
                store.write(new.rows, [kv[new.start : new.stop]])
    assert store.bytes_per_row == index.bytes_per_token
    assert index.stats.hit_tokens > 500 and index.stats.evicted > 50


@pytest.mark.parametrize(
    ("rows", "tensors", "said"),
    [
        ([0, 8], [torch.zeros(2, 3)], "from 0 to 8, but the store has 8"),
        ([-1], [torch.zeros(1, 3)], "from -1 to -1"),
        ([1, 1], [torch.zeros(2, 3)], "rows repeat"),
        ([1], [torch.zeros(2, 3)], "has shape"),
        ([1], [torch.zeros(1, 3).double()], "torch.float64"),
        ([1], [torch.zeros(1, 3)] * 2, "2 tensors, but the store has 1"),
        ([1], [], "tensors is empty"),
        ([1], torch.zeros(1, 3), "tensors is of type Tensor"),
        ([1.0], [torch.zeros(1, 3)], "float32"),
    ],
)
def test_wrong_arguments_are_named(rows, tensors, said):
    store = RowStore(8)
    store.write(torch.tensor([2]), [torch.ones(1, 3)])
    with pytest.raises(ArgumentError, match=rf"({said}).*Fix: "):
        store.write(torch.tensor(rows), tensors)
    assert torch.equal(store.read(torch.tensor([2]))[0], torch.ones(1, 3))
    with pytest.raises(ArgumentError, match="from 8 to 8"):
        store.read(torch.tensor([8]))
    with pytest.raises(ArgumentError, match="nothing has been written"):
        RowStore(4).read(torch.tensor([0]))


def test_a_first_write_in_inference_mode():
    """An engine's; training goes on without it."""
    store, rows = RowStore(8), torch.tensor([1, 6])
    with torch.inference_mode():
        first = torch.randn(2, 3)
        store.write(rows, [first])
    assert same(store.read(rows)[0], first)
    second = torch.randn(2, 3)
    store.write(rows, [second])
    (read,) = store.read(rows)
    assert same(read, second)
    weight = torch.ones(3, requires_grad=True)
    (read * weight).sum().backward()  # saved for backward
    assert torch.equal(weight.grad, second.sum(0))


def test_values_in_the_memory_of_the_store_are_refused():
    """On a GPU rows would be read while others write them."""
    whole = torch.arange(40.0)
    out, index = whole[:30].view(10, 3), torch.tensor([0, 1, 2])
    inside, transposed = out[1:4], out.T[:, :3].contiguous().T
    expected = out.clone().index_copy_(0, index, transposed.clone())
    for values in (inside, out[7:], whole[21:30].view(3, 3).T, whole[29:38].view(3, 3)):
        with pytest.raises(ArgumentError, match="values share memory with out"):
            scatter_rows(out, index, values)
    scatter_rows(out, index, transposed)
    assert torch.equal(out, expected)
    beside = whole[30:39].view(3, 3)  # of one buffer, and not of the store
    scatter_rows(out, index, beside)
    assert torch.equal(out[:3], beside)


def test_layers_on_several_devices_are_refused_before_a_store_is_made():
    store, rows = RowStore(8), torch.tensor([1, 6])
    with pytest.raises(ArgumentError, match="tensors are on several devices"):
        store.write(rows, [torch.zeros(2, 3), torch.zeros(2, 3, device="meta")])
    assert store.tensors == []
    store.write(rows, [torch.zeros(2, 3)])


def test_first_writes_of_several_threads_are_all_kept():
    """Each made a store of its own before, and the last one stayed."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            store, together = RowStore(32), threading.Barrier(8)

            def write(k, store=store, together=together):
                together.wait()
                store.write(np.arange(4) + 4 * k, [torch.full((4,), float(k))])

            threads = [threading.Thread(target=write, args=(k,)) for k in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found = store.read(np.arange(32))[0]
            assert found.tolist() == np.arange(8.0).repeat(4).tolist()
    finally:
        sys.setswitchinterval(interval)


def test_a_store_is_copied_with_its_rows():
    store = RowStore(4)
    store.write(np.array([2]), [torch.ones(1, 3)])
    for other in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        other.write(np.array([2]), [torch.zeros(1, 3)])
        assert other.read(np.array([2]))[0].tolist() == [[0, 0, 0]]
    assert store.read(np.array([2]))[0].tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("rows", [10**14, 10**30])
def test_a_store_that_no_memory_holds(rows):
    with pytest.raises(ArgumentError, match="Fix: give the PrefixIndex a smaller budget"):
        RowStore(rows).write(np.array([0]), [torch.ones(1, 1024)])
