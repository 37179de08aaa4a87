"""Registration of ops whose kernel is short compared with the call: as `torch.library.custom_op`, without its wrappers.

`custom_op` and its `register_autograd` take several times the host time that the launch takes. Gradients of these ops
come from a `torch.autograd.Function` around the op, which torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mmpack.errors import ArgumentError
from mmpack.ops.backend import Op, implementation
from mmpack.ops.namespace import NAMESPACE
from mmpack.ops.records import flat, schema

LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def define_op(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define mmpack::`name`, which mutates nothing, for every device; returns the op of the fields of records.

    Args: fake: annotated; for tensors without data, returns empty ones. run: takes the same.
    """
    kinds = get_type_hints(fake, include_extras=True)
    LIBRARY.define(schema(name, kinds), tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, flat(run, kinds), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", flat(fake, kinds), lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def by_backend(op: Op, function: str) -> Callable[..., Any]:
    """`function` of the module that runs `op`, chosen by the first tensor or the first field of the first record."""

    def run(first: Any, *rest: Any) -> Any:
        x = first if isinstance(first, Tensor) else first[0]
        return getattr(implementation(op, x.device, x.dtype), function)(first, *rest)

    return run


def refuse_transforms(what: str, *tensors: Tensor) -> None:
    """Raise ArgumentError in forward-mode AD and torch.func's transforms: derivatives would be lost silently."""
    level = forward_ad._current_level
    if level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise ArgumentError(
            f"{what}: it has no forward-mode derivative. Fix: use backward mode, or detach its inputs"
        )
    # Dynamo traces no look at the stack of transforms.
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return
    raise ArgumentError(
        f"{what}: it has no rule for torch.func's transforms. Fix: call it outside of grad and vmap"
    )


def distinct_views(*tensors: Tensor | None) -> Iterable[Tensor | None]:
    """The tensors for a Function, of which Dynamo takes none twice."""
    if not torch.compiler.is_compiling():
        return tensors
    return (None if x is None else x.view_as(x) for x in tensors)
