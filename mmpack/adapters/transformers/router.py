"""The load-balancing loss of a model with experts over a batch: each row of tokens counts once, padding not at all."""

from __future__ import annotations

import sys
from typing import Any

import torch

from mmpack.adapters.transformers.routes import num_experts, recorded_rows, routes_of
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import ModelError
from mmpack.packing.batch import Batch


def router_loss(
    model: Any, batch: Batch, router_logits: tuple[torch.Tensor, ...] | None
) -> torch.Tensor:
    """transformers' own `load_balancing_loss_func` (Switch Transformers, equations 4 to 6) over the rows of `batch`.

    Rows of a shared prefix are routed once and count once. So the loss of a shared pack is that of a pack without
    sharing in which a prefix's later copies have no weight; it is not that of the copies all counted. The model's own
    `aux_loss` counts the rows that `pad_to_multiple_of` adds.

    Of a batch with `routed_experts` the share of tokens per expert (f, equation 5) is that of the experts replayed,
    where the tokens went; the model's own `aux_loss` counts those that its routers would have taken. Probabilities (P,
    equation 6) are of the model's logits either way, and so are gradients.

    Args: `router_logits`: of a forward with `output_router_logits=True`, [rows, experts] per layer.
    Returns: scalar, without the model's coefficient. Raises: ModelError for a model or an output without experts.
    """
    whole = unwrap(model, "router_loss")
    loss = getattr(sys.modules[type(whole).__module__], "load_balancing_loss_func", None)
    if loss is None:
        raise ModelError(
            f"router_loss: {type(whole).__name__} has no experts, or transformers has no loss for them (a bias "
            "balances them). Fix: leave out router_loss"
        )
    if not router_logits:
        raise ModelError(
            "router_loss: there are no router logits. "
            "Fix: pass those of model(…, output_router_logits=True).router_logits"
        )
    text = whole.config.get_text_config()
    rows = torch.zeros(batch.input_ids.numel(), dtype=torch.int64, device=batch.device)
    rows[batch.token_rows] = 1
    if batch.routed_experts is not None:
        return _replayed_loss(routes_of(batch, whole, "router_loss"), router_logits, rows)
    out: torch.Tensor = loss(
        router_logits, num_experts(whole), text.num_experts_per_tok, rows.view(1, -1)
    )
    return out


def _replayed_loss(
    routes: list[torch.Tensor], router_logits: tuple[torch.Tensor, ...], rows: torch.Tensor
) -> torch.Tensor:
    """experts · Σ f · P, both means over counted rows of all layers.

    Args: `routes`: [rows, k] per layer. `rows`: 1 for a row that counts.
    """
    experts = router_logits[0].shape[-1]
    counted = rows.to(torch.float32)[:, None]
    total = counted.sum() * len(router_logits)
    tokens = torch.zeros(experts, device=rows.device)
    share = torch.zeros(experts, device=rows.device)
    for own, logits in zip(routes, router_logits, strict=True):
        k = own.shape[1]
        ids = torch.where(recorded_rows(own), own.long(), logits.topk(k, dim=-1).indices)
        tokens = tokens.index_add(0, ids.flatten(), counted.expand(-1, k).flatten())
        share = share + (logits.float().softmax(-1) * counted).sum(0)
    return experts * (tokens / total * (share / total)).sum()
