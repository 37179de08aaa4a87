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
    spread_out,
    weights_of,
    with_pixels,
)
from support.routed import CHOSEN, EXPERTS, Engine, Forced, routed_model
from support.samples import make_sample, routes_of
from support.tiny_models import tiny_model
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

import mmpack as mp
from mmpack.adapters.transformers import (
    attach,
    model_inputs,
    packed_logprobs,
    prefix_logprobs,
    record_routes,
)
from mmpack.adapters.transformers.routes import router_loss, rule_of, take_routes
from mmpack.cache.index import PrefixIndex
from mmpack.cache.rows import RowStore
from mmpack.errors import ArgumentError, ModelError

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


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", ["packed", "shared, rounded up", "right", "detached"])
def test_replayed_routes_give_the_engines_logprobs_and_gradients(model, rollout, layout):
    samples, wanted, gradients = rollout
    assert mp.validate(samples) == []
    make = LAYOUTS["left" if layout == "detached" else layout]
    with contextlib.nullcontext() if layout == "detached" else attach(model):
        values, found = logprobs_and_gradients(model, make(samples))
        with torch.no_grad():
            own = packed_logprobs(model, make([_without_routes(s) for s in samples]))
    assert (values - wanted).abs().max() <= 1e-6
    assert relative_difference(found, gradients) <= 1e-6
    gates = [g for name, g in found.items() if name.endswith("mlp.gate.weight")]
    assert len(gates) == LAYERS and all((g != 0).any() for g in gates)
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


@pytest.mark.few(1)
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


def test_copies_pickles_and_lora_replay_too(model, rollout):
    peft = pytest.importorskip("peft")
    samples, wanted, _ = rollout
    batch = mp.pack(samples[-1:])
    take_routes(model)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])  # starts at 0
    for other in (*others, peft.get_peft_model(copy.deepcopy(model), config)):
        with attach(other), torch.no_grad():
            values = packed_logprobs(other, batch)
        assert (values - wanted[-len(values) :]).abs().max() <= 1e-6
    for other in others:
        assert vars(other.model)["_mmpack_route_slots"] is not take_routes(model)


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
def test_weights_at_other_ids_are_those_of_the_routers_own_code(name):
    module, config_name, own = ROUTERS[name]
    modeling = __import__(f"transformers.models.{module}.modeling_{module}", fromlist=[name])
    if not hasattr(modeling, name):
        pytest.skip("this transformers has no such router")
    router = getattr(modeling, name)(getattr(transformers, config_name, None)(**SIZES, **own))
    if "return router_logits\n" in inspect.getsource(type(router).forward):
        with pytest.raises(ModelError, match="weighs its experts by a rule"):  # outside of it
            rule_of(router)
        return
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=draw))
    ids = torch.rand(20, 12, generator=draw).argsort(-1)[:, :3]
    hidden = torch.randn(20, 32, generator=draw)
    for dtype, bound in ((torch.bfloat16, 2e-2), (torch.float32, 1e-5)):
        router, hidden = router.to(dtype), hidden.to(dtype)
        with Forced(ids, 12):
            logits, wanted, forced = router(hidden)
        assert torch.equal(forced, ids) and not torch.equal(router(hidden)[2], ids)
        found = rule_of(router).weights(logits, ids).to(wanted.dtype)
        assert torch.equal(found, wanted)
        slopes = [
            torch.autograd.grad(
                (x.float() * torch.arange(3.0)).sum(), router.weight, retain_graph=True
            )
            for x in (found, wanted)
        ]
        off, scale = (slopes[0][0] - slopes[1][0]).abs().max(), slopes[1][0].abs().max()
        assert off <= bound * scale


# ---- what does not fit -------------------------------------------------------------------------------


