"""Sequence parallelism beside one process: models whose heads more ranks divide, and sums of gradients over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.float64 import assert_as_exact_as_separate
from support.kits import get_kit
from support.models import (
    Gradients,
    logprobs_and_gradients,
    relative_difference,
    spread_out,
)
from support.ranks import GPU_BOUND, gradient_bound, here, logprob_bound
from torch import distributed


def model_with_heads(name: str, heads: int, kv: int, **more: int) -> Any:
    """The family's small model with other numbers of heads."""
    kit = get_kit(name)
    config = kit.model_config(narrow=True)
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    text.update({"num_attention_heads": heads, "num_key_value_heads": kv} | more)
    if hasattr(text, "head_dim"):
        text.head_dim = size
    else:
        text.update({"hidden_size": size * heads})
    torch.manual_seed(0)
    return spread_out(kit.classes()[0](config), kit.spread).eval()


def split_logprobs_and_gradients(
    model: Any, batch: Any, group: Any, **kwargs: Any
) -> tuple[torch.Tensor, Gradients]:
    """As `logprobs_and_gradients`, of rows split over the group, gradients summed over it."""
    values, gradients = logprobs_and_gradients(model, batch, sequence_group=group, **kwargs)
    for gradient in gradients.values():
        distributed.all_reduce(gradient, group=group)
    return values, gradients


def assert_same(
    found: tuple[torch.Tensor, Gradients],
    wanted: tuple[torch.Tensor, Gradients],
    where: object,
    oracle: Callable[[], tuple[Gradients, Gradients]] | None = None,
) -> None:
    """Logprobs within the contract of layouts, gradients within the least that it allows; none of them lost.

    `oracle`: gradients of separate forwards, and in float64, which decide where two of float32 lie further apart.
    """
    off = (found[0] - wanted[0]).abs().max()
    assert off <= logprob_bound(), (where, float(off))
    both = {name: found[1][name] for name in wanted[1]}
    error = relative_difference(both, wanted[1])
    if oracle is not None and error > gradient_bound():
        assert_as_exact_as_separate({n: g.cpu() for n, g in both.items()}, *oracle(), where)
    else:
        assert error <= gradient_bound(), (where, error)
    most = 1e-4 if here().type == "cpu" else GPU_BOUND
    for name, gradient in wanted[1].items():  # those that are small beside the others too
        assert (both[name] - gradient).norm() <= most * gradient.norm() + 1e-7, (where, name)
    # of a tower that ran for nothing
    assert all(found[1][name].abs().max() == 0 for name in found[1].keys() - wanted[1].keys())
