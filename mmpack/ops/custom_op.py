"""Registration of ops whose kernel is short beside the call: as `torch.library.custom_op`, without its wrappers.

`custom_op` and its `register_autograd` take several times the host time that the launch takes. Gradients of these ops
come from a `torch.autograd.Function` around the op, which torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mmpack.errors import ArgumentError

SCHEMA_TYPES = {
    Tensor: "Tensor",
    torch.dtype: "ScalarType",
    bool: "bool",
    float: "float",
    int: "int",
    str: "str",
}

_LIBRARY = torch.library.Library("mmpack", "FRAGMENT")


def define_op(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define mmpack::NAME, which mutates nothing, for every device; returns the op.

    Args: schema: "name(Tensor x, …) -> Tensor". run: gets the arguments in the order of the schema. fake: the same
    for tensors without data, returns empty ones.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mmpack::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.mmpack, name).default


def parameters(*records: type) -> str:
    """The parameters of a schema: the fields of NamedTuples in their order, which the op gets one by one."""
    fields = [field for record in records for field in get_type_hints(record).items()]
    return ", ".join(f"{_schema_type(kind)} {name}" for name, kind in fields)


def _schema_type(kind: Any) -> str:
    """How a schema writes the type of a field."""
    if get_origin(kind) in (Union, UnionType):
        (inner,) = (part for part in get_args(kind) if part is not NoneType)
        return f"{_schema_type(inner)}?"
    if get_origin(kind) is Sequence:
        return f"{_schema_type(get_args(kind)[0])}[]"
    return "str" if get_origin(kind) is Literal else SCHEMA_TYPES[kind]


def refuse_transforms(what: str, *tensors: Tensor) -> None:
    """Raise ArgumentError in forward-mode AD and torch.func's transforms: derivatives would be lost silently."""
    level = forward_ad._current_level
    if level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise ArgumentError(
            f"{what}: it has no forward-mode derivative. Fix: differentiate backward, or detach its inputs"
        )
    # Dynamo traces no look at the stack of transforms.
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return
    raise ArgumentError(
        f"{what}: it has no rule for torch.func's transforms. Fix: call it outside of grad and vmap"
    )


def distinct_views(*tensors: Tensor) -> Iterable[Tensor]:
    """The tensors for a Function, of which Dynamo takes none twice."""
    return (x.view_as(x) for x in tensors) if torch.compiler.is_compiling() else tensors
