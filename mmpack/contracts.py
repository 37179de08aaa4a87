"""The numerical contract: every tolerance that tests and benchmarks hold mmpack to, as one table.

No tolerance at all, `torch.equal`, holds for positions, pack, unpack, gather, cache and masks; and for the same sample
in another batch, order, pack or padding: mmpack's ops forward, and gradients to activations.

Errors are absolute differences from float64 on the same inputs, unless a row says otherwise. The functions take
floats, numpy arrays and torch tensors; logprobs are natural logs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

FP32_EPS = 2.0**-24  # unit roundoff


@dataclass(frozen=True)
class Tolerance:
    """One row of the table: how far `what` may be off, in the unit of `measure`."""

    what: str
    measure: str
    value: float


TOLERANCES = {
    "selected_logprob": Tolerance("selected logprob from logits", "+ 4 · 2^-24 · |logp|", 1e-5),
    "linear_logprob": Tolerance(
        "fused linear selected logprob, entropy; fp32 and bf16 inputs",
        "× max(1, max|z| / 50)",
        1e-4,
    ),
    "loss": Tolerance("ratio, KL, losses", "× sum of |terms| / denominator", 1e-6),
    "gradient_fp32": Tolerance("gradients, fp32", "× largest |gradient|", 1e-5),
    "linear_gradient_fp32": Tolerance(
        "gradients of the fused linear selected logprob, fp32",
        "× largest sum of |terms| × max(1, max|z| / 50)",
        1e-5,
    ),
    "gradient_bf16": Tolerance("gradients, bf16", "relative Frobenius norm", 5e-3),
    "gradient_vs_torch": Tolerance("gradients, all dtypes", "× PyTorch's own error", 1.1),
    "advantage": Tolerance("advantages, reward scatter", "absolute", 1e-6),
    "parameter_gradient_fp32": Tolerance(
        "parameter gradients over other micro-batches or a shared prefix, fp32",
        "relative Frobenius norm",
        1e-5,
    ),
    "parameter_gradient_vs_separate": Tolerance(
        "the same, where this is less",
        "× the error of separate forwards in the same dtype on the same machine",
        1.5,
    ),
    "parameter_gradient_floor": Tolerance(
        "the same, fp32: always allowed", "relative Frobenius norm", 2e-6
    ),
    # 1.5 × √3, rounded up: what is computed once, as a shared picture, averages fewer roundings than what is separate
    "parameter_gradient_of_a_kind": Tolerance(
        "parameter gradients of one kind of weight",
        "× the error of separate forwards, of that kind",
        3.0,
    ),
    "parameter_gradient_bf16": Tolerance(
        "parameter gradients over other micro-batches or a shared prefix, bf16",
        "relative Frobenius norm",
        5e-3,
    ),
    "layouts": Tolerance("one model, two layouts, fp32 CPU, all logprobs", "absolute", 1e-5),
    "generate": Tolerance("one model against generate with a KV cache, fp32 CPU", "absolute", 1e-4),
    "engines_mean": Tolerance("two engines, fp32 CPU", "mean absolute", 1e-5),
    "engines_max": Tolerance("two engines, fp32 CPU", "largest absolute", 1e-3),
    "engines_k3": Tolerance("two engines, fp32 CPU", "k3", 1e-6),
}


def selected_logprob_bound(logp: Any) -> Any:
    """Allowed error of each selected logprob; `logp` is the float64 value."""
    return TOLERANCES["selected_logprob"].value + 4 * FP32_EPS * abs(logp)


def linear_logprob_bound(max_abs_logit: float) -> float:
    """Allowed error of a fused linear logprob or entropy; `max_abs_logit` is over finite logits after temperature."""
    return TOLERANCES["linear_logprob"].value * max(1.0, max_abs_logit / 50)


def loss_bound(sum_abs_terms: Any, denominator: Any) -> Any:
    """Allowed error of a loss that is a sum of terms over a denominator."""
    return TOLERANCES["loss"].value * sum_abs_terms / denominator


def gradient_fp32_bound(peak: Any) -> Any:
    """Allowed error of each entry of an fp32 gradient whose largest entry is `peak`."""
    return TOLERANCES["gradient_fp32"].value * abs(peak)


def parameter_gradient_bound(
    separate: float, *, half: bool = False, share: str = "parameter_gradient_vs_separate"
) -> float:
    """Allowed error of parameter gradients; `separate` is the error of one forward per sample, of the same weights.

    Both errors are relative Frobenius norms of the difference from a wider dtype. Two results of one dtype are not
    each other's oracle: how much they differ depends on the machine.

    Args:
        half: gradients are bf16 or fp16, else fp32.
        share: of TOLERANCES, for all weights together; for those of one kind "parameter_gradient_of_a_kind".
    """
    floor = TOLERANCES["parameter_gradient_" + ("bf16" if half else "floor")].value
    if not math.isfinite(separate):  # a broken reference allows no more
        return floor
    return max(floor, TOLERANCES[share].value * separate)


def parameter_gradient_fp32_bound(separate: float) -> float:
    """The same for operators and adapters in fp32: `parameter_gradient_bound`, and never more than 1e-5."""
    return min(parameter_gradient_bound(separate), TOLERANCES["parameter_gradient_fp32"].value)


def linear_gradient_fp32_bound(sum_abs_terms: Any, max_abs_logit: float) -> Any:
    """Allowed error of each entry of a fused linear fp32 gradient; the rounding of the logits changes it.

    Args:
        sum_abs_terms: the largest sum over loss tokens of the absolute values that they add to an entry, with a slope
            of 1 for softcap.
        max_abs_logit: over finite logits before softcap, after temperature.
    """
    return TOLERANCES["linear_gradient_fp32"].value * sum_abs_terms * max(1.0, max_abs_logit / 50)
