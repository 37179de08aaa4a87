"""Their lists of kept ids, `rollout_top_p_token_ids` and `…_offsets`: one list per response token of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmpack.errors import ArgumentError, kind_of
from mmpack.ops.logprobs.support import Support


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
        >>> from mmpack.adapters.vime.kept import kept_support
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
        values = whole_numbers("top_p_token_ids", where, ids[i])
        ends = whole_numbers("top_p_token_offsets", where, offsets[i])
        if not fits(ends, len(values)) or len(ends) != lengths[i] + 1:
            raise ArgumentError(
                f"{where}: top_p_token_offsets has {len(ends)} entries for {len(values)} ids and {lengths[i]} response "
                "tokens, expected one offset per token and one more, rising from 0 to the number of ids (kept_ids). "
                "Fix: pass the rollout's own"
            )
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


def fits(offsets: np.ndarray, count: int) -> bool:
    """Whether offsets rise from 0 to `count`."""
    return bool(
        len(offsets) and offsets[0] == 0 and offsets[-1] == count and (np.diff(offsets) >= 0).all()
    )
