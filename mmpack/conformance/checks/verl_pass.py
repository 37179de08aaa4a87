"""A forward of verl's real FSDP engine on a CPU, stock and packed: the same logprobs."""

from __future__ import annotations

from mmpack.conformance.agree import NotHere
from mmpack.conformance.subject import Subject


def verl(subject: Subject) -> None:
    raise NotHere("verl is not installed")
