"""The kernel of mmpack::scatter_scores against a loop in numpy, token by token: the same bits."""

import numpy as np
import pytest
import torch
from support.kernels import poison_outputs

from mmpack.losses.rewards import SCATTER_SCORES
from mmpack.losses.rewards.placing import table_of
from mmpack.losses.rewards.scatter_op import table_op
from mmpack.ops.backend import choose

pytestmark = pytest.mark.kernel


@pytest.fixture
def device(monkeypatch):
    found = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setenv("MMPACK_BACKEND", "triton")
    assert choose(SCATTER_SCORES, found) == "triton"
    return found


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
    plain = np.zeros(count)  # the table itself, by the ranges that it was made of
    for k, a, b in zip(owner, start, stop, strict=True):
        plain[a:b] += values[k]
    if not weighed:
        assert np.array_equal(got.cpu().numpy(), plain.astype(np.float32))


def test_opcheck(device):
    table = table_of(np.array([0, 1]), np.array([0, 2]), np.array([5, 9]), 9)
    columns = (np.array([1.0, 2.0]), table.index, np.ones(3), table.offsets, table.edges)
    moved = [torch.from_numpy(x).to(device) for x in columns]
    torch.library.opcheck(table_op, (*moved, 9, table.most))


@pytest.mark.gpu
def test_a_million_tokens_in_ten_thousand_turns(device):
    turns, count = 10_000, 1_000_000
    rng = np.random.default_rng(0)
    edges = np.concatenate(
        [[0], np.sort(rng.choice(count - 1, turns - 1, replace=False)) + 1, [count]]
    )
    owner = np.concatenate([np.arange(turns), [turns]])
    start, stop = np.append(edges[:-1], 0), np.append(edges[1:], count)
    values = rng.normal(size=turns + 1)
    got = launched(device, table_of(owner, start, stop, count), values, None, count)
    wanted = np.repeat(values[:-1] + values[-1], np.diff(edges)).astype(np.float32)
    assert np.array_equal(got.cpu().numpy(), wanted)
