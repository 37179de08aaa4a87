"""The mode: torch's products and sums of rows are ours while it is on, and so is attention.

A model's RMSNorms run as one kernel each; they are known by their form, and no framework is imported.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import torch

from mmpack.errors import ArgumentError, kind_of
from mmpack.invariant.overrides import Installed
from mmpack.ops import invariance
from mmpack.ops.norms.rms import rms_norm

_lock = threading.Lock()
_installed: Installed | None = None
_eager: contextlib.ExitStack | None = None  # undoes torch.compile's stance
# blocks that a norm is in: of several threads, in any order
_users: dict[torch.nn.Module, int] = {}


@contextlib.contextmanager
def batch_invariant(model: torch.nn.Module | None = None) -> Iterator[None]:
    """Within the block a token's values and gradients are the same bits, whatever it is batched with.

    It needs an attached model (`mmpack.adapters.transformers.attach`), and the backward within the block too. Torch's
    products, sums and softmaxes of a last dimension, grouped products and convolutions that are products run by ops of
    a fixed order, on the CPU and on CUDA devices; packed rows' and the tower's attention by `fixed_blocks`. What
    torch.compile compiled runs eagerly. Torch's own fused attention raises. All of it is put back on leaving the
    outermost block; blocks nest. It holds for the whole process, for gradients are computed in threads of their own.

    Equal: logprobs of a sample alone, packed in any order, padded on any side, and behind a shared prefix; gradients to
    activations alone, packed and padded. Not equal, and bounded: gradients to parameters, which sum over rows, and
    gradients to the rows of a shared prefix, which sum over its branches.

    Args: `model`: its RMSNorms run as one kernel each, forward and backward; without it as torch's single steps.
    Raises ArgumentError for what is no module.

    Example:
        >>> import torch
        >>> from mmpack import invariant
        >>> linear, rows = torch.nn.Linear(7, 5), torch.randn(40, 7)
        >>> with torch.no_grad(), invariant.batch_invariant():
        ...     torch.equal(linear(rows)[31:32], linear(rows[31:32]))
        True
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            f"batch_invariant: model is {kind_of(model)}, expected a module. "
            "Fix: pass the model, or nothing"
        )
    with contextlib.ExitStack() as stack:
        _enter()
        stack.callback(_leave)
        if model is not None:
            stack.enter_context(own_norms(model))
        yield


def _enter() -> None:
    global _installed, _eager
    with _lock:
        if invariance.enter() > 0:
            return
        with contextlib.ExitStack() as undo:
            undo.callback(invariance.leave)
            with contextlib.ExitStack() as eager:
                eager.enter_context(torch.compiler.set_stance("force_eager"))
                _installed = Installed()
                _eager = eager.pop_all()
            undo.pop_all()


def _leave() -> None:
    global _installed, _eager
    with _lock:
        if invariance.leave() == 0 and _installed is not None and _eager is not None:
            _installed.remove()
            _eager.close()
            _installed = _eager = None


def installed() -> Any:
    """What is in torch's place now; None where the mode is off."""
    return _installed


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
