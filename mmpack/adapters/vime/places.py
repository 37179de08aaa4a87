"""Which response tokens a rank has logits of, under each of their context-parallel layouts (numpy, on the host).

They pack the samples of a micro-batch one after the other. A token is predicted by the row before it, so the response
of a sample has the rows from the prompt's last token on. N counts response tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from mmpack.errors import ArgumentError

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
        >>> from mmpack.adapters.vime.places import places
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
