"""What all losses share: the offsets cu_loss [B+1] that cut [N] loss tokens into samples, and the checks on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from mmpack.errors import ArgumentError
from mmpack.ops.inputs import can_look_at, check_are_tensors
from mmpack.ops.segments import segment_ids, segment_sum


def check_columns(
    what: str,
    cu_loss: Tensor,
    columns: Mapping[str, Tensor | None],
    optional: Collection[str] = (),
    offsets: str = "cu_loss",
) -> None:
    """Raise ArgumentError unless every column is a float [N] and cu_loss cuts N; columns named `optional` may be None.

    Args: offsets: the name of cu_loss in errors. Its values are read on the CPU only, on a GPU that would wait for it,
    and not while torch.compile traces.
    """
    check_are_tensors(what, optional, **{offsets: cu_loss}, **columns)
    if cu_loss.ndim != 1 or len(cu_loss) == 0 or cu_loss.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            f"{what}: {offsets} has shape {list(cu_loss.shape)} and dtype {cu_loss.dtype}, expected [B+1] int32. "
            f"Fix: pass batch.cu_loss"
        )
    shape: torch.Size | None = None
    for name, column in columns.items():
        if column is None:
            continue
        shape = column.shape if shape is None else shape
        floats = column.is_floating_point() and column.dtype.itemsize > 1  # not float8
        if column.ndim != 1 or column.shape != shape or not floats:
            fits = column.ndim == 1 and column.shape == shape
            fix = f"{name}.float()" if fits else "columns of the same batch, not padded rectangles"
            raise ArgumentError(
                f"{what}: {name} has shape {list(column.shape)} and dtype {column.dtype}, expected {list(shape)[:1]} "
                f"floats, one per loss token. Fix: pass {fix}"
            )
        if column.device != cu_loss.device:
            raise ArgumentError(
                f"{what}: {name} is on {column.device}, {offsets} on {cu_loss.device}. Fix: move both to one device"
            )
    if can_look_at(cu_loss) and shape is not None:
        first, last = int(cu_loss[0]), int(cu_loss[-1])
        if first != 0 or last != shape[0] or not bool((cu_loss[1:] >= cu_loss[:-1]).all()):
            raise ArgumentError(
                f"{what}: {offsets} runs from {first} to {last} for {shape[0]} loss tokens, expected offsets "
                f"that rise from 0 to {shape[0]}. Fix: pass the {offsets} of the columns' own batch"
            )


def per_token(per_sample: Tensor, cu_loss: Tensor, count: int) -> Tensor:
    """[B] -> [N]: to each loss token its sample's value."""
    return per_sample[segment_ids(cu_loss, count)]


def sample_lengths(cu_loss: Tensor) -> Tensor:
    """Loss tokens of each sample, [B] float64, at least 1 so that it can divide an empty sum."""
    return (cu_loss[1:] - cu_loss[:-1]).double().clamp(min=1.0)


def sample_mean(values: Tensor, cu_loss: Tensor) -> Tensor:
    """Mean over each sample's loss tokens, [N] -> [B] float64; 0 for a sample without one."""
    return segment_sum(values, cu_loss) / sample_lengths(cu_loss)
