"""Gated delta nets (Qwen3.5's linear attention) over a batch's segments: none reads a row of another path.

The plan goes through the model's forward as the keyword `segment_plan`. A hook of each layer that has such a net puts
it in the place of the net's attention mask, which every transformers hands on and gradient checkpointing keeps; the
net's forward runs mmpack's ops where it finds it there, and is its own for any other mask.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional

from mmpack.adapters.transformers.guards import NoMask
from mmpack.adapters.transformers.modules import decoder_layers
from mmpack.adapters.transformers.ulysses.heads import OwnHeads, net_by_heads
from mmpack.adapters.transformers.ulysses.split import KEYWORD as ROW_SPLIT
from mmpack.adapters.transformers.ulysses.split import RowSplit
from mmpack.errors import ModelError
from mmpack.ops import invariance
from mmpack.ops.attention.attention_plan import checksum_of
from mmpack.ops.linear_attention import SegmentPlan, segment_conv1d, segment_delta_rule

KEYWORD = "segment_plan"
KIND = "linear_attention"  # in `layer_types` of a text model's config
PARTS = (  # of a net
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "A_log", "dt_bias"),
    *("norm", "out_proj", "head_k_dim", "head_v_dim", "key_dim", "value_dim", "activation"),
)


class Segments(NoMask):
    """In the place of a net's attention mask: its rows' segments. Whatever else reads it comes to an error."""

    def __init__(self, plan: SegmentPlan, split: RowSplit | None = None):
        self.plan, self.split = plan, split


class SegmentForward:
    """In the place of a net's forward, inside of its hooks: over segments where it gets `Segments`, else its own.

    It stays, for backward may run layers again after detach. A pickled or copied net has one too.
    """

    def __init__(self, net: torch.nn.Module):
        self.net = net
        self.own = vars(net).get("forward")  # as accelerate's hooks set one

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, Segments):
            # The class's forward as it is now: `fully_shard` makes a class of its own.
            own = self.own or type(self.net).forward.__get__(self.net)
            out: torch.Tensor = own(hidden_states, *args, **kwargs)
            return out
        return over_segments(self.net, hidden_states, mask.plan, mask.split)


def over_segments(
    net: Any, hidden: torch.Tensor, plan: SegmentPlan, split: RowSplit | None = None
) -> torch.Tensor:
    """A gated delta net's forward, step by step as transformers takes it: hidden [B, S, H] -> [B, S, H].

    `split`: hidden are this rank's rows of a pack, and states run over all of them.
    Source: Qwen3_5GatedDeltaNet of transformers' modeling_qwen3_5.py; Yang et al. 2024, "Gated Delta Networks".
    """
    rows = hidden.shape[0] * hidden.shape[1]
    mixed = net.in_proj_qkv(hidden).reshape(rows, -1)
    decay = net.in_proj_a(hidden).reshape(rows, -1)
    write = net.in_proj_b(hidden).reshape(rows, -1)
    states = functools.partial(_states, net, plan)
    by_heads = states if split is None else functools.partial(net_by_heads, split, net, states)
    out = by_heads(mixed, decay, write)
    gate = net.in_proj_z(hidden).reshape(-1, net.head_v_dim)
    normed = net.norm(out.reshape(-1, net.head_v_dim), gate)
    projected: torch.Tensor = net.out_proj(normed.reshape(*hidden.shape[:2], -1))
    return projected


def _states(
    net: Any,
    plan: SegmentPlan,
    mixed: torch.Tensor,
    decay: torch.Tensor,
    write: torch.Tensor,
    own: OwnHeads | None = None,
) -> torch.Tensor:
    """What stands between the products: [rows, value heads, d]. `own`: the inputs are of these heads alone."""
    weights = [net.conv1d.weight.squeeze(1), net.conv1d.bias, net.A_log, net.dt_bias]
    values, rows = net.value_dim, len(mixed)
    if own is not None:
        index = [own.channels, own.channels, own.values, own.values]
        weights = [
            None if w is None else w[i.to(w.device)] for w, i in zip(weights, index, strict=True)
        ]
        values = len(own.values) * net.head_v_dim
    conv, bias, a_log, dt_bias = weights
    mixed = segment_conv1d(mixed, conv, bias, plan=plan, activation=net.activation)
    keys = (mixed.shape[1] - values) // 2
    query, key, value = mixed.split([keys, keys, values], dim=-1)
    forget = -a_log.float().exp() * functional.softplus(decay.float() + dt_bias)
    write = write.sigmoid()
    with torch.autocast(mixed.device.type, enabled=False):  # states are float32
        return segment_delta_rule(
            query.reshape(rows, -1, net.head_k_dim),
            key.reshape(rows, -1, net.head_k_dim),
            value.reshape(rows, -1, net.head_v_dim),
            forget,
            write,
            plan,
        )


def _is_of(plan: SegmentPlan, kwargs: dict[str, Any]) -> bool:
    """Whether the plan is of the batch whose attention rule goes with it, as far as a host can tell."""
    beside, seen = kwargs.get("attention_plan"), kwargs.get("visible_until")
    if beside is not None:
        return bool(plan.checksum == beside.checksum)
    return seen is None or seen.device.type != "cpu" or plan.checksum == checksum_of(seen.numpy())


def has_linear_attention(whole: Any) -> bool:
    """Whether any layer of the text model hands a state from row to row."""
    return KIND in (getattr(whole.config.get_text_config(), "layer_types", None) or ())


def refuse_unknown_nets(whole: Any) -> None:
    """Raise ModelError for linear attention that is not a gated delta net as mmpack runs it."""
    if not has_linear_attention(whole):
        return
    text = whole.config.get_text_config()
    kinds = zip(text.layer_types, decoder_layers(whole), strict=True)
    for number, (kind, layer) in enumerate(kinds):
        if kind != KIND:
            continue
        net = net_of(layer)
        if net is None:
            raise ModelError(
                f"attach: layer {number} has linear attention that is not a gated delta net known here, and its state "
                "would run across samples. Fix: detach it and train on padded batches (mp.pad)"
            )
        if not isinstance(net.conv1d, torch.nn.Conv1d):
            raise ModelError(
                f"attach: conv1d of layer {number} is a {type(net.conv1d).__name__}, and linear attention would "
                "read its base weight only. Fix: leave conv1d out of LoRA's target_modules"
            )


def net_of(layer: torch.nn.Module) -> Any:
    """The gated delta net of a layer, known by its parts; None where it has none."""
    return next((m for m in layer.children() if all(hasattr(m, part) for part in PARTS)), None)


def take_segments(core: Any) -> None:
    """Let the layers of a model below its head take `segment_plan=`. They run as they did where it is not given."""
    for layer in core.get_decoder().layers:
        net = net_of(layer)
        if net is None:
            continue
        if not isinstance(vars(net).get("forward"), SegmentForward):
            net.forward = SegmentForward(net)
        if _hand_over not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_hand_over, with_kwargs=True)


def _hand_over(layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before a layer with a net: the plan in the place of its mask, which is none where rows are packed."""
    plan = kwargs.get(KEYWORD)
    if plan is None:
        return args, kwargs
    others = {name: value for name, value in kwargs.items() if name != KEYWORD}
    return args, others | {"attention_mask": Segments(plan, kwargs.get(ROW_SPLIT))}


