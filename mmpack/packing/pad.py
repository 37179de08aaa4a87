"""`pad`: the same samples as rectangles [B, S], padded left or right, with the columns of a packed batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmpack.errors import ArgumentError
from mmpack.families import Family
from mmpack.layout.batch_positions import batch_positions
from mmpack.layout.blocks import visible_from
from mmpack.layout.forest import build_forest
from mmpack.layout.occurrences import occurrences
from mmpack.ops.attention import plan_attention
from mmpack.packing.batch import Batch
from mmpack.packing.columns import Column, token_columns_of
from mmpack.packing.prepare import Prepared, common_fields, counted, prepare, row_multiple
from mmpack.packing.replay import routes_in_rows
from mmpack.packing.segments import segments_of
from mmpack.packing.tensors import to_int32
from mmpack.schema.sample import Sample


@dataclass(kw_only=True, repr=False)
class PaddedBatch(Batch):
    """Rectangles of B samples by S tokens; row (b, s) is b·S + s of `loss_rows` and of unpacked tensors."""

    side: str
    input_ids: torch.Tensor  # [B, S] int64
    attention_mask: torch.Tensor  # [B, S] int64, 1 where a token is
    position_ids: torch.Tensor  # [4, B, S] int64; [1, B, S] for families with one row of positions
    loss_mask: torch.Tensor  # [B, S] bool, at the loss tokens themselves
    visible_until: torch.Tensor  # [B, S] int32: q of a sample sees k if k <= q < visible_until[k]

    @property
    def _num_rows(self) -> int:
        return self.input_ids.numel()

    def rectangle(self, x: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Put x [N] at the loss tokens of a [B, S] rectangle, `fill` everywhere else."""
        self._expect(x, self.num_loss_tokens, "rectangle", "loss tokens")
        if x.ndim != 1:
            raise ArgumentError(f"rectangle: x has shape {list(x.shape)}. Fix: pass one column [N]")
        out = x.new_full((self.input_ids.numel(),), fill)
        return out.index_copy(0, self.loss_rows.long() + 1, x).view_as(self.input_ids)


def pad(
    samples: Sequence[Sample],
    side: str = "left",
    media: Mapping[str, Any] | None = None,
    pad_to_multiple_of: int | None = None,
    loss_columns: Mapping[str, Column] | None = None,
    token_columns: Mapping[str, Column] | None = None,
    on_invalid: str = "raise",
) -> PaddedBatch:
    """Rectangles of `samples`, padded on `side` (`left` or `right`). Other arguments and errors are those of `pack`.

    `input_ids` is int64 [B, S]. `token_columns` come back as [B·S, …], 0 at the padding.

    Example:
        >>> import mmpack as mp
        >>> text = {"schema_version": "1", "group_id": "q", "family": "qwen2_vl", "media": [], "modality_spans": []}
        >>> text["loss_spans"] = [{"start": 1, "stop": 2, "kind": "response"}]
        >>> samples = [
        ...     mp.Sample.from_dict(text | {"sample_id": str(len(ids)), "input_ids": ids})
        ...     for ids in ([5, 6], [5, 6, 7])
        ... ]
        >>> batch = mp.pad(samples, side="left")
        >>> batch.input_ids.tolist(), batch.loss_rows.tolist()
        ([[151643, 5, 6], [5, 6, 7]], [1, 3])
    """
    if side not in ("left", "right"):
        raise ArgumentError(f"pad: side is {side!r}. Fix: use 'left' or 'right'")
    multiple = row_multiple(pad_to_multiple_of, "pad")
    given = prepare(samples, loss_columns, token_columns, "pad", on_invalid)
    samples, family = given.samples, given.family
    width = max(len(s) for s in samples)
    width += -width % multiple
    starts = [b * width + (width - len(s) if side == "left" else 0) for b, s in enumerate(samples)]
    rows = [np.arange(a, a + len(s)) for a, s in zip(starts, samples, strict=True)]
    order = [(b, o.media_index) for b, s in enumerate(samples) for o in occurrences(s)]
    common = common_fields(given, rows, order, media)
    batch = PaddedBatch(
        **common,
        **_row_fields(given.samples, family, rows, width),
        side=side,
        loss_mask=_loss_mask(common["loss_rows"], len(samples), width),
        token_columns=_token_columns(given, common["token_rows"], len(samples) * width),
        routed_experts=routes_in_rows(samples, rows, len(samples) * width),
    )
    batch.stats = counted(batch, tokens=batch.input_ids.numel(), padded=batch.input_ids.numel())
    batch.stats["patches"] = sum(batch.media[i].num_patches for i in batch.media_order)
    return batch


def _row_fields(
    samples: list[Sample], family: Family, rows: list[np.ndarray], width: int
) -> dict[str, Any]:
    """ids, masks, positions and the attention rule of every row, token or padding; the padding sees itself."""
    flat = np.concatenate(rows)
    size = len(samples) * width
    ids = np.full(size, family.pad_token_id, dtype=np.int64)
    ids[flat] = np.concatenate([s.input_ids for s in samples])
    mask = np.zeros(size, dtype=np.int64)
    mask[flat] = 1
    seen = np.arange(size) % width + 1
    seen[flat] = np.concatenate([np.full(len(r), r[-1] % width + 1) for r in rows if len(r)])
    rowed = family.position_rows > 1
    places = np.zeros((1 + rowed * family.position_rows, size), dtype=np.int64)
    places[0, flat] = np.concatenate([np.arange(len(s)) for s in samples])
    if rowed:
        places[1:, flat] = batch_positions(samples, family)
    first = None
    if family.two_way is not None:
        first = (visible_from(samples, rows, size, family) % width).reshape(-1, width)
    padding = mask.reshape(-1, width) == 0
    plan = plan_attention(seen.reshape(-1, width), padding, first)
    return {
        "input_ids": torch.from_numpy(ids).view(-1, width),
        "attention_mask": torch.from_numpy(mask).view(-1, width),
        "position_ids": torch.from_numpy(places).view(len(places), -1, width),
        "visible_until": to_int32(seen).view(-1, width),
        "visible_from": None if first is None else to_int32(first),
        "attention_plan": plan,
        "segment_plan": segments_of(
            family, np.arange(len(samples) + 1) * width, np.full(len(samples), -1), padding, plan
        ),
    }


def _loss_mask(loss_rows: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """bool [count, width]: the loss tokens themselves, each one row behind the row that predicts it."""
    scored = torch.zeros(count * width, dtype=torch.bool)
    scored[loss_rows.long() + 1] = True
    return scored.view(count, width)


def _token_columns(given: Prepared, rows: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    """The columns [size, …], 0 at the padding."""
    forest = build_forest(given.samples, share=False)
    columns = token_columns_of(given.samples, given.token_columns, forest, given.what)
    return {
        name: x.new_zeros((size, *x.shape[1:])).index_copy_(0, rows, x)
        for name, x in columns.items()
    }
