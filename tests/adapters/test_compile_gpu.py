"""Compiled layers on a GPU: bf16 against eager ones, both against float32; graphs that packs make; caches on disk."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from support.models import logprobs_and_gradients, relative_difference, small_model, with_pixels
from support.samples import make_sample
from torch._dynamo.utils import counters

import mmpack as mp
from mmpack.adapters.transformers import attach, compile_layers, packed_logprobs
from mmpack.contracts import TOLERANCES
from mmpack.ops.attention.choose import TREE

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def pack(size, share, family="qwen2_5_vl"):
    samples = []
    for p in range(1 + size % 3):
        image = (1, 4, 4) if family == "internvl" else (1, 8, 8 + 2 * size)
        prompt = [("text", range(150 + size)), ("image", image, f"{p}{size}"), ("text", [7])]
        for n in range(2 + size % 2):
            answer = ("response", [100 * n + i for i in range(40 + 9 * size + n)])
            samples.append(make_sample([*prompt, answer], f"{p}.{n}", family=family))
    return mp.pack(with_pixels(samples), share_prefix=share).to("cuda")


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True, params=["varlen", "flash_attn_4"])
def backend(request, monkeypatch):
    reason = TREE.explain(torch.device("cuda"), torch.bfloat16, 32)[request.param]
    if reason is not None:
        pytest.skip(reason)
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setenv("MMPACK_ATTENTION", request.param)
    return request.param


@pytest.mark.parametrize(("family", "checkpointing"), [("qwen2_5_vl", True), ("qwen3_vl", False)])
def test_values_gradients_and_graphs(family, checkpointing, monkeypatch, backend):
    exact = small_model(family).cuda().train()
    eager = copy.deepcopy(exact).to(torch.bfloat16)
    model = copy.deepcopy(eager)
    compile_layers(model)
    for m in (eager, model):
        if checkpointing:
            m.gradient_checkpointing_enable({"use_reentrant": False})
    made = []
    for size, share in [(0, True), (1, True), (2, False), (4, True)]:
        batch = pack(size, share, family)
        with monkeypatch.context() as patch, attach(exact):
            patch.setenv("MMPACK_ATTENTION", "sdpa")
            values, gradients = logprobs_and_gradients(exact, batch)
        with attach(eager), attach(model):
            own = logprobs_and_gradients(eager, batch)
            found = logprobs_and_gradients(model, batch)
        made.append(graphs())
        off, allowed = ((x[0] - values).abs().mean() for x in (found, own))
        assert off <= 1.2 * allowed + 1e-3, (size, off, allowed)
        wrong, allowed = (
            relative_difference({n: g.float() for n, g in x[1].items()}, gradients)
            for x in (found, own)
        )
        limit = TOLERANCES["gradient_bf16"].value
        assert wrong <= max(1.1 * allowed, limit), (size, wrong, allowed)
    print(family, checkpointing, backend, "graphs after each pack:", made)
    # The decoder's for shared and for plain packs; the blocks' by whether their input needs a gradient, and by whether
    # a picture is one window; each twice where the first run of a checkpoint has no gradients.
    assert made[-1] <= 12 and made[-1] == made[-2]


def test_no_gradients_and_then_gradients():
    """Passes of the old policy and of this one: three graphs of the decoder at most, whatever comes after."""
    model = small_model("qwen2_5_vl").to("cuda", torch.bfloat16)
    compile_layers(model, tower=False)
    with attach(model):
        for size in (0, 1, 2, 3):
            with torch.no_grad():
                old = packed_logprobs(model, pack(size, True))
            new = packed_logprobs(model, pack(size, True))
            new.sum().backward()
            assert (old - new).abs().mean() <= 1e-2
            assert graphs() <= 3


STEP = """
import sys
import torch
sys.path.insert(0, "tests")
from adapters.test_compile_gpu import counters, pack
from support.models import small_model
from mmpack.adapters.transformers import attach, compile_layers, packed_logprobs

model = small_model("qwen2_5_vl").to("cuda", torch.bfloat16).train()
model.gradient_checkpointing_enable({"use_reentrant": False})
compile_layers(model, tower=False)
with attach(model):
    packed_logprobs(model, pack(0, True)).sum().backward()
print("hits", counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_bypass"])
"""


def test_a_second_process_loads_what_the_first_compiled(tmp_path, backend):
    settings = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "MMPACK_ATTENTION": backend}
    found = [
        subprocess.run(
            [sys.executable, "-c", STEP], env=settings, capture_output=True, text=True, check=False
        )
        for _ in range(2)
    ]
    assert found[0].returncode == 0, found[0].stderr[-2000:]
    hits = [next(x for x in f.stdout.splitlines() if x.startswith("hits")) for f in found]
    assert hits[0] == "hits 0 0" and int(hits[1].split()[1]) >= 1 and hits[1].endswith(" 0")
