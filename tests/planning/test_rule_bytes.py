"""Terms of the delta rule against counted bytes: in plain torch, and what flash-linear-attention makes room for."""

import numpy as np
import pytest
import torch
from support.live_bytes import LiveBytes

from mmpack.ops.linear_attention import plan_segments, segment_delta_rule, waves
from mmpack.planning.layer_bytes import Decoder, Net, chunks_of, linear_layer

PLAIN, SHARED = [-1, -1, -1], [-1, 0, 0]
NETS = [Net(2, 8, 32, 64), Net(4, 4, 64, 32)]
ROWS = 1024


def counted(net, parents, dtype, run):
    """Bytes kept, and held more than that in the backward, of the rule on queries, keys and values in one tensor."""
    plan = plan_segments(np.array([0, 700, 860, ROWS]), np.array(parents))
    keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
    torch.manual_seed(0)
    mixed = torch.randn(ROWS, 2 * keys + values, dtype=dtype, requires_grad=True)
    g = -torch.rand(ROWS, net.value_heads)
    beta = torch.rand(ROWS, net.value_heads, dtype=dtype, requires_grad=True)
    mixed.grad, beta.grad = torch.zeros_like(mixed), torch.zeros_like(beta)
    plan.chunk_plan()
    with LiveBytes([mixed, g, beta, mixed.grad, beta.grad]) as live:
        q, k, v = mixed.split([keys, keys, values], -1)
        shapes = [(net.key_heads, net.key_dim)] * 2 + [(net.value_heads, net.value_dim)]
        q, k, v = (x.reshape(ROWS, *s) for x, s in zip((q, k, v), shapes, strict=True))
        out = run(q, k, v, g.requires_grad_(), beta, plan)
        before = live.peak = live.now
        out.backward(torch.ones_like(out))
    return before - out.untyped_storage().nbytes(), live.peak - before, plan


def said(net, rule, e, plan):
    """The same by the terms: of a layer with the rule, less one whose rule is of no size."""
    size = Decoder(e, 64, 64, 1, 64, 64, normed=True, gated=True)
    layer = linear_layer(size, net, rule)
    keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
    mlp, _, _ = size.mlp
    around = 2 * size.norm + (12 + 3 * e) * values + 20 * net.value_heads + mlp
    around += e * (2 * keys + values)  # the convolution's input
    around += e * (2 * keys + values) if rule == "torch" else 0  # and its output
    chunks = int(chunks_of(np.diff(plan.offsets)).sum())
    branches = int((plan.parents >= 0).sum())
    kept = layer.activations(ROWS, ROWS, chunks, branches) - ROWS * around
    before = mlp + size.norm + (12 + 3 * e) * values + 4 * net.value_heads
    backward = ROWS * (layer.rule.backward + before - 2 * e * size.width)
    return kept, backward + chunks * layer.rule.chunk_backward


def check(net, rule, dtype, run):
    """A shared pack runs wave by wave, and may hold less at a time than the terms say."""
    for parents in (PLAIN, SHARED):
        kept, backward, plan = counted(net, parents, dtype, run)
        kept_said, backward_said = said(net, rule, dtype.itemsize, plan)
        assert 0.95 <= kept_said / kept <= 1.05
        assert backward_said / backward >= 0.95
        assert backward_said / backward <= 1.1 or parents is SHARED


@pytest.mark.parametrize("net", NETS, ids=str)
def test_in_plain_torch(net):
    check(net, "torch", torch.float32, segment_delta_rule)


@pytest.mark.parametrize("net", NETS, ids=str)
def test_what_fla_makes_room_for(net, monkeypatch):
    """Its kernels are left out: they write into what its Python makes, and none makes room by itself."""
    pytest.importorskip("fla")
    jit = pytest.importorskip("triton.runtime.jit")
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    for kind in (jit.JITFunction, autotuner.Autotuner, autotuner.Heuristics):
        monkeypatch.setattr(kind, "__getitem__", lambda self, grid: lambda *args, **kwargs: None)

    def run(q, k, v, g, beta, plan):
        return waves.delta_rule(q, k, v, g, beta, plan, q.shape[-1] ** -0.5, True)

    check(net, "fla", torch.bfloat16, run)
