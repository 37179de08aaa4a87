"""`pad`: the same samples as rectangles [B, S], padded left or right, with the columns of a packed batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mmpack.errors import ArgumentError
from mmpack.families import get_family
from mmpack.layout.forest import build_forest, positions_of
from mmpack.layout.occurrences import occurrences
from mmpack.ops.attention import plan_attention
from mmpack.packing.batch import Batch
from mmpack.packing.columns import Column
from mmpack.packing.columns import token_columns as pack_token_columns
from mmpack.packing.prepare import (
    common_fields,
    keep_valid,
    kept_columns,
    loss_tokens_of,
    row_multiple,
)
from mmpack.packing.tensors import to_int32
from mmpack.schema.sample import Sample, as_samples


@dataclass(kw_only=True, repr=False)
class PaddedBatch(Batch):
    """Rectangles of B samples by S tokens; row (b, s) is b·S + s of `loss_rows` and of unpacked tensors."""

    side: str
    input_ids: torch.Tensor  # [B, S] int64
    attention_mask: torch.Tensor  # [B, S] int64, 1 where a token is
    position_ids: torch.Tensor  # [1 + rows, B, S] int64
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
    """Rectangles of `samples`, padded on `side` (`left` or `right`); arguments and errors as in `pack`.

    `token_columns` come back as [B·S, …], 0 at the padding.
    """
    if side not in ("left", "right"):
        raise ArgumentError(f"pad: side is {side!r}. Fix: use 'left' or 'right'")
    multiple = row_multiple(pad_to_multiple_of, "pad")
    samples = as_samples(samples, "pad")
    keep, dropped = keep_valid(samples, "pad", on_invalid)
    if dropped:
        loss_columns = kept_columns(loss_columns, samples, loss_tokens_of, keep, "pad")
        token_columns = kept_columns(token_columns, samples, len, keep, "pad")
        samples = [samples[i] for i in keep]
    family = get_family(samples[0].family)
    width = max(len(s) for s in samples)
    width += -width % multiple
    starts = [b * width + (width - len(s) if side == "left" else 0) for b, s in enumerate(samples)]
    rows = [np.arange(a, a + len(s)) for a, s in zip(starts, samples, strict=True)]
    flat = np.concatenate(rows)
    size = len(samples) * width

    ids = np.full(size, family.pad_token_id, dtype=np.int64)
    ids[flat] = np.concatenate([s.input_ids for s in samples])
    mask = np.zeros(size, dtype=np.int64)
    mask[flat] = 1
    seen = np.arange(size) % width + 1
    seen[flat] = np.concatenate(
        [np.full(len(s), a % width + len(s)) for a, s in zip(starts, samples, strict=True)]
    )
    rowed = family.position_rows > 1
    places = np.zeros((1 + rowed * family.position_rows, size), dtype=np.int64)
    places[0, flat] = np.concatenate([np.arange(len(s)) for s in samples])
    if rowed:
        places[1:, flat] = np.concatenate([positions_of(s) for s in samples], axis=1)
    order = [(b, m) for b, s in enumerate(samples) for _, _, m in occurrences(s)]
    common = common_fields(samples, rows, order, media, loss_columns, "pad")
    scored = torch.zeros(size, dtype=torch.bool)
    scored[common["loss_rows"].long() + 1] = True
    columns = pack_token_columns(samples, token_columns, build_forest(samples, share=False), "pad")
    batch = PaddedBatch(
        **common,
        side=side,
        input_ids=torch.from_numpy(ids).view(-1, width),
        attention_mask=torch.from_numpy(mask).view(-1, width),
        position_ids=torch.from_numpy(places).view(len(places), -1, width),
        loss_mask=scored.view(-1, width),
        visible_until=to_int32(seen).view(-1, width),
        attention_plan=plan_attention(seen.reshape(-1, width), mask.reshape(-1, width) == 0),
        token_columns={
            name: x.new_zeros((size, *x.shape[1:])).index_copy_(0, torch.from_numpy(flat), x)
            for name, x in columns.items()
        },
        dropped=dropped,
    )
    patches = np.diff(batch.patch_offsets.numpy())
    batch.stats = {
        "tokens": size,
        "tokens_unshared": len(flat),
        "tokens_padded": size,
        "loss_tokens": batch.num_loss_tokens,
        "media": len(batch.media),
        "media_occurrences": len(order),
        "patches": int(patches[batch.media_occurrence.numpy()].sum()),
    }
    return batch
