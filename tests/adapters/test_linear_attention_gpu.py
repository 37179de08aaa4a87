"""Hybrids on a GPU: float32 by our chunks, bf16 by FLA where it runs, in each layout, beside a CPU's float32."""

import copy

import pytest
import torch
from support.families import LAYOUTS, mixed_batch
from support.float64 import separate, torch_functions
from support.models import logprobs_and_gradients, relative_difference, small_model

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.errors import BackendError
from mmpack.ops.linear_attention.choose import choose

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("untuned"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = ["qwen3_5", "qwen3_5_moe", "minicpmv4_6"]
WAYS = ("packed, rounded up", "shared", "left")


@pytest.fixture(scope="module", params=FAMILIES)
def made(request):
    """A model on the CPU, its samples, their values and gradients there."""
    model, samples = small_model(request.param), mixed_batch(request.param)
    return model, samples, *separate(model, samples)


@pytest.mark.parametrize("layout", WAYS)
def test_float32(made, layout, no_tf32):
    model, samples, wanted, gradients = made
    own = copy.deepcopy(model).cuda()
    with attach(own):
        values, found = logprobs_and_gradients(own, LAYOUTS[layout](samples).to("cuda"))
    assert (values.cpu() - wanted).abs().max() <= 1e-4
    assert relative_difference({n: g.cpu() for n, g in found.items()}, gradients) <= 1e-4


@pytest.mark.parametrize("layout", WAYS)
def test_bf16_is_about_as_near_as_a_cpus_separate_forwards(made, layout):
    model, samples, wanted, gradients = made
    head_dim = model.config.get_text_config().linear_key_head_dim
    try:
        choose(torch.device("cuda"), torch.bfloat16, head_dim)
    except BackendError as error:
        pytest.skip(str(error))
    low = copy.deepcopy(model).bfloat16()
    with torch.no_grad(), torch_functions(low):
        apart = torch.cat([packed_logprobs(low, mp.pad([s])) for s in samples])
    low = low.cuda()
    with attach(low):
        values, found = logprobs_and_gradients(low, LAYOUTS[layout](samples).to("cuda"))
    off, bound = ((x.float().cpu() - wanted).square().mean() for x in (values, apart))
    assert off <= 3**2 * bound
    assert relative_difference({n: g.float().cpu() for n, g in found.items()}, gradients) <= 0.1
