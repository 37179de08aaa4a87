"""The ops of csrc/, loaded from a platform wheel's library or from the one that `python -m mmpack.ops.build` left."""

from __future__ import annotations

import functools
from typing import Any

from mmpack.errors import needs
from mmpack.ops.build import library, why_no_library

with needs("torch", "mmpack.ops"):
    import torch


@functools.cache
def native_ops() -> Any:
    """The ops of the library, `torch.ops.mmpack_native`. Only where `why_not()` is None."""
    torch.ops.load_library(str(library()))
    return torch.ops.mmpack_native


def why_not() -> str | None:
    """Why the library can't be loaded; None where it can."""
    if torch.version.hip is not None:
        return "csrc/ is built for CUDA only"
    return why_no_library() if library() is None else None
