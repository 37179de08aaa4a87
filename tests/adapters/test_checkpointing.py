"""checkpoint_layers: gradients of full checkpointing, bit by bit, in counted bytes that keep the budget."""

import copy

import pytest
import torch
from support.memory import counted_model, load_of, peak_bytes, some_pack
from support.models import logprobs_and_gradients, smallest_qwen2_5_vl, with_pixels
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.transformers import attach, checkpoint_layers
from mmpack.errors import ArgumentError, ModelError, PlanError
from mmpack.planning.memory import memory_model

pytestmark = pytest.mark.adapter
PLENTY = 10**12


def batch_of(lengths=(3, 4, 6), share_prefix=True):
    prompt = [("text", range(5)), ("image", (1, 4, 6), "x"), ("text", [7])]
    samples = [make_sample([*prompt, ("response", range(n))], f"a{n}") for n in lengths]
    return mp.pack(with_pixels(samples), share_prefix=share_prefix)


def made(reentrant=False):
    model = smallest_qwen2_5_vl(tied=False).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def flags(model):
    return [m.gradient_checkpointing for m in model.get_decoder().layers], [
        m.gradient_checkpointing for m in model.model.visual.blocks
    ]


def some(model, batch, kept, kept_blocks=0):
    """The bytes that just so many layers take."""
    least, most = 0, PLENTY
    while most - least > 1:
        middle = (least + most) // 2
        try:
            with checkpoint_layers(model, batch, middle) as found:
                enough = (found.layers, found.blocks) >= (kept, kept_blocks)
        except PlanError:
            enough = False
        least, most = (least, middle) if enough else (middle, most)
    return most


def same(found, expected):
    (values, gradients), (values_expected, gradients_expected) = found, expected
    assert torch.equal(values, values_expected)
    assert gradients.keys() == gradients_expected.keys()
    assert all(torch.equal(g, gradients_expected[n]) for n, g in gradients.items())


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_are_those_of_full_checkpointing(reentrant):
    model, batch = made(reentrant), batch_of()
    with attach(model):
        expected = logprobs_and_gradients(model, batch)
        layers, blocks = (len(f) for f in flags(model))
        for budget, kept_blocks in ((some(model, batch, layers, 1), 1), (PLENTY, blocks)):
            handle = checkpoint_layers(model, batch, budget)
            assert (handle.layers, handle.blocks) == (layers, kept_blocks)
            same(logprobs_and_gradients(model, batch), expected)
        handle.undo()
    assert all(map(all, flags(model)))


def test_selective_layers_have_the_same_gradients():
    model, batch = made(reentrant=True), batch_of()
    functions = [m._gradient_checkpointing_func for m in model.get_decoder().layers]
    with attach(model):
        expected = logprobs_and_gradients(model, batch)
        with checkpoint_layers(model, batch, some(model, batch, 1), selective=True) as kept:
            assert (kept.layers, kept.selective) == (1, 0)
        memory = some(model, batch, len(functions)) - 1
        handle = checkpoint_layers(model, batch, memory, selective=True)
        assert handle.selective == len(functions) - handle.layers > 0
        same(logprobs_and_gradients(model, batch), expected)
    # detached in between
    with attach(model):
        same(logprobs_and_gradients(model, batch), expected)
    handle.undo()
    assert [m._gradient_checkpointing_func for m in model.get_decoder().layers] == functions


def test_each_batch_has_its_own_number():
    model, small, large = made(), batch_of(), batch_of(range(3, 40), share_prefix=False)
    layers = len(model.get_decoder().layers)
    with checkpoint_layers(model, small, some(model, small, layers)) as kept:
        assert kept.layers == layers and flags(model)[0] == [False] * layers
        with checkpoint_layers(model, large, some(model, large, 1)) as kept:
            assert kept.layers == 1 and flags(model)[0] == [True] * (layers - 1) + [False]
    assert all(map(all, flags(model)))


def test_half_precision_keeps_more():
    model, batch = made(), batch_of()
    layers = len(model.get_decoder().layers)
    memory = some(model, batch, layers) - 1
    assert checkpoint_layers(model, batch, memory).layers < layers
    assert checkpoint_layers(model, batch, memory, dtype=torch.bfloat16).layers == layers
    assert checkpoint_layers(model, 100, PLENTY).layers == layers  # rows instead of a batch


