"""A model's RMSNorms as one kernel each. Modules are known by their form: no framework is imported."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import torch

from mmpack.ops.norms.rms import rms_norm

_lock = threading.Lock()
_users: dict[
    torch.nn.Module, int
] = {}  # blocks that a norm is in: of several threads, in any order


@contextlib.contextmanager
def own_norms(model: torch.nn.Module) -> Iterator[int]:
    """Within the block the model's RMSNorms run by `rms_norm`; yields how many. Others keep their own steps."""
    with _lock:
        norms = [m for m in model.modules() if m in _users or _is_norm(m)]
        for module in norms:
            _users[module] = _users.get(module, 0) + 1
            if _users[module] == 1:
                vars(module)["forward"] = functools.partial(_forward, module)
    try:
        yield len(norms)
    finally:
        with _lock:
            for module in norms:
                _users[module] -= 1
                if not _users[module]:
                    del _users[module]
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
