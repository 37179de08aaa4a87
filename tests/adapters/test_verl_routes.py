"""Routing replay beside verl's own code: its choice of experts, its weights at these, and rows of its workers."""

import sys
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import transformers

import mmpack as mp
from mmpack.adapters.transformers.routes import recorded_rows, rule_of
from mmpack.adapters.verl.engine import samples_of
from mmpack.errors import ArgumentError
from mmpack.families import get_family

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("verl_on_cpu")]
EXPERTS, CHOSEN = 8, 2
MOE = "megatron.core.transformer.moe"
MEGATRON = [f"{MOE}.{name}" for name in ("moe_utils", "token_dispatcher", "router")] + [
    "megatron",
    "megatron.core",
    "megatron.core.transformer",
    "megatron.core.transformer.transformer_config",
    MOE,
]


def router():
    config = transformers.Qwen3VLMoeTextConfig(
        hidden_size=32, num_experts=EXPERTS, num_experts_per_tok=CHOSEN
    )
    return transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextTopKRouter(config)


def routes(rows, draw):
    return torch.rand(rows, EXPERTS, generator=draw).argsort(-1)[:, :CHOSEN]


def test_rows_without_a_route_are_verls():
    """VeOmni's replay: zeros mean that nothing was recorded, and the router's own ids stay."""
    from verl.utils.veomni.router_replay import VeOmniRouterReplay

    draw = torch.Generator().manual_seed(0)
    own, given = routes(12, draw), routes(12, draw)
    given[[3, 11]] = 0
    replay = VeOmniRouterReplay()
    replay.begin_replay()
    replay.begin_microbatch([given])
    wanted = replay.on_router_forward(torch.nn.Identity(), own.float(), own)
    assert torch.equal(torch.where(recorded_rows(given), given, own), wanted)
    assert not torch.equal(wanted, given) and not torch.equal(wanted, own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_their_gradients_are_verls(dtype, monkeypatch):
    """Megatron's router as verl patches it: softmax of the logits at the replayed experts. It runs without Megatron."""
    for name in MEGATRON:
        monkeypatch.setitem(sys.modules, name, MagicMock())
    from verl.utils.megatron.router_replay_patch import (
        RouterReplay,
        RouterReplayAction,
        _patched_topk_routing_with_score_function,
    )

    draw = torch.Generator().manual_seed(1)
    ids = routes(20, draw)
    logits = torch.randn(20, EXPERTS, generator=draw).to(dtype).requires_grad_()
    replay = RouterReplay()
    replay.set_target_indices(ids)
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    about = {"num_groups": None, "group_topk": None, "expert_bias": None, "fused": False}
    spread, _ = _patched_topk_routing_with_score_function(
        logits,
        CHOSEN,
        use_pre_softmax=False,
        score_function="softmax",
        router_replay=replay,
        scaling_factor=None,
        **about,
    )
    wanted = spread.gather(1, ids)
    found = rule_of(router()).weights(logits, ids).to(dtype)
    bound = 1e-6 if dtype == torch.float32 else 2**-8
    assert (found - wanted).abs().max() <= bound
    weights = torch.randn(20, CHOSEN, generator=draw).to(dtype)
    slopes = [
        torch.autograd.grad((values * weights).sum(), logits, retain_graph=True)[0]
        for values in (found, wanted)
    ]
    assert (slopes[0] - slopes[1]).abs().max() <= bound * max(1, slopes[1].abs().max())


def jagged(*rows):
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def rows_of_a_worker(**more):
    """Prompts of 3 and 2, responses of 4 and 3; the first's last two tokens came back from a tool, without routes."""
    from tensordict import TensorDict

    ids = jagged(torch.arange(7), torch.arange(5))
    draw = torch.Generator().manual_seed(0)
    taken = [routes(3 * n, draw).view(n, 3, CHOSEN) for n in (7, 5)]
    taken[0][4:], taken[1][4:] = 0, 0
    columns = {
        "input_ids": ids,
        "position_ids": ids,
        "prompts": jagged(torch.arange(3), torch.arange(2)),
        "responses": jagged(torch.arange(4), torch.arange(3)),
        "routed_experts": jagged(*taken),
    }
    return TensorDict(columns | more, batch_size=2), taken


def test_rows_of_a_worker():
    batch, taken = rows_of_a_worker(response_mask=torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]]))
    # layers without experts, zeros of every row as the rollout writes them, are left out
    more = jagged(*(torch.cat([torch.zeros(len(own), 1, CHOSEN).long(), own], 1) for own in taken))
    for given in (batch["routed_experts"], more):
        batch["routed_experts"] = given
        samples = samples_of(batch, get_family("qwen3_vl_moe"), EXPERTS)
        for sample, own in zip(samples, taken, strict=True):
            assert sample.routed_experts.dtype == np.uint8
            assert sample.routed_experts.tolist() == own.tolist()
        assert [s.loss_indices.tolist() for s in samples] == [[3, 4], [2, 3, 4]]
        assert mp.validate(samples) == []
    dense = samples_of(batch, get_family("qwen3_vl"))
    assert all(s.routed_experts is None for s in dense)
    assert [s.loss_indices.tolist() for s in dense] == [[3, 4, 5, 6], [2, 3, 4]]


def test_kept_ids_follow_the_tokens_that_are_scored():
    """Lists of what came back without routes go with it; an empty one before is the token itself."""
    from tensordict import NonTensorData, NonTensorStack

    lists = [[[3, 9], [], [5, 8], []], [[2, 7], [3], [1, 4]]]
    batch, _ = rows_of_a_worker(kept_ids=NonTensorStack(*map(NonTensorData, lists)))
    samples = samples_of(batch, get_family("qwen3_vl_moe"), EXPERTS)
    found = [[x.tolist() for x in s.kept_ids.lists()] for s in samples]
    assert found == [[[3, 9], [4]], [[2, 7], [3], [1, 4]]] and mp.validate(samples) == []
    packed = mp.pack(samples, share_prefix=True)
    assert len(packed.kept_ids) == 5 and packed.routed_experts is not None


def test_a_sampled_token_without_routes_is_refused():
    """Its logprob would be 0, and the loss would pass over it."""
    mask = jagged(torch.tensor([1, 1, 0, 1]), torch.tensor([1, 1, 1]))
    for given in (mask, mask.to_padded_tensor(0)):
        batch, _ = rows_of_a_worker(response_mask=given)
        with pytest.raises(ArgumentError, match="row 0: response token 3 was sampled, and routed"):
            samples_of(batch, get_family("qwen3_vl_moe"), EXPERTS)
        assert len(samples_of(batch, get_family("qwen3_vl"))) == 2
