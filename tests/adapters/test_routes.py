"""Routes replayed: a rollout whose routers chose otherwise gives the trainer its logprobs and gradients, any layout."""

import contextlib
import copy
import dataclasses
import inspect
import pickle

import numpy as np
import pytest
import torch
import transformers
from support.families import LAYOUTS, mixed_batch
from support.models import (
    logprobs_and_gradients,
    relative_difference,
    small_model,
    weights_of,
    with_pixels,
)
from support.routed import EXPERTS, Engine, Forced, routed_model
from support.samples import make_sample, routes_of

import mmpack as mp
from mmpack.adapters.transformers import (
    attach,
    model_inputs,
    packed_listed_logprobs,
    packed_logprobs,
    prefix_logprobs,
    probe_side,
    record_routes,
)
from mmpack.adapters.transformers.routes import rule_of, take_routes
from mmpack.cache.index import PrefixIndex
from mmpack.cache.rows import RowStore
from mmpack.errors import ArgumentError, ModelError
from mmpack.parity.drift import logprob_drift

pytestmark = pytest.mark.adapter
LAYERS = 4


@pytest.fixture(scope="module")
def model():
    return routed_model()


@pytest.fixture(scope="module")
def rollout(model):
    """Samples, and the engine's logprobs and gradients. Two share a prompt and took the same routes through it."""
    samples = mixed_batch("qwen3_vl_moe")
    return samples, *Engine(model).answers(samples, seeds=[0, 0, 1, 2, 3])


def short(n=2, length=6, seed=0):
    """Text samples with routes that no model took."""
    rng = np.random.default_rng(seed)
    samples = [
        make_sample([("text", range(4)), ("response", rng.integers(0, 999, length - 4))], f"s{k}")
        for k in range(n)
    ]
    for sample in samples:
        sample.family = "qwen3_vl_moe"
        sample.routed_experts = routes_of(sample, rng, LAYERS, 2, EXPERTS)
    return samples


# ---- the same logprobs and gradients -----------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replayed_routes_give_the_engines_logprobs_and_gradients(model, rollout, layout):
    samples, wanted, gradients = rollout
    assert mp.validate(samples) == []
    batch = LAYOUTS[layout](samples)
    with attach(model):
        values, found = logprobs_and_gradients(model, batch)
    assert (values - wanted).abs().max() <= 1e-6
    assert relative_difference(found, gradients) <= 1e-6
    gates = [g for name, g in found.items() if name.endswith("mlp.gate.weight")]
    assert len(gates) == LAYERS and all((g != 0).any() for g in gates)
    bare = LAYOUTS[layout]([_without_routes(s) for s in samples])
    with attach(model), torch.no_grad():
        own = packed_logprobs(model, bare)
    assert (own - wanted).abs().max() > 0.1  # the trainer's own routes are others


def _without_routes(sample):
    out = copy.copy(sample)
    out.routed_experts = None
    return out


def test_unlike_routes_end_a_shared_segment_and_like_ones_do_not(rollout):
    samples = rollout[0]
    bare = mp.pack([_without_routes(s) for s in samples], share_prefix=True)
    batch = mp.pack(samples, share_prefix=True)
    assert bare.num_tokens < batch.num_tokens < sum(map(len, samples))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_of_a_detached_model(model, rollout, side):
    samples, wanted, _ = rollout
    with torch.no_grad():
        values = packed_logprobs(model, mp.pad(samples, side=side))
    assert (values - wanted).abs().max() <= 1e-6


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_take_the_routes_of_their_forward(rollout, reentrant):
    """Two forwards before their backwards, and a model that is detached by then."""
    samples, wanted, gradients = rollout
    model = routed_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    parts = [samples[:2], samples[2:]]
    with attach(model):
        values = [packed_logprobs(model, mp.pack(part, share_prefix=True)) for part in parts]
    assert (torch.cat(values) - wanted).abs().max() <= 1e-6
    weights = [weights_of(mp.pack(part)) for part in parts]
    sum((v * w).sum() for v, w in zip(values, weights, strict=True)).backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert relative_difference(found, gradients) <= 1e-6


