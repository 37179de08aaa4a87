"""Routes replayed on a GPU: bf16 and float32, eager and compiled layers, recomputed ones, beside a CPU's float32."""

import copy

import pytest
import torch
from support.families import mixed_batch
from support.models import logprobs_and_gradients, relative_difference, small_model
from support.routed import EXPERTS

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs, record_routes

pytestmark = pytest.mark.gpu
LAYERS, CHOSEN = 4, 2


@pytest.fixture(scope="module")
def model():
    made = small_model("qwen3_vl_moe")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 3 and "experts" in name:
                parameter.mul_(12)  # another expert is another answer
    return made


@pytest.fixture(scope="module")
def samples():
    """Two branches of one prompt take the same experts through it."""
    out = mixed_batch("qwen3_vl_moe")
    for k, sample in enumerate(out):
        draw = torch.Generator().manual_seed(max(0, k - 1))
        taken = torch.rand(256, LAYERS, EXPERTS, generator=draw).argsort(-1)[: len(sample)]
        sample.routed_experts = mp.compact_routes(taken[..., :CHOSEN].numpy(), EXPERTS)
    return out


def on_gpu(model, dtype):
    return copy.deepcopy(model).to(device="cuda", dtype=dtype)


def test_float32_is_the_cpus(model, samples):
    batch = mp.pack(samples, share_prefix=True)
    with attach(model):
        wanted, gradients = logprobs_and_gradients(model, batch)
    other = on_gpu(model, torch.float32)
    with attach(other), record_routes(other) as taken:
        values, found = logprobs_and_gradients(other, batch.to("cuda"))
    recorded = batch.routed_experts[: batch.num_tokens].long()
    assert torch.equal(taken.rows[: batch.num_tokens].cpu(), recorded)
    assert (values.cpu() - wanted).abs().max() <= 1e-3
    assert relative_difference({n: g.cpu() for n, g in found.items()}, gradients) <= 1e-3


def test_bf16_takes_the_experts_of_the_trace(model, samples):
    """Its own routers take others at some tokens, and then logprobs are off by more."""
    bare = [copy.copy(s) for s in samples]
    for sample in bare:
        sample.routed_experts = None
    with attach(model), record_routes(model) as taken, torch.no_grad():
        batch = mp.pack(bare)
        wanted = packed_logprobs(model, batch)
        for sample, own in zip(samples, batch.unpack_tokens(taken.rows), strict=True):
            sample.routed_experts = mp.compact_routes(own.numpy(), EXPERTS)
    other = on_gpu(model, torch.bfloat16)
    routed = mp.pack(samples).to("cuda")
    with attach(other), record_routes(other) as taken, torch.no_grad():
        values = packed_logprobs(other, routed)
    assert torch.equal(taken.rows, routed.routed_experts.long())
    assert (values.cpu() - wanted).abs().max() <= 0.3


def test_more_than_256_experts_are_int32_on_the_device(samples):
    from transformers import Qwen3VLMoeForConditionalGeneration

    config = copy.deepcopy(small_model("qwen3_vl_moe").config)
    config.text_config.num_experts = 300
    torch.manual_seed(0)
    wide = Qwen3VLMoeForConditionalGeneration(config).to("cuda").eval()
    for sample in samples:
        taken = torch.rand(len(sample), LAYERS, 300).argsort(-1)[..., :CHOSEN]
        sample.routed_experts = mp.compact_routes(taken.numpy(), 300)
    batch = mp.pack(samples).to("cuda")
    assert batch.routed_experts.dtype == torch.int32
    with attach(wide), record_routes(wide) as routes, torch.no_grad():
        packed_logprobs(wide, batch)
    assert torch.equal(routes.rows, batch.routed_experts.long())
