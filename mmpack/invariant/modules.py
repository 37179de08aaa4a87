"""A model's RMSNorms as one kernel each. Modules are known by their form: no framework is imported."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from mmpack.ops.norms.rms import rms_norm


@contextlib.contextmanager
def own_norms(model: torch.nn.Module) -> Iterator[int]:
    """Within the block the model's RMSNorms run by `rms_norm`; yields how many. Others keep their own steps."""
    norms = [m for m in model.modules() if _is_norm(m)]
    for module in norms:
        vars(module)["forward"] = functools.partial(_forward, module)
    try:
        yield len(norms)
    finally:
        for module in norms:
            vars(module).pop("forward", None)


def _is_norm(module: Any) -> bool:
    """T5's form, as Llama's and Qwen's: one input, a weight that multiplies, and `variance_epsilon`.

    Gemma's and Qwen3.5's multiply by 1 + weight, and call the epsilon `eps`. A forward that another library put in
    the place of the class's own stays.
    """
    kind = type(module)
    return (
        kind.__name__.endswith("RMSNorm")
        and isinstance(getattr(module, "variance_epsilon", None), float)
        and isinstance(getattr(module, "weight", None), torch.Tensor)
        and module.weight.ndim == 1
        and "forward" not in vars(module)
        and len(inspect.signature(kind.forward).parameters) == 2
    )


def _forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden_states, module.weight, module.variance_epsilon)
