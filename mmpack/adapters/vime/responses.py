"""Logprobs and entropies of response tokens from their model's logits [1, T, V / tensor-parallel ranks].

What their `get_log_probs_and_entropy` computes for every row of a micro-batch, for the rows of responses alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from mmpack.adapters.vime.megatron import Ranks, ranks
from mmpack.errors import ArgumentError, ModelError, kind_of
from mmpack.ops.logprobs.selected import selected_logprobs
from mmpack.ops.logprobs.sharded import sharded_selected_logprobs
from mmpack.ops.logprobs.support import Support

# ---- their lists of kept ids ------------------------------------------------------------------------


def kept_support(
    ids: Sequence[Any],
    offsets: Sequence[Any],
    responses: Sequence[np.ndarray],
    lengths: Sequence[int],
    targets: Tensor,
) -> Support:
    """The lists of the response tokens `responses` of each sample, on the targets' device.

    Args: `ids`, `offsets`: per sample integers [m] and [R + 1], tensors or lists. `lengths`: R of each sample.
    `targets`: [N] ids of those tokens; an empty list becomes the target alone, and the logprob 0.

    Raises: ArgumentError for offsets that don't fit.

    Example: of two response tokens the sampler drew the first from ids 3 and 7, a tool wrote the second.
        >>> import numpy as np
        >>> import torch
        >>> from mmpack.adapters.vime.responses import kept_support
        >>> support = kept_support([[7, 3]], [[0, 2, 2]], [np.arange(2)], [2], torch.tensor([7, 5]))
        >>> support.offsets.tolist(), support.ids.tolist()
        ([0, 2, 3], [3, 7, 5])
    """
    if len(ids) != len(responses) or len(offsets) != len(responses):
        raise ArgumentError(
            f"vime: top_p_token_ids has {len(ids)} entries and top_p_token_offsets {len(offsets)} for "
            f"{len(responses)} samples. Fix: pass one of each per sample"
        )
    flat, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for i, own in enumerate(responses):
        where = f"vime: sample {i}"
        names = ("top_p_token_ids", "top_p_token_offsets")
        values, ends = kept_lists(where, names, (ids[i], offsets[i]), lengths[i])
        counts = np.diff(ends)[own]
        shift = np.repeat(ends[:-1][own] - (np.cumsum(counts) - counts), counts)
        flat.append(values[shift + np.arange(len(shift))])
        sizes.append(counts)
    counts = np.concatenate(sizes)
    token = np.repeat(np.arange(len(counts)), counts)
    found = np.concatenate(flat)
    found = found[np.lexsort((found, token))]
    filled = np.maximum(counts, 1)
    ends = np.concatenate([[0], np.cumsum(filled)])
    empty = np.flatnonzero(counts == 0)
    whole = np.zeros(ends[-1], np.int64)
    taken = np.ones(len(whole), bool)
    taken[ends[:-1][empty]] = False
    whole[taken] = found
    device = targets.device
    out = torch.from_numpy(whole).to(device, non_blocking=True)
    if len(empty):
        at = torch.from_numpy(empty).to(device, non_blocking=True)
        place = torch.from_numpy(ends[:-1][empty]).to(device, non_blocking=True)
        out = out.index_copy(0, place, targets[at].long())
    return Support(torch.from_numpy(ends).to(device, non_blocking=True), out)


def whole_numbers(name: str, where: str, given: Any) -> np.ndarray:
    """Their tensor or list as int64 [n]. Raises: ArgumentError for what is none."""
    try:
        values = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        values = np.zeros((0, 0), object)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise ArgumentError(
            f"{where}: {name} is {kind_of(given)}, expected integers [n]. Fix: pass the rollout's own"
        )
    return values.astype(np.int64)


def kept_lists(
    where: str, names: Sequence[str], given: Sequence[Any], length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids [m], and offsets [length + 1] that rise from 0 to m. Raises: ArgumentError for what does not fit."""
    ids, ends = (whole_numbers(n, where, x) for n, x in zip(names, given, strict=True))
    rising = len(ends) == length + 1 and ends[0] == 0 and (np.diff(ends) >= 0).all()
    if not rising or ends[-1] != len(ids):
        raise ArgumentError(
            f"{where}: {names[1]} has {len(ends)} entries for {length} response tokens and {len(ids)} ids, "
            "expected one offset per token and one more, rising from 0 to the number of ids (kept_ids). "
            "Fix: pass the rollout's own"
        )
    return ids, ends


