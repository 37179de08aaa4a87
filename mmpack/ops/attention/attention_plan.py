"""What a pack's attention rule means for kernels: sequences for varlen kernels, blocks for FlexAttention.

Made on the host from `visible_until`, where rows are packed, so that nothing is asked of the GPU later.
"""

from __future__ import annotations

import weakref
import zlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mmpack.errors import ArgumentError
from mmpack.ops.attention.rule import BlockPlan, HostRule, Rule, blocks_of
from mmpack.ops.moving import Moving
from mmpack.ops.rows.inverse import Inverse

# rows of padding in one sequence: a long one would cost time, and padding is not read
PADDING_PIECE = 128


UNRESOLVED: dict[str, Any] = dict.fromkeys(("choice", "chosen_under", "block_mask"))


@dataclass
class AttentionPlan(Moving):
    """S sequences of adjacent rows, `rows` in all; each sees its path: the rows above it and itself.

    Sequence s has queries cu_seqlens_q[s] to cu_seqlens_q[s+1], and keys cu_seqlens_k[s] to cu_seqlens_k[s+1] of
    `key_rows`, in order; its last query stands at its last key (bottom-right causal). Rows of padding form sequences
    of their own, up to PADDING_PIECE rows each.

    A plan belongs to one visible_until. After a change of that array make a new plan; `check` finds most changes, a
    batch's those of its ids and positions too.

    `plan_of_rule` makes plans of other rules of the same rows. Where a window counts, a sequence has no keys that lie
    before all of its windows. Rows of two-way blocks are computed with the others, and once more by `blocks`, which is
    what counts.
    """

    rows: int  # T of a packed batch, B·S of a padded one
    cu_seqlens_q: Tensor  # [S+1] int32
    cu_seqlens_k: Tensor  # [S+1] int32
    max_seqlen_q: int
    max_seqlen_k: int
    # [K] int32; None where no sequence has rows above it: keys are rows
    key_rows: Tensor | None
    key_inverse: Inverse | None  # of key_rows
    pairs: int  # of a query and a key that it sees: what varlen kernels compute
    # of FLEX_BLOCK² pairs, all of them seen: what FlexAttention computes without a mask
    full_blocks: int
    mixed_blocks: int  # and with one: some pairs are seen
    checksum: int  # of visible_until
    start_checksum: int | None = None  # of visible_from
    # of a batch's further arrays, by name
    row_checksums: dict[str, int] = field(default_factory=dict)
    host: HostRule | None = None  # what plans of other rules are made of
    # the rule that the plan was asked for, whether or not it says anything about these rows
    window: int | None = None
    two_way: bool = False
    # int32, as visible_until: each row's path, where the window leaves out a key
    path: Tensor | None = None
    blocks: BlockPlan | None = None  # where a block has two rows or more
    made: dict[Any, AttentionPlan] = field(default_factory=dict)  # by `plan_of_rule`
    choice: dict[torch.dtype, str] | None = None  # queries' dtype -> backend; see `resolve`
    chosen_under: tuple[Any, ...] | None = None  # the settings that `choice` holds for
    block_mask: Any = None  # FlexAttention's, if that was chosen
    # the arrays seen last, weakly, and their versions, by name
    checked: dict[str, tuple[Any, int]] | None = None

    unresolved: ClassVar[dict[str, Any]] = UNRESOLVED | {"made": {}, "checked": None}

    @property
    def sequences(self) -> int:
        own = self.cu_seqlens_q.shape[0] - 1
        return own if self.blocks is None else own + self.blocks.cu_seqlens_q.shape[0] - 1

    @property
    def gathered(self) -> int:
        """Keys that are gathered from rows: none where they are the rows."""
        own = 0 if self.key_rows is None else len(self.key_rows)
        return own if self.blocks is None else own + len(self.blocks.key_rows)

    @property
    def windowed(self) -> bool:
        """Whether kernels have to keep to a window."""
        return self.path is not None

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens_q.device

    def cover(self, **rows: Tensor) -> None:
        """Let `check` find changes of these arrays of the same batch too, by name."""
        self.row_checksums |= {name: checksum_of(x.cpu().numpy()) for name, x in rows.items()}

    def check(
        self, visible_until: Tensor, visible_from: Tensor | None = None, **rows: Tensor
    ) -> None:
        """Raise ArgumentError for another visible_until (or visible_from) than the plan's, without asking a GPU.

        An array on the CPU is read every time. Elsewhere only a change in place of the tensor seen last is found, by
        torch's count of changes, which tensors of inference mode lack. `rows`: arrays that `cover` took; another tensor
        than the one seen last is read, wherever it is.
        """
        rows = {name: x for name, x in rows.items() if name in self.row_checksums}
        checksums = {"visible_until": self.checksum, "visible_from": self.start_checksum}
        arrays = {"visible_until": visible_until, "visible_from": visible_from, **rows}
        last = self.checked or {}
        for name, tensor in arrays.items():
            if tensor is None:
                continue
            seen, version = last.get(name, (lambda: None, 0))
            if tensor.device.type == "cpu" or (name in rows and seen() is not tensor):
                same = (
                    checksum_of(tensor.cpu().numpy()) == {**checksums, **self.row_checksums}[name]
                )
            else:
                same = seen() is not tensor or version == _version(tensor)
            if not same and name in rows:
                raise ArgumentError(
                    f"attention: the batch's {name} are not those that it was packed with; its loss tokens, media and "
                    "attention are of those. Fix: change the samples, and pack them again"
                )
            if not same:
                raise ArgumentError(
                    f"attention: the plan was made of another {name}, or {name} was changed since. "
                    "Fix: pass batch.attention_plan; after a change, call plan_attention(visible_until, "
                    "padding, visible_from)"
                )
        self.bind(visible_until, visible_from, **rows)

    def bind(
        self, visible_until: Tensor, visible_from: Tensor | None = None, **rows: Tensor | None
    ) -> None:
        """Take these arrays for the plan's own, without reading them; `check` finds their changes from now on."""
        arrays = {"visible_until": visible_until, "visible_from": visible_from, **rows}
        given = {n: (weakref.ref(x), _version(x)) for n, x in arrays.items() if x is not None}
        self.checked = (self.checked or {}) | given


