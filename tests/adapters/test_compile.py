"""Compiled layers: values and gradients of eager ones, and how many graphs packs of changing shapes make.

The attention is torch's varlen op, as on a GPU, with a kernel for the CPU of our own.
"""

import copy
import pickle

import pytest
import torch
import transformers
from packaging.version import Version
from support.attention import run_varlen_on_the_cpu
from support.models import logprobs_and_gradients, relative_difference, small_model, with_pixels
from support.samples import make_sample
from torch._dynamo.testing import CompileCounterWithBackend

import mmpack as mp
from mmpack.adapters.transformers import (
    attach,
    compile_layers,
    model_inputs,
    packed_logprobs,
)
from mmpack.adapters.transformers.compile import (
    CompiledForward,
    CompiledPart,
    decoder_layers,
    tower_blocks,
)
from mmpack.adapters.transformers.compile_ahead import compile_ahead
from mmpack.errors import ModelError
from mmpack.ops.attention import choose

pytestmark = pytest.mark.adapter
FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "internvl")


@pytest.fixture(autouse=True)
def varlen(monkeypatch):
    """Every plan chooses `varlen`, and dynamo starts with nothing compiled."""
    torch._dynamo.reset()
    chosen = {torch.float32: "varlen", torch.float64: "sdpa"}
    monkeypatch.setattr(choose.Chooser, "choices", lambda *args: chosen)
    with torch.library._scoped_library("torch_attn", "FRAGMENT") as library:
        run_varlen_on_the_cpu(library)
        yield


def pack(size, share, family="qwen2_5_vl", prompts=1):
    """`size` sets the rows and the number of answers."""
    samples = []
    for p in range(prompts):
        image = (1, 4, 4) if family == "internvl" else (1, 4, 4 + 2 * size)
        prompt = [("text", range(5 + size)), ("image", image, f"{p}{size}"), ("text", [7])]
        for n in range(2 + size % 2):
            answer = ("response", [100 * n + i for i in range(3 + size + n)])
            samples.append(make_sample([*prompt, answer], f"{p}.{n}", family=family))
    return mp.pack(with_pixels(samples), share_prefix=share)


def check(model, batches):
    """The model's compiled layers against a copy with eager ones, for each batch."""
    eager = copy.deepcopy(model)
    for layer in [*decoder_layers(eager), *tower_blocks(eager)]:
        layer.__dict__.pop("forward", None)
    for batch in batches:
        with attach(eager):
            values, gradients = logprobs_and_gradients(eager, batch)
        with attach(model):
            found, found_gradients = logprobs_and_gradients(model, batch)
        assert (found - values).abs().max() <= 1e-5
        assert relative_difference(found_gradients, gradients) <= 2e-6


@pytest.mark.slow
def test_one_graph_for_shared_packs_and_one_for_plain_ones():
    counter = CompileCounterWithBackend("aot_eager")
    model = small_model("qwen2_5_vl").train()
    compile_layers(model, tower=False, backend=counter)
    check(model, [pack(0, True)])
    assert counter.frame_count == 1  # of two layers
    check(model, [pack(2, True, prompts=2)])
    assert counter.frame_count == 1
    with attach(model):
        packed_logprobs(model, pack(3, False, prompts=2))
        packed_logprobs(model, pack(4, True))
        assert counter.frame_count == 2
        with torch.no_grad():
            for size in (1, 2):
                packed_logprobs(model, pack(size, True))
    assert counter.frame_count == 3


