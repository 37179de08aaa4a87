"""This kernel has no csrc/; the kernel mmpack-csrc has."""

from typing import Any


def native_ops() -> Any:
    """Never called: `why_not` has a reason."""
    raise RuntimeError(why_not())


def why_not() -> str:
    """Why there are no ops of csrc/."""
    return "csrc/ is not in this kernel, but in mmpack-csrc"
