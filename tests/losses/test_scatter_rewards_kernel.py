"""The kernels of mmpack::scatter_rewards against numpy, sample by sample."""

import numpy as np
import pytest
import torch
from support.kernels import poison_outputs

from mmpack.losses.rewards.scatter_op import scatter_op

pytestmark = pytest.mark.kernel

LENGTHS = {"few": [3, 0, 700, 1], "short": [5, 0, 33, 1] * 40, "none": [0, 0], "one": [2000]}


def scattered(rewards, lengths, weight, at):
    out = np.zeros(sum(lengths))
    starts = np.cumsum([0, *lengths])
    for r, start, stop in zip(rewards, starts, starts[1:], strict=False):
        if stop > start:
            where = slice(stop - 1, stop) if at == "last" else slice(start, stop)
            out[where] = r * weight / (stop - start if at == "mean" else 1)
    return torch.from_numpy(out)


@pytest.mark.parametrize("at", ["last", "all", "mean"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_places(device, lengths, at, monkeypatch):
    poison_outputs(monkeypatch, device)
    cu = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    for rewards in (torch.randn(len(lengths)), torch.arange(len(lengths))):
        got = scatter_op(rewards.to(device), cu, sum(lengths), 1.5, at)
        want = scattered(rewards.double().numpy(), lengths, 1.5, at)
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-7, atol=0)


def test_opcheck(device):
    cu = torch.tensor([0, 2, 2, 9], dtype=torch.int32, device=device)
    for at in ("last", "mean"):
        torch.library.opcheck(scatter_op, (torch.ones(3, device=device), cu, 9, 1.0, at))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[32] * 4096, [16384, 1, 20000]])
def test_large_and_captured(device, lengths):
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