def test_a_models_own_routes_change_no_bit():
    model = small_model("qwen3_vl_moe")
    samples = mixed_batch("qwen3_vl_moe")
    for share in (False, True):
        batch = mp.pack(samples, share_prefix=share)
        with attach(model):
            with record_routes(model) as routes:
                values, gradients = logprobs_and_gradients(model, batch)
            assert routes.rows.shape == (len(batch.input_ids), LAYERS, 2)
            batch.routed_experts = routes.rows
            again, others = logprobs_and_gradients(model, batch)
        assert torch.equal(values, again)
        assert all(torch.equal(gradients[name], others[name]) for name in gradients)


def test_rows_without_a_route_take_the_models_own(model):
    samples = short()
    recorded = [s.routed_experts.copy() for s in samples]
    for sample, routes in zip(samples, recorded, strict=True):
        routes[-1] = 5  # one expert twice
        sample.routed_experts = routes
    batch = mp.pack(samples, pad_to_multiple_of=16)
    with attach(model), record_routes(model) as taken, torch.no_grad():
        packed_logprobs(model, batch)
    for own, routes in zip(batch.unpack_tokens(taken.rows), recorded, strict=True):
        assert own[:-1].tolist() == routes[:-1].tolist()
        assert (own[-1, :, 0] != own[-1, :, 1]).all()
    assert (taken.rows[batch.num_tokens :, :, 0] != taken.rows[batch.num_tokens :, :, 1]).all()


@pytest.mark.slow
def test_a_family_with_linear_attention():
    """Packed, shared and rounded up, also with layers that are run again after detach; and padded, detached."""
    model = routed_model("qwen3_5_moe")
    samples = mixed_batch("qwen3_5_moe")[1:3]
    wanted, gradients = Engine(model).answers(samples, seeds=[0, 0])
    ways = {"left": None, "packed": False, "shared, rounded up": False, "shared": True}
    for layout, checkpointed in ways.items():
        batch = LAYOUTS[layout](samples)
        if checkpointed:
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
        with contextlib.nullcontext() if checkpointed is None else attach(model):
            values = packed_logprobs(model, batch)
        (values * weights_of(batch)).sum().backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        assert (values - wanted).abs().max() <= 1e-6, layout
        assert relative_difference(found, gradients) <= 1e-6, layout
    model.gradient_checkpointing_disable()
    with attach(model.eval()), torch.no_grad():
        own = packed_logprobs(model, mp.pack([_without_routes(s) for s in samples]))
    assert (own - wanted).abs().max() > 1e-3


def test_layers_without_experts(rollout):
    """Routes of the layers with experts, or of all layers as engines return them."""
    config = copy.deepcopy(routed_model().config)
    config.text_config.mlp_only_layers = [0, 2]
    torch.manual_seed(0)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config).double().eval()
    model.config.text_config._experts_implementation = "eager"
    samples = short()
    of_two = [s.routed_experts[:, 1::2].copy() for s in samples]
    found = []
    for routes in (of_two, [s.routed_experts for s in samples]):
        for sample, own in zip(samples, routes, strict=True):
            sample.routed_experts = np.ascontiguousarray(own)
        with attach(model), torch.no_grad(), record_routes(model) as taken:
            found.append(packed_logprobs(model, mp.pack(samples)))
        batch = mp.pack(samples)
        for own, wanted in zip(batch.unpack_tokens(taken.rows), of_two, strict=True):
            assert own.tolist() == wanted.tolist()
    assert torch.equal(*found)
    for sample in samples:
        sample.routed_experts = sample.routed_experts[:, :3].copy()
    with attach(model), pytest.raises(ModelError, match=r"has 3 layers, .* has 2 layers with exp"):
        model_inputs(mp.pack(samples), model)


