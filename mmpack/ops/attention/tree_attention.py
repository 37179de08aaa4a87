"""Attention of packed rows: row q sees row k exactly if k <= q < visible_until[k]; the whole rule: rule.py."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, BackendError, check_whole
from mmpack.ops.attention.attention_plan import AttentionPlan
from mmpack.ops.attention.choose import FLEX, TREE
from mmpack.ops.attention.lse import by_rule, with_gradient
from mmpack.ops.attention.operands import as_autocast, check_operands
from mmpack.ops.attention.rule import Rule, path_on_device
from mmpack.ops.attention.sdpa import sdpa
from mmpack.ops.inputs import check_are_tensors


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible_until: Tensor,
    plan: AttentionPlan | None = None,
    *,
    visible_from: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Softmax attention under the rule; every backend computes the same.

    Args:
        query: [B, heads, T, d]; key, value: [B, kv heads, T, d], of latent attention value's d is smaller;
            visible_until: int [T] or [B, T].
        plan: of this rule (`batch.attention_plan`; `plan_of_rule` with visible_from or a window); every backend but
            sdpa needs it.
        visible_from: as visible_until: then row q sees row k exactly if visible_from[k] <= q < visible_until[k], for
            blocks whose rows see each other.
        window: rows, at least 1: then row q sees row k only if path(q) - path(k) < window, where path counts the rows
            that a row sees by visible_until alone.
        scale: of the scores; d ** -0.5 if not given.
        dropout: of the weights, in [0, 1]; only sdpa has it.
        backend: a name of `choose.TREE.names`, instead of the one that MMPACK_ATTENTION or cost chose.
        return_lse: also the log-sum-exp of each row's scores, for `merge_attention`. All backends give it but
            flex_flash, which `auto` then leaves out.

    Returns [B, T, heads, d], and with `return_lse` also [B, heads, T], float32 (float64 for float64), natural log, of
    the scores before dropout. Its gradient to query and key takes one more attention, forward and backward; it has no
    second. A row that sees nothing gets 0 and -inf. Kernels that take sequences let a row of padding see the padding
    before it; those rows are not read. Under torch.use_deterministic_algorithms the gradients are the same bits every
    time. Autocast casts as it does for torch's own sdpa.

    Raises ArgumentError for shapes that don't fit, numbers out of their range, a plan of another batch or rule or of
    arrays that were changed since; BackendError for a backend that was asked for and can't run.
    """
    _check_arguments(query, key, value, visible_until, visible_from, window, scale, dropout)
    lines, _, width, head_dim = query.shape
    query, key, value = as_autocast(query, key, value)
    if plan is not None:
        _check_plan(plan, visible_until, visible_from, window, lines, width)
        if plan.choice is None or not torch.compiler.is_compiling():
            resolve(
                plan, visible_until.to(query.device), head_dim, dropout, visible_from=visible_from
            )
    seen = rule_of(visible_until.to(query.device), visible_from, window, plan)
    name = _backend(query, plan, dropout, backend)
    if not return_lse:
        return _attend(name, query, key, value, seen, plan, scale, dropout)[0]
    name = _with_lse(name, query, plan, dropout, backend)
    out, lse = _attend(name, query, key, value, seen, plan, scale, dropout, return_lse=True)
    assert lse is not None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend(name, q, k, v, seen, plan, scale, 0.0)[0]

    return out, with_gradient(lse, query, key, attend, scale)


