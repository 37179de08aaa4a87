"""Logprobs over lists of ids on Triton kernels: what they get, and in which order they run."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mmpack.ops.logprobs.autograd import Incoming
from mmpack.ops.logprobs.lists import list_kernels as kernels
from mmpack.ops.logprobs.lists import sum_kernels as sums
from mmpack.ops.logprobs.lists.call import HiddenCall, Lists, Runs, Statistics, Window

LANES = 64  # entries of a list at a time; most lists are shorter
LONG_LANES = 1024  # where lists are long


def dots(call: HiddenCall) -> Tensor:
    """Logits [M] of the entries, before the temperature; NaN for ids that this weight lacks."""
    hidden, weight, columns = call.hidden, call.weight, call.columns
    out = torch.empty(len(columns), dtype=torch.float32, device=hidden.device)
    if len(columns):
        with torch.cuda.device_of(hidden):
            sums.dots_kernel[(triton.cdiv(len(columns), sums.ENTRIES),)](
                hidden,
                *hidden.stride(),
                weight,
                *weight.stride(),
                None if call.bias is None else call.bias.contiguous(),
                call.entry_rows,
                columns,
                out,
                len(columns),
                len(weight),
                hidden.shape[1],
                0.0 if call.softcap is None else call.softcap,
                SOFTCAP=call.softcap is not None,
                ENTRIES=sums.ENTRIES,
                DEPTH=_columns(hidden.shape[1], sums.DEPTH),
                num_warps=sums.WARPS,
            )
    return out


def statistics(lists: Lists, entry_logits: Tensor, entropy: bool) -> Statistics:
    """Statistics of the entries' logits; NaN for a list that is empty, does not rise or lacks its target."""
    count, device = len(lists.targets), entry_logits.device
    logprobs = torch.empty(count, dtype=torch.float32, device=device)
    maximum, log_total, entropies = (
        torch.empty(n, dtype=torch.float64, device=device)
        for n in (count, count, count if entropy else 0)
    )
    if count:
        with torch.cuda.device_of(entry_logits):
            kernels.statistics_kernel[(count,)](
                entry_logits,
                lists.ids,
                lists.starts,
                lists.targets,
                lists.temperature,
                logprobs,
                entropies,
                maximum,
                log_total,
                count,
                len(lists.ids),
                ENTROPY=entropy,
                LANES=LANES,
                num_warps=1,
            )
    return Statistics(logprobs, entropies, maximum, log_total, entry_logits)


def slopes(lists: Lists, given: Incoming, statistics: Statistics, softcap: float | None) -> Tensor:
    """Gradient [M] to each entry's logit before softcap, float32; 0 for tokens that no gradient reaches."""
    out = torch.zeros_like(statistics.entry_logits)
    if len(out):
        with torch.cuda.device_of(out):
            kernels.slopes_kernel[(len(lists.targets),)](
                statistics.entry_logits,
                lists.ids,
                lists.starts,
                lists.targets,
                lists.temperature,
                given.grad_logprobs.contiguous(),
                None if given.grad_entropies is None else given.grad_entropies.contiguous(),
                statistics.logprobs,
                statistics.entropies,
                statistics.maximum,
                statistics.log_total,
                out,
                len(out),
                0.0 if softcap is None else softcap,
                SOFTCAP=softcap is not None,
                LANES=LANES,
                num_warps=1,
            )
    return out


def sum_runs(
    out: Tensor, places: Tensor | None, source: Tensor, index: Tensor, scale: Tensor, runs: Runs
) -> None:
    """out[places[r]] = sum over the entries m of run r, in their order, of scale[m] · source[index[m]].

    source [K, H]; index, scale [M]; out [·, H] contiguous. Rows of source whose scale is 0 are not read.
    """
    count, (entries, width) = len(runs.offsets) - 1, (len(index), source.shape[1])
    if count == 0 or width == 0:
        return
    columns = _columns(width, sums.COLUMNS)
    read = (source, *source.stride(), index, scale, runs.order, runs.offsets)
    places = None if places is None else places.contiguous()
    shape = {"PIECE": sums.PIECE, "COLUMNS": columns, "num_warps": sums.WARPS}
    with torch.cuda.device_of(out):
        sums.sum_runs_kernel[(count,)](out, places, *read, width, AT_ONCE=sums.AT_ONCE, **shape)
        if entries <= sums.PIECE:
            return  # no run is longer
        slots = torch.arange(0, entries, sums.PIECE, device=out.device)
        slot_runs = torch.searchsorted(runs.offsets[1:], slots, right=True)
        partial = torch.empty(2 * len(slots), width, dtype=torch.float32, device=out.device)
        grid = len(slots), triton.cdiv(width, columns)
        sums.sum_pieces_kernel[grid](
            partial, slot_runs, *read, count, width, AT_ONCE=sums.AT_ONCE, **shape
        )
        sums.join_pieces_kernel[grid](
            out, places, partial, slot_runs, runs.offsets, count, width, **shape
        )


def take(block: Tensor, out: Tensor, window: Window) -> None:
    """out[m] = block[row, column] for the entries of the window."""
    _exchange(block, out, window, put=False)


def put(block: Tensor, values: Tensor, window: Window) -> None:
    """block[row, column] = values[m] for the entries of the window."""
    _exchange(block, values, window, put=True)


def _exchange(block: Tensor, values: Tensor, window: Window, put: bool) -> None:
    lists = window.lists
    with torch.cuda.device_of(block):
        kernels.window_kernel[(window.rows,)](
            block,
            block.stride(0),
            values,
            lists.ids,
            lists.starts,
            len(lists.targets),
            len(lists.ids),
            window.first_token,
            window.first_column,
            window.columns,
            PUT=put,
            LANES=LONG_LANES,
            num_warps=4,
        )


def _columns(width: int, most: int) -> int:
    return min(triton.next_power_of_2(max(width, 16)), most)
