"""What a model family declares: its special ids, merge sizes, video layout, position rule and what may be packed.

One file per family beside this one; everything else asks the `Family` and never the model's name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Family:
    """A model family. Ids are token ids, sizes are in pixels (patch), frames (temporal patch) or patches (merge)."""

    name: str
    model_types: tuple[str, ...]  # transformers' `config.model_type` of the whole model
    processors: tuple[str, ...]  # transformers' class names
    image_token_id: int
    video_token_id: int | None  # None: a video is a series of images
    vision_start_id: int
    vision_end_id: int
    pad_token_id: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    video_layout: str  # "single": one span per video; "frames": one per temporal patch; "images"
    position_rules: tuple[str, ...]  # of layout/mrope.py; the first is the newest transformers'
    position_rows: int  # rows of Sample.position_ids
    # temporal step of released models; None: one position per temporal patch
    tokens_per_second: float | None
    # how patches lie, and what the tower takes. "patches": those that are merged lie together; "tiles": row by row,
    # the tower takes t whole tiles; "padded": row by row, the tower takes lines of patches with their places
    pixel_layout: str = "patches"
    # the id that stands for a picture in ids that are not expanded; None: its placeholder
    image_prompt_id: int | None = None
    # what a picture is written as where it is expanded; {run}: its placeholders, between vision start and end where
    # `writes_markers`
    image_text: str = "{run}"
    # of a picture of several tiles, each a run of its own: {first} and {rest} are their `image_text`, the rest with
    # blanks between; None: the tiles of a picture are one run
    tiles_text: str | None = None
    # what a temporal patch of a video in text is written as ({seconds}; {clock}: minutes and seconds; {run}:
    # placeholders between vision start and end), and what stands between two
    frame_text: str = "<{seconds:.1f} seconds>{run}"
    frames_between: str = ""
    # what transformers' processor of the family hands to its image processor, in place of that one's own
    image_options: tuple[tuple[str, Any], ...] = ()
    # and what it hands over where that one says nothing
    image_defaults: tuple[tuple[str, Any], ...] = ()
    # the forward's keyword for which tokens are of an image (1) or a video (2); None: it asks for none
    token_types: str | None = None
    # setting of the text config by which the forward caps logits: cap · tanh(logits / cap); None: it caps none
    logit_cap: str | None = None
    # rows of the largest released embedding; the last ones belong to no token
    vocab_size: int = 152_064
    # vision start and end of an image are set by expanding it, not by the chat template
    writes_markers: bool = False
    vision_levels: int = 1  # embeddings per vision token (deepstack families have more)
    # what released models write boxes and points in: a `coordinate_system`; None: not known
    coordinates: str | None = None
    packing: str = "yes"  # "yes" | "kernels-only" | "no"
    sharing: str = "tree"  # "tree" | "none"

    @property
    def placeholder_ids(self) -> dict[str, int]:
        """Modality name to placeholder id, of the modalities that the family has."""
        ids = {"image": self.image_token_id, "video": self.video_token_id}
        return {modality: i for modality, i in ids.items() if i is not None}

    @property
    def prompt_ids(self) -> dict[str, int]:
        """Modality name to the id that stands for a medium in ids that are not expanded."""
        given = {"image": self.image_prompt_id}
        return {m: given.get(m) or placeholder for m, placeholder in self.placeholder_ids.items()}

    @property
    def patch_dim(self) -> int:
        """Values of a patch: channels, frames, height, width."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def pixel_shape(self, grid: tuple[int, int, int]) -> tuple[int, ...]:
        """Shape of a medium's `pixel_values`: one row per patch."""
        return math.prod(grid), self.patch_dim

    def vision_tokens(self, grid: tuple[int, int, int]) -> int:
        """Tokens of a medium of `grid` = (t, h, w) patches, after merging."""
        t, h, w = grid
        return t * (h // self.spatial_merge_size) * (w // self.spatial_merge_size)

    def spans_of(self, modality: str, grid: tuple[int, int, int]) -> int:
        """Runs of placeholders that one medium of `grid` has."""
        return grid[0] if self.in_pieces(modality) else 1

    def in_pieces(self, modality: str) -> bool:
        """Whether a medium lies in the text piece by piece, a run for each t of its grid: frames, or tiles."""
        if modality == "video":
            return self.video_layout == "frames"
        return self.tiles_text is not None

    def same_layout(self, other: Family) -> bool:
        """Whether samples of one are samples of the other: only the model behind the ids differs."""
        return replace(self, name=other.name, model_types=other.model_types) == other
