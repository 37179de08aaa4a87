"""TRL's padded rows [B, P + C] (prompts padded left, completions right) as samples.

Ids are taken as they are. Every image is a medium of its own grid, known by its processed pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from mmpack.adapters.checks import valid_tokens
from mmpack.adapters.processed_media import media_of_inputs
from mmpack.adapters.row_sample import row_sample
from mmpack.errors import ArgumentError
from mmpack.families import Family
from mmpack.layout.runs import placeholder_runs
from mmpack.packing.media import patches_of_canvas
from mmpack.processors.pixels import patches_of, patches_of_lines
from mmpack.processors.wrap import Processor
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample


def rows_to_samples(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_start: int,
    family: Family,
    media: Sequence[Sequence[Medium]],
    scored: torch.Tensor | None = None,
    processor: Processor | None = None,
) -> list[Sample]:
    """One sample per row; its loss spans are the completion's tokens except placeholders, where `scored` says so.

    Args: `input_ids`, `attention_mask`, `scored`: [B, P + C]. `completion_start`: P. `media`: each row's, see
    `media_of_rows`. `processor`: whose settings are recorded.
    Raises: LayoutError where placeholders and images of a row don't match; ArgumentError for a mask with holes.
    """
    ids, mask = input_ids.cpu().numpy(), attention_mask.cpu().numpy().astype(bool)
    wanted = ~np.isin(ids, list(family.placeholder_ids.values()))
    wanted[:, :completion_start] = False
    if scored is not None:
        wanted &= scored.cpu().numpy().astype(bool)
    out = []
    for b, row in enumerate(ids):
        where = f"trl: row {b}"
        kept = valid_tokens(mask[b], where, "pad prompts left and completions right")
        own = media[b] if len(media) else []
        sample = row_sample(
            where,
            row[kept],
            {kind: [m for m in own if m.modality == kind] for kind in ("image", "video")},
            wanted[b, kept],
            family,
            response_start=max(completion_start - kept.start, 0),
            processor=processor,
            sample_id=str(b),
            group_id=str(b),
        )
        out.append(sample)
    return out


def media_of_rows(
    pixel_values: torch.Tensor | None,
    image_grid_thw: torch.Tensor | None,
    num_images: Sequence[int] | None,
    family: Family,
    image_sizes: torch.Tensor | None = None,
    image_position_ids: torch.Tensor | None = None,
    *,
    where: str = "trl",
) -> list[list[Medium]]:
    """The images of each row, or [] where the batch has none. Equal pixels of equal grids get one cache key.

    Args: `pixel_values`: [patches, patch_dim], the images of all rows one after the other. `image_grid_thw`:
    [images, 3]. `num_images`: [B]. `image_sizes`: [images, 2], where a family's pixels are padded pictures [images, 3,
    height, width] and these say how large each is. `image_position_ids`: [images, longest, 2], where they are lines of
    patches with these places. Pictures of one tile need none of the three. `where` begins errors.
    Raises: ArgumentError where they don't fit.
    """
    if pixel_values is None:
        return []
    if family.pixel_layout == "canvas" and image_sizes is not None:
        sizes = image_sizes.tolist()
        if len(sizes) != len(pixel_values):
            raise ArgumentError(
                f"{where}: {len(sizes)} image_sizes for {len(pixel_values)} pictures. Fix: pass the fields of one batch"
            )
        pixel_values, grids_of = patches_of_canvas(pixel_values.detach().cpu(), sizes, family)
        image_grid_thw = torch.tensor(grids_of)
    made = _one_by_one(pixel_values, image_position_ids, num_images, family)
    if made is not None:
        pixel_values, image_grid_thw = made
    if image_grid_thw is None or num_images is None:
        raise ArgumentError(
            f"{where}: pixel_values come without image_grid_thw or num_images. "
            "Fix: use a family of mmpack.families, whose images have grids"
        )
    patches = image_grid_thw.prod(dim=1).tolist()
    if sum(num_images) != len(patches) or sum(patches) != len(pixel_values):
        raise ArgumentError(
            f"{where}: num_images counts {sum(num_images)} images, image_grid_thw {len(patches)} of {sum(patches)} "
            f"patches, pixel_values has {len(pixel_values)}. Fix: pass the fields of one batch"
        )
    grids = image_grid_thw.cpu().split(list(num_images))
    own = pixel_values.detach().cpu().split([int(g.prod(dim=1).sum()) for g in grids])
    return [
        media_of_inputs({"pixel_values": p, "image_grid_thw": g}, family, f"{where}: row {b}")[
            "image"
        ]
        for b, (p, g) in enumerate(zip(own, grids, strict=True))
    ]


def pictures_of(
    ids: np.ndarray, family: Family, grids: Iterator[Sequence[int]] | None = None
) -> int:
    """How many pictures a row [L] has: as many of the next `grids` (t, h, w) as its runs of placeholders need.

    Without grids, one for each run.
    """
    runs = len(placeholder_runs(ids, family).of("image").bounds)
    if grids is None:
        return runs
    count = 0
    while runs > 0 and (grid := next(grids, None)) is not None:
        t, h, w = grid
        runs -= family.spans_of("image", (t, h, w))
        count += 1
    return count


def _one_by_one(
    pixel_values: torch.Tensor,
    places: torch.Tensor | None,
    num_images: Sequence[int] | None,
    family: Family,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Patches and grids of pictures that lie one by one: whole, each one tile, or as lines. None: they don't."""
    if num_images is None or len(pixel_values) != sum(num_images) or not len(pixel_values):
        return None
    values = pixel_values.detach().float().cpu().numpy()
    if family.pixel_layout == "padded" and places is not None:
        at = places.cpu().numpy()
        done = [patches_of_lines(values[i : i + 1], at[i : i + 1], family) for i in range(len(at))]
    elif family.pixel_layout == "tiles" and values.ndim == 4:
        done = [patches_of(values[i : i + 1], family) for i in range(len(values))]
    else:
        return None
    rows = torch.cat([torch.from_numpy(d.pixel_values) for d in done])
    return rows.to(pixel_values.dtype), torch.tensor([d.grid_thw for d in done])
