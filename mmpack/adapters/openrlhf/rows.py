"""The arguments of an OpenRLHF Actor's forward as samples: rows [B, T], and the pictures of all rows in one dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mmpack.adapters.checks import valid_tokens
from mmpack.adapters.row_sample import row_sample
from mmpack.adapters.trl.batch_rows import media_of_rows
from mmpack.errors import LayoutError, ModelError
from mmpack.families import Family
from mmpack.layout.occurrences import context_ids
from mmpack.layout.runs import placeholder_runs
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample

WHERE = "OpenRLHF actor"
PIXELS = ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids")
# follow from ids and grids
UNREAD = ("mm_token_type_ids", "token_type_ids", "num_soft_tokens_per_image")


def rows_to_samples(
    sequences: torch.Tensor,
    attention_mask: torch.Tensor,
    action_mask: torch.Tensor,
    mm_inputs: Mapping[str, Any],
    family: Family,
) -> list[Sample]:
    """One sample per row: its loss tokens are its actions, and `metadata["start"]` is the column of its first token.

    Args: `sequences`, `attention_mask`: [B, T]. `action_mask`: [B, A], of the last A tokens. `mm_inputs`: pixels and
    grids of all rows' pictures, one after the other.
    Raises: ModelError for other inputs than pictures, and for pictures of several tiles; LayoutError (MM104, MM107)
    where pictures and placeholders differ in number; ArgumentError for an attention mask with holes.
    """
    ids, mask = sequences.cpu().numpy(), attention_mask.cpu().numpy().astype(bool)
    scored = np.zeros_like(mask)
    scored[:, ids.shape[1] - action_mask.shape[1] :] = action_mask.cpu().numpy().astype(bool)
    scored &= mask
    names = [f"{WHERE}: row {b}" for b in range(len(ids))]
    kept = [
        valid_tokens(own, name, "pad at the end only")
        for name, own in zip(names, mask, strict=True)
    ]
    rest = _pictures(mm_inputs, family)
    pictures, out = len(rest), []
    for b, own in enumerate(kept):
        row, actions = ids[b, own], scored[b, own]
        images = _take(rest, context_ids(row, actions, family), family)
        begin = np.flatnonzero(actions)[:1].tolist() or [len(row)]
        out.append(
            row_sample(
                names[b],
                row,
                {"image": images, "video": []},
                actions,
                family,
                response_start=begin[0],
                sample_id=str(b),
                group_id=str(b),
                metadata={"start": own.start},
            )
        )
    if rest and family.pixel_layout == "tiles":
        raise ModelError(
            f"{WHERE}: {family.name} cut pictures into tiles, and OpenRLHF does not keep how many each has. "
            "Fix: make one tile per picture, by the processor's settings"
        )
    if rest:
        raise LayoutError(
            f"{WHERE}: {pictures} pictures came, {len(rest)} more than the rows have placeholders for "
            "(dropped_image). Fix: keep each row with its own media",
            "MM107",
        )
    return out


def _pictures(mm_inputs: Mapping[str, Any], family: Family) -> list[Medium]:
    """The pictures of all rows, in their order. Equal pixels of equal grids get one cache key."""
    given = {k: v for k, v in mm_inputs.items() if v is not None and k not in UNREAD}
    unknown = sorted(given.keys() - set(PIXELS))
    if unknown:
        raise ModelError(
            f"{WHERE}: {unknown[0]} has no place in a packed batch. Fix: train this model without mmpack"
        )
    pixels, grids, sizes, places = (given.get(name) for name in PIXELS)
    if pixels is None:
        return []
    count = len(pixels) if grids is None else len(grids)
    [media] = media_of_rows(pixels, grids, [count], family, sizes, places, where=WHERE)
    return media


def _take(rest: list[Medium], context: np.ndarray, family: Family) -> list[Medium]:
    """The pictures of one row, off the front of `rest`: as many as its runs of placeholders need."""
    runs, out = len(placeholder_runs(context, family).of("image").bounds), []
    while runs > 0 and rest:
        out.append(rest.pop(0))
        runs -= family.spans_of("image", out[-1].grid_thw)
    return out
