"""Every family on a GPU: its layouts in float32 and bf16, by each kernel that its layers need, beside a CPU's float32.

Linear attention runs by our chunks in float32, in bf16 by FLA where it runs.
"""

import copy

import pytest
import torch
from support.families import LAYOUTS, mixed_batch
from support.float64 import separate, torch_functions
from support.models import logprobs_and_gradients, relative_difference, small_model

import mmpack as mp
from mmpack.adapters.transformers import attach
from mmpack.errors import BackendError
from mmpack.families import FAMILIES
from mmpack.ops.attention import TREE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("untuned")]
WAYS = ("packed, rounded up", "shared", "left")
# full attention; windows and pictures that see both ways; heads of two sizes
BY_NAME = {name: tuple(TREE.names) for name in ("qwen2_5_vl", "gemma3", "gemma4", "kimi_k25")}
HALF = [(n, backend) for n in FAMILIES for backend in ("auto", *BY_NAME.get(n, ()))]


@pytest.fixture(scope="module")
def made():
    """A model on the CPU, its samples, their values and gradients there, in float32 and in bf16."""
    kept = {}

    def get(name):
        if name not in kept:
            kept.clear()  # one at a time
            model, samples = small_model(name), mixed_batch(name)
            low = copy.deepcopy(model).bfloat16()
            with torch_functions(low):
                kept[name] = model, samples, separate(model, samples), separate(low, samples)
        return kept[name]

    return get


@pytest.mark.parametrize("layout", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_float32(made, name, layout, no_tf32):
    model, samples, (wanted, gradients), _ = made(name)
    own = copy.deepcopy(model).cuda()
    with attach(own):
        values, found = logprobs_and_gradients(own, LAYOUTS[layout](samples).to("cuda"))
    assert (values.cpu() - wanted).abs().max() <= 1e-4
    assert relative_difference({n: g.cpu() for n, g in found.items()}, gradients) <= 1e-4


@pytest.mark.parametrize("layout", WAYS)
@pytest.mark.parametrize(("name", "backend"), HALF)
def test_bf16_is_about_as_near_as_a_cpus_separate_forwards(
    made, name, backend, layout, monkeypatch
):
    model, samples, (wanted, gradients), (apart, rounded) = made(name)
    monkeypatch.setenv("MMPACK_ATTENTION", backend)
    own = copy.deepcopy(model).bfloat16().cuda()
    try:
        with attach(own):
            values, found = logprobs_and_gradients(own, LAYOUTS[layout](samples).to("cuda"))
    except BackendError as error:
        if backend == "auto" and not FAMILIES[name].linear_attention:
            raise
        pytest.skip(str(error))
    off, bound = ((x.float().cpu() - wanted).square().mean() for x in (values, apart))
    assert off <= 3**2 * bound
    off, bound = (
        relative_difference({n: g.float().cpu() for n, g in x.items()}, gradients)
        for x in (found, rounded)
    )
    assert off <= 3 * bound


@pytest.mark.parametrize("make", [mp.pack, mp.pad])
def test_a_batch_moves_as_one(make):
    samples = mixed_batch("qwen2_5_vl")
    batch = make(samples, token_columns={"x": [range(len(s)) for s in samples]}).to("cuda")
    on_host = [
        name
        for name, value in vars(batch).items()
        for x in (value.values() if isinstance(value, dict) else [value])
        if torch.is_tensor(x) and not x.is_cuda
    ]
    assert on_host == [] and batch.pixel_values.is_cuda and batch.device.type == "cuda"
