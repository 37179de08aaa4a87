"""How a router weighs the experts that it takes: a rule over its logits, which replay applies to other ids.

Rows [T], experts [E], k of them per row.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from mmpack.errors import ModelError

ROWS = 16  # of made-up hidden states


@dataclass(frozen=True)
class Rule:
    """Scores of all experts in float32, those of the ids taken, divided by their sum or not, times `scale`."""

    score: str  # "softmax" or "sigmoid"
    normalised: bool
    scale: float = 1.0

    def weights(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """float32 [T, k] of logits [T, E] at ids int64 [T, k]; differentiable in the logits, of all experts or of k."""
        logits = logits.float()
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        taken = scores.gather(-1, ids)
        if self.normalised:
            taken = taken / taken.sum(-1, keepdim=True)
        return taken if self.scale == 1 else taken * self.scale


def rule_of(router: Any) -> Rule:
    """The rule of a router of transformers' (logits, weights, ids), found by its own code on made-up numbers.

    Raises: ModelError for a router that weighs by another rule.
    """
    known = hasattr(router, "num_experts") and not list(router.children())
    answer = _asked(router) if known else None
    if isinstance(answer, tuple) and len(answer) == 3:
        logits, weights, ids = answer
        scale = float(getattr(router, "routed_scaling_factor", 1.0))
        for score, normalised in product(("softmax", "sigmoid"), (True, False)):
            rule = Rule(score, normalised, scale)
            if torch.allclose(rule.weights(logits, ids), weights.float(), rtol=1e-5, atol=1e-7):
                return rule
    raise ModelError(
        f"routed_experts: {type(router).__name__} weighs its experts by a rule that replay does not know. "
        "Fix: set routed_experts of the samples to None, and correct for the drift (correction='tis')"
    )


def _asked(router: Any) -> Any:
    """What the router's own forward gives, with weights that are drawn: its own may be sharded, or on meta."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    asked = copy.copy(router)
    state = vars(asked)
    for kind in ("_parameters", "_buffers"):
        state[kind] = {
            name: None if value is None else drawn(*value.shape)
            for name, value in state[kind].items()
        }
    state["_parameters"]["weight"] = drawn(router.num_experts, router.hidden_dim)
    with torch.no_grad():
        return type(router).forward(asked, drawn(ROWS, router.hidden_dim))
