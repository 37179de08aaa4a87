"""Which rule each layer of a text model has: its window, and whether placeholders see each other in it.

Both follow from the model's config and its family. `LayerPlans` goes to the layers in the place of the batch's
attention plan, where any layer has more than `visible_until`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from mmpack.adapters.transformers.modules import decoder_layers
from mmpack.errors import ModelError
from mmpack.families import Family, family_of_config
from mmpack.ops.attention import AttentionPlan, plan_of_rule, resolve
from mmpack.versions import blocks_keep_to_windows

SLIDING, FULL = "sliding_attention", "full_attention"
# values of a config's `layer_types`; the last has no attention
KNOWN = (SLIDING, FULL, "linear_attention")
RULES = "_mmpack_rules"  # on the decoder of an attached model


class LayerRule(NamedTuple):
    """Rule of one kind of layers, which is told by the first two."""

    window: int | None  # what transformers hands to its attention as `sliding_window`
    head_dim: int
    two_way: bool


class LayerPlans(NamedTuple):
    """A plan for each rule, as the layers' keyword `attention_plan`."""

    rules: tuple[LayerRule, ...]
    plans: tuple[AttentionPlan, ...]

    def of(self, window: int | None, head_dim: int) -> tuple[LayerRule, AttentionPlan]:
        """Those of a layer. Raises ModelError where the config names no such layer."""
        for rule, plan in zip(self.rules, self.plans, strict=True):
            if rule.window == window and rule.head_dim == head_dim:
                return rule, plan
        known = ", ".join(f"{r.window} with heads of {r.head_dim}" for r in self.rules)
        raise ModelError(
            f"mmpack attention: a layer has a window of {window} with heads of {head_dim}, the config says {known}. "
            "Fix: set sliding_window and layer_types in the config before you build the model"
        )


def layer_rules(whole: Any, what: str) -> tuple[LayerRule, ...]:
    """The rules of a model's layers with attention, each once, in order; none where all see by `visible_until` alone.

    Raises ModelError, as `what`, for layers of a kind that packed rows can't obey.
    """
    text = whole.config.get_text_config()
    family = family_of_config(whole.config)
    layers = decoder_layers(whole)
    types = getattr(text, "layer_types", None)
    if unknown := sorted(set(types or ()) - set(KNOWN)):
        raise ModelError(
            f"{what}: the model has layers of {', '.join(unknown)}, which packed rows can't obey. "
            "Fix: detach it and train on padded batches (mp.pad)"
        )
    window = getattr(text, "sliding_window", None)
    if types is None:
        types = [FULL if window is None else SLIDING] * len(layers)
    if SLIDING in types and not window:
        raise ModelError(
            f"{what}: the config has layers of {SLIDING} but no sliding_window. Fix: set it in the config"
        )
    found: dict[LayerRule, None] = {}
    for kind, layer in zip(types, layers, strict=True):
        attention = getattr(layer, "self_attn", None)
        if kind not in (SLIDING, FULL) or attention is None:
            continue
        if getattr(attention, "is_causal", True) is False:
            raise ModelError(
                f"{what}: the model's text layers attend in both directions, which packed rows can't obey. "
                "Fix: detach it and train on padded batches (mp.pad)"
            )
        rule = LayerRule(
            window if kind == SLIDING else None,
            getattr(attention, "head_dim", None) or head_dim_of(text),
            _two_way(family, text, kind),
        )
        found[rule] = None
    if any(rule.window is not None or rule.two_way for rule in found):
        return tuple(found)
    return ()