def _attend(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Rule,
    plan: AttentionPlan | None,
    scale: float | None,
    dropout: float,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """By this backend: [B, T, heads, d], and log-sum-exp [B, heads, T] where it is asked for."""
    if plan is None or plan.rows == 0 or name == "sdpa":
        out = sdpa(query, key, value, seen, scale, dropout)
        return out, by_rule(query, key, seen, scale) if return_lse else None
    narrow = value.shape[-1]
    if narrow < query.shape[-1]:  # latent attention: kernels take heads of one size
        value = torch.nn.functional.pad(value, [0, query.shape[-1] - narrow])
        wide, lse = _attend(name, query, key, value, seen, plan, scale, dropout, return_lse)
        return wide[..., :narrow], lse
    if name in FLEX:
        from mmpack.ops.attention.flex import block_mask, flex

        if plan.block_mask is None:
            plan.block_mask = block_mask(seen)
        return flex(
            query, key, value, plan.block_mask, scale, name == "flex_flash", return_lse=return_lse
        )
    from mmpack.ops.attention import varlen

    return varlen.by_sequences(varlen.KERNELS[name], query, key, value, plan, scale, return_lse)


def _with_lse(
    name: str, query: Tensor, plan: AttentionPlan | None, dropout: float, asked: str | None
) -> str:
    """The backend, if it gives log-sum-exp; else, where none was named, the cheapest that does."""
    without = [other for other, backend in TREE.backends.items() if not backend.lse]
    if name not in without:
        return name
    if asked or TREE.wanted() != "auto" or plan is None:
        able = ", ".join(other for other in TREE.names if other not in without)
        raise BackendError(
            f"attention: {name} was requested, but returns no log-sum-exp. Fix: use one of {able}, or return_lse=False"
        )
    return TREE.choices(plan, query.device, query.shape[-1], dropout, without)[query.dtype]


def _backend(query: Tensor, plan: AttentionPlan | None, dropout: float, asked: str | None) -> str:
    """The backend that runs: the one asked for, that of the resolved plan, or sdpa without a plan.

    Raises BackendError where a named one can't run.
    """
    if plan is None:
        name = asked or TREE.wanted()
        if name not in ("auto", "sdpa"):
            raise BackendError(f"attention: {name} needs a plan. Fix: pass batch.attention_plan")
        return "sdpa"
    return TREE.picked(plan, query, dropout, asked)


def rule_of(
    visible_until: Tensor,
    visible_from: Tensor | None,
    window: int | None,
    plan: AttentionPlan | None = None,
) -> Rule:
    """The rule on the device of visible_until ([T] or [B, T]); of a plan, without what says nothing about its rows."""
    until = torch.atleast_2d(visible_until)
    start = path = None
    if visible_from is not None and (plan is None or plan.blocks is not None):
        start = torch.atleast_2d(visible_from.to(until.device))
    if plan is not None:
        path = None if plan.path is None else torch.atleast_2d(plan.path)
    elif window is not None:
        path = path_on_device(until)
    return Rule(until, start, path, None if path is None else window)


def _check_plan(
    plan: AttentionPlan,
    visible_until: Tensor,
    visible_from: Tensor | None,
    window: int | None,
    lines: int,
    width: int,
) -> None:
    if plan.rows != lines * width:
        raise ArgumentError(
            f"attention: the plan is for {plan.rows} rows, but there are {lines} × {width}. "
            "Fix: pass batch.attention_plan"
        )
    if (plan.window, plan.two_way) != (window, visible_from is not None):
        raise ArgumentError(
            f"attention: the plan is for {_named(plan.window, plan.two_way)}, but the call for "
            f"{_named(window, visible_from is not None)}. Fix: pass plan_of_rule(batch.attention_plan, window, two_way)"
        )
    if not torch.compiler.is_compiling():
        plan.check(visible_until, visible_from)


def _named(window: int | None, two_way: bool) -> str:
    blocks = "two-way blocks" if two_way else "no two-way blocks"
    return f"{'no window' if window is None else f'a window of {window}'} and {blocks}"


def _check_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible_until: Tensor,
    visible_from: Tensor | None,
    window: int | None,
    scale: float | None,
    dropout: float,
) -> None:
    check_operands("attention", {"query": query, "key": key, "value": value}, scale, dropout)
    rules = {"visible_until": visible_until}
    if visible_from is not None:
        rules["visible_from"] = visible_from
    check_are_tensors("attention", **rules)
    for name, x in rules.items():
        if x.shape[-1:] != query.shape[2:3] or x.is_floating_point():
            raise ArgumentError(
                f"attention: {name} has shape {list(x.shape)} and dtype {x.dtype}, expected "
                f"[{query.shape[2]}] integers. Fix: pass batch.{name}"
            )
    if window is not None:
        check_whole("attention", "window", window)


def resolve(
    plan: AttentionPlan,
    visible_until: Tensor,
    head_dim: int,
    dropout: float = 0.0,
    without: Collection[str] = (),
    *,
    visible_from: Tensor | None = None,
) -> None:
    """Fill in which backends run on the device of visible_until ([T] or [B, T]), and move there what they need.

    Does nothing if the plan was resolved under the same settings: MMPACK_ATTENTION, determinism, head size, dropout.
    `without`: backends that `auto` leaves out. `visible_from`: of a plan of two-way blocks.
    Raises BackendError where MMPACK_ATTENTION names one that is unknown or can't run.
    """
    chosen = TREE.resolve(plan, visible_until.device, head_dim, dropout, without)
    flexes = not set(FLEX).isdisjoint(chosen)
    if flexes and plan.block_mask is None and plan.rows:
        from mmpack.ops.attention.flex import block_mask

        plan.block_mask = block_mask(rule_of(visible_until, visible_from, plan.window, plan))
