"""What stands in the place of torch's own kernels, below autograd: so backwards run by it too, and checkpoints.

Each function has the signature of the ATen op in its name. What it does not need to change goes to torch's own kernel
through the op's `out` form, which stays as it is.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmpack.errors import ModelError
from mmpack.ops.norms.rows import softmax, sum_rows_of, variance
from mmpack.ops.products.product import FLOATS, multiply
from mmpack.ops.tf32 import allows_tf32_convolutions

KEYS = ("CPU", "CUDA")  # CUDA is ROCm's key too
FEW = 32  # a sum over so many of another dimension is made one by one
aten = torch.ops.aten


class Installed:
    """All overrides, until `remove`."""

    def __init__(self) -> None:
        self.library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # that a kernel is overridden, which is meant
            warnings.simplefilter("ignore", UserWarning)
            for key in KEYS:
                for name, run in TABLE.items():
                    _put(self.library, name, run, key)
                for name in FUSED_ATTENTION[key]:
                    _put(self.library, name, functools.partial(_refuse, name), key)

    def remove(self) -> None:
        self.library._destroy()


def _put(library: Any, name: str, run: Callable[..., Any], key: str) -> None:
    try:
        library.impl(name, run, key, allow_override=True)
    except TypeError:  # an older torch has no such word, and needs none
        library.impl(name, run, key)


def mm(a: Tensor, b: Tensor) -> Tensor:
    if not _multiply(a, b, 2):
        return torch.mm(a, b, out=a.new_empty(0))
    return multiply(a, b, None, a.dtype)


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if not _multiply(a, b, 2, bias):
        return torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=a.new_empty(0))
    columns = b.shape[1]
    if beta == alpha == 1 and bias.numel() == columns and bias.shape[-1:] == (columns,):
        return multiply(a, b, bias.reshape(columns), a.dtype)
    return _scaled(multiply(a, b, None, _wide(a)), bias, beta, alpha, a.dtype)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    if not _multiply(a, b, 3):
        return torch.bmm(a, b, out=a.new_empty(0))
    return multiply(a, b, None, a.dtype)


def baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if not _multiply(a, b, 3, bias):
        return torch.baddbmm(bias, a, b, beta=beta, alpha=alpha, out=a.new_empty(0))
    return _scaled(multiply(a, b, None, _wide(a)), bias, beta, alpha, a.dtype)


def mv(a: Tensor, vector: Tensor) -> Tensor:
    if vector.ndim != 1 or not _multiply(a, vector[:, None], 2):
        return torch.mv(a, vector, out=a.new_empty(0))
    return multiply(a, vector[:, None], None, a.dtype)[:, 0]


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Groups of rows of a [M, K] by b [E, K, N]; of two matrices, groups of K: [E, M, N]. `offs`: where groups end."""
    dtype = out_dtype or a.dtype
    if a.ndim == 3 and b.ndim == 3:
        out = multiply(a, b, None, dtype)
    else:
        assert offs is not None
        ends = offs.tolist()
        groups = [slice(s, e) for s, e in zip([0, *ends], ends, strict=False)]
        if a.ndim == 2 and b.ndim == 3:
            out = a.new_zeros(a.shape[0], b.shape[2], dtype=dtype)
            for matrix, rows in zip(b, groups, strict=True):
                out[rows] = multiply(a[rows], matrix, None, dtype)
        elif a.ndim == 3:
            out = a.new_zeros(a.shape[1], b.shape[1], dtype=dtype)
            for matrix, columns in zip(a, groups, strict=True):
                out[:, columns] = multiply(matrix, b[:, columns], None, dtype)
        else:
            each = [multiply(a[:, part], b[part], None, dtype) for part in groups]
            out = torch.stack(each)
    return out if bias is None else out + bias


