"""vime's provider of selected logprobs: `--linear-logp-provider mmpack.adapters.vime.linear_logp.provider`.

A request holds logits [T, V / ranks], targets [T] and, where vime has them, the hidden states [T, H] and the head's
weight [V / ranks, H] that the logits are of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmpack._version import __version__
from mmpack.adapters.vime.megatron import size_of
from mmpack.errors import ArgumentError, kind_of
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.selected import selected_logprobs
from mmpack.ops.logprobs.sharded import sharded_selected_logprobs

CONTRACT = "mmpack.logprobs.1"


@dataclass(frozen=True)
class LinearLogp:
    """What vime reads of a provider."""

    logp: Tensor  # [T, 1] float32
    entropy: Tensor | None  # [T], nats
    backend_id: str  # the op that ran
    contract_id: str
    provenance: Mapping[str, Any]


def provider(request: Any) -> LinearLogp:
    """Logprobs of a `LinearLogpRequest`'s targets, and entropies where it asks for them.

    Of hidden states, without a gradient of the size of the logits, where the request has them, the vocabulary is whole
    and no id is masked. Else of the logits: over ranks by `sharded_selected_logprobs`, because a request does not say
    whether Megatron sums the gradient to the hidden states over the ranks once more. With `log_prob_keep_mask` logprobs
    are over the ids that it keeps, and the target; entropies are over all, as vime's are.

    Raises: ArgumentError for what is no such request, and for lists of `top_p_sparse_token_ids`.
    """
    logits, targets = getattr(request, "logits", None), getattr(request, "target_ids", None)
    if not isinstance(logits, Tensor) or not isinstance(targets, Tensor):
        raise ArgumentError(
            f"vime: the request is {kind_of(request)}, expected a LinearLogpRequest with logits and "
            "target_ids. Fix: name this provider in --linear-logp-provider"
        )
    metadata = getattr(request, "metadata", None) or {}
    if metadata.get("top_p_sparse_token_ids") is not None:
        raise ArgumentError(
            "vime: the request has top_p_sparse_token_ids. Fix: let vime send log_prob_keep_mask"
        )
    group, context = request.tensor_parallel_group, getattr(request, "context", None)
    mask = getattr(request, "log_prob_keep_mask", None)
    temperature = getattr(request, "temperature", None)
    scaled = bool(metadata.get("logits_are_temperature_scaled", True))
    entropy, entropy_gradient = bool(request.with_entropy), bool(request.with_entropy_grad)
    split, one = size_of(group) > 1, _number(temperature)

    def of_logits(logits: Tensor, entropy: bool) -> Any:
        if split:
            rows = torch.arange(len(logits), device=logits.device)
            return sharded_selected_logprobs(logits, targets, rows, group, 1.0, entropy)
        return selected_logprobs(logits, targets, entropy=entropy)

    if context is not None and mask is None and not split and one is not None:
        name, head = "linear_selected_logprobs", context.projection
        values = linear_selected_logprobs(
            context.hidden, head.weight, targets, None, head.bias, one, entropy
        )
        logprobs, entropies = values if isinstance(values, tuple) else (values, None)
    else:
        name = "sharded_selected_logprobs" if split else "selected_logprobs"
        if not scaled and temperature is not None:
            logits = logits / (temperature if one is not None else temperature.reshape(-1, 1))
        if mask is None:
            values = of_logits(logits, entropy)
            logprobs, entropies = values if entropy else (values, None)
        else:
            logprobs = of_logits(_masked(logits, mask, targets, group), False)
            with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
                entropies = of_logits(logits, True)[1] if entropy else None
    if entropies is not None and not entropy_gradient:
        entropies = entropies.detach()
    return LinearLogp(
        logprobs[:, None],
        entropies,
        f"mmpack.{name}",
        CONTRACT,
        {"mmpack": __version__, "torch": torch.__version__, "device": logits.device.type},
    )


def _number(temperature: Any) -> float | None:
    """One temperature of all rows; None for one per row."""
    if isinstance(temperature, Tensor) and temperature.numel() != 1:
        return None
    return 1.0 if temperature is None else float(temperature)


def _masked(logits: Tensor, mask: Tensor, targets: Tensor, group: Any) -> Tensor:
    """Logits with -inf where nothing is kept; the target is always kept."""
    first = torch.distributed.get_rank(group) * logits.shape[1] if size_of(group) > 1 else 0
    columns = torch.arange(first, first + logits.shape[1], device=logits.device)
    return logits.masked_fill(~(mask | (columns == targets[:, None])), -torch.inf)
