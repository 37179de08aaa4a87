"""A dense Megatron model, and a mixture of experts with the engine's routes replayed: mmpack beside their own loss.

Runs where vime or slime can be imported, and megatron-core. The models are Megatron's, and so is the replay; the routes
go through samples and back, and then through their own layout.
"""

import contextlib
import importlib
import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.vime_steps import options
from torch import distributed

from mmpack.adapters.vime import enable, from_samples, to_samples

pytest.importorskip("megatron.core")
NAME = next((name for name in ("vime", "slime") if importlib.util.find_spec(name)), "")
if not NAME:
    pytest.skip("neither vime nor slime is installed", allow_module_level=True)

VOCAB, EXPERTS, LAYERS, TOP_K = 900, 6, 2, 2


@pytest.fixture(scope="module", autouse=True)
def megatron(tmp_path_factory):
    """One rank on the CPU. Megatron asks for a CUDA device, its random states and a kernel of TransformerEngine."""
    from megatron.core import mpu, tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    torch.compiler.set_stance("force_eager")
    rendezvous = tmp_path_factory.mktemp("one") / "rendezvous"
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    mpu.initialize_model_parallel(create_gloo_process_groups=False)
    tracker = SimpleNamespace(fork=lambda *_: contextlib.nullcontext())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        yield
    mpu.destroy_model_parallel()
    distributed.destroy_process_group()
    torch.compiler.set_stance("default")


def make_model(experts):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    moe = {
        "num_moe_experts": experts,
        "moe_router_topk": TOP_K,
        "moe_ffn_hidden_size": 32,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
        "moe_enable_routing_replay": True,
    }
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **(moe if experts else {}),
    )
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False)
    return GPTModel(config, spec, VOCAB, 512, share_embeddings_and_output_weights=False)


def forward(model, ids, routes=None):
    """Logits [1, T, V]; with `routes` [T, layers, k], each layer's experts are those."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()
    if routes is not None:
        RouterReplay.set_replay_data([routes[:, k].long() for k in range(LAYERS)])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    length = ids.shape[1]
    hidden = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    return model(ids, torch.arange(length)[None], hidden)


def their_module():
    return importlib.import_module(f"{NAME}.backends.megatron_utils.loss")


def micro_batch(tokens, response, rollout):
    total = len(tokens)
    advantage = torch.full((response,), 0.7)
    return {
        "unconcat_tokens": [tokens],
        "total_lengths": [total],
        "response_lengths": [response],
        "loss_masks": [torch.ones(response, dtype=torch.int)],
        "rollout_mask_sums": torch.tensor([float(response)]),
        "advantages": [advantage],
        "log_probs": None,
        "rollout_log_probs": [rollout],
    }


def step(model, args, batch, routes):
    model.zero_grad()
    tokens = batch["unconcat_tokens"][0][None]
    out, _, log = their_module().loss_function(
        args, dict(batch), 1, 1, forward(model, tokens, routes)
    )
    out.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return out.detach(), dict(zip(log["keys"], log["values"][1:].tolist(), strict=True)), gradients


@pytest.mark.parametrize("experts", [None, EXPERTS])
def test_a_model_trained_by_either(experts, fixture):
    from megatron.core.transformer.moe.router_replay import RouterReplay

    helpers = importlib.import_module(f"{NAME}.backends.megatron_utils.cp_utils")

    from matrix.vime_trace import items as made_items

    RouterReplay.clear_global_router_replay_instances()
    model = make_model(experts)
    args = options("grpo", entropy_coef=0.01, use_rollout_logprobs=True)
    item = made_items(fixture)[0]
    item |= {"tokens": [t % VOCAB for t in item["tokens"]], "multimodal_train_inputs": None}
    item |= {"multimodal_inputs": None}
    tokens, response = torch.tensor(item["tokens"]), item["response_length"]
    routes = None
    if experts:
        draw = np.random.default_rng(0)
        drawn = draw.random((len(tokens) - 1, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]
        item["rollout_routed_experts"] = torch.from_numpy(drawn.astype(np.int32))
        sample = to_samples([item], fixture.processor, num_experts=EXPERTS)[0]
        assert sample.routed_experts.dtype == np.uint8
        back = from_samples([sample])[0]["rollout_routed_experts"]
        assert torch.equal(back, item["rollout_routed_experts"])
        routes = helpers.prepare_routed_experts_for_routing_replay(
            [back],
            [tokens],
            num_experts=EXPERTS,
            data_pad_size_multiplier=1,
            sequence_parallel=False,
            allgather_cp=False,
        )

    def logprobs(routes):
        logits = forward(model, tokens[None], routes)
        given = {
            "args": args,
            "unconcat_tokens": [tokens],
            "total_lengths": [len(tokens)],
            "response_lengths": [response],
        }
        return their_module().get_log_probs_and_entropy(logits, **given)[1]["log_probs"][0].detach()

    rollout = logprobs(routes)  # the engine has the trainer's weights, and these routes
    batch = micro_batch(tokens, response, rollout)
    theirs = step(model, args, batch, routes)
    with enable(args):
        mine = step(model, args, batch, routes)
        replayed, free = logprobs(routes), logprobs(None)
    torch.testing.assert_close(replayed, rollout, rtol=0, atol=1e-6)
    if experts:
        assert (free - rollout).abs().max() > 1e-3
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-6, atol=1e-6)
    assert mine[1].keys() == theirs[1].keys() and abs(mine[1]["ppo_kl"]) < 1e-6
    worst = 0.0
    for name, gradient in theirs[2].items():
        peak = gradient.abs().max()
        error = (mine[2][name] - gradient).abs().max()
        assert error <= 1e-5 * peak, name
        worst = max(worst, float(error / peak.clamp(min=1e-30)))
    drift = float((free - rollout).abs().max())
    near = float((replayed - rollout).abs().max())
    print(f"experts {experts}: replayed {near:.1e}, not {drift:.1e}, gradients {worst:.1e}")
