"""Every family on a GPU: its layouts in float32 and bf16, by each kernel that its layers need, beside a CPU's float32.

Families with linear attention: test_linear_attention_gpu.py.
"""

import copy

import pytest
from support.families import LAYOUTS, mixed_batch
from support.float64 import separate
from support.models import logprobs_and_gradients, relative_difference, small_model

from mmpack.adapters.transformers import attach
from mmpack.errors import BackendError
from mmpack.families import FAMILIES
from mmpack.ops.attention import TREE

pytestmark = pytest.mark.gpu
WAYS = ("packed, rounded up", "shared", "left")
NAMES = [name for name, family in FAMILIES.items() if not family.linear_attention]
# windows and pictures that see both ways; heads of two sizes
BY_NAME = {name: tuple(TREE.names) for name in ("gemma3", "gemma4", "kimi_k25")}
HALF = [(n, backend) for n in NAMES for backend in ("auto", *BY_NAME.get(n, ()))]


@pytest.fixture(scope="module")
def made():
    """A model on the CPU, its samples, their values and gradients there, in float32 and in bf16."""
    kept = {}

    def get(name):
        if name not in kept:
            kept.clear()  # one at a time
            model, samples = small_model(name), mixed_batch(name)
            low = copy.deepcopy(model).bfloat16()
            kept[name] = model, samples, separate(model, samples), separate(low, samples)
        return kept[name]

    return get


@pytest.mark.parametrize("layout", WAYS)
@pytest.mark.parametrize("name", NAMES)
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
        if backend == "auto":
            raise
        pytest.skip(str(error))
    off, bound = ((x.float().cpu() - wanted).square().mean() for x in (values, apart))
    assert off <= 3**2 * bound
    off, bound = (
        relative_difference({n: g.float().cpu() for n, g in x.items()}, gradients)
        for x in (found, rounded)
    )
    assert off <= 3 * bound
