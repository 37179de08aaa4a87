"""Routers of experts in a pack: routes as a trace recorded them, and losses that count samples, not rows.

A row that n samples share counts n times in the balance of experts, as it would in n separate samples, and a padding
row not at all. Routes are replayed in the place where Megatron's RouterReplay does it. A layer's hook says which rows
come, also where the layer is recomputed.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func
from torch import Tensor

from mmpack.adapters.megatron.modules import refuse_first
from mmpack.adapters.megatron.rows import Rows
from mmpack.adapters.transformers.routes import recorded_rows


class Watched:
    """What a router is to do with the rows that come; it takes the place of its `router_replay`."""

    def __init__(self, own: Any):
        self.own = own  # Megatron's, if it has one
        self.weights: Tensor | None = None  # [rows]: of how many samples; None: no pack comes
        self.routes: Tensor | None = None  # int64 [rows, k]

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, compute: Any
    ) -> tuple[Tensor, Tensor]:
        """Scores [rows, k] and ids [rows, k] of the experts that each row takes."""
        if self.routes is None:
            if self.own is not None:
                return self.own.get_replay_topk(scores, topk, num_groups, group_topk, compute)
            return compute(scores, topk, num_groups, group_topk)
        _, ids = compute(scores, topk, num_groups, group_topk)
        ids = torch.where(recorded_rows(self.routes), self.routes, ids)
        return scores.gather(1, ids), ids


def router_of(layer: Any) -> Any:
    """The layer's router; None where it has no experts."""
    return getattr(layer.mlp, "router", None)


def watch_router(undo: ExitStack, layer: Any) -> None:
    """Let a layer's router know the rows of each forward, until `undo` is closed."""
    router = router_of(layer)
    if router is None:
        return
    before = layer.register_forward_pre_hook(_before, with_kwargs=True)
    after = layer.register_forward_hook(_after, always_call=True)
    undo.callback(before.remove)
    undo.callback(after.remove)
    undo.callback(setattr, router, "router_replay", router.router_replay)
    router.router_replay = Watched(router.router_replay)
    for name, ours in (("_apply_aux_loss", _aux_loss), ("_apply_expert_bias", _count)):
        setattr(router, name, functools.partial(ours, router, getattr(router, name)))
        undo.callback(delattr, router, name)


def refuse_routes(language: Any, routes: Tensor, largest: int) -> None:
    """Raise ModelError where routes [T, layers, k] can't be replayed by this model."""
    config, (layers, k) = language.config, routes.shape[1:]
    apart = config.recompute_granularity == "selective" and "moe" in config.recompute_modules
    known = config.num_layers, len(_expert_layers(config))
    topk, experts = config.moe_router_topk, config.num_moe_experts or 0
    own = "pass routes from an engine that runs this model"
    refuse_first(
        "routed_experts",
        (not experts, "the model has no experts", "set the samples' routed_experts to None"),
        (config.moe_router_fusion, "a fused router takes none", "set moe_router_fusion=False"),
        (apart, "recompute_modules has 'moe', apart from its layer", "recompute whole layers"),
        (layers not in known, f"they are of {layers} layers, the model has {known[0]}", own),
        (k != topk, f"{k} experts a token, the model takes {topk}", own),
        (largest >= experts, f"they name expert {largest}, the model has {experts}", own),
    )


def _expert_layers(config: Any) -> list[int]:
    """Numbers, from 0, of the model's layers with experts."""
    every = config.moe_layer_freq
    pattern = (
        every if isinstance(every, list) else [i % every == 0 for i in range(config.num_layers)]
    )
    return [i for i, sparse in enumerate(pattern) if sparse]


def _before(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    rows, watched = kwargs.get("packed_seq_params"), router_of(layer).router_replay
    if not isinstance(rows, Rows):
        return
    own = slice(None)
    if layer.config.sequence_parallel:
        group = layer.tp_group
        each = len(rows.weights) // group.size()
        own = slice(group.rank() * each, (group.rank() + 1) * each)
    watched.weights = rows.weights[own]
    if rows.routes is not None:
        number, sparse = layer.layer_number - 1, _expert_layers(layer.config)
        column = sparse.index(number) if rows.routes.shape[1] == len(sparse) else number
        watched.routes = rows.routes[own, column].long()


def _after(layer: Any, args: Any, output: Any) -> None:
    watched = router_of(layer).router_replay
    watched.weights = watched.routes = None


def _aux_loss(
    router: Any,
    own: Any,
    probs: Tensor,
    scores: Tensor,
    routing_map: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Switch Transformer's loss (arXiv 2101.03961, section 2.2), of rows that count as often as samples have them."""
    weights, coefficient = router.router_replay.weights, router.get_aux_loss_coeff("aux_loss")
    if weights is None or not coefficient:
        out: Tensor = own(probs, scores, routing_map, *args, **kwargs)
        return out
    counts = torch.cat([(routing_map * weights[:, None]).sum(0), weights.sum()[None]])
    counts = reduce_from_tensor_model_parallel_region(counts, router.tp_cp_group)
    loss = switch_load_balancing_loss_func(
        probs=scores * weights[:, None],
        tokens_per_expert=counts[:-1],
        total_num_tokens=counts[-1],
        topk=router.topk,
        num_experts=router.config.num_moe_experts,
        moe_aux_loss_coeff=coefficient,
    )
    out = router.attach_and_log_load_balancing_loss(
        probs,
        coefficient,
        loss,
        "load_balancing_loss",
        router.tp_cp_group,
        valid_token_count=weights.sum(),
    )
    return out


def _count(router: Any, own: Any, routing_map: Tensor, *args: Any, **kwargs: Any) -> None:
    """Tokens per expert, by which Megatron moves the experts' bias."""
    weights = router.router_replay.weights
    if weights is None:
        own(routing_map, *args, **kwargs)
    elif router.enable_expert_bias and torch.is_grad_enabled():
        router.local_tokens_per_expert += (routing_map * weights[:, None]).sum(0)