def plan_layers(
    plan: AttentionPlan,
    rules: tuple[LayerRule, ...],
    visible_until: torch.Tensor,
    visible_from: torch.Tensor | None,
    dropout: float = 0.0,
    without: Collection[str] = (),
) -> LayerPlans:
    """The plan of each rule, with its backend chosen; `plan` is the batch's. Raises ModelError for blocks of a batch
    that has no visible_from, and for those that this transformers lets see past a window.
    """
    plan.check(visible_until, visible_from)
    plans = []
    for rule in rules:
        if rule.two_way and visible_from is None:
            raise ModelError(
                "mmpack attention: the model's placeholders attend to each other, but visible_from is missing. "
                "Fix: call model(**model_inputs(batch, model)) with a batch of this family"
            )
        made = plan_of_rule(plan, rule.window, rule.two_way)
        _refuse_other_masks(made)
        start = visible_from if rule.two_way else None
        resolve(made, visible_until, rule.head_dim, dropout, without, visible_from=start)
        plans.append(made)
    return LayerPlans(rules, tuple(plans))


class KeptRules:
    """The rules of a decoder's layers, on it for as long as it is attached. Raises as `layer_rules` does."""

    def __init__(self, core: Any):
        self.decoder, self.rules = core.get_decoder(), layer_rules(core, "attach")
        vars(self.decoder)[RULES] = self

    def remove(self) -> None:
        vars(self.decoder).pop(RULES, None)


def plans_of_forward(
    decoder: Any, kwargs: dict[str, Any], without: Collection[str]
) -> LayerPlans | None:
    """What the layers of an attached decoder get for the batch's own plan, as a collator hands it over; None: as it is.

    `kwargs`: of the decoder's forward. Raises ModelError where the layers need a plan and there is none.
    """
    rules, until = vars(decoder)[RULES].rules, kwargs.get("visible_until")
    plan = kwargs.get("attention_plan")
    if not rules or until is None or isinstance(plan, LayerPlans):
        return None
    if plan is None:
        raise ModelError(NO_PLAN)
    dropout = getattr(decoder.config, "attention_dropout", 0.0) if decoder.training else 0.0
    return plan_layers(plan, rules, until, kwargs.get("visible_from"), dropout, without)


def plan_of_layer(
    plan: AttentionPlan | LayerPlans | None, module: Any, window: int | None, head_dim: int
) -> tuple[bool, AttentionPlan | None]:
    """Whether a layer, whose attention got this window, is two-way; and its plan. Raises ModelError for another layer.

    A layer that hands over no window, though the config gives it one, would see everything.
    """
    if not isinstance(plan, LayerPlans):
        if window is not None:
            raise ModelError(NO_PLAN)
        return False, plan
    if not torch.compiler.is_compiling():
        types = getattr(getattr(module, "config", None), "layer_types", None)
        at = getattr(module, "layer_idx", None)
        if types is not None and at is not None and (types[at] == SLIDING) != (window is not None):
            raise ModelError(
                f"mmpack attention: layer {at} is {types[at]} in the config, and its window is {window}. "
                "Fix: set layer_types in the config before you build the model"
            )
    rule, own = plan.of(window, head_dim)
    return rule.two_way, own


NO_PLAN = (
    "mmpack attention: the model has sliding windows or placeholders that attend to each other, and attention_plan is "
    "missing. Fix: call model(**model_inputs(batch, model))"
)


def _two_way(family: Family, text: Any, kind: str) -> bool:
    """Whether placeholders see each other in layers of this kind."""
    rule = family.two_way
    if rule is None:
        return False
    if rule.setting is not None:
        name, value = rule.setting
        if getattr(text, name, None) != value:
            return False
    return rule.layers is None or kind in rule.layers


def head_dim_of(text: Any) -> int:
    """Size of a head of queries and keys, by the text model's config."""
    if hasattr(text, "qk_nope_head_dim"):  # latent attention, whose head_dim is of its rotary part
        return int(text.qk_nope_head_dim + text.qk_rope_head_dim)
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _refuse_other_masks(plan: AttentionPlan) -> None:
    if blocks_keep_to_windows() or plan.blocks is None or not plan.windowed:
        return
    assert plan.window is not None
    if plan.blocks.max_seqlen_q > plan.window:
        raise ModelError(
            f"mmpack attention: a block of {plan.blocks.max_seqlen_q} placeholders is longer than the window of "
            f"{plan.window}, and this transformers lets it see past that. Fix: install a newer transformers"
        )