@pytest.mark.slow
def test_replayed_routes_make_one_more_graph():
    """Of packs with routes, without a break; none for other lengths, and packs without routes keep theirs."""
    if Version(transformers.__version__) < Version("5.20"):
        pytest.skip("on a CPU its experts' fallback reads their offsets, which no graph can")
    counter = CompileCounterWithBackend("aot_eager")
    model = small_model("qwen3_vl_moe").train()
    compile_layers(model, tower=False, backend=counter)
    draw = torch.Generator().manual_seed(0)

    def routed(size):
        batch = pack(size, True, "qwen3_vl_moe", prompts=2)
        chosen = torch.rand(len(batch.input_ids), 4, 8, generator=draw).argsort(-1)[..., :2]
        batch.routed_experts = chosen.to(torch.uint8)
        return batch

    check(model, [pack(0, True, "qwen3_vl_moe")])
    graphs = counter.frame_count
    check(model, [routed(0)])
    more = counter.frame_count
    assert more == graphs + 1
    check(model, [routed(size) for size in (1, 3)])
    check(model, [pack(2, True, "qwen3_vl_moe")])
    assert counter.frame_count == more


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    if family == "qwen3_vl_moe" and Version(transformers.__version__) < Version("5.20"):
        pytest.skip("on a CPU its experts' fallback reads their offsets, which no graph can")
    counter = CompileCounterWithBackend("aot_eager")
    model = small_model(family).train()
    compile_layers(model, backend=counter)
    # Of one picture alone transformers < 5.17 makes another graph: its blocks subtract the pictures' offsets.
    check(model, [pack(0, True, family, prompts=2)])
    graphs = counter.frame_count
    check(model, [pack(size, True, family, prompts) for size, prompts in ((1, 3), (3, 2))])
    # The decoder's and the blocks'. InternVL's tower stays eager.
    assert counter.frame_count == graphs <= 2
    if family == "qwen3_vl":  # some transformers run a layer again without its input's gradient
        model.gradient_checkpointing_enable({"use_reentrant": False})
        check(model, [pack(size, True, family) for size in (0, 1)])


def test_what_is_not_packed_is_not_compiled():
    counter = CompileCounterWithBackend("aot_eager")
    model = small_model("qwen2_5_vl")
    compile_layers(model, backend=counter)
    sample = with_pixels([make_sample([("text", range(5)), ("response", [6, 7])], "a")])
    packed_logprobs(model, mp.pad(sample))
    model.generate(
        input_ids=torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False, pad_token_id=0
    )
    assert counter.frame_count == 0


def test_flex_attention_is_left_out_and_runs_eagerly_where_it_is_named(monkeypatch):
    asked = []
    monkeypatch.setattr(
        choose.Chooser, "choices", lambda *args: asked.append(args[-1]) or {torch.float32: "varlen"}
    )
    model = small_model("qwen2_5_vl")
    with attach(model):
        model_inputs(pack(0, True), model)
        compile_layers(model, backend="eager")
        inputs = model_inputs(pack(0, True), model)
    assert [sorted(without) for without in asked] == [[], ["flex", "flex_flash"]]
    forward = decoder_layers(model)[0].forward
    assert forward._is_one_graph((), inputs)
    inputs["attention_plan"].choice = {torch.float32: "flex"}
    assert not forward._is_one_graph((), inputs)


def test_copies_and_pickles_compile_for_themselves():
    model = small_model("qwen2_5_vl")
    compile_layers(model, tower=False, backend="eager")
    layer = decoder_layers(model)[0]
    layer.forward.compiled = len
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(other.forward, CompiledForward)
        assert other.forward.layer is other and other.forward.compiled is None
    assert "forward" not in vars(tower_blocks(model)[0])


def test_compiling_twice_is_refused():
    model = small_model("qwen2_5_vl")
    compile_layers(model, tower=False)
    with pytest.raises(ModelError, match="Fix: call it once"):
        compile_layers(model)
    other = small_model("qwen2_5_vl")
    decoder_layers(other)[1].compile()
    with pytest.raises(ModelError, match="Fix: call it once"):
        compile_layers(other)


