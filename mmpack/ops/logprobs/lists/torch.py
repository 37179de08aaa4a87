"""Logprobs over lists of ids in plain torch. What there is per entry or token is computed in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.ops.logprobs.autograd import Incoming
from mmpack.ops.logprobs.lists.call import HiddenCall, Lists, Runs, Statistics, Window
from mmpack.ops.logprobs.softmax import LOWEST
from mmpack.ops.rows.inverse import Inverse
from mmpack.ops.rows.torch import sum_rows
from mmpack.ops.segments import segment_sum

# Entries of one product: a fixed count, so that an entry's bits don't depend on how many there are.
ENTRIES_CPU = 64
ENTRIES_GPU = 4096
SUMMED = 1 << 24  # values that are held while runs are summed


def dots(call: HiddenCall) -> Tensor:
    """Logits [M] of the entries, before the temperature; NaN for ids that this weight lacks."""
    hidden, weight, columns, rows = call.hidden, call.weight, call.columns, call.entry_rows
    size = ENTRIES_CPU if hidden.device.type == "cpu" else ENTRIES_GPU
    count, here = len(columns), columns < len(weight)
    padding = (0, -count % size)
    rows = torch.nn.functional.pad(rows, padding)
    read = torch.nn.functional.pad(torch.where(here, columns, 0), padding)
    found = torch.empty(len(rows), dtype=call.dtype, device=hidden.device)
    for start in range(0, len(rows) if weight.numel() else 0, size):
        part = slice(start, start + size)
        x, w = (a.index_select(0, i[part]) for a, i in ((hidden, rows), (weight, read)))
        found[part] = (x.to(call.dtype) * w.to(call.dtype)).sum(-1)
    found = found[:count]
    if call.bias is not None:
        found = found + call.bias.index_select(0, read[:count])
    if call.softcap is not None:
        found = torch.tanh(found / call.softcap) * call.softcap
    return torch.where(here, found, torch.nan).to(call.dtype)


def statistics(lists: Lists, entry_logits: Tensor, entropy: bool) -> Statistics:
    """Statistics of the entries' logits; NaN for a list that is empty, does not rise or lacks its target."""
    z, tokens, starts = entry_logits.double(), lists.tokens, _fitting(lists)
    shape = starts.shape[0] - 1
    highest = z.new_full((shape,), -torch.inf).scatter_reduce_(0, tokens, z, "amax")
    shifted = (z - highest[tokens]) / lists.temperature
    hit = lists.ids == lists.targets[tokens]
    sound = _is_sound(lists, tokens, hit)
    finite = shifted.clamp(min=LOWEST)
    p = finite.exp()
    total = segment_sum(p, starts)
    log_total = total.log()
    logprobs = segment_sum(torch.where(hit, shifted, 0.0), starts) - log_total
    entropies = logprobs[:0]
    if entropy:
        entropies = log_total - segment_sum(p * finite, starts) / total
        entropies = torch.where(sound, entropies, torch.nan)
    return Statistics(
        torch.where(sound, logprobs, torch.nan).to(entry_logits.dtype),
        entropies,
        highest,
        log_total,
        entry_logits,
    )


def slopes(lists: Lists, given: Incoming, statistics: Statistics, softcap: float | None) -> Tensor:
    """Gradient [M] to each entry's logit before softcap, float64; 0 for tokens that no gradient reaches.

    With p the softmax over the list: d logp_t = onehot_t - p, d H = -p · (log p + H).
    """
    tokens, z = lists.tokens, statistics.entry_logits.double()
    logp = (z - statistics.maximum[tokens]) / lists.temperature - statistics.log_total[tokens]
    g = given.grad_logprobs.double()[tokens]
    live = g != 0
    # -expm1(logp) keeps its digits as p nears 1.
    hit = lists.ids == lists.targets[tokens]
    found = torch.where(hit, -torch.expm1(logp), -logp.exp()) * g
    if given.grad_entropies is not None:
        u = given.grad_entropies.double()[tokens]
        live |= u != 0
        finite = logp.clamp(min=LOWEST)
        found -= finite.exp() * (finite + statistics.entropies[tokens]) * u
    found /= lists.temperature
    if softcap is not None:
        found *= 1 - (z / softcap) ** 2
    found = torch.where(statistics.logprobs.isnan()[tokens], torch.nan, found)
    return torch.where(live, found, 0.0)


def sum_runs(
    out: Tensor, places: Tensor | None, source: Tensor, index: Tensor, scale: Tensor, runs: Runs
) -> None:
    """out[places[r]] = sum over the entries m of run r, in their order, of scale[m] · source[index[m]].

    source [K, H]; index, scale [M]; out [·, H] contiguous. Rows of source whose scale is 0 are not read.
    """
    dtype = torch.promote_types(source.dtype, torch.float32)
    count, live = len(runs.offsets) - 1, scale != 0
    inside = live & (runs.keys < count)
    keys, index = torch.where(inside, runs.keys, 0), torch.where(inside, index, 0)
    inverse = None if runs.order is None else Inverse(runs.order, runs.offsets)
    scale = scale.to(dtype)[:, None]
    if inverse is None:
        inverse = Inverse(torch.arange(len(keys), device=keys.device), runs.offsets)
    width = max(SUMMED // max(len(keys), 1), 1)
    for first in range(0, source.shape[1], width):
        part = slice(first, first + width)
        values = source[:, part].index_select(0, index).to(dtype) * scale
        values = values.masked_fill_(~inside[:, None], 0.0)
        summed = sum_rows(values, keys, inverse, count).to(out.dtype)
        if places is None:
            out[:, part] = summed
        else:
            out[:, part].index_copy_(0, places.long(), summed)


def take(block: Tensor, out: Tensor, window: Window) -> None:
    """out[m] = block[row, column] for the entries of the window; on a CPU."""
    at, row, column = _entries_in(window)
    out[at] = block[row, column]


def put(block: Tensor, values: Tensor, window: Window) -> None:
    """block[row, column] = values[m] for the entries of the window; on a CPU."""
    at, row, column = _entries_in(window)
    block[row, column] = values[at].to(block.dtype)


def _entries_in(window: Window) -> tuple[Tensor, Tensor, Tensor]:
    """The window's entries: which, their rows and columns."""
    lists, first = window.lists, window.first_token
    starts, last = lists.starts, min(first + window.rows, len(lists.targets))
    at = torch.arange(int(starts[first]), int(starts[last]))
    column = lists.ids[at].long() - window.first_column
    inside = (column >= 0) & (column < window.columns)
    at, column = at[inside], column[inside]
    return at, torch.searchsorted(starts[first + 1 : last + 1], at, right=True), column


def _is_sound(lists: Lists, tokens: Tensor, hit: Tensor) -> Tensor:
    """Whether each list rises and holds its target once, and all offsets fit; [N] bool."""
    starts, ids, fitting = lists.starts, lists.ids, _fitting(lists)
    falls = torch.zeros_like(hit)
    falls[1:] = (ids[1:] <= ids[:-1]) & (tokens[1:] == tokens[:-1])
    held, fallen = (segment_sum(x.double(), fitting) for x in (hit, falls))
    return (held == 1) & (fallen == 0) & (starts == fitting).all()


def _fitting(lists: Lists) -> Tensor:
    """The lists' offsets if they rise from 0 to M, else others that do."""
    fitting = lists.starts.clamp(0, len(lists.ids)).cummax(0).values
    fitting[0], fitting[-1] = 0, len(lists.ids)
    return fitting
