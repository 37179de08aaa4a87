"""Gated delta nets over segments: no state leaks, wrong use raises, and checkpoints, copies and LoRA run as they do."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from support.float64 import assert_as_exact_as_separate, exact, separate, torch_functions
from support.models import logprobs_and_gradients, small_model, weights_of
from support.samples import make_sample

import mmpack as mp
from mmpack import invariant
from mmpack.adapters.transformers import attach, detach, model_inputs, packed_logprobs
from mmpack.adapters.transformers.linear_attention import net_of
from mmpack.adapters.transformers.prefix import kv_bytes_per_token
from mmpack.contracts import TOLERANCES

pytestmark = pytest.mark.adapter
NAME = "qwen3_5"


@pytest.fixture(scope="module")
def model():
    return small_model(NAME)


@pytest.fixture(autouse=True)
def without_fla(model):
    """What transformers alone gives is its torch functions', where FLA is installed too."""
    with torch_functions(model):
        yield


def texts():
    """Three samples of text."""
    rng = np.random.default_rng(5)
    parts = [[rng.integers(0, 999, 6), rng.integers(0, 999, 4 + k)] for k in range(3)]
    return [
        make_sample([("text", a), ("response", b)], f"s{k}", family=NAME)
        for k, (a, b) in enumerate(parts)
    ]


def tree():
    """A prompt of two rows, an answer of one that three samples go on from, and another answer."""
    prompt, answer = ("text", [7, 3]), ("response", [5])
    parts = [[prompt, answer, ("text", [k]), ("response", [k, 9, k])] for k in range(3)]
    parts.append([prompt, ("response", [4, 4])])
    return [make_sample(p, f"s{k}", family=NAME) for k, p in enumerate(parts)]


# ---- wrong use ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segment_plan": None}, "segment_plan is missing, and linear attention would run across"),
        ({"segment_plan": mp.pack(tree()).segment_plan}, "is of 25 rows, there are 1 × 33"),
        ({"segment_plan": mp.pack(texts()[::-1]).segment_plan}, "is of another batch than"),
        (
            {"segment_plan": mp.pack(texts()[::-1]).segment_plan, "attention_plan": None},
            "is of another batch than",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_an_error(model, change, message):
    with attach(model), torch.no_grad():
        inputs = model_inputs(mp.pack(texts()), model)
        with pytest.raises(mp.ModelError, match=rf"{message}.* Fix: call model\(.*, or detach"):
            model(**(inputs | change))


def test_nets_that_are_not_known_are_refused():
    with torch.device("meta"):
        model = small_model(NAME)
    net = net_of(model.get_decoder().layers[1])
    norm = net.norm
    del net.norm
    with pytest.raises(mp.ModelError, match=r"layer 1 has linear attention that is not a gated"):
        attach(model)
    net.norm = norm
    net.conv1d = torch.nn.Sequential(net.conv1d)
    with pytest.raises(mp.ModelError, match=r"conv1d of layer 1 is a Sequential.*target_modules"):
        attach(model)


# ---- wrapped, copied, detached -----------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_run_again_after_detach_as_they_ran(model, reentrant):
    """And after another batch went through the model."""
    batch = mp.pack(tree(), share_prefix=True)
    with attach(model):
        values, gradients = logprobs_and_gradients(model, batch)
    other = copy.deepcopy(model).train()
    other.zero_grad(set_to_none=True)
    other.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        other.enable_input_require_grads()
    with attach(other):
        found = packed_logprobs(other, batch)
        with torch.no_grad():
            packed_logprobs(other, mp.pack(texts()))
    (found * weights_of(batch)).sum().backward()
    assert torch.equal(found, values)
    own = {n: p.grad for n, p in other.named_parameters() if p.grad is not None}
    assert own.keys() == gradients.keys()
    assert all(torch.equal(own[name], g) for name, g in gradients.items())


def test_detached_copied_and_pickled_models_are_their_own():
    model, ids = small_model(NAME), torch.tensor([[1, 2, 3, 4]])
    given = {"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1, 1]]), "use_cache": True}
    batch = mp.pack(tree(), share_prefix=True)
    with torch.no_grad():
        expected = model(**given).logits
        with attach(model):
            values = packed_logprobs(model, batch)
            copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
            assert torch.equal(packed_logprobs(pickled, batch), values)
        detach(pickled)
        for own in (model, copied, pickled):
            assert torch.equal(own(**given).logits, expected)
            with attach(own):
                assert torch.equal(packed_logprobs(own, batch), values)
    nets = [net_of(layer) for layer in copied.get_decoder().layers[:3]]
    assert all(net.forward.net is net for net in nets)


def test_lora_of_linear_layers():
    peft = pytest.importorskip("peft")
    samples = tree()
    targets = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(
        small_model(NAME), peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    ).eval()
    wanted, exactly = exact(wrapped, samples)
    _, separately = separate(wrapped, samples)
    with attach(wrapped):
        found, ours = logprobs_and_gradients(wrapped, mp.pack(samples, share_prefix=True))
    assert (found - wanted).abs().max() <= TOLERANCES["layouts"].value
    assert len(ours) == 2 * 3 * len(targets) and all((g != 0).any() for g in ours.values())
    assert_as_exact_as_separate(ours, separately, exactly)


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_bf16_is_about_as_near_as_separate_forwards(model, how):
    samples, low = tree(), copy.deepcopy(model).bfloat16() if how == "weights" else model
    wide = copy.deepcopy(low).float()
    with torch.no_grad():
        wanted = torch.cat([packed_logprobs(wide, mp.pad([s])) for s in samples])
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            apart = torch.cat([packed_logprobs(low, mp.pad([s])) for s in samples])
            with attach(low):
                found = packed_logprobs(low, mp.pack(samples, share_prefix=True))
    assert (found - wanted).square().mean() <= 2**2 * (apart - wanted).square().mean()


def test_what_keeps_kv_alone_or_needs_one_order_of_sums(model):
    with pytest.raises(mp.ModelError, match="KV of each token before it, and the model has linear"):
        kv_bytes_per_token(model)
    batch = mp.pack(texts())
    with attach(model):
        with (
            invariant.batch_invariant(model),
            pytest.raises(mp.ModelError, match="batch_invariant: the model has linear attention"),
        ):
            packed_logprobs(model, batch)
        with pytest.raises(mp.ModelError, match="the batch has no segment_plan"):
            model_inputs(dataclasses.replace(batch, segment_plan=None), model)
