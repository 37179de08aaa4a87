"""The checks, in the order of README's table. Each takes a `Subject` and raises AssertionError, or NotHere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conformance.checks.generating import generate
from conformance.checks.heads import head, lora
from conformance.checks.layouts import layout, parity, positions
from conformance.checks.media import tower, video
from conformance.checks.packing import pack, padded, share
from conformance.checks.trl_step import trl
from conformance.checks.verl_pass import verl
from conformance.subject import Subject

__all__ = ["CHECKS", "Check"]


@dataclass(frozen=True)
class Check:
    """One promise: `run(subject)`.

    `slow`: left out of the default suite; `packs`: not of families that can't be packed; `packages`: whose versions
    matter beside torch's and transformers'.
    """

    name: str
    run: Callable[[Subject], None]
    slow: bool = True
    packs: bool = True
    packages: tuple[str, ...] = ()


CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        Check("layout", layout, slow=False, packs=False),
        Check("positions", positions, slow=False, packs=False),
        Check("parity", parity, slow=False, packs=False),
        Check("pack", pack, slow=False),
        Check("share", share, slow=False),
        Check("padded", padded, slow=False),
        Check("video", video),
        Check("head", head),
        Check("tower", tower, slow=False),
        Check("lora", lora, packages=("peft",)),
        Check("generate", generate),
        Check("trl", trl, packages=("trl",)),
        Check("verl", verl, packages=("verl",)),
    )
}
