"""The load-balancing loss of a pack: rows of tokens once each, against transformers' own function on chosen rows."""

import numpy as np
import pytest
import torch
from support.models import spread_out, with_pixels
from support.samples import make_sample
from support.tiny_models import tiny_model
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs
from mmpack.adapters.transformers.routes import router_loss

pytestmark = pytest.mark.adapter
EXPERTS, CHOSEN = 8, 2


@pytest.fixture(scope="module")
def model():
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


def routed(model, batch):
    with attach(model):
        return model(**model_inputs(batch, model), output_router_logits=True)


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
def test_each_token_counts_once(model):
    """A shared pack's loss is that of the unshared forward in which a prefix counts only at its first sample."""
    plain = mp.pack(samples())
    out = routed(model, plain)
    first = torch.ones(len(plain.input_ids), dtype=torch.int64)
    lengths = [len(s) for s in samples()]
    prefix = lengths[0] - 5
    for b in (1, 2):
        start = sum(lengths[:b])
        first[start : start + prefix] = 0
    wanted = load_balancing_loss_func(out.router_logits, EXPERTS, CHOSEN, first[None])
    for rounded in (None, 64):
        batch = mp.pack(samples(), share_prefix=True, pad_to_multiple_of=rounded)
        found = router_loss(model, batch, routed(model, batch).router_logits)
        assert abs(found - wanted) <= 1e-5
    everything = load_balancing_loss_func(out.router_logits, EXPERTS, CHOSEN)
    assert abs(everything - wanted) > 1e-3  # the statistic of all copies is another one


@torch.no_grad()
def test_padding_does_not_count(model):
    wanted = routed(model, mp.pack(samples())).aux_loss
    rounded = mp.pack(samples(), pad_to_multiple_of=64)
    out = routed(model, rounded)
    assert abs(out.aux_loss - wanted) > 1e-2  # the model's own counts it
    assert abs(router_loss(model, rounded, out.router_logits) - wanted) <= 1e-5
    padded = mp.pad(samples(), side="left")
    assert abs(router_loss(model, padded, routed(model, padded).router_logits) - wanted) <= 1e-5


def routes_of_logits(logits):
    return torch.stack([x.topk(CHOSEN, dim=-1).indices for x in logits], dim=1)


@torch.no_grad()
def test_replayed_routes_count_where_tokens_went(model):
    """As transformers has it where routes are the routers' own; else by the formula."""
    for batch in (mp.pack(samples(), share_prefix=True, pad_to_multiple_of=64), mp.pad(samples())):
        logits = routed(model, batch).router_logits
        wanted = router_loss(model, batch, logits)
        batch.routed_experts = routes_of_logits(logits)
        assert abs(router_loss(model, batch, logits) - wanted) <= 1e-5
        counts = torch.zeros(batch.input_ids.numel())
        counts[batch.token_rows] = 1
        other = (batch.routed_experts + 1) % EXPERTS
        last = batch.token_rows[len(samples()[0]) - 1]
        other[last] = 0  # not recorded
        batch.routed_experts = other.to(torch.uint8)
        went = [x.clone() for x in other.unbind(1)]
        for own, layer in zip(went, logits, strict=True):
            own[last] = layer[last].topk(CHOSEN).indices
        found = router_loss(model, batch, logits)
        assert abs(by_hand(logits, counts.double(), went) - found) <= 1e-5
        assert abs(found - wanted) > 1e-3


def test_gradients_reach_the_routers_where_there_are_some(model):
    batch = mp.pack(samples(), share_prefix=True)
    model.zero_grad()
    router_loss(model, batch, routed(model, batch).router_logits).backward()
    gates = [p.grad for n, p in model.named_parameters() if "mlp.gate.weight" in n]
    assert len(gates) == 4 and all((g != 0).any() for g in gates)
    with pytest.raises(mp.ModelError, match="no router logits"):
        router_loss(model, batch, None)
    with pytest.raises(mp.ModelError, match="has no experts"):
        router_loss(tiny_model("internvl"), batch, (torch.zeros(1, 8),))