def test_counted_bytes_keep_the_budget():
    model = counted_model("qwen2_5_vl", layers=6)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = some_pack("qwen2_5_vl", True, pictures=False, prompt=300)
    model.model.visual.requires_grad_(False)
    with attach(model):
        full = peak_bytes(model, batch)
        counted = []
        for kept in (1, 2, 6):
            memory = some(model, batch, kept)
            with checkpoint_layers(model, batch, memory) as handle:
                assert handle.layers == kept
                counted.append(peak_bytes(model, batch))
            assert counted[-1] <= memory
        numbers = {"kept": 1, "selective": 3, "train_tower": False}
        terms = memory_model(model.config, "float32", "sdpa")
        with checkpoint_layers(
            model, batch, terms.peak(load_of(batch, model), **numbers), selective=True
        ) as handle:
            assert (handle.layers, handle.selective) == (1, 3)
            selective = peak_bytes(model, batch)
        assert counted[0] < selective < counted[-1] and selective <= handle.expected
    # the first kept layer costs nothing, every other one does
    assert counted[0] <= full and counted == sorted(counted) and counted[1] > full


def test_peft_and_a_frozen_tower():
    peft = pytest.importorskip("peft")
    model, batch = made(), batch_of()
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
    model.base_model.model.model.visual.requires_grad_(False)
    with attach(model):
        expected = logprobs_and_gradients(model, batch)
        with checkpoint_layers(model, batch, PLENTY) as kept:
            assert kept.layers == len(model.get_base_model().get_decoder().layers)
            assert kept.blocks == 0 and all(flags(model.get_base_model())[1])
            same(logprobs_and_gradients(model, batch), expected)


def test_compiled_layers():
    model, batch = made(), batch_of()
    torch._dynamo.reset()
    with attach(model):
        expected = logprobs_and_gradients(model, batch)
        for layer in model.get_decoder().layers:
            layer.compile(backend="eager")
        with checkpoint_layers(model, batch, some(model, batch, 1)):
            same(logprobs_and_gradients(model, batch), expected)


def test_a_copy_has_its_own_and_what_is_switched_off_since_stays_off():
    model = made()
    handle = checkpoint_layers(model, 100, PLENTY)
    twin = copy.deepcopy(model)
    handle.undo()
    assert not any(flags(twin)[0]) and all(flags(model)[0])
    with checkpoint_layers(twin, 100, PLENTY):
        pass
    assert all(flags(twin)[0])
    handle = checkpoint_layers(model, 100, PLENTY)
    model.gradient_checkpointing_disable()
    handle.undo()
    assert not any(flags(model)[0])


@pytest.mark.slow
def test_linear_attention_keeps_gradients_and_bytes():
    """In the bytes that are given; the first layer, with linear attention, is recomputed first."""
    model = counted_model("qwen3_5")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = some_pack("qwen3_5", share_prefix=True, pictures=False, prompt=120)
    layers = len(model.get_decoder().layers)
    with attach(model):
        expected = logprobs_and_gradients(model, batch)
        with checkpoint_layers(model, batch, PLENTY) as kept:
            assert (kept.layers, kept.selective) == (layers, 0)
            most = kept.expected
        with checkpoint_layers(model, batch, most - 1) as kept:
            assert 1 <= kept.layers < layers and kept.expected < most
            same(logprobs_and_gradients(model, batch), expected)
            assert peak_bytes(model, batch) <= kept.expected
        with pytest.raises(PlanError, match="with every layer recomputed"):
            checkpoint_layers(model, batch, kept.expected // 4)


def test_what_is_refused():
    model, batch = made(), batch_of()
    with pytest.raises(
        PlanError, match=r"with every layer recomputed, but there are 10\. Fix: plan"
    ):
        checkpoint_layers(model, batch, 10)
    with pytest.raises(ArgumentError, match="memory"):
        checkpoint_layers(model, batch, -1)
    for wrong in ([batch], None):
        with pytest.raises(ArgumentError, match=r"batch is .*Fix: pass a batch"):
            checkpoint_layers(model, wrong, PLENTY)
    with pytest.raises(ModelError, match="in eval mode"):
        checkpoint_layers(model.eval(), batch, PLENTY)
    model.train().gradient_checkpointing_disable()
    with pytest.raises(ModelError, match=r"layers are not recomputed\. Fix: call model"):
        checkpoint_layers(model, batch, PLENTY)
