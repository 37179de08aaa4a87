"""RowStore on a GPU: KV of many layers, bit for bit, at the rows of an index; in CUDA graphs too."""

import numpy as np
import pytest
import torch

from mmpack.cache import PrefixIndex, RowStore
from mmpack.cache.keys import PrefixKeys

pytestmark = pytest.mark.gpu
BLOCK = 16


def same(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(4, 128), (8, 64), (1, 96), (3, 7)], ids=str)
def test_rows_of_an_index_come_back_bit_for_bit(shape, dtype):
    torch.manual_seed(0)
    size = torch.empty(0, dtype=dtype).element_size()
    index = PrefixIndex(
        300 * BLOCK * 6 * int(np.prod(shape)) * size,
        bytes_per_token=6 * int(np.prod(shape)) * size,
        block_size=BLOCK,
    )
    kv, rng = RowStore(index.num_rows), np.random.default_rng(0)
    written = {}
    for _ in range(40):
        path = tuple(rng.integers(0, 3, 20).tolist())
        keys = PrefixKeys(
            tuple(repr(path[: k + 1]).encode() for k in range(len(path))), BLOCK, BLOCK * len(path)
        )
        with index.reserve(keys) as new:
            if len(new.rows):
                raw = torch.randint(-128, 128, (len(new.rows), 6, *shape, size), device="cuda")
                made = raw.to(torch.int8).view(dtype).flatten(-2)  # any bits: NaNs too
                layers = [made[:, k].reshape(len(new.rows), *shape) for k in range(6)]
                kv.write(new.rows, layers)
                for k in range(new.start // BLOCK, new.stop // BLOCK):
                    cut = slice(k * BLOCK - new.start, (k + 1) * BLOCK - new.start)
                    written[keys.blocks[k]] = [x[cut].clone() for x in layers]
        with index.hold(keys) as hit:
            assert hit.tokens == BLOCK * 20
            for k, layer in enumerate(kv.read(hit.rows)):
                assert same(layer, torch.cat([written[key][k] for key in keys.blocks]))
    assert index.stats.evicted > 0 and kv.bytes_per_row == index.bytes_per_token


def test_reads_and_writes_do_not_wait_for_the_gpu():
    """In a CUDA graph, where any wait is an error."""
    kv = RowStore(64)
    rows = torch.randperm(64, device="cuda")[:40].int()
    values = [torch.randn(40, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    kv.write(rows, values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv.write(rows, values)
        found = kv.read(rows)
    for x in values:
        x.normal_()
    graph.replay()
    assert all(map(same, found, values))