ODD = torch.full((12, 4, 2), 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("routes", "error", "match"),
    [
        (torch.zeros(12, 3, 2, dtype=torch.uint8), ModelError, "has 3 layers, .* has 4 layers"),
        (torch.zeros(12, 4, 3, dtype=torch.uint8), ModelError, "3 experts per token, .* takes 2"),
        (ODD, ModelError, "expert 8, .* has 8 per layer"),
        (torch.full((12, 4, 2), -1), ModelError, "expert -1, .* has 8 per layer"),
        (torch.zeros(11, 4, 2, dtype=torch.uint8), ArgumentError, r"expected integers \[12, lay"),
        (torch.zeros(12, 4, 2), ArgumentError, r"float32 \[12, 4, 2\], expected integers"),
        ([[[0, 1]]], ArgumentError, "routed_experts is of type list, expected int"),
    ],
)
@pytest.mark.parametrize("last", [None, 7])
def test_routes_of_another_model_or_none(model, routes, error, match, last):
    """What is known of a batch's own routes says nothing of those that are put there."""
    batch = mp.pack(short())
    batch.routed_experts, batch.last_expert = routes, last
    with attach(model), pytest.raises(error, match=rf"{match}.*Fix: "):
        model_inputs(batch, model)


def test_models_and_routers_that_can_not_replay(model):
    dense, samples = small_model("qwen3_vl"), short()
    samples = [dataclasses.replace(s, family="qwen3_vl") for s in samples]
    with attach(dense), pytest.raises(ModelError, match=r"has no experts\. Fix: set routed_expert"):
        packed_logprobs(dense, mp.pack(samples))
    with pytest.raises(ModelError, match=r"record_routes: .* has no experts"), record_routes(dense):
        pass
    with record_routes(model) as routes, pytest.raises(ModelError, match="no forward ran"):
        routes.rows  # noqa: B018
    index = PrefixIndex(10**6, bytes_per_token=100, block_size=4)
    with pytest.raises(ModelError, match="KV in the store is of the model's own routes"):
        prefix_logprobs(model, short()[0], index, RowStore(index.num_rows))
    other = routed_model()
    take_routes(other)
    with pytest.raises(ModelError, match="not checked against this model"), torch.no_grad():
        other(torch.tensor([[1, 2]]), routed_experts=torch.zeros(2, 4, 2, dtype=torch.uint8))
    router = other.model.language_model.layers[0].mlp.gate

    class Squared(type(router)):
        def forward(self, hidden):
            logits, weights, ids = super().forward(hidden)
            return logits, weights**2, ids

    router.__class__ = Squared
    with pytest.raises(ModelError, match=r"Squared weighs its experts by a rule .+ Fix: "):
        rule_of(router)


def without_router(other):
    other.model.language_model.layers[1].mlp.forward = lambda hidden: hidden


def without_keywords(other):
    decoder = other.model.language_model
    own = decoder.forward
    decoder.forward = lambda *args, routed_experts=None, **kwargs: own(*args, **kwargs)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (without_router, "experts of layer 1 ran without their router"),
        (without_keywords, "no routes reached layer 0"),
    ],
)
def test_routes_that_do_not_arrive_raise(model, change, match):
    other = copy.deepcopy(model)
    change(other)
    with attach(other), torch.no_grad(), pytest.raises(ModelError, match=match):
        packed_logprobs(other, mp.pack(short()))


# ---- the load-balancing loss of a pack ----


@pytest.fixture(scope="module")
def model_loss():
    return spread_out(tiny_model("qwen3_vl_moe"))


def samples():
    """A prompt of 20 tokens and a picture, three responses of 5, 6 and 7 tokens."""
    rng = np.random.default_rng(0)
    prompt = [("text", rng.integers(0, 1000, 20)), ("image", (1, 4, 6), "x")]
    return with_pixels(
        [
            make_sample(
                [*prompt, ("response", rng.integers(0, 1000, 5 + i))],
                f"s{i}",
                family="qwen3_vl_moe",
            )
            for i in range(3)
        ]
    )


def routed(model_loss, batch):
    with attach(model_loss):
        return model_loss(**model_inputs(batch, model_loss), output_router_logits=True)


