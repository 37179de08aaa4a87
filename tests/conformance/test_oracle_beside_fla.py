"""A model on a CPU where flash-linear-attention is installed, whose kernels take no tensor there."""

import functools

import pytest
import torch
from conformance.oracle import LINEAR_ATTENTION, exact, separate
from support.linear_attention import of_transformers
from support.models import small_model
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs


@pytest.fixture
def kernels(monkeypatch):
    """transformers' functions as they are with FLA and causal-conv1d: a kernel, with the torch function behind it."""
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")

    def kernel(function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

        return run

    for name in LINEAR_ATTENTION:
        monkeypatch.setattr(modeling, name, kernel(of_transformers(name).__wrapped__))
    return modeling


def test_oracles_and_attached_models_call_no_kernel(kernels):
    model = small_model("qwen3_5")
    parts = [[("text", [7, 3]), ("response", [5, k])] for k in range(2)]
    samples = [make_sample(p, f"s{k}", family="qwen3_5") for k, p in enumerate(parts)]
    with torch.no_grad(), pytest.raises(ValueError, match="cpu tensor"):
        packed_logprobs(model, mp.pad(samples))
    held = [getattr(kernels, name) for name in LINEAR_ATTENTION]
    (wanted, _), (apart, _) = exact(model, samples), separate(model, samples)
    assert [getattr(kernels, name) for name in LINEAR_ATTENTION] == held
    for share in (False, True):
        with attach(model), torch.no_grad():
            found = packed_logprobs(model, mp.pack(samples, share_prefix=share))
        assert (found - wanted).abs().max() <= 1e-5
    assert (apart - wanted).abs().max() <= 1e-5
