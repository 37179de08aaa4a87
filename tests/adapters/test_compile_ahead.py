"""`compile_ahead`: the steps that follow compile nothing, and are what they would have been without it."""

import copy

import pytest
import torch
from adapters.test_compile import pack
from support.attention import run_varlen_on_the_cpu
from support.models import logprobs_and_gradients, small_model
from torch._dynamo.testing import CompileCounterWithBackend

from mmpack.adapters.transformers import attach, compile_ahead, compile_layers, packed_logprobs
from mmpack.errors import ModelError
from mmpack.ops.attention import choose

pytestmark = pytest.mark.adapter


@pytest.fixture
def varlen(monkeypatch):
    torch._dynamo.reset()
    chosen = {torch.float32: "varlen", torch.float64: "sdpa"}
    monkeypatch.setattr(choose.Chooser, "choices", lambda *args: chosen)
    with torch.library._scoped_library("torch_attn", "FRAGMENT") as library:
        run_varlen_on_the_cpu(library)
        yield


@pytest.mark.slow
def test_steps_after_it_compile_nothing(varlen):
    counter = CompileCounterWithBackend("aot_eager")
    model = small_model("qwen2_5_vl").train()
    compile_layers(model, tower=False, backend=counter)
    with attach(model):
        compile_ahead(model, pack(0, True))
        graphs = counter.frame_count
        assert graphs == 2  # with gradients, and without
        with torch.no_grad():
            packed_logprobs(model, pack(2, True, prompts=2))
        packed_logprobs(model, pack(1, True)).sum().backward()
    assert counter.frame_count == graphs


def test_without_old_logprobs_there_is_no_pass_without_gradients():
    seen = []
    model = small_model("qwen2_5_vl").train()
    model.model.language_model.register_forward_pre_hook(
        lambda *args: seen.append(torch.is_grad_enabled())
    )
    with attach(model):
        compile_ahead(model, pack(1, True), old_logprobs=False, entropy=True)
        assert seen == [True]
        compile_ahead(model, pack(1, True))
    assert seen == [True, False, True]


def test_nothing_is_left_behind():
    model = small_model("qwen2_5_vl").train()
    model.model.language_model.norm.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    with attach(model):
        want = logprobs_and_gradients(model, pack(1, True))
        model.zero_grad(set_to_none=True)
        compile_ahead(model, pack(0, True))
        assert all(p.grad is None for p in model.parameters())
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
        found = logprobs_and_gradients(model, pack(1, True))
    assert torch.equal(want[0], found[0])
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in want[1].items())


def test_dropout_draws_the_numbers_that_it_would_have_drawn():
    model = small_model("qwen2_5_vl").train()
    model.model.language_model.layers[0].mlp = torch.nn.Sequential(
        model.model.language_model.layers[0].mlp, torch.nn.Dropout(0.5)
    )
    random = torch.random.get_rng_state()
    with attach(model):
        compile_ahead(model, pack(1, True))
        assert torch.equal(torch.random.get_rng_state(), random)
        packed_logprobs(model, pack(1, True))
        assert not torch.equal(torch.random.get_rng_state(), random)


def test_gradients_are_not_lost():
    model = small_model("qwen2_5_vl").train()
    with attach(model):
        packed_logprobs(model, pack(1, True)).sum().backward()
        with pytest.raises(ModelError, match="Fix: call it before the first backward"):
            compile_ahead(model, pack(1, True))
    assert model.lm_head.weight.grad is not None


def test_a_model_of_which_nothing_is_trained():
    """As a reference model."""
    model = small_model("qwen2_5_vl").requires_grad_(False)
    with attach(model):
        compile_ahead(model, pack(1, True))


def test_a_detached_model_is_refused_as_in_a_step():
    with pytest.raises(ModelError, match="attach"):
        compile_ahead(small_model("qwen2_5_vl"), pack(1, True))