def plan_attention(
    visible_until: np.ndarray, padding: np.ndarray, visible_from: np.ndarray | None = None
) -> AttentionPlan:
    """The plan of a batch, for layers without a window and without two-way blocks; of others: `plan_of_rule`.

    Args:
        visible_until: int [T] or [B, S], of segments in depth-first order: row q of a line sees its row k exactly if
            k <= q < visible_until[k].
        padding: bool of the same shape, rows that hold no token.
        visible_from: as visible_until, where the family has two-way blocks: the first row of each row's block, else
            the row itself. It is kept for `plan_of_rule`.

    Example: one prompt of two rows, with two branches of one row.
        >>> import numpy as np
        >>> from mmpack.ops.attention import plan_attention
        >>> plan = plan_attention(np.array([4, 4, 3, 4]), np.zeros(4, dtype=bool))
        >>> plan.cu_seqlens_q.tolist(), plan.cu_seqlens_k.tolist()
        ([0, 3, 4], [0, 3, 6])
        >>> plan.key_rows.tolist()
        [0, 1, 2, 0, 1, 3]
    """
    lines = np.atleast_2d(visible_until)
    lines = lines.astype(np.int32 if lines.size < 2**31 else np.int64, copy=False)
    until, width = lines.reshape(-1), lines.shape[1]
    if len(lines) > 1:
        until = until + np.repeat(np.arange(len(lines), dtype=until.dtype) * width, width)
    starts = starts_of(until, padding.ravel())
    queries = np.diff(starts, append=len(until))
    pieces = Pieces(until, starts)
    keys = np.bincount(pieces.reader, pieces.length, minlength=len(starts)).astype(np.int64)
    key_rows = inverse = None
    if keys.sum() > len(until):
        key_rows = torch.from_numpy(pieces.rows().astype(np.int32))
        inverse = pieces.inverse()
    mixed, full = blocks_of(Rule(torch.tensor(lines)))
    return AttentionPlan(
        rows=len(until),
        cu_seqlens_q=offsets_of(queries),
        cu_seqlens_k=offsets_of(keys),
        max_seqlen_q=int(queries.max(initial=0)),
        max_seqlen_k=int(keys.max(initial=0)),
        key_rows=key_rows,
        key_inverse=inverse,
        pairs=int((queries * (keys - queries) + queries * (queries + 1) // 2).sum()),
        full_blocks=int(full.sum()),
        mixed_blocks=int(mixed.sum()),
        checksum=checksum_of(visible_until),
        start_checksum=None if visible_from is None else checksum_of(visible_from),
        host=HostRule(visible_until, visible_from, padding),
    )


class Pieces:
    """The keys of all sequences as ranges of rows, without a loop: chains of hundreds of turns have many.

    A run is adjacent rows of one sequence with one visible_until; below it lie the sequences that start before that.
    So its readers are an interval, from its own sequence on, and each of them has the run as one piece. Arrays of
    pieces [P] are ordered by run, then reader.
    """

    def __init__(self, until: np.ndarray, starts: np.ndarray):
        changes = np.flatnonzero(until[1:] != until[:-1]) + 1
        self.run_start = np.union1d(starts, changes)
        self.run_length = np.diff(self.run_start, append=len(until))
        own = np.searchsorted(starts, self.run_start, side="right") - 1
        self.readers = np.searchsorted(starts, until[self.run_start]) - own  # sequences per run
        self.run = np.repeat(np.arange(len(own)), self.readers)
        self.reader = ranges(own, self.readers)
        self.length = self.run_length[self.run]
        self.by_reader = np.argsort(self.reader, kind="stable")

    def rows(self) -> np.ndarray:
        """[K] the keys of each sequence, rising; one sequence after the other."""
        return ranges(self.run_start[self.run[self.by_reader]], self.length[self.by_reader])

    def inverse(self) -> Inverse:
        """Where each row stands in `rows`: once per reader of its run, as far from the piece's start as the run's."""
        lengths = self.length[self.by_reader]
        at = np.empty_like(lengths)
        at[self.by_reader] = np.cumsum(lengths) - lengths  # of each piece in `rows`
        count = np.repeat(self.readers, self.run_length)  # of each row
        first = np.repeat(np.cumsum(self.readers) - self.readers, self.run_length)
        within = ranges(np.zeros_like(self.run_start), self.run_length)
        order = at[ranges(first, count)] + np.repeat(within, count)
        return Inverse(torch.from_numpy(order.astype(np.int32)), offsets_of(count))


def starts_of(until: np.ndarray, padding: np.ndarray) -> np.ndarray:
    """Rows that do not see the row before them; in a run of padding, each PADDING_PIECE-th row instead."""
    rows = np.arange(len(until), dtype=until.dtype)
    new = np.ones(len(until), dtype=bool)
    np.less_equal(until[:-1], rows[1:], out=new[1:])
    if not padding.any():
        return np.flatnonzero(new)
    padded = padding & np.append(False, padding[:-1])[: len(until)]  # as is the row before
    run = np.maximum.accumulate(np.where(padded, 0, rows))
    return np.flatnonzero(np.where(padded, (rows - run) % PADDING_PIECE == 0, new))


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers of ranges, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(starts - before, lengths)


def offsets_of(lengths: np.ndarray) -> Tensor:
    return torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32))


def checksum_of(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array, dtype=np.int32).data)


def _version(tensor: Tensor) -> int:
    """Grows with changes in place; tensors of inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version
