"""Half precision on a CUDA device never goes to cuDNN's attention; everything else is torch's choice."""

from types import SimpleNamespace

import pytest
import torch

from mmpack.ops.attention import without_cudnn


@pytest.mark.parametrize(
    ("device", "dtype", "allowed"),
    [
        ("cuda", torch.bfloat16, False),
        ("cuda", torch.float16, False),
        ("cuda", torch.float32, True),
        ("cpu", torch.bfloat16, True),
    ],
)
def test_cudnn_is_left_out(monkeypatch, device, dtype, allowed):
    def found(query, key, value, **options):
        return torch.backends.cuda.cudnn_sdp_enabled(), options

    monkeypatch.setattr(without_cudnn, "scaled_dot_product_attention", found)
    query = SimpleNamespace(device=torch.device(device), dtype=dtype)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    assert without_cudnn.attend(query, None, None, scale=2.0) == (allowed, {"scale": 2.0})
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu(compiled):
    q, k, v = (
        torch.randn(2, 4, 704, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    attend = without_cudnn.attend
    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    mask = torch.ones(704, 704, device="cuda", dtype=torch.bool).tril()
    for options in ({}, {"attn_mask": mask}, {"is_causal": True}):
        out = run(q, k, v, **options)
        seen, stack = set(), [out.grad_fn]
        while stack:
            node = stack.pop()
            if node is not None and node not in seen:
                seen.add(node)
                stack += [n for n, _ in node.next_functions]
        assert not any("Cudnn" in type(node).__name__ for node in seen)
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))