@pytest.mark.slow
def test_a_tower_in_one_launch(monkeypatch):
    """Its windows and whole pictures share a graph, whatever their sizes and number; sdpa's loop is left eager."""
    counter = CompileCounterWithBackend("aot_eager")
    model = small_model("qwen2_5_vl").train()
    compile_layers(model, backend=counter)
    check(model, [pack(size, True, prompts=prompts) for size, prompts in ((1, 2), (3, 2))])
    graphs = counter.frame_count
    assert graphs == 2  # the decoder's and the blocks'
    check(model, [pack(size, True, prompts=prompts) for size, prompts in ((4, 3), (6, 2), (2, 4))])
    assert counter.frame_count == graphs
    monkeypatch.setattr(choose.Chooser, "choices", lambda *args: {torch.float32: "sdpa"})
    for block in tower_blocks(model):
        block.forward.compiled = lambda *args, **kwargs: pytest.fail("compiled")
    check(model, [pack(8, True)])


# ---- ahead ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_steps_after_compile_ahead_compile_nothing():
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
        with pytest.raises(ModelError, match="Fix: call it before the first backward"):
            compile_ahead(model, pack(1, True))  # gradients are not lost
    assert model.lm_head.weight.grad is not None


def test_compile_ahead_leaves_nothing_behind():
    """No gradients, no other weights, and dropout draws the numbers that it would have drawn."""
    model, seen = small_model("qwen2_5_vl").train(), []
    decoder = model.model.language_model
    decoder.layers[0].mlp = torch.nn.Sequential(decoder.layers[0].mlp, torch.nn.Dropout(0.5))
    decoder.register_forward_pre_hook(lambda *args: seen.append(torch.is_grad_enabled()))
    before, random = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    with pytest.raises(ModelError, match="attach"):
        compile_ahead(model, pack(1, True))
    with attach(model):
        compile_ahead(model, pack(1, True), old_logprobs=False, entropy=True)
        assert seen == [True]
        compile_ahead(model, pack(1, True))
        assert seen == [True, False, True]
        compile_ahead(model.requires_grad_(False), pack(1, True))  # as a reference model
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


# ---- compiled layers of a model with linear attention ----


def parts_of(layer):
    """Names of a layer's modules that ran compiled."""
    forwards = {name: vars(m).get("forward") for name, m in layer.named_modules() if name}
    return {n for n, f in forwards.items() if isinstance(f, CompiledPart) and f.compiled}


@pytest.mark.slow
def test_norms_and_mlps_beside_linear_attention():
    model = small_model("qwen3_5").train()
    compile_layers(model, tower=False, backend="eager")
    check(model, [pack(0, True, "qwen3_5")])
    linear, full = decoder_layers(model)[0], decoder_layers(model)[3]
    expected = {"input_layernorm", "post_attention_layernorm", "mlp", "linear_attn.norm"}
    assert parts_of(linear) == expected and linear.forward.compiled is None
    assert parts_of(full) == set() and full.forward.compiled is not None


def test_what_is_not_packed_is_not_compiled_hybrid():
    counter = CompileCounterWithBackend("eager")
    model = small_model("qwen3_5")
    compile_layers(model, backend=counter)
    batch = pack(0, False, "qwen3_5")
    assert not any(layer.forward.packed for layer in decoder_layers(model)[:3])
    model.generate(
        input_ids=batch.input_ids[None, :4].long(),
        max_new_tokens=2,
        do_sample=False,
        pad_token_id=0,
    )
    assert counter.frame_count == 0
    other = copy.deepcopy(model)
    layer = decoder_layers(other)[0]
    assert layer.mlp.forward.whole is layer.forward and layer.mlp.forward.layer is layer.mlp


@pytest.mark.slow
def test_packs_of_other_lengths_make_no_more_graphs():
    counter = CompileCounterWithBackend("aot_eager")
    model = small_model("qwen3_5").train()
    compile_layers(model, tower=False, backend=counter)
    check(model, [pack(0, True, "qwen3_5", prompts=2)])
    graphs = counter.frame_count
    check(model, [pack(size, True, "qwen3_5", prompts) for size, prompts in ((1, 3), (3, 2))])
    # a layer with full attention, a norm, an MLP, the norm of a net's output
    assert counter.frame_count == graphs == 4
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check(model, [pack(2, True, "qwen3_5", prompts=2)])
    with attach(model), torch.no_grad():
        for size in (1, 2):
            packed_logprobs(model, pack(size, True, "qwen3_5"))