def check_segments(decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Before the forward of an attached text model: its plan, on the device of its rows.

    Raises: ModelError where linear attention would run without it, or by that of another batch.
    """
    if KIND not in (getattr(decoder.config, "layer_types", None) or ()):
        return None
    if invariance.is_on():
        raise ModelError(
            "batch_invariant: the model has linear attention, which sums states in an order that depends on "
            "the batch. Fix: use a model with full attention in all layers"
        )
    plan: SegmentPlan | None = kwargs.get(KEYWORD)
    split: RowSplit | None = kwargs.get(ROW_SPLIT)
    given = kwargs.get("inputs_embeds")
    if given is None:
        given = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
    rows, why = given.shape[0] * given.shape[1], None
    if plan is None:
        why = "segment_plan is missing, and linear attention would run across samples"
    elif split is not None and (plan.rows, rows) != (split.bounds[-1], split.counts[split.rank]):
        why = (
            f"segment_plan is of {plan.rows} rows, of which this rank of sequence_group has {rows}"
        )
    elif split is None and plan.rows != rows:
        why = f"segment_plan is of {plan.rows} rows, there are {given.shape[0]} × {given.shape[1]}"
    elif not _is_of(plan, kwargs):
        why = "segment_plan is of another batch than visible_until"
    if plan is None or why is not None:
        raise ModelError(
            f"mmpack linear attention: {why}. Fix: call model(**model_inputs(batch, model)), or detach"
        )
    return args, kwargs | {KEYWORD: plan.to(given.device)}
