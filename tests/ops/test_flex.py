"""FlexAttention's graphs: torch's limit of eight is none, past which it would hold all scores."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention

from mmpack.ops.attention import flex, plan_sequences


@pytest.mark.filterwarnings("error")  # of an attention that holds all scores
def test_more_graphs_than_torch_s_limit(monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(flex, "_compiled", torch.compile(flex_attention, backend=counter))
    mask = flex.block_mask_of_sequences(plan_sequences([64] * 3))
    kinds = [(heads, dim) for dim in (16, 32) for heads in range(2, 8)]
    for heads, dim in kinds:
        q = torch.randn(1, heads, 192, dim)
        flex.flex(q, q, q, mask, None, flash=False)
    assert counter.frame_count == len(kinds)
    torch._dynamo.reset()
