"""What a check says when it fails: one line with what, where and by how much."""

from __future__ import annotations

from typing import Any

import torch
from conformance.oracle import Gradients, relative_difference

from mmpack.contracts import TOLERANCES, parameter_gradient_fp32_bound


class NotHere(Exception):
    """A check that can't run: a package or a processor is missing. Its text is the reason."""


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def close(found: torch.Tensor, wanted: torch.Tensor, where: str, name: str = "layouts") -> None:
    """Logprobs agree within a row of `mmpack.contracts.TOLERANCES`; a NaN does not."""
    bound = TOLERANCES[name].value
    expect(found.shape == wanted.shape, f"{where}: {found.shape} values, expected {wanted.shape}")
    off = (found.double() - wanted.double()).abs()
    worst = int(off.nan_to_num(torch.inf).argmax()) if len(off) else 0
    expect(
        bool((off <= bound).all()),
        f"{where}: loss token {worst} is {float(found[worst])}, expected {float(wanted[worst])}; allowed is {bound}",
    )


def as_exact_as_separate(
    found: Gradients, apart: Gradients, wanted: Gradients, where: str = ""
) -> None:
    """The contract of parameter gradients in fp32, whose oracle is float64: two fp32 paths are not each other's."""
    off, bound = (relative_difference(g, wanted) for g in (found, apart))
    allowed = parameter_gradient_fp32_bound(bound)
    expect(off <= allowed, f"{where}: gradients are off by {off:.2e}, allowed is {allowed:.2e}")


def same(found: Any, wanted: Any, what: str) -> None:
    """Arrays or tensors are equal, bit for bit."""
    a, b = torch.as_tensor(found), torch.as_tensor(wanted)
    expect(a.shape == b.shape, f"{what}: shape {list(a.shape)}, expected {list(b.shape)}")
    differ = (a != b).flatten()
    if bool(differ.any()):
        at = int(differ.long().argmax())
        was, should = a.flatten()[at].item(), b.flatten()[at].item()
        raise AssertionError(f"{what}: entry {at} is {was}, expected {should}")
