"""What a model family declares: its special ids, merge sizes, video layout, position rule and what may be packed.

One file per family beside this one; everything else asks the `Family` and never the model's name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Views:
    """Texts around the placeholders of a picture's views: the whole picture, then slices of it, row by row."""

    whole: tuple[str, str]
    slice: tuple[str, str]
    row_end: str  # between two rows of slices
    number: tuple[str, str]  # around the picture's number in its sample, before the views


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
    # "patches": patches that are merged lie together; the others row by row: "tiles": t tiles; "squares": the model
    # takes each patch as a small picture; "strip": all patches beside each other, as one picture of a patch's height
    pixel_layout: str = "patches"
    # temporal patches of a video whose features the tower averages: one run of placeholders (the last: of the rest)
    pooled_frames: int = 1
    # the model's module that makes embeddings of what such a tower gives
    projector: str | None = None
    # what one run of a video in frames is written as; {seconds}: a float; {time}: 00:00:01.500; {run}: its placeholders
    # between vision start and end, or these three by themselves: {start}, {pads}, {end}
    frame_text: str = "<{seconds:.1f} seconds>{run}"
    frame_time: str = (
        "middle"  # the run's time: halfway between its first and last frame, or "first"
    )
    # whether mmpack samples, decodes and resizes videos as the family's processor does; else it takes them processed
    plans_frames: bool = True
    # rows of the largest released embedding; the last ones belong to no token
    vocab_size: int = 152_064
    # vision start and end of an image are set by expanding it, not by the chat template
    writes_markers: bool = False
    # a picture is cut into views, each a medium of its own
    views: Views | None = None
    # settings of its image processor that layouts rest on
    fixed_settings: tuple[tuple[str, object], ...] = ()
    vision_levels: int = 1  # embeddings per vision token (deepstack families have more)
    # what released models write boxes and points in: a `coordinate_system`; None: not known
    coordinates: str | None = None
    # modalities whose placeholders see each other, both ways, within one run of adjacent tokens
    two_way_media: tuple[str, ...] = ()
    # the config's `layer_types` where they do; None: all layers
    two_way_layers: tuple[str, ...] | None = None
    # name and value of the text config's setting that switches it on; None: always on
    two_way_setting: tuple[str, str | bool] | None = None
    # layers whose state runs from row to row along a path: its batches carry a `segment_plan`
    linear_attention: bool = False
    packing: str = "yes"  # "yes" | "kernels-only" | "no"
    sharing: str = "tree"  # "tree" | "none"

    @property
    def placeholder_ids(self) -> dict[str, int]:
        """Modality name to placeholder id, of the modalities that the family has."""
        ids = {"image": self.image_token_id, "video": self.video_token_id}
        return {modality: i for modality, i in ids.items() if i is not None}

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
        return (
            -(-t // self.pooled_frames)
            * (h // self.spatial_merge_size)
            * (w // self.spatial_merge_size)
        )

    def spans_of(self, modality: str, grid: tuple[int, int, int]) -> int:
        """Runs of placeholders that one medium of `grid` has."""
        in_frames = modality == "video" and self.video_layout == "frames"
        return -(-grid[0] // self.pooled_frames) if in_frames else 1

    def same_layout(self, other: Family) -> bool:
        """Whether samples of one are samples of the other: only the model behind the ids differs."""
        return replace(self, name=other.name, model_types=other.model_types) == other
