"""The ops mmpack::scatter_rewards and scatter_scores, in plain torch and as kernels, against loops in numpy."""

import numpy as np
import pytest
import torch
from support.kernels import each_backend, poison_outputs

from mmpack.losses.rewards.placing import table_of
from mmpack.losses.rewards.scores import scatter_op, table_op

LENGTHS = {"few": [3, 0, 700, 1], "short": [5, 0, 33, 1] * 40, "none": [0, 0], "one": [2000]}


def scattered(rewards, lengths, weight, at):
    out = np.zeros(sum(lengths))
    starts = np.cumsum([0, *lengths])
    for r, start, stop in zip(rewards, starts, starts[1:], strict=False):
        if stop > start:
            where = slice(stop - 1, stop) if at == "last" else slice(start, stop)
            out[where] = r * weight / (stop - start if at == "mean" else 1)
    return torch.from_numpy(out)


@each_backend
@pytest.mark.parametrize("at", ["last", "all", "mean"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_places(device, lengths, at, monkeypatch):
    poison_outputs(monkeypatch, device)
    cu = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    for rewards in (torch.randn(len(lengths)), torch.arange(len(lengths))):
        got = scatter_op(rewards.to(device), cu, sum(lengths), 1.5, at)
        want = scattered(rewards.double().numpy(), lengths, 1.5, at)
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-7, atol=0)


@each_backend
def test_opcheck(device):
    cu = torch.tensor([0, 2, 2, 9], dtype=torch.int32, device=device)
    for at in ("last", "mean"):
        torch.library.opcheck(scatter_op, (torch.ones(3, device=device), cu, 9, 1.0, at))
    table = table_of(np.array([0, 1]), np.array([0, 2]), np.array([5, 9]), 9)
    columns = (
        np.array([1.0, 2.0]),
        table.index,
        np.ones(len(table.index)),
        table.offsets,
        table.edges,
    )
    moved = [torch.from_numpy(x).to(device) for x in columns]
    torch.library.opcheck(table_op, (*moved, 9, table.most))


def ranges(rng, scores, count):
    """Random ranges of tokens, sorted by score; a score may have none or several."""
    owner = np.sort(rng.integers(0, scores, 2 * scores))
    bounds = np.sort(rng.integers(0, count + 1, (2, len(owner))), axis=0)
    keep = bounds[0] < bounds[1]
    return owner[keep], bounds[0][keep], bounds[1][keep]


def launched(device, table, values, factors, count):
    columns = (values, table.index, factors, table.offsets, table.edges)
    moved = [None if x is None else torch.from_numpy(x).to(device) for x in columns]
    return table_op(*moved, count, table.most)


@each_backend
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize(("scores", "count"), [(1, 1), (3, 700), (40, 300), (0, 5), (9, 0)])
def test_sums(device, scores, count, weighed, monkeypatch):
    poison_outputs(monkeypatch, device)
    rng = np.random.default_rng(scores)
    owner, start, stop = ranges(rng, scores, count) if scores else (np.zeros(0, int),) * 3
    table = table_of(owner, start, stop, count)
    values = rng.normal(size=scores) * 10.0 ** rng.integers(-12, 12, scores)
    factors = rng.normal(size=len(table.index)) if weighed else None
    wanted = np.zeros(count)
    for piece in range(len(table.edges) - 1):
        for t in range(table.offsets[piece], table.offsets[piece + 1]):
            term = values[table.index[t]] * (factors[t] if weighed else 1.0)
            wanted[table.edges[piece] : table.edges[piece + 1]] += term
    got = launched(device, table, values, factors, count)
    assert got.dtype == torch.float32
    assert np.array_equal(got.cpu().numpy(), wanted.astype(np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[32] * 4096, [16384, 1, 20000]])
def test_large_and_captured(lengths):
    cu = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    rewards = torch.randn(len(lengths), device="cuda")
    scatter_op(rewards, cu, sum(lengths), 1.0, "mean")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = scatter_op(rewards, cu, sum(lengths), 1.0, "mean")
    rewards.normal_()
    graph.replay()
    want = scattered(rewards.cpu().double().numpy(), lengths, 1.0, "mean")
    torch.testing.assert_close(captured.cpu().double(), want, rtol=1e-7, atol=0)


@pytest.mark.gpu
def test_a_million_tokens_in_ten_thousand_turns():
    turns, count = 10_000, 1_000_000
    rng = np.random.default_rng(0)
    edges = np.concatenate(
        [[0], np.sort(rng.choice(count - 1, turns - 1, replace=False)) + 1, [count]]
    )
    owner = np.concatenate([np.arange(turns), [turns]])
    start, stop = np.append(edges[:-1], 0), np.append(edges[1:], count)
    values = rng.normal(size=turns + 1)
    got = launched("cuda", table_of(owner, start, stop, count), values, None, count)
    wanted = np.repeat(values[:-1] + values[-1], np.diff(edges)).astype(np.float32)
    assert np.array_equal(got.cpu().numpy(), wanted)
