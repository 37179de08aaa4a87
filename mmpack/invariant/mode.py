"""The mode: torch's products and sums of rows are ours while it is on, and so is attention."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from mmpack.errors import ArgumentError, kind_of
from mmpack.invariant.modules import own_norms
from mmpack.invariant.overrides import Installed
from mmpack.ops import invariance

_lock = threading.Lock()
_installed: Installed | None = None
_eager: contextlib.ExitStack | None = None  # undoes torch.compile's stance


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
