"""What all losses share: the offsets cu_loss [B+1] that cut [N] loss tokens into samples, and the checks on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_number, kind_of
from mmpack.ops.inputs import can_look_at, check_are_tensors
from mmpack.ops.segments import segment_ids, segment_sum


def check_column(
    what: str, name: str, given: Any, size: int, kind: str, like: Tensor, fix: str = ""
) -> None:
    """Raise ArgumentError unless `given` is a dense tensor [size] of `kind` on the device of `like`.

    Args: kind: `floats` (not float8), `integers` (no bools), or `values` of any dtype.
    """
    check_are_tensors(what, **{name: given})
    floats = given.is_floating_point()
    integers = not (floats or given.is_complex() or given.dtype == torch.bool)
    floats = floats and given.dtype.itemsize > 1
    of_kind = {"floats": floats, "integers": integers, "values": True}[kind]
    fits, there = given.shape == (size,), given.device == like.device
    if fits and of_kind and there:
        return
    if fits and not of_kind:
        fix = f"pass {name}.{'long' if kind == 'integers' else 'float'}()"
    elif fits:
        fix = "move both to one device"
    raise ArgumentError(
        f"{what}: {name} has shape {list(given.shape)} and dtype {given.dtype} on {given.device}, expected [{size}] "
        f"{kind} on {like.device}. Fix: {fix or 'pass columns of one batch, not padded rectangles'}"
    )


def check_batch(what: str, batch: Any) -> None:
    """Raise ArgumentError for what is no packed or padded batch."""
    if not hasattr(batch, "cu_loss"):
        raise ArgumentError(
            f"{what}: batch is {kind_of(batch)}, expected a PackedBatch or PaddedBatch. "
            "Fix: pass what mp.pack or mp.pad returned"
        )


def check_weights(
    what: str, weights: Any, wanted: Collection[str] = (), least: float | None = None
) -> None:
    """Raise ArgumentError unless `weights` is a dict of numbers, of `least` or more, with one for each of `wanted`."""
    if not isinstance(weights, Mapping):
        raise ArgumentError(
            f"{what}: weights is {kind_of(weights)}, expected a dict. Fix: pass names and their factors"
        )
    if missing := [name for name in wanted if name not in weights]:
        raise ArgumentError(
            f"{what}: weights lacks {missing[0]!r:.40}. Fix: pass one for each, 0 to leave one out"
        )
    for name, weight in weights.items():
        check_number(what, f"weights[{name!r:.40}]", weight, least=least)


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
    given = {name: column for name, column in columns.items() if column is not None}
    if not given:
        return
    count = next(iter(given.values())).numel()
    for name, column in given.items():
        check_column(what, name, column, count, "floats", cu_loss)
    if not can_look_at(cu_loss):
        return
    first, last = int(cu_loss[0]), int(cu_loss[-1])
    if first != 0 or last != count or not bool((cu_loss[1:] >= cu_loss[:-1]).all()):
        raise ArgumentError(
            f"{what}: {offsets} runs from {first} to {last} for {count} loss tokens, expected offsets "
            f"that rise from 0 to {count}. Fix: pass the {offsets} of the columns' own batch"
        )


def check_finite(what: str, name: str, values: Tensor) -> None:
    """Raise ArgumentError for values that are not finite in float32. Waits for a GPU."""
    if values.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ArgumentError(
            f"{what}: {name} can't be read while a CUDA graph is captured. Fix: pass check=False"
        )
    values = values.detach().cpu()
    bad = (~values.float().isfinite()).nonzero()[:, 0].tolist()
    if bad:
        named = ", ".join(f"{name}[{i}] is {float(values[i])}" for i in bad[:3])
        raise ArgumentError(
            f"{what}: {named} ({len(bad)} of {len(values)} are not finite in float32). "
            "Fix: leave those samples out, or score them again"
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
