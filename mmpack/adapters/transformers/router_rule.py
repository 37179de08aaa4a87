"""How a router weighs the experts that it takes: a rule over its logits, which replay applies to other ids.

Rows [T], experts [E], k of them per row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from mmpack.errors import ModelError

ROWS = 16  # of made-up hidden states
EACH = "per_expert_scale"  # of Gemma 4
# of what a router gives first: logits, or probabilities already
SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
    "given": lambda probabilities: probabilities,
}


def is_router(module: Any) -> bool:
    """One of transformers' routers, which give (logits or probabilities, weights, ids)."""
    plain = all(hasattr(module, name) for name in ("top_k", "num_experts", "hidden_dim"))
    named = "router" in type(module).__name__.lower()
    return named and (plain or hasattr(module, EACH))


def experts_of(router: Any) -> int:
    """How many there are."""
    return int(getattr(router, "num_experts", None) or router.config.num_experts)


def chosen_of(router: Any) -> int:
    """How many a token takes."""
    return int(getattr(router, "top_k", None) or router.config.top_k_experts)


@dataclass(frozen=True)
class Rule:
    """Scores of all experts in float32, those of the ids taken, divided by their sum or not, times `scale`."""

    score: str  # of SCORES
    normalised: bool
    scale: float = 1.0
    scales: str | None = None  # the router's parameter with a scale for each expert

    def weights(self, logits: torch.Tensor, ids: torch.Tensor, router: Any = None) -> torch.Tensor:
        """float32 [T, k] of logits [T, E] at ids int64 [T, k]; differentiable in the logits, of all experts or of k.

        `router`: whose `scales` they are multiplied by.
        """
        taken = SCORES[self.score](logits.float()).gather(-1, ids)
        if self.normalised:
            taken = taken / taken.sum(-1, keepdim=True)
        if self.scales is not None:
            taken = taken * getattr(router, self.scales)[ids]
        return taken if self.scale == 1 else taken * self.scale


def rule_of(router: Any) -> Rule:
    """The rule of a router of transformers' (logits, weights, ids), found by its own code on made-up numbers.

    Raises: ModelError for a router that weighs by another rule.
    """
    each = EACH if hasattr(router, EACH) else None
    asked = _drawn_copy(router, torch.Generator().manual_seed(0)) if is_router(router) else None
    answer = None if asked is None else _answer(asked, router)
    if isinstance(answer, tuple) and len(answer) == 3:
        logits, weights, ids = answer
        scale = float(getattr(router, "routed_scaling_factor", 1.0))
        for score, normalised in product(SCORES, (True, False)):
            rule = Rule(score, normalised, scale, each)
            found = rule.weights(logits, ids, asked)
            if torch.allclose(found, weights.float(), rtol=1e-5, atol=1e-7):
                return rule
    raise ModelError(
        f"routed_experts: {type(router).__name__} weighs its experts by a rule that replay does not know. "
        "Fix: set routed_experts of the samples to None, and correct for the drift (correction='tis')"
    )


def _drawn_copy(module: Any, generator: torch.Generator) -> Any:
    """The module without hooks, with weights that are drawn: its own may be sharded, or on meta."""
    out = copy.copy(module)
    state = vars(out)
    for kind in ("_parameters", "_buffers"):
        state[kind] = {
            name: None if value is None else _drawn(generator, *value.shape)
            for name, value in state[kind].items()
        }
    for kind in ("_forward_hooks", "_forward_pre_hooks"):
        state[kind] = type(state[kind])()
    state["_modules"] = {
        name: None if child is None else _drawn_copy(child, generator)
        for name, child in state["_modules"].items()
    }
    return out


def _answer(asked: Any, router: Any) -> Any:
    """What the router's own forward gives for made-up hidden states."""
    generator = torch.Generator().manual_seed(1)
    width = getattr(router, "hidden_dim", None) or router.hidden_size
    if "weight" in vars(asked)["_parameters"]:  # a shard may be flat
        vars(asked)["_parameters"]["weight"] = _drawn(generator, experts_of(router), width)
    with torch.no_grad():
        return type(router).forward(asked, _drawn(generator, ROWS, width))


def _drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
