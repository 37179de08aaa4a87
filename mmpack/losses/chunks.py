"""Loss tokens [N] cut into chunks [C]: the actions of one turn, or a fixed number of tokens of it.

A chunk stands where a token does: `policy_loss` and `gae` take columns [C] with the `cu_loss` of chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mmpack.errors import ArgumentError, check_whole
from mmpack.losses.samples import check_batch, check_column, check_columns
from mmpack.ops.segments import segment_ids, segment_sum

WHAT = "action_chunks"


class TurnBatch(Protocol):
    """The fields of a packed or padded batch that are read here."""

    sample_ids: list[str]
    cu_loss: Tensor  # [B+1]
    loss_turn: Tensor  # [N]


@dataclass(frozen=True)
class Chunks:
    """Where C chunks lie: among loss tokens, and in samples."""

    cu_tokens: Tensor  # [C+1] int32, loss tokens before each chunk
    cu_loss: Tensor  # [B+1] int32, chunks before each sample: what losses take with columns [C]
    turn: Tensor  # [C] int32
    num_tokens: int  # N

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Chunks:
        """The same on `device`, for a batch that goes there."""
        tokens, loss, turn = (
            x.to(device, non_blocking=non_blocking)
            for x in (self.cu_tokens, self.cu_loss, self.turn)
        )
        return Chunks(tokens, loss, turn, self.num_tokens)

    def sum(self, tokens: Tensor) -> Tensor:
        """[N] to [C] float64: the sum over each chunk's tokens; of logprobs, the chunk's logprob. Differentiable."""
        check_columns("Chunks.sum", self.cu_tokens, {"tokens": tokens})
        return segment_sum(tokens, self.cu_tokens)

    def spread(self, chunks: Tensor) -> Tensor:
        """[C] to [N]: to each loss token the number of its chunk, as an advantage of chunks for tokens."""
        fix = "pass one number per chunk"
        check_column("Chunks.spread", "chunks", chunks, len(self.turn), "values", self.turn, fix)
        return chunks[segment_ids(self.cu_tokens, self.num_tokens)]


def action_chunks(batch: TurnBatch, tokens: int | None = None) -> Chunks:
    """The chunks of a batch: the loss tokens of each turn, or each `tokens` of them (one action of a chunk).

    They are the levels of RLinf-VLA (arXiv 2510.06710): a chunk of 8 actions of 7 tokens is one turn; by
    default its logprob is that of the chunk, with `tokens=7` those of its actions; tokens need no chunks. A chunk's
    ratio is `policy_loss(chunks.sum(logprobs), …, chunks.cu_loss, old_logprobs=chunks.sum(old_logprobs))`.

    Args: batch: a PackedBatch or PaddedBatch. Its turns are read on the host: call it before `batch.to` a GPU, then
    `chunks.to`.
    Raises ArgumentError for loss tokens without a turn, for a turn in several parts, and for one that is no multiple of
    `tokens`.

    Example: a turn of two actions of two tokens.
        >>> import numpy as np
        >>> import mmpack as mp
        >>> from mmpack.losses.chunks import action_chunks
        >>> ids, loss = np.arange(5), [mp.LossSpan(1, 5, "action", turn=0)]
        >>> batch = mp.pack([mp.Sample("s", "g", "qwen2_vl", ids, [], [], loss)])
        >>> action_chunks(batch).cu_tokens.tolist(), action_chunks(batch, tokens=2).cu_tokens.tolist()
        ([0, 4], [0, 2, 4])
    """
    check_batch(WHAT, batch)
    if tokens is not None:
        check_whole(WHAT, "tokens", tokens)
    cu, turn = batch.cu_loss.cpu().numpy(), batch.loss_turn.cpu().numpy()
    sample = np.repeat(np.arange(len(cu) - 1), np.diff(cu))
    if (turn < 0).any():
        raise ArgumentError(
            f"{WHAT}: a loss token of sample {batch.sample_ids[sample[np.argmax(turn < 0)]]!r} belongs to no turn. "
            "Fix: set a turn on its loss spans, one per chunk"
        )
    changes = (np.diff(turn) != 0) | (np.diff(sample) != 0)
    starts = np.concatenate([[0], np.flatnonzero(changes) + 1]) if len(turn) else np.zeros(0, int)
    lengths = np.diff(starts, append=len(turn))
    _, first = np.unique(np.stack([sample[starts], turn[starts]]), axis=1, return_index=True)
    if len(first) < len(starts):
        at = starts[np.setdiff1d(np.arange(len(starts)), first)[0]]
        raise ArgumentError(
            f"{WHAT}: turn {turn[at]} of sample {batch.sample_ids[sample[at]]!r} is in several parts, with "
            "another turn in between. Fix: number the turns of its loss spans in order"
        )
    if tokens is not None:
        size = min(int(tokens), len(turn) + 1)  # no turn is longer
        odd = np.flatnonzero(lengths % size)
        if len(odd):
            at = starts[odd[0]]
            raise ArgumentError(
                f"{WHAT}: turn {turn[at]} of sample {batch.sample_ids[sample[at]]!r} has {lengths[odd[0]]} loss "
                f"tokens, not a multiple of {tokens}. Fix: drop the sample, or end its loss span where the action ends"
            )
        pieces = lengths // size
        within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = np.repeat(starts, pieces) + within * size
    offsets = np.searchsorted(starts, cu)
    device = batch.cu_loss.device
    return Chunks(
        _int32(np.append(starts, len(turn)), device),
        _int32(offsets, device),
        _int32(turn[starts], device),
        len(turn),
    )


def _int32(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)
