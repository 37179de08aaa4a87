"""Media of a pack in a VLM of Megatron's: each is encoded once, on the first stage, and placed wherever it occurs.

Context parallel ranks encode different media and exchange features. A stage without media to encode runs its tower,
if that is trained, on the smallest picture with weight 0: all ranks have the same collectives and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor

from mmpack.adapters.megatron.modules import refuse_first
from mmpack.adapters.megatron.rows import Rows
from mmpack.adapters.transformers.ulysses.media import exchange_features, share_media
from mmpack.errors import ModelError
from mmpack.ops.embeddings.merge import merge_embeddings
from mmpack.packing.pixels import float_pixels

Tower = Callable[[Tensor, Tensor], Any]  # (pixels, grids) -> features, or (features, levels)


def tower_of(whole: Any) -> Tower:
    """The tower of a VLM. Raises: ModelError for one of an unknown kind."""
    name = type(whole).__name__
    known: dict[str, Tower] = {
        # mbridge's; Megatron-Bridge's
        "Qwen2_5VLModel": lambda pixels, grids: whole.vision_model(pixels, grids),
        "Qwen25VLModel": lambda pixels, grids: whole.visual(pixels, grid_thw=grids),
        "Qwen3VLModel": lambda pixels, grids: whole.vision_model(pixels, grid_thw=grids),
    }
    if name in known:
        return known[name]
    raise ModelError(
        f"attach: the tower of {name} is not known. Fix: pass tower=, a function of pixels [patches, patch_dim] and "
        "grids [M, 3] that returns features [tokens, H], or (features, deepstack levels)"
    )


def forward_with_media(
    whole: Any, language: Any, tower: Any, own: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A VLM's forward of what `model_inputs` made, without its own count of positions; else its own."""
    rows = kwargs.get("packed_seq_params")
    if not isinstance(rows, Rows):
        return own(*args, **kwargs)
    given: dict[str, Any] = {"decoder_input": None}
    if whole.pre_process:
        embeddings = language.embedding(input_ids=rows.ids, position_ids=None)
        given = _merged(whole, language, tower, rows, embeddings[:, 0])
    return language(
        input_ids=None,
        position_ids=rows.positions,
        attention_mask=None,
        packed_seq_params=rows,
        **given,
    )


def _merged(
    whole: Any, language: Any, tower: Any, rows: Rows, embeddings: Tensor
) -> dict[str, Any]:
    """What the language model takes: rows [t, 1, H], and with deepstack the levels of this rank's vision rows."""
    batch, split = rows.batch, rows.split
    owner = share_media([m.num_patches for m in batch.media], 1 if split is None else split.ranks)
    mine = np.flatnonzero(owner == (0 if split is None else split.rank)).tolist()
    trained = torch.is_grad_enabled() and any(
        p.requires_grad
        for name, p in whole.named_parameters()
        if not name.startswith("language_model.")
    )
    made = _encode(rows, tower, mine)
    if not made and (trained or batch.media):
        made = _smallest(rows, tower, embeddings.device)
        nothing = 0 * torch.stack([level.sum() for level in made]).sum()
        embeddings = embeddings + nothing.to(embeddings.dtype)
    seen = batch.vision_rows.source[slice(None) if split is None else split.own] >= 0
    levels: Sequence[Tensor] = ()
    if batch.media and split is None:
        embeddings, levels = merge_embeddings(embeddings, made[0], batch.vision_rows, made[1:])
    elif batch.media and split is not None:
        chosen = np.ones(len(batch.media), dtype=bool)
        first, *levels = exchange_features(batch, split, made, mine, owner, chosen)
        places = seen.nonzero()[:, 0]
        embeddings = embeddings.index_copy(0, places, first.to(embeddings.dtype))
        levels = [level.to(embeddings.dtype) for level in levels]
    hidden = embeddings[:, None]
    if language.config.sequence_parallel:
        group, places = language.pg_collection.tp, seen.nonzero()[:, 0]
        # by way of all rows: each rank needs the whole gradient of its tower
        wide = [torch.zeros_like(embeddings).index_copy(0, places, level) for level in levels]
        seen = seen.chunk(group.size())[group.rank()]
        levels = [scatter_to_sequence_parallel_region(x, group=group)[seen] for x in wide]
        hidden = scatter_to_sequence_parallel_region(hidden, group=group).contiguous()
    if not levels:
        return {"decoder_input": hidden}
    whole_layers = language.config.recompute_granularity == "full" and language.training
    why = "Megatron-Bridge's full recomputation can't run deepstack again"
    refuse_first("mmpack", (whole_layers, why, "set recompute_granularity='selective'"))
    return {
        "decoder_input": hidden,
        "visual_pos_masks": seen[None],
        "deepstack_visual_embeds": list(levels),
    }


def _encode(rows: Rows, tower: Tower, mine: list[int]) -> list[Tensor]:
    """Features of these media of the batch, one after the other, and deepstack levels; [] for no media."""
    batch = rows.batch
    batch.stats["patches_encoded"] = sum(batch.media[i].num_patches for i in mine)
    if not mine:
        return []
    return _run(tower, float_pixels(batch, mine), [batch.media[i].grid_thw for i in mine])


def _smallest(rows: Rows, tower: Tower, device: torch.device) -> list[Tensor]:
    family = rows.batch.family_of()
    side = family.spatial_merge_size
    grid = (1, side, side)
    return _run(tower, torch.ones(family.pixel_shape(grid, "image"), device=device), [grid])


def _run(tower: Tower, pixels: Tensor, grids: list[tuple[int, int, int]]) -> list[Tensor]:
    out = tower(pixels, torch.tensor(grids, device=pixels.device))
    if hasattr(out, "pooler_output"):  # of transformers 5
        out = out.pooler_output, getattr(out, "deepstack_features", None) or ()
    features, levels = out if isinstance(out, tuple) else (out, ())
    return [features, *levels]
