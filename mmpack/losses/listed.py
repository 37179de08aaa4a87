"""Small columns [B] that callers pass as lists, arrays or tensors, as lists of Python numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, kind_of


def listed(
    what: str, name: str, given: Any, kinds: str, word: str, fix: str, count: int | None = None
) -> list[Any]:
    """[B] values whose numpy dtype is of `kinds`, as a list; else ArgumentError. A tensor on a GPU is read."""
    try:
        found = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    # lists of unequal lengths, tensors without values
    except (TypeError, ValueError, RuntimeError):
        found = np.asarray(None)
    size = "B" if count is None else str(count)
    fits = found.ndim == 1 and (count is None or len(found) == count)
    if not fits or (len(found) and found.dtype.kind not in kinds):
        shape = f", {found.dtype} of shape {list(found.shape)}" if found.ndim else ""
        raise ArgumentError(
            f"{what}: {name} is {kind_of(given)}{shape}, expected [{size}] {word}. Fix: {fix}"
        )
    values: list[Any] = found.tolist()
    return values
