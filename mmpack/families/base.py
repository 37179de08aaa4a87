"""What a model family declares: its special ids, merge sizes, video layout, position rule and what may be packed.

One file per family beside this one; everything else asks the `Family` and never the model's name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A model family. Ids are token ids, sizes are in pixels (patch), frames (temporal patch) or patches (merge)."""

    name: str
    model_types: tuple[str, ...]  # transformers' `config.model_type` of the whole model
    image_token_id: int
    video_token_id: int
    vision_start_id: int
    vision_end_id: int
    pad_token_id: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    video_layout: str  # "single": one span a video; "frames": one span a temporal patch
    position_rules: tuple[str, ...]  # of layout/mrope.py; the first is the newest transformers'
    position_rows: int  # rows of Sample.position_ids
    tokens_per_second: (
        float | None
    )  # temporal step of released models; None: one position a temporal patch
    vision_levels: int = 1  # embeddings a vision token has (deepstack families have more)
    packing: str = "yes"  # "yes" | "kernels-only" | "no"
    sharing: str = "tree"  # "tree" | "none"

    @property
    def placeholder_ids(self) -> dict[str, int]:
        """Modality name to placeholder id."""
        return {"image": self.image_token_id, "video": self.video_token_id}

    def vision_tokens(self, grid: tuple[int, int, int]) -> int:
        """Tokens of a medium of `grid` = (t, h, w) patches, after merging."""
        t, h, w = grid
        return t * (h // self.spatial_merge_size) * (w // self.spatial_merge_size)
