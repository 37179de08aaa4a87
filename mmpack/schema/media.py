"""A medium: one image, one video or one audio, known by its content.

Grids count patches before merging; the grid of an audio is (feature frames, 1, 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mmpack.schema.error_text import safe_repr
from mmpack.schema.fields import Record, column
from mmpack.schema.spans import MODALITIES
from mmpack.schema.specs import Array, Float, Floats, Int, Ints, Json, Str


@dataclass(eq=False)
class Medium(Record):
    """One image, video or audio as the processor saw it. Traces never hold `pixel_values`."""

    media_id: str = column(Str(), "the caller's name")
    modality: str = column(Str(MODALITIES), "image, video or audio")
    cache_key: str = column(
        Str(), "sha256 of content, grid and settings: equal keys, equal embeddings"
    )
    grid_thw: tuple[int, int, int] = column(
        Ints(3), "patches: time, height, width; of an audio: feature frames, 1, 1"
    )
    num_tokens: int = column(
        Int(), "placeholders: vision tokens after merging, or tokens of an audio"
    )
    content_hash: str | None = column(
        Str(), "sha256 of modality, size and RGB pixels; of an audio of its rate and samples", None
    )
    size: tuple[int, int] | None = column(Ints(2), "width, height handed to the processor", None)
    decoded_size: tuple[int, int] | None = column(
        Ints(2), "width, height of the decoded file", None
    )
    mode: str | None = column(Str(), "Pillow's mode before conversion to RGB", None)
    exif_orientation: int | None = column(Int(0, 255), "EXIF orientation of the file", None)
    file_hash: str | None = column(Str(), "sha256 of the encoded file", None)
    source: str | None = column(Str(), "path below a root that the reader gives", None)
    fps: float | None = column(Float(), "frames per second of the file", None)
    frame_indices: np.ndarray | None = column(Array("int64", exact=False), "sampled frames", None)
    frame_timestamps: tuple[float, ...] | None = column(Floats(), "seconds of the frames", None)
    second_per_grid_ts: float | None = column(Float(), "seconds between temporal patches", None)
    total_frames: int | None = column(Int(), "frames of the file", None)
    sampling_rate: int | None = column(
        Int(), "samples per second of an audio, as handed over", None
    )
    num_samples: int | None = column(Int(), "samples of an audio that its features are of", None)
    hop_length: int | None = column(Int(), "samples from one feature frame to the next", None)
    metadata: dict[str, Any] = column(Json(), "unknown fields, carried through", factory=dict)

    pixel_values: Any = None  # [t·h·w, patch_dim]; of an audio its features [frames, mel_bins]
    in_video: bool = (
        False  # of an audio: its placeholders are written among those of the video before it
    )

    @property
    def num_patches(self) -> int:
        """Patches before merging, or feature frames: rows that a tower reads."""
        t, h, w = self.grid_thw
        return t * h * w

    def __repr__(self) -> str:
        pixels = self.__dict__.get("pixel_values")
        shape = None if pixels is None else safe_repr(lambda: str(list(pixels.shape)))
        return (
            f"Medium({safe_repr(lambda: repr(self.media_id))}, {safe_repr(lambda: repr(self.modality))}, "
            f"grid_thw={safe_repr(lambda: str(self.grid_thw))}, num_tokens={safe_repr(lambda: str(self.num_tokens))}, "
            f"pixel_values={shape})"
        )
