"""What a model family declares: its special ids, merge sizes, video layout, position rule and what may be packed.

One file per family beside this one; everything else asks the `Family` and never the model's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

Size = tuple[int, int]  # (height, width) in pixels


@dataclass(frozen=True)
class Audio:
    """Audio that a family hears. A feature frame is `mel_bins` values of `hop_length` samples; ids are token ids."""

    token_id: int
    start_id: int
    end_id: int
    # the tower reads `chunk_frames` at a time, and halves their number by each of these, rounding "up" or "down"
    chunk_frames: int
    halvings: tuple[str, ...]
    # a video's sound lies between its placeholders: "chunks" of `seconds_per_chunk`, or by "time", token by token
    interleaving: str
    # handed to the feature extractor with each audio, as transformers' processor of the family does
    options: tuple[tuple[str, Any], ...]
    sampling_rate: int = 16_000
    hop_length: int = 160
    mel_bins: int = 128
    seconds_per_chunk: float = 2.0
    # vision start and audio start before a video with sound have one position, and both ends have
    joint_markers: bool = False
    # whether a video's temporal patch that starts between two positions is moved to the one before
    cuts_times: bool = True
    # whether features of an audio shorter than a chunk depend on how far the tower pads it, among longer ones
    padding_shows: bool = False

    def tokens(self, frames: Any) -> Any:
        """Tokens of an audio of so many feature frames; a number, or an array of them."""
        whole, rest = frames // self.chunk_frames, frames % self.chunk_frames
        return whole * self._halved(self.chunk_frames) + self._halved(rest)

    def _halved(self, frames: Any) -> Any:
        for rounding in self.halvings:
            frames = (frames + (rounding == "up")) // 2
        return frames


@dataclass(frozen=True)
class VideoDefaults:
    """Settings of released video processors, and the policies that sample videos, transformers' own first."""

    policies: tuple[str, ...]
    # least and most pixels: of a frame, where a video is one span; of the whole video, where it is frames in text
    area: tuple[int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    # those that decide which frames are taken, by their names in preprocessor_config.json
    sampling: tuple[tuple[str, Any], ...]
    max_video_tokens: int | None = None  # of a budget for frames; None: there is no such setting
    # "area": a medium's size is kept between a minimum and a maximum of pixels; "budget": it is scaled to the maximum
    # of tokens, which processors set (`max_soft_tokens`) instead of an area
    resize: str = "area"


@dataclass(frozen=True)
class Views:
    """Texts around the placeholders of a picture's views: the whole picture, and slices of it, row by row."""

    whole: tuple[str, str]
    slice: tuple[str, str]  # may hold {row} and {column}, counted from 1
    row_end: str  # between two rows of slices
    # around the picture's number in its sample, before the views; None: pictures have no numbers
    number: tuple[str, str] | None = None
    # the whole picture comes behind its slices, after this text; None: before them
    whole_last: str | None = None


@dataclass(frozen=True)
class Texts:
    """What is written around runs of placeholders, as transformers' processor of the family writes it."""

    # vision start and end of an image are written when it is expanded, not by the chat template
    markers: bool = False
    # what an image is expanded to; {run}: its placeholders, with vision start and end if `markers`
    image: str = "{run}"
    # what an image of several tiles, each a separate run, is expanded to: {first} and {rest} are their `image`,
    # the rest joined by blanks; None: the tiles of an image are one run
    tiles: str | None = None
    # one run of a video; {run}: vision start, placeholders, vision end; its time as {seconds}, {whole} seconds, a
    # {clock}, or a {time} with hours and thousandths; and what stands between two runs
    frame: str = "<{seconds:.1f} seconds>{run}"
    between: str = ""
    # the id before its placeholders, if that is not vision start
    frame_start_id: int | None = None
    # which time of a run's frames: the "middle" of first and last | "first"
    frame_time: str = "middle"


@dataclass(frozen=True)
class ImageSettings:
    """Settings of a family's image processor, as pairs of name and value."""

    # what transformers' processor passes to it to override its settings, and as defaults for settings that it lacks
    passed: tuple[tuple[str, Any], ...] = ()
    defaults: tuple[tuple[str, Any], ...] = ()
    # that layouts depend on; and those of the whole processor
    fixed: tuple[tuple[str, object], ...] = ()
    fixed_of_processor: tuple[tuple[str, object], ...] = ()
    # limits that users set under another name than the recorded one; `…_tokens` counts merged patches
    limit_names: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class TwoWay:
    """Placeholders that see each other in both directions, within one run of adjacent tokens."""

    media: tuple[str, ...]  # modalities
    layers: tuple[str, ...] | None = (
        None  # the config's `layer_types` where they do; None: all layers
    )
    # name and value of the text config's setting that switches this on; None: always on
    setting: tuple[str, str | bool] | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family. Ids are token ids, sizes are in pixels (patch), frames (temporal patch) or patches (merge)."""

    name: str
    model_types: tuple[str, ...]  # transformers' `config.model_type` of the whole model
    processors: tuple[str, ...]  # transformers' class names
    image_token_id: int | None  # None: the family reads text only
    video_token_id: int | None = None  # None: a video is a series of images
    vision_start_id: int | None = None  # None: nothing precedes an image
    vision_end_id: int | None = None  # None: nothing follows one
    pad_token_id: int
    patch_size: int
    temporal_patch_size: int = 1
    spatial_merge_size: int
    # "single": one span per video; "frames": one per temporal patch; "images"
    video_layout: str = "images"
    # of layout/mrope.py; the first is the newest transformers'
    position_rules: tuple[str, ...] = ("count",)
    # temporal step of released models; None: one position per temporal patch
    tokens_per_second: float | None = None
    # the order of patches, and what the tower takes. "patches": merged patches are adjacent. In all others, patches are
    # row by row, and the tower takes, for "tiles": t whole tiles; "canvas": pictures side by side as
    # [n, 3, height, width], with the size of each; "padded": lines of patches with their coordinates; "squares": each
    # patch as a small picture; "strip": all patches side by side as one picture
    pixel_layout: str = "patches"
    # temporal patches of a video whose features the tower averages into one run of placeholders (the last: the rest)
    pooled_frames: int = 1
    # the model's module that turns such a tower's output into embeddings
    projector: str | None = None
    # tokens of a picture whose grid does not say them, as of a tower that cuts padding and ends lines: by its size
    # before the resize, patches and pixels along a tile's side, and the sizes that it may be resized to
    tokens_by_size: Callable[[Size, int, int, Sequence[Size]], int] | None = None
    # rows of the largest released embedding; the last ones belong to no token
    vocab_size: int = 152_064
    # a picture is cut into views, each of them a separate medium
    views: Views | None = None
    # ids that begin a sample, before its first turn
    first_ids: tuple[int, ...] = ()
    # ids that open a turn: one before the name of any role, or one per role
    turn_ids: tuple[int, ...] = ()
    # the `coordinate_system` in which released models write boxes and points; None: unknown
    coordinates: str | None = None
    audio: Audio | None = None  # None: the family has no audio input
    two_way: TwoWay | None = None  # None: all attention is causal
    # has layers whose state passes from row to row along a path: batches carry a `segment_plan`
    linear_attention: bool = False
    full_attention_share: float = 1.0  # the share of layers whose cost grows with pairs of rows
    packing: str = "yes"  # "yes" | "kernels-only" | "no"
    sharing: str = "tree"  # "tree" | "none"
    # ids that stand for a medium before it is expanded (from chat templates), if they are not its placeholder
    image_prompt_id: int | None = None
    video_prompt_id: int | None = None
    # image placeholders between these two ids belong to a video: one id for both modalities
    video_bounds: tuple[int, int] | None = None
    # an image has one run per row of merged patches: this id follows each row, and `vision_end_id` the last
    row_end_id: int | None = None
    texts: Texts = Texts()  # around runs of placeholders
    images: ImageSettings = ImageSettings()  # of its image processor
    video: VideoDefaults | None = None  # None: videos must be given processed
    # placeholders of media that mmpack doesn't read: their kind and id
    unread: tuple[tuple[str, int], ...] = ()
    # the first transformers whose forward accepts mmpack's inputs; None: any that mmpack supports
    oldest_transformers: str | None = None
    # the forward's keyword that marks tokens of an image (1) or a video (2); None: it has none
    token_types: str | None = None
    # the text config's setting with which the forward caps logits: cap · tanh(logits / cap); None: no cap
    logit_cap: str | None = None

    @property
    def position_rows(self) -> int:
        """Rows of Sample.position_ids: time, height and width, or one that counts tokens."""
        return 1 if self.position_rules[0] == "count" else 3

    @property
    def video_policies(self) -> tuple[str, ...]:
        """Policies that sample its videos, transformers' own first."""
        return () if self.video is None else self.video.policies

    @property
    def placeholder_ids(self) -> dict[str, int]:
        """Modality name to placeholder id, of the modalities that the family has."""
        ids = {"image": self.image_token_id, "video": self.video_token_id}
        ids["audio"] = None if self.audio is None else self.audio.token_id
        return {modality: i for modality, i in ids.items() if i is not None}

    @property
    def prompt_ids(self) -> dict[str, int]:
        """Modality name to the id that stands for one medium in ids that are not expanded."""
        own = {"image": self.image_prompt_id, "video": self.video_prompt_id}
        return self.placeholder_ids | {m: i for m, i in own.items() if i is not None}

    @property
    def starts(self) -> list[int]:
        """The id before an image, if there is one."""
        return [] if self.vision_start_id is None else [self.vision_start_id]

    @property
    def ends(self) -> list[int]:
        """The id behind an image, if there is one."""
        return [] if self.vision_end_id is None else [self.vision_end_id]

    @property
    def patch_dim(self) -> int:
        """Values of a patch: channels, frames, height, width."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def pixel_shape(self, grid: tuple[int, int, int], modality: str = "image") -> tuple[int, ...]:
        """Shape of a medium's `pixel_values`: one row per patch, or per feature frame of an audio."""
        if modality == "audio" and self.audio is not None:
            return grid[0], self.audio.mel_bins
        return math.prod(grid), self.patch_dim

    def vision_tokens(self, grid: tuple[int, int, int]) -> int:
        """Tokens of a medium of `grid` = (t, h, w) patches, after merging."""
        t, h, w = grid
        return (
            -(-t // self.pooled_frames)
            * (h // self.spatial_merge_size)
            * (w // self.spatial_merge_size)
        )

    def tokens_of(self, modality: str, grid: tuple[int, int, int]) -> int:
        """Tokens of a medium: of an image or a video of patches, of an audio of (frames, 1, 1)."""
        if modality == "audio" and self.audio is not None:
            return int(self.audio.tokens(grid[0]))
        return self.vision_tokens(grid)

    def tokens_in(self, medium: Any) -> int:
        """Tokens of a `Medium`; where its grid does not say them, as it does itself."""
        if self.tokens_by_size is not None:
            return int(medium.num_tokens)
        return self.tokens_of(medium.modality, medium.grid_thw)

    def spans_of(self, modality: str, grid: tuple[int, int, int]) -> int:
        """Runs of placeholders that one medium of `grid` has; one in pieces, with a video's sound, counts as one."""
        if not self.in_pieces(modality):
            return 1
        if modality == "video":
            return -(-grid[0] // self.pooled_frames)
        in_rows = modality == "image" and self.row_end_id is not None
        return grid[0] * (grid[1] // self.spatial_merge_size if in_rows else 1)

    def in_pieces(self, modality: str) -> bool:
        """Whether a medium is several runs of placeholders, numbered by `ModalitySpan.frame`: frames, rows, tiles."""
        if modality == "video":
            return self.video_layout == "frames"
        in_rows = self.row_end_id is not None or self.texts.tiles is not None
        return modality == "image" and in_rows

    def same_layout(self, other: Family) -> bool:
        """Whether samples of one are samples of the other: what wrote the ids differs, or the model behind them."""
        alike: dict[str, Any] = {name: getattr(other, name) for name in _OF_MAKERS}
        there = other.texts
        alike["texts"] = replace(
            self.texts, frame=there.frame, between=there.between, frame_time=there.frame_time
        )
        alike["images"] = replace(
            self.images, passed=other.images.passed, defaults=other.images.defaults
        )
        return replace(self, **alike) == other


# what says who wrote a sample's ids, and for which model; not how they are read
_OF_MAKERS = ("name", "model_types", "processors", "video", "coordinates")
