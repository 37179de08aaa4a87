"""The oracle of values and gradients in float64, which is that of the conformance checks; and its assertion."""

from __future__ import annotations

from conformance.oracle import Wide, exact, separate, torch_functions, wide_copy
from support.models import Gradients, relative_difference

from mmpack.contracts import parameter_gradient_fp32_bound

__all__ = [
    "Wide",
    "assert_as_exact_as_separate",
    "exact",
    "separate",
    "torch_functions",
    "wide_copy",
]


def assert_as_exact_as_separate(
    found: Gradients, apart: Gradients, wanted: Gradients, where: object = ""
) -> None:
    """The contract of parameter gradients in fp32, whose oracle is float64: two fp32 paths are not each other's."""
    off, bound = (relative_difference(g, wanted) for g in (found, apart))
    assert off <= parameter_gradient_fp32_bound(bound), (where, off, bound)