# ---- where response tokens are ----------------------------------------------------------------------

Layout = Literal["single", "zigzag", "allgather"]


class Places(NamedTuple):
    """Response tokens of this rank, in the order of samples."""

    rows: np.ndarray  # int64 [N], row of the rank's logits
    tokens: np.ndarray  # int64 [N], index into the samples' tokens, one after the other
    responses: list[np.ndarray]  # per sample int64 [n], index into its response


def places(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    layout: Layout,
    rank: int,
    ranks: int,
    num_rows: int | None,
) -> Places:
    """Where the rows, targets and response tokens of a rank are.

    Args:
        total_lengths, response_lengths: tokens of each sample, prompt included and not.
        layout: `single`: all rows are here. `zigzag`: each sample is cut into 2 · ranks equal chunks (the last ones are
            padded), and a rank has chunk `rank` and the one that mirrors it. `allgather`: the row of samples is cut
            into one piece of `num_rows` per rank.
        num_rows: rows of this rank's logits; None: not looked at.

    Raises: ArgumentError for lengths that don't fit each other, and for a response without a prompt.

    Example: two samples of five and four tokens, the last two of each are the response.
        >>> from mmpack.adapters.vime.responses import places
        >>> at = places([5, 4], [2, 2], "single", 0, 1, 9)
        >>> at.rows.tolist(), at.tokens.tolist()
        ([2, 3, 6, 7], [3, 4, 7, 8])
    """
    _check(total_lengths, response_lengths, layout, ranks, num_rows)
    rows: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    responses: list[np.ndarray] = []
    first, base = 0, 0  # of the sample: its first token, and its first row on this rank
    for total, response in zip(total_lengths, response_lengths, strict=True):
        # in the sample, of the rows that are read
        at: np.ndarray = np.arange(total - response - 1, total - 1)
        if layout == "zigzag":
            chunk = -(-total // (2 * ranks))
            starts = rank * chunk, (2 * ranks - rank - 1) * chunk
            halves = [at[(at >= start) & (at < start + chunk)] for start in starts]
            own = [base + k * chunk + halves[k] - starts[k] for k in range(2)]
            at, row = np.concatenate(halves), np.concatenate(own)
            base += 2 * chunk
        else:
            row = first + at
            if layout == "allgather" and num_rows is not None:
                row = row - rank * num_rows
                here = (row >= 0) & (row < num_rows)
                at, row = at[here], row[here]
        rows.append(row)
        tokens.append(first + at + 1)
        responses.append(at + 1 - (total - response))
        first += total
    none = np.zeros(0, np.int64)
    return Places(np.concatenate([none, *rows]), np.concatenate([none, *tokens]), responses)


def _check(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    layout: Layout,
    ranks: int,
    num_rows: int | None,
) -> None:
    where = "vime: a micro-batch"
    if len(total_lengths) != len(response_lengths):
        raise ArgumentError(
            f"{where} has {len(total_lengths)} total_lengths and {len(response_lengths)} response_lengths. "
            "Fix: pass one of each per sample"
        )
    for i, (total, response) in enumerate(zip(total_lengths, response_lengths, strict=True)):
        if not 0 <= response < total:
            raise ArgumentError(
                f"{where}: sample {i} has {response} response tokens of {total}, and no row predicts the first. "
                "Fix: begin each sample with a prompt"
            )
    if num_rows is None:
        return
    needed = sum(
        2 * -(-total // (2 * ranks)) if layout == "zigzag" else total for total in total_lengths
    )
    have = num_rows * ranks if layout == "allgather" else num_rows
    if needed > have:
        raise ArgumentError(
            f"{where} needs {needed} rows of logits, there are {have}. "
            "Fix: pass the logits of these samples; --qkv-format thd packs them without padding"
        )


def log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    top_p_token_ids: Sequence[Any] | None = None,
    top_p_token_offsets: Sequence[Any] | None = None,
    max_seq_lens: Sequence[int] | None = None,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Stands in for `get_log_probs_and_entropy` of vime and slime: its arguments, and what it returns.

    Args:
        logits: [1, T, V / tensor-parallel ranks], not divided by the temperature.
        args: read are `rollout_temperature`, `entropy_coef` (at 0 the entropy has no gradient), `allgather_cp` and
            vime's `qkv_format`.
        unconcat_tokens: int64 [L] of each sample.
        top_p_token_ids, top_p_token_offsets: per sample the ids that the sampler left, and where the list of each
            response token begins and ends; logprobs are over these, entropies over the whole vocabulary, as theirs
            are. An empty list stands for a token that no policy sampled, a tool's: its logprob is 0.
        non_loss_data, max_seq_lens: not read.

    Returns an empty tensor, and `log_probs` and, `with_entropy`, `entropy`: per sample float32 [n], of the response
    tokens of this context-parallel rank (all-gathered sequences come back in zigzag order, as theirs do).

    Raises: ArgumentError for lengths that don't fit; ModelError for `qkv_format` bshd.
    """
    if getattr(args, "qkv_format", "thd") != "thd":
        raise ModelError(
            f"vime: qkv_format is {args.qkv_format!r}, whose samples are padded. Fix: set --qkv-format thd"
        )
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[0] != 1:
        what = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ArgumentError(
            f"vime: logits are {what}, expected [1, T, V]. Fix: pass what the model returns"
        )
    if (top_p_token_ids is None) != (top_p_token_offsets is None):
        raise ArgumentError(
            "vime: top_p_token_ids and top_p_token_offsets must be passed together. Fix: pass both or neither"
        )
    rows_of = logits[0]
    here, device = ranks(), logits.device
    layout: Layout = "zigzag" if here.cp_size > 1 else "single"
    gathered = bool(getattr(args, "allgather_cp", False)) and here.cp_size > 1
    own = places(
        total_lengths,
        response_lengths,
        "allgather" if gathered else layout,
        here.cp_rank,
        here.cp_size,
        len(rows_of),
    )
    targets = torch.cat(list(unconcat_tokens))[_on(own.tokens, device)]
    support = None
    if top_p_token_ids is not None and top_p_token_offsets is not None:
        support = kept_support(
            top_p_token_ids, top_p_token_offsets, own.responses, response_lengths, targets
        )
    values = scores(
        rows_of,
        targets,
        _on(own.rows, device),
        here,
        float(getattr(args, "rollout_temperature", 1.0)),
        with_entropy,
        with_entropy and getattr(args, "entropy_coef", 0.0) != 0,
        support,
    )
    if gathered:
        zigzag = places(total_lengths, response_lengths, layout, here.cp_rank, here.cp_size, None)
        values = [_exchanged(x, own, zigzag, response_lengths, here.cp_group) for x in values]
        own = zigzag
    counts = [len(x) for x in own.responses]
    out = {
        name: list(x.split(counts))
        for name, x in zip(("log_probs", "entropy"), values, strict=False)
    }
    return logits.new_zeros(0), out


def scores(
    logits: Tensor,
    targets: Tensor,
    rows: Tensor,
    here: Ranks,
    temperature: float,
    entropy: bool,
    entropy_gradient: bool,
    support: Support | None,
) -> list[Tensor]:
    """Logprobs [N] of `targets` at `rows` of logits [T, V / ranks], over `support`; entropies [N] over all of V."""

    def compute(entropy: bool, support: Support | None) -> Any:
        if here.tp_size > 1:
            return sharded_selected_logprobs(
                logits, targets, rows, here.tp_group, temperature, entropy, support=support
            )
        distinct = torch.arange(len(rows), device=rows.device)
        return selected_logprobs(
            logits,
            targets,
            temperature=temperature,
            entropy=entropy,
            rows_unique=rows,
            row_inverse=distinct,
            support=support,
        )

    if not entropy:
        return [compute(False, support)]
    if support is None:
        logprobs, entropies = compute(True, None)
    else:
        logprobs = compute(False, support)
        with nullcontext() if entropy_gradient else torch.no_grad():
            entropies = compute(True, None)[1]
    return [logprobs, entropies if entropy_gradient else entropies.detach()]


def _exchanged(
    values: Tensor, own: Places, zigzag: Places, response_lengths: Sequence[int], group: Any
) -> Tensor:
    """Values of this rank's piece of all-gathered samples, for those of its zigzag chunks."""
    first = np.cumsum([0, *response_lengths])
    flat, wanted = (
        np.concatenate(
            [np.zeros(0, np.int64), *(a + x for a, x in zip(first, p.responses, strict=False))]
        )
        for p in (own, zigzag)
    )
    whole = values.new_zeros(int(first[-1])).index_copy(0, _on(flat, values.device), values)
    summed: Tensor = all_reduce(whole, group=group)
    return summed[_on(wanted, values.device)]


def _on(index: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(index)).to(device, non_blocking=True)
