"""Ops whose blocks wait for each other: on several streams at once, captured before anything else, in graph trees."""

import pytest
import torch
from support.process import run_python

import mmpack as mp

pytestmark = [pytest.mark.kernel, pytest.mark.gpu]


def batch(seed, count=65536):
    g = torch.Generator().manual_seed(seed)
    cu = torch.tensor([0, count // 4, count]).int()
    columns = torch.randn(count, generator=g), torch.randn(2, generator=g), cu
    return [x.cuda() for x in (*columns, columns[0] + 0.1)]


def step(lp, adv, cu, old):
    out = mp.policy_loss(lp, adv, cu, old)
    return out.loss, *out.metrics.values()


def test_streams_at_once(device):
    batches = [batch(seed) for seed in range(2)]
    want = [step(*b) for b in batches]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in batches]
    got = []
    for _ in range(200):
        for stream, columns in zip(streams, batches, strict=True):
            with torch.cuda.stream(stream):
                got.append(step(*columns))
    torch.cuda.synchronize()
    for i, values in enumerate(got):
        assert all(map(torch.equal, values, want[i % 2]))


def test_graphs_at_once(device):
    batches = [batch(seed) for seed in range(2)]
    want = [step(*b) for b in batches]
    graphs, outputs = [torch.cuda.CUDAGraph() for _ in batches], []
    for graph, columns in zip(graphs, batches, strict=True):
        with torch.cuda.graph(graph):
            outputs.append(step(*columns))
    streams = [torch.cuda.Stream() for _ in batches]
    for _ in range(50):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        step(*batches[0])
    torch.cuda.synchronize()
    for got, expected in zip(outputs, want, strict=True):
        assert all(map(torch.equal, got, expected))


CAPTURED = """
import torch, mmpack as mp
g = torch.Generator().manual_seed(0)
lp, old = (torch.randn(5000, generator=g).cuda() for _ in range(2))
adv, cu = torch.ones(2).cuda(), torch.tensor([0, 1000, 5000]).int().cuda()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = mp.policy_loss(lp, adv, cu, old).loss
for _ in range(3):
    graph.replay()
    assert torch.equal(captured, mp.policy_loss(lp, adv, cu, old).loss)
"""


def test_capture_as_the_very_first_call(device):
    result = run_python(CAPTURED)
    assert result.returncode == 0, result.stderr


def test_graph_trees(device):
    result = run_python(TREES)
    assert result.returncode == 0, result.stderr


TREES = """
import torch, mmpack as mp
g = torch.Generator().manual_seed(0)
lp, old = (torch.randn(5000, generator=g).cuda() for _ in range(2))
adv, cu = torch.ones(2).cuda(), torch.tensor([0, 1000, 5000]).int().cuda()

def step(lp):
    out = mp.policy_loss(lp * 1.5, adv, cu, old)
    return out.loss, out.metrics["ess"]

fast = torch.compile(step, fullgraph=True, mode="reduce-overhead")
for turn in range(5):
    torch.compiler.cudagraph_mark_step_begin()
    eager, leaf = (lp + turn).requires_grad_(), (lp + turn).requires_grad_()
    want, got = step(eager), fast(leaf)
    assert torch.equal(want[0], got[0]) and torch.equal(want[1], got[1])
    want[0].backward()
    got[0].backward()
    assert torch.equal(eager.grad, leaf.grad)
"""
