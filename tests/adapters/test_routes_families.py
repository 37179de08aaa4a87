"""Routes replayed in every family with experts: values and gradients of its own routers, each sample alone.

The oracle is transformers' router itself, in which the choice of k out of all experts is made before.
"""

import contextlib
import copy
import dataclasses
import functools

import numpy as np
import pytest
import torch
from support.families import LAYOUTS, mixed_batch
from support.kits import get_kit
from support.models import logprobs_and_gradients, relative_difference, small_model
from support.routed import Forced

import mmpack as mp
from mmpack.adapters.transformers import attach, packed_logprobs, record_routes
from mmpack.adapters.transformers.routes import (
    chosen_of,
    experts_of,
    is_router,
)

pytestmark = pytest.mark.adapter
CLOSE = 1e-6  # some routers compute in float32
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def gemma4():
    """Gemma 4's kit is dense; its largest but one has experts beside each layer's MLP."""
    kit = get_kit("gemma4")
    if not kit.available:
        pytest.skip("this transformers has no Gemma 4")
    text = dict(kit.config["text_config"]) | {"enable_moe_block": True, "num_experts": 8}
    text |= {"top_k_experts": 2, "moe_intermediate_size": 64}
    return dataclasses.replace(kit, config=dict(kit.config) | {"text_config": text}).small()


def made(family):
    model = gemma4() if family == "gemma4" else small_model(family)
    model = model.double().eval()
    model.config.get_text_config()._experts_implementation = "eager"  # grouped: no float64
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 3 and "experts" in name:
                parameter.mul_(12)  # another expert is another answer
            if name.endswith("per_expert_scale"):
                parameter.copy_(torch.rand(parameter.shape, generator=draw) + 0.5)
    return model


def routers_of(model):
    return [m for m in model.modules() if is_router(m)]


def answers(model, samples):
    """Values [N], and gradients added up, of the model's own routers forced to the samples' routes."""
    model = copy.deepcopy(model)
    now = {}

    def forced(router, k, own):
        def forward(*args, **kwargs):
            with Forced(now["routes"][:, k], experts_of(router)):
                out = own(*args, **kwargs)
            assert torch.equal(out[2], now["routes"][:, k])
            return out

        return forward

    for k, router in enumerate(routers_of(model)):
        router.forward = forced(router, k, router.forward)
    found = []
    for sample in samples:
        now["routes"] = torch.from_numpy(sample.routed_experts.astype(np.int64))
        bare = dataclasses.replace(sample, routed_experts=None)
        found.append(logprobs_and_gradients(model, mp.pad([bare])))
    names = dict.fromkeys(name for _, gradients in found for name in gradients)
    total = {n: torch.stack([g[n] for _, g in found if n in g]).sum(0) for n in names}
    return torch.cat([values for values, _ in found]), total


@pytest.mark.parametrize(
    "family", ["glm4v_moe", *map(slow, ("qwen3_5_moe", "gemma4", "qwen3_omni_moe", "kimi_k25"))]
)
def test_replayed_routes_are_those_of_the_familys_own_routers(family):
    model = made(family)
    routers = routers_of(model)
    if not routers:  # as GLM's before transformers 5.15
        with pytest.raises(mp.ModelError, match="do not return their choice"), record_routes(model):
            pass
        pytest.skip("routers of this transformers do not return their choice")
    experts, chosen = experts_of(routers[0]), chosen_of(routers[0])
    samples = mixed_batch(family)[:3]
    for k, sample in enumerate(samples):  # the first two share a prompt, and its routes
        draw = np.random.default_rng(max(0, k - 1)).random((256, len(routers), experts))
        taken = draw.argsort(-1)[: len(sample), :, :chosen]
        sample.routed_experts = mp.schema.compact_routes(taken, experts)
    wanted, gradients = answers(model, samples)
    for layout in ("packed", "shared", "left"):
        batch = LAYOUTS[layout](samples)
        with contextlib.nullcontext() if layout == "left" else attach(model):
            values, found = logprobs_and_gradients(model, batch)
        assert (values - wanted).abs().max() <= CLOSE, layout
        assert relative_difference(found, gradients) <= CLOSE, layout
    bare = mp.pack([dataclasses.replace(s, routed_experts=None) for s in samples])
    with attach(model), torch.no_grad():
        with record_routes(model) as own:
            without = packed_logprobs(model, bare)
        assert (without - wanted).abs().max() > 0.05
        bare.routed_experts = own.rows
        assert torch.equal(packed_logprobs(model, bare), without)  # its own routes change no bit
