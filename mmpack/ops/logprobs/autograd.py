"""The ops of logprobs as autograd sees them: one wrapper for what all four share.

An op takes a Call (tensors first, then options) and returns Statistics, which begin with logprobs and entropies: these
two have gradients. What an op brings along is its forward, a fake of it, and how its inputs get their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from mmpack.ops.namespace import NAMESPACE
from mmpack.ops.records import flat


class Incoming(NamedTuple):
    """Gradients that come in, per loss token."""

    grad_logprobs: Tensor  # [N]
    grad_entropies: Tensor | None  # [N]


def incoming(
    logprobs: Tensor, grad_logprobs: Tensor | None, grad_entropies: Tensor | None, entropy: bool
) -> Incoming:
    """The gradients from autograd, which are None for an output that was not used."""
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(logprobs)
    return Incoming(grad_logprobs, grad_entropies if entropy else None)


class Needs(NamedTuple):
    """Which gradients are asked for."""

    to_hidden: bool
    to_weight: bool
    to_bias: bool


def define(
    name: str, forward: Callable[..., Any], fake: Callable[..., Any], gradients: Callable[..., Any]
) -> Callable[..., Any]:
    """Define the op mmpack::`name` of the fields of a Call, one by one: `forward`(call) -> Statistics.

    Args: fake: the same for tensors without data, annotated. gradients: (given, call, statistics, which inputs need
    one) to the gradients of the first inputs, in their order.
    """
    kinds = get_type_hints(fake)
    call_of, statistics_of = kinds["call"], kinds["return"]
    fields = get_type_hints(call_of).values()
    tensors = sum(kind in (Tensor, Tensor | None) for kind in fields)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options, entropy = inputs[tensors:], call_of(*inputs).entropy
        ctx.save_for_backward(*inputs[:tensors], *output)
        ctx.mark_non_differentiable(*output[2 if entropy else 1 :])
        ctx.set_materialize_grads(False)

    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None, *_: Any
    ) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        call, statistics = call_of(*saved[:tensors], *ctx.options), statistics_of(*saved[tensors:])
        given = incoming(statistics.logprobs, grad_logprobs, grad_entropies, call.entropy)
        found = gradients(given, call, statistics, ctx.needs_input_grad)
        return *found, *(None,) * (len(call) - len(found))

    op = _custom_op(name, forward, fake, kinds)
    op.register_autograd(backward, setup_context=keep)
    return op


def gradient_to_logits(
    name: str, run: Callable[..., Any], fake: Callable[..., Any], sparse: Callable[..., Tensor]
) -> Callable[..., tuple[Tensor]]:
    """Define the backwards of an op of logits, mmpack::`name` and mmpack::`name`_; returns `gradients` of `define`.

    Args: run: (given, call, statistics) to the gradient [T, V], compact [S, V] where `call.gradient` says so, or
    written over the logits. sparse: a compact one and the call, to a sparse COO tensor [T, V].
    """

    def write(*args: Any) -> None:
        run(*args)

    kinds = get_type_hints(fake)
    apart = _custom_op(name, run, fake, kinds)
    in_place = torch.library.custom_op(
        f"{NAMESPACE}::{name}_", flat(write, kinds | {"return": None}), mutates_args={"logits"}
    )

    def gradients(given: Incoming, call: Any, statistics: Any, _: Any) -> tuple[Tensor]:
        if call.gradient == "inplace":
            call = call._replace(logits=call.logits.detach())
            in_place(*given, *call, *statistics)
            return (call.logits,)
        grad = apart(*given, *call, *statistics)
        return (sparse(grad, call) if call.gradient == "compact" else grad,)

    return gradients


def sparse_rows(index: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """Values [S, V] at rows `index` [S], as a sparse COO tensor of the shape of `like`."""
    with torch.sparse.check_sparse_tensor_invariants(False):  # it would wait for the GPU
        return torch.sparse_coo_tensor(index[None], values, like.shape)


def gradients_to_head(name: str, run: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Define the backward of an op of hidden, weight and bias, mmpack::`name`; returns `gradients` of `define`.

    Args: run: (given, call, statistics, needs) to the three gradients, None for those that `needs` leaves out.
    """

    def dense(*args: Any) -> Any:
        _, call, *_ = args
        like = call.hidden, call.weight, call.hidden if call.bias is None else call.bias
        found = zip(run(*args), like, strict=True)
        return tuple(x.new_empty(0) if g is None else g for g, x in found)

    def fake(*args: Any) -> Any:
        _, call, _, needs = args
        inputs = zip(call[:3], needs, strict=True)
        return tuple(
            call.hidden.new_empty(0) if x is None else x.new_empty(x.shape if need else 0)
            for x, need in inputs
        )

    kinds = get_type_hints(run) | {"return": tuple[Tensor, Tensor, Tensor]}
    op = _custom_op(name, dense, fake, kinds)

    def gradients(
        given: Incoming, call: Any, statistics: Any, needs_grad: tuple[bool, ...]
    ) -> tuple[Any, ...]:
        needs = Needs(*needs_grad[:3])
        found = op(*given, *call, *statistics, *needs)
        return tuple(g if need else None for g, need in zip(found, needs, strict=True))

    return gradients


def _custom_op(
    name: str, run: Callable[..., Any], fake: Callable[..., Any], kinds: dict[str, Any]
) -> Any:
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", flat(run, kinds), mutates_args=())
    op.register_fake(flat(fake, kinds))
    return op
