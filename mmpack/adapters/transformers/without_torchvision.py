"""Qwen-VL processors of transformers where torchvision is missing: their video processor needs it, mmpack's does not.

Videos are taken as sampled frames: `do_sample_frames=False`, with `video_metadata`.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import (
    IMAGE_PROCESSOR_NAME,
    PROCESSOR_NAME,
    VIDEO_PROCESSOR_NAME,
)
from transformers.utils.hub import cached_file
from transformers.video_processing_utils import BaseVideoProcessor
from transformers.video_utils import make_batched_metadata, make_batched_videos

from mmpack.processors.frame_processor import FrameProcessor


class Videos(FrameProcessor):
    """Hands the metadata on, as transformers' video processors do."""

    def __call__(
        self, videos: Any, *, video_metadata: Any = None, **options: Any
    ) -> dict[str, Any]:
        batch: Any = make_batched_videos(videos)
        about = make_batched_metadata(batch, video_metadata=video_metadata)
        return super().__call__(batch, **options) | {"video_metadata": about}


class WithVideos(transformers.ProcessorMixin):
    """Goes before a processor class of transformers, which reads off `__init__` what parts it has."""

    family: str
    saved_as = "Qwen2VLVideoProcessor"  # where torchvision is

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.video_processor = Videos(self.family, **image_processor.to_dict())

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        processor = super().from_pretrained(name, *args, **kwargs)
        if _has_video_settings(name):
            settings, _ = BaseVideoProcessor.get_video_processor_dict(name)
            processor.video_processor = Videos(cls.family, **settings)
        return processor

    def save_pretrained(self, folder: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        files = super().save_pretrained(folder, *args, **kwargs)
        settings = {"video_processor_type": self.saved_as} | self.video_processor.to_dict()
        text = json.dumps(settings, indent=2) + "\n"
        (Path(folder) / VIDEO_PROCESSOR_NAME).write_text(text, encoding="utf-8")
        return files

    @property
    def model_input_names(self) -> list[str]:
        parts = (self.tokenizer, self.image_processor)
        own = ["mm_token_type_ids", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"]
        return [name for part in parts for name in part.model_input_names] + own


def _has_video_settings(name: Any) -> bool:
    """Whether a checkpoint says how videos are laid out, in a file of theirs or in one for pictures and videos."""
    found = partial(cached_file, name, _raise_exceptions_for_missing_entries=False)
    if found(VIDEO_PROCESSOR_NAME) or found(IMAGE_PROCESSOR_NAME):
        return True
    whole = found(PROCESSOR_NAME)
    return whole is not None and "video_processor" in json.loads(Path(whole).read_text("utf-8"))


# Named as their bases are: a processor is recognised by its class name.
class Qwen2VLProcessor(WithVideos, transformers.Qwen2VLProcessor):
    family = "qwen2_vl"


class Qwen2_5_VLProcessor(WithVideos, transformers.Qwen2_5_VLProcessor):
    family = "qwen2_5_vl"


class Qwen3VLProcessor(WithVideos, transformers.Qwen3VLProcessor):
    family = "qwen3_vl"
    saved_as = "Qwen3VLVideoProcessor"


WITHOUT_TORCHVISION: dict[str, Any] = {
    kind.__name__: kind for kind in (Qwen2VLProcessor, Qwen2_5_VLProcessor, Qwen3VLProcessor)
}
