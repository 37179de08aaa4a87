"""Compiled layers on a GPU: bf16 against eager ones, both against float32; graphs that packs make; caches on disk."""

import copy

import pytest
import torch
from support.models import logprobs_and_gradients, relative_difference, small_model, with_pixels
from support.samples import make_sample
from torch._dynamo.utils import counters

import mmpack as mp
from mmpack.adapters.transformers import attach, compile_layers
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
    # The decoder's for shared and for plain packs; the blocks' by whether their input needs a gradient, and by whether
    # a picture is one window; each twice where the first run of a checkpoint has no gradients.
    assert made[-1] <= 12 and made[-1] == made[-2]