def by_hand(logits, weights, went=None):
    """Switch Transformers, equations 4 to 6, in float64, with a weight for each row; layers are pooled."""
    share, chosen, rows = 0.0, 0.0, 0.0
    for k, layer in enumerate(logits):
        p = torch.softmax(layer.double(), dim=-1)
        ids = p.topk(CHOSEN, dim=-1).indices if went is None else went[k]
        picked = torch.zeros_like(p).scatter_(1, ids, 1.0)
        share = share + (p * weights[:, None]).sum(0)
        chosen = chosen + (picked * weights[:, None]).sum(0)
        rows = rows + weights.sum()
    return EXPERTS * float(((share / rows) * (chosen / rows)).sum())


@torch.no_grad()
def test_each_token_counts_once(model_loss):
    """A shared pack's loss is that of the unshared forward in which a prefix counts only at its first sample."""
    plain = mp.pack(samples())
    out = routed(model_loss, plain)
    first = torch.ones(len(plain.input_ids), dtype=torch.int64)
    lengths = [len(s) for s in samples()]
    prefix = lengths[0] - 5
    for b in (1, 2):
        start = sum(lengths[:b])
        first[start : start + prefix] = 0
    wanted = load_balancing_loss_func(out.router_logits, EXPERTS, CHOSEN, first[None])
    for rounded in (None, 64):
        batch = mp.pack(samples(), share_prefix=True, pad_to_multiple_of=rounded)
        found = router_loss(model_loss, batch, routed(model_loss, batch).router_logits)
        assert abs(found - wanted) <= 1e-5
    everything = load_balancing_loss_func(out.router_logits, EXPERTS, CHOSEN)
    assert abs(everything - wanted) > 1e-3  # the statistic of all copies is another one


@torch.no_grad()
def test_padding_does_not_count(model_loss):
    wanted = routed(model_loss, mp.pack(samples())).aux_loss
    rounded = mp.pack(samples(), pad_to_multiple_of=64)
    out = routed(model_loss, rounded)
    assert abs(out.aux_loss - wanted) > 1e-2  # the model_loss's own counts it
    assert abs(router_loss(model_loss, rounded, out.router_logits) - wanted) <= 1e-5
    padded = mp.pad(samples(), side="left")
    assert (
        abs(router_loss(model_loss, padded, routed(model_loss, padded).router_logits) - wanted)
        <= 1e-5
    )


def routes_of_logits(logits):
    return torch.stack([x.topk(CHOSEN, dim=-1).indices for x in logits], dim=1)


@torch.no_grad()
def test_replayed_routes_count_where_tokens_went(model_loss):
    """As transformers has it where routes are the routers' own; else by the formula."""
    for batch in (mp.pack(samples(), share_prefix=True, pad_to_multiple_of=64), mp.pad(samples())):
        logits = routed(model_loss, batch).router_logits
        wanted = router_loss(model_loss, batch, logits)
        batch.routed_experts = routes_of_logits(logits)
        assert abs(router_loss(model_loss, batch, logits) - wanted) <= 1e-5
        counts = torch.zeros(batch.input_ids.numel())
        counts[batch.token_rows] = 1
        other = (batch.routed_experts + 1) % EXPERTS
        last = batch.token_rows[len(samples()[0]) - 1]
        other[last] = 0  # not recorded
        batch.routed_experts = other.to(torch.uint8)
        went = [x.clone() for x in other.unbind(1)]
        for own, layer in zip(went, logits, strict=True):
            own[last] = layer[last].topk(CHOSEN).indices
        found = router_loss(model_loss, batch, logits)
        assert abs(by_hand(logits, counts.double(), went) - found) <= 1e-5
        assert abs(found - wanted) > 1e-3


def test_gradients_reach_the_routers_where_there_are_some(model_loss):
    batch = mp.pack(samples(), share_prefix=True)
    model_loss.zero_grad()
    router_loss(model_loss, batch, routed(model_loss, batch).router_logits).backward()
    gates = [p.grad for n, p in model_loss.named_parameters() if "mlp.gate.weight" in n]
    assert len(gates) == 4 and all((g != 0).any() for g in gates)
    with pytest.raises(mp.ModelError, match="no router logits"):
        router_loss(model_loss, batch, None)
    with pytest.raises(mp.ModelError, match="has no experts"):
        router_loss(tiny_model("internvl"), batch, (torch.zeros(1, 8),))