def sum_dim(
    x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    out_dtype = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    if not _is_ours(x, out_dtype):
        return torch.sum(x, dim, keepdim, dtype=dtype, out=x.new_empty(0, dtype=out_dtype))
    width = _last(x, dim)
    if width is not None:
        return _kept(_sum_last(x, width, out_dtype), x, dim, keepdim)
    one = dim is not None and len(dim) == 1 and x.ndim > 0 and _are_there(x, dim)
    if one and dim is not None and 0 < x.shape[dim[0]] <= FEW:
        first, *others = x.to(_wide(x)).unbind(dim[0])
        total = functools.reduce(torch.add, others, first).to(out_dtype)
        return total.unsqueeze(dim[0]) if keepdim else total
    return torch.sum(x, dim, keepdim, dtype=dtype, out=x.new_empty(0, dtype=out_dtype))


def mean_dim(
    x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    out_dtype = dtype or x.dtype
    width = _last(x, dim) if _is_ours(x, out_dtype) else None
    if width is None:
        return torch.mean(x, dim, keepdim, dtype=dtype, out=x.new_empty(0, dtype=out_dtype))
    return _kept(_sum_last(x, width, out_dtype, 1 / width), x, dim, keepdim)


def var(
    x: Tensor, dim: list[int] | None = None, *, correction: Any = None, keepdim: bool = False
) -> Tensor:
    if not (_is_ours(x, x.dtype) and dim is not None and len(dim) == 1 and _last(x, dim)):
        out = x.new_empty(0, dtype=x.dtype.to_real())
        return torch.var(x, dim, correction=correction, keepdim=keepdim, out=out)
    found = variance(x, 1 if correction is None else correction, x.dtype)
    return found[..., None] if keepdim else found


def std(
    x: Tensor, dim: list[int] | None = None, *, correction: Any = None, keepdim: bool = False
) -> Tensor:
    if not (_is_ours(x, x.dtype) and dim is not None and len(dim) == 1 and _last(x, dim)):
        out = x.new_empty(0, dtype=x.dtype.to_real())
        return torch.std(x, dim, correction=correction, keepdim=keepdim, out=out)
    wide = variance(x, 1 if correction is None else correction, _wide(x)).sqrt().to(x.dtype)
    return wide[..., None] if keepdim else wide


def softmax_op(x: Tensor, dim: int, half_to_float: bool, log: bool = False) -> Tensor:
    dtype = torch.float32 if half_to_float else x.dtype
    if not (_is_ours(x, dtype) and _is_last(x, dim)):
        own = aten._log_softmax if log else aten._softmax
        return own.out(x, dim, half_to_float, out=torch.empty_like(x, dtype=dtype))  # type: ignore[no-any-return]
    return softmax(x, log, dtype)


def softmax_backward(
    grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype, log: bool = False
) -> Tensor:
    if not (_is_ours(grad, grad.dtype) and _is_last(grad, dim)):
        own = aten._log_softmax_backward_data if log else aten._softmax_backward_data
        made = torch.empty_like(grad, dtype=input_dtype)
        if log:
            return own.out(grad, out, dim, input_dtype, out=made)  # type: ignore[no-any-return]
        return own.out(grad, out, dim, input_dtype, grad_input=made)  # type: ignore[no-any-return]
    wide, value = grad.to(_wide(grad)), out.to(_wide(out))
    if log:
        total = sum_rows_of(wide, wide.dtype)[..., None]
        return (wide - value.exp() * total).to(input_dtype)
    total = sum_rows_of(wide * value, wide.dtype)[..., None]
    return (value * (wide - total)).to(input_dtype)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """A patch embedding, whose kernel steps by its own size, is a product; any other convolution is torch's own."""
    kernel = list(weight.shape[2:])
    cells = [n // k for n, k in zip(x.shape[2:], kernel, strict=False)]
    is_product = (
        not transposed
        and groups == 1
        and _is_ours(x, x.dtype)
        and x.dtype == weight.dtype
        and x.ndim == weight.ndim
        and x.shape[1] == weight.shape[1]
        and (bias is None or (bias.dtype == x.dtype and list(bias.shape) == [len(weight)]))
        and list(stride) == kernel
        and not any(padding)
        and all(d == 1 for d in dilation)
        and list(x.shape[2:]) == [n * k for n, k in zip(cells, kernel, strict=True)]
    )
    if not is_product:
        cudnn = torch.backends.cudnn
        made: Tensor = torch._convolution(
            x, weight, bias, stride, padding, dilation, transposed, output_padding, groups,
            cudnn.benchmark, cudnn.deterministic, cudnn.enabled, allows_tf32_convolutions(),
        )  # fmt: skip
        return made
    count, dims = len(kernel), range(len(kernel))
    split = [s for pair in zip(cells, kernel, strict=True) for s in pair]
    patches = x.reshape(*x.shape[:2], *split)
    order = [0, *(2 + 2 * i for i in dims), 1, *(3 + 2 * i for i in dims)]
    rows = patches.permute(order).reshape(-1, weight[0].numel())
    out = multiply(rows, weight.reshape(len(weight), -1).t(), bias, x.dtype)
    out = out.view(x.shape[0], *cells, len(weight))
    return out.permute(0, count + 1, *range(1, count + 1)).contiguous()


def _refuse(name: str, *args: Any, **kwargs: Any) -> Any:
    raise ModelError(
        f"batch_invariant: torch's own attention ({name}) was called, and its bits depend on the batch. Fix: "
        "call mmpack.adapters.transformers.attach(model), and call the model with model_inputs(batch, model)"
    )


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _expands(x: Tensor, shape: Sequence[int]) -> bool:
    sizes = zip(reversed(x.shape), reversed(shape), strict=False)
    return x.ndim <= len(shape) and all(n in (1, size) for n, size in sizes)


def _is_ours(x: Tensor, out_dtype: torch.dtype) -> bool:
    return x.dtype in FLOATS and out_dtype in FLOATS


def _multiply(a: Tensor, b: Tensor, ndim: int, bias: Tensor | None = None) -> bool:
    """Whether a · b is ours; other dtypes are torch's, and so are its errors for what doesn't fit."""
    return (
        a.dtype in FLOATS
        and a.dtype == b.dtype
        and a.device == b.device
        and a.ndim == b.ndim == ndim
        and a.shape[-1] == b.shape[-2]
        and a.shape[: ndim - 2] == b.shape[: ndim - 2]
        and (
            bias is None or (bias.dtype == a.dtype and _expands(bias, (*a.shape[:-1], b.shape[-1])))
        )
    )


def _is_last(x: Tensor, dim: int) -> bool:
    return x.ndim > 0 and x.numel() > 0 and dim in (-1, x.ndim - 1)


def _are_there(x: Tensor, dim: Sequence[int]) -> bool:
    return all(-x.ndim <= d < x.ndim for d in dim)


def _last(x: Tensor, dim: list[int] | None) -> int | None:
    """Elements of a row, where `dim` are the last dimensions and not all of them; else None."""
    if not dim or x.numel() == 0 or len(dim) >= max(x.ndim, 1) or not _are_there(x, dim):
        return None
    if sorted(d % x.ndim for d in dim) != list(range(x.ndim - len(dim), x.ndim)):
        return None
    width = 1
    for size in x.shape[x.ndim - len(dim) :]:
        width *= size
    return width


def _sum_last(x: Tensor, width: int, out_dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return sum_rows_of(x.reshape(-1, width), out_dtype, scale)


def _kept(total: Tensor, x: Tensor, dim: list[int] | None, keepdim: bool) -> Tensor:
    count = len(dim or ())
    return total.view(*x.shape[: x.ndim - count], *(1,) * (count if keepdim else 0))


def _scaled(total: Tensor, bias: Tensor, beta: Any, alpha: Any, dtype: torch.dtype) -> Tensor:
    """beta · bias + alpha · total; a bias that beta makes 0 may hold NaN."""
    total = total * alpha if alpha != 1 else total
    return (total + beta * bias.to(total.dtype) if beta else total).to(dtype)


TABLE: dict[str, Callable[..., Any]] = {
    "mm": mm,
    "addmm": addmm,
    "bmm": bmm,
    "baddbmm": baddbmm,
    "mv": mv,
    "_grouped_mm": grouped_mm,
    "sum.dim_IntList": sum_dim,
    "mean.dim": mean_dim,
    "var.correction": var,
    "std.correction": std,
    "_softmax": softmax_op,
    "_log_softmax": functools.partial(softmax_op, log=True),
    "_softmax_backward_data": softmax_backward,
    "_log_softmax_backward_data": functools.partial(softmax_backward, log=True),
    "convolution": convolution,
}
FUSED_ATTENTION = {
    "CPU": ("_scaled_dot_product_flash_attention_for_cpu",),
    "CUDA": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    ),
}