def test_copies_and_pickles_replay_too(model, rollout):
    samples, wanted, _ = rollout
    batch = mp.pack(samples[-1:])
    take_routes(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with attach(other), torch.no_grad():
            values = packed_logprobs(other, batch)
        assert (values - wanted[-len(values) :]).abs().max() <= 1e-6
        assert vars(other.model)["_mmpack_route_slots"] is not take_routes(model)


def test_teachers_are_scored_by_the_replayed_experts(model, rollout):
    """One forward for the loss and for the lists; values are those of full logits under replay."""
    samples, wanted, _ = rollout
    taught = [_taught(s, [5, 17, 99]) for s in samples]
    with attach(model), torch.no_grad():
        batch = mp.pack(taught, share_prefix=True)
        own, out = packed_listed_logprobs(model, batch)
        alone = mp.pack(taught)
        logits = model(**model_inputs(alone, model)).logits[0].double()[alone.loss_rows.long()]
    assert (own - wanted).abs().max() <= 1e-6
    lists = logits.log_softmax(-1)[:, [5, 17, 99]]
    assert (out.lists["7B"].view(-1, 3) - lists).abs().max() <= 1e-6
    with attach(model), torch.no_grad():
        bare = mp.pack([_without_routes(s) for s in taught])
        _, other = packed_listed_logprobs(model, bare)
    assert (other.lists["7B"].view(-1, 3) - lists).abs().max() > 0.1


def _taught(sample, ids):
    out, n = copy.copy(sample), sample.num_loss_tokens
    out.teachers = {"7B": mp.Ragged.of([ids] * n, [[-1.0, -2.0, -3.0]] * n)}
    return out


def test_the_probe_replays_routes_and_names_the_router_without(rollout):
    """Layouts are alike with them; without, the first fault is where experts are chosen."""
    samples = [*rollout[0][:2], rollout[0][-1]]
    model = routed_model().float()
    packed = mp.probe.record(probe_side(model), samples)
    for layout in ("shared", "padded_right"):
        report = mp.probe.run(packed, probe_side(model, layout=layout), samples)
        assert report.ok, report.text()
    side = probe_side(model)
    bare = dataclasses.replace(
        side,
        run=lambda given, recorder: side.run([_without_routes(s) for s in given], recorder),
    )
    report = mp.probe.run(packed, bare, samples)
    assert not report.ok and "layers.0.mlp.gate" in report.text()


def test_drift_is_named_routing_unless_routes_are_replayed(model, rollout):
    samples, wanted, _ = rollout
    sizes = [s.num_loss_tokens for s in samples]
    rolled = [copy.copy(s) for s in samples]
    for sample, own in zip(rolled, wanted.split(sizes), strict=True):
        sample.rollout_logprobs = own.float().numpy()
    for replayed in (True, False):
        train = rolled if replayed else [_without_routes(s) for s in rolled]
        batch = mp.pack(train)
        with attach(model), torch.no_grad(), record_routes(model) as taken:
            logprobs = batch.unpack_loss(packed_logprobs(model, batch))
        routes = [x.numpy() for x in batch.unpack_tokens(taken.rows)]
        drift = logprob_drift(rolled, [x.numpy() for x in logprobs], routed_experts=routes)
        assert drift.ok == replayed and list(drift.causes) == ["routing"] * (not replayed)


# ---- weights, for every router -----------------------------------------------------------------------


SIZES = {"hidden_size": 32, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
ROUTERS = {
    "Qwen3VLMoeTextTopKRouter": ("qwen3_vl_moe", "Qwen3VLMoeTextConfig", {"num_experts": 12}),
    "Qwen3_5MoeTopKRouter": ("qwen3_5_moe", "Qwen3_5MoeTextConfig", {"num_experts": 12}),
    "Qwen3MoeTopKRouter": ("qwen3_moe", "Qwen3MoeConfig", {"num_experts": 12}),
    "Qwen2MoeTopKRouter": (
        "qwen2_moe",
        "Qwen2MoeConfig",
        {"num_experts": 12, "norm_topk_prob": True},
    ),
    "MixtralTopKRouter": ("mixtral", "MixtralConfig", {"num_local_experts": 12}),
    "OlmoeTopKRouter": ("olmoe", "OlmoeConfig", {"num_experts": 12}),
    "DeepseekV3TopkRouter": (
        "deepseek_v3",
        "DeepseekV3Config",
        {"n_routed_experts": 12, "n_group": 4, "topk_group": 4, "routed_scaling_factor": 2.5},
    ),
    "Glm4vMoeTextTopkRouter": (
        "glm4v_moe",
        "Glm4vMoeTextConfig",
        {"n_routed_experts": 12, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_at_other_ids_are_those_of_the_routers_own_code(name, dtype):
    module, config_name, own = ROUTERS[name]
    modeling = __import__(f"transformers.models.{module}.modeling_{module}", fromlist=[name])
    if not hasattr(modeling, name):
        pytest.skip("this transformers has no such router")
    router = getattr(modeling, name)(getattr(transformers, config_name, None)(**SIZES, **own))
    if "return router_logits\n" in inspect.getsource(type(router).forward):
        with pytest.raises(
            ModelError, match="weighs its experts by a rule"
        ):  # outside of the router
            rule_of(router)
        return
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=draw))
    router = router.to(dtype)
    hidden = torch.randn(20, 32, generator=draw).to(dtype)
    ids = torch.rand(20, 12, generator=draw).argsort(-1)[:, :3]
    with Forced(ids, 12):
        logits, wanted, forced = router(hidden)
    assert torch.equal(forced, ids) and not torch.equal(router(hidden)[2], ids)
    found = rule_of(router).weights(logits, ids).to(wanted.dtype)
    assert torch.equal(found, wanted)
    slopes = []
    for make in (lambda x: rule_of(router).weights(x, ids), None):
        router.zero_grad()
        x = hidden.detach().clone().requires_grad_()
        if make is None:
            with Forced(ids, 12):
                out = router(x)[1]
        else:
            out = make(router(x)[0])
        (out.float() * torch.arange(3.0)).sum().backward()
        slopes.append(router.weight.grad.float())
    scale = slopes[1].abs().max()
    assert (slopes[0] - slopes[1]).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2) * scale


def test_a_router_of_an_unknown_rule_is_refused():
    router = transformers.models.mixtral.modeling_mixtral.MixtralTopKRouter(
        transformers.MixtralConfig(hidden_size=32, num_local_experts=4)
    )

    class Squared(type(router)):
        def forward(self, hidden):
            logits, weights, ids = super().forward(hidden)
            return logits, weights**2, ids

    router.__class__ = Squared
    with pytest.raises(ModelError, match=r"Squared weighs its experts by a rule .+ Fix: "):
        rule_of(router)


# ---- what does not fit -------------------------------------------------------------------------------


def batch_with(routes=None, last=None, **changes):
    batch = mp.pack(short())
    if routes is not None:
        batch.routed_experts, batch.last_expert = routes, last
    return batch


@pytest.mark.parametrize(
    ("routes", "error", "match"),
    [
        (torch.zeros(12, 3, 2, dtype=torch.uint8), ModelError, "has 3 layers, .* has 4 layers"),
        (torch.zeros(12, 4, 3, dtype=torch.uint8), ModelError, "3 experts per token, .* takes 2"),
        (torch.full((12, 4, 2), 8, dtype=torch.uint8), ModelError, "expert 8, .* has 8 per layer"),
        (torch.full((12, 4, 2), -1), ModelError, "expert -1, .* has 8 per layer"),
        (torch.zeros(11, 4, 2, dtype=torch.uint8), ArgumentError, r"expected integers \[12, lay"),
        (torch.zeros(12, 4, 2), ArgumentError, r"float32 \[12, 4, 2\], expected integers"),
        (torch.zeros(12, 8, dtype=torch.uint8), ArgumentError, r"uint8 \[12, 8\], expected"),
        ([[[0, 1]]], ArgumentError, "routed_experts is of type list, expected int"),
    ],
)
def test_routes_of_another_model_or_none(model, routes, error, match):
    batch = batch_with()
    batch.routed_experts, batch.last_expert = routes, None
    with attach(model), pytest.raises(error, match=match) as caught:
        model_inputs(batch, model)
    assert "Fix: " in str(caught.value) and "\n" not in str(caught.value)


def test_routes_that_take_the_place_of_others(model):
    """What is known of a batch's own routes says nothing of those that are put there."""
    batch = batch_with()
    batch.last_expert, batch.routed_experts = 7, torch.full((12, 4, 2), 8, dtype=torch.uint8)
    with attach(model), pytest.raises(ModelError, match=r"expert 8, .* has 8 per layer"):
        model_inputs(batch, model)


def test_a_model_without_experts_is_told():
    dense = small_model("qwen3_vl")
    samples = short()
    for sample in samples:
        sample.family = "qwen3_vl"
    with (
        attach(dense),
        pytest.raises(ModelError, match=r"has no experts\. Fix: set routed_experts"),
    ):
        packed_logprobs(dense, mp.pack(samples))
    with pytest.raises(ModelError, match=r"record_routes: .* has no experts"), record_routes(dense):
        pass


def test_no_forward_was_recorded(model):
    with record_routes(model) as routes, pytest.raises(ModelError, match="no forward ran"):
        routes.rows  # noqa: B018


def test_inputs_with_routes_are_for_one_model(model):
    batch = mp.pad(short())
    inputs = model_inputs(batch, model)
    with pytest.raises(ModelError, match="made for another model"), torch.no_grad():
        copy.deepcopy(model)(**inputs)


def test_experts_that_run_without_their_router_raise(model, rollout):
    other = copy.deepcopy(model)
    block = other.model.language_model.layers[1].mlp
    block.forward = lambda hidden: hidden
    with (
        attach(other),
        torch.no_grad(),
        pytest.raises(ModelError, match="experts of layer 1 ran wi"),
    ):
        packed_logprobs(other, mp.pack(rollout[0]))


def test_a_forward_that_keeps_keywords_from_its_layers_raises(model, rollout):
    other = copy.deepcopy(model)
    decoder = other.model.language_model
    own = decoder.forward
    decoder.forward = lambda *args, routed_experts=None, **kwargs: own(*args, **kwargs)
    with (
        attach(other),
        torch.no_grad(),
        pytest.raises(ModelError, match="no routes reached layer 0"),
    ):
        packed_logprobs(other, mp.pack(rollout[0]))


def test_routes_that_were_not_checked_raise():
    other = routed_model()
    take_routes(other)
    with pytest.raises(ModelError, match="not checked against this model"), torch.no_grad():
        other(torch.tensor([[1, 2]]), routed_experts=torch.zeros(2, 4, 2, dtype=torch.uint8))


def test_the_prefix_cache_knows_no_routes(model):
    index = PrefixIndex(10**6, bytes_per_token=100, block_size=4)
    with pytest.raises(ModelError, match="KV in the store is of the model's own routes"):
        prefix_logprobs(model, short()[0], index, RowStore(index.num_rows))


def test_forwards_without_routes_are_as_before(model):
    fresh, sample = routed_model(), make_sample([("text", range(5)), ("response", [6, 7])], "a")
    sample.family = "qwen3_vl_moe"
    take_routes(model)
    batch = mp.pack(with_pixels([sample]))
    with attach(model), attach(fresh), torch.no_grad():
        assert torch.equal(packed_logprobs(model, batch), packed_logprobs(fresh, batch))
