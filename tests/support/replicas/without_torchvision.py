"""Processors of other families where torchvision is missing, as `mmpack.adapters.transformers.without_torchvision`."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import transformers
from transformers.utils.import_utils import is_torchvision_available

from mmpack.adapters.transformers import without_torchvision as qwen
from mmpack.adapters.transformers.without_torchvision import Videos, WithVideos
from mmpack.errors import BackendError


class Parts(transformers.ProcessorMixin):
    """Goes before a processor class of transformers, which reads off `__init__` what parts it has."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    @property
    def model_input_names(self) -> list[str]:
        parts = (self.tokenizer, self.image_processor)
        return [name for part in parts for name in part.model_input_names] + ["mm_token_type_ids"]


class Glm4vProcessor(WithVideos, transformers.Glm4vProcessor):
    family = "glm4v"
    saved_as = "Glm4vVideoProcessor"


class Glm46VProcessor(WithVideos, transformers.Glm46VProcessor):
    family = "glm46v"
    saved_as = "Glm46VVideoProcessor"


class _Hearing(WithVideos):
    """Of the Omni families, whose processors have a feature extractor too."""

    def __init__(
        self,
        image_processor: Any,
        feature_extractor: Any,
        tokenizer: Any,
        chat_template: str | None = None,
    ):
        transformers.ProcessorMixin.__init__(
            self, image_processor, feature_extractor, tokenizer, chat_template=chat_template
        )
        for name in _NAMED:
            setattr(self, name, getattr(tokenizer, name))
        self.video_processor = Videos(self.family, **image_processor.to_dict())


_NAMED = (
    *(f"{kind}_token{end}" for kind in ("image", "video", "audio") for end in ("", "_id")),
    *(f"{kind}_{end}_token" for kind in ("vision", "audio") for end in ("bos", "eos")),
)


class Qwen2_5OmniProcessor(_Hearing, transformers.Qwen2_5OmniProcessor):
    family = "qwen2_5_omni"


class Qwen3OmniMoeProcessor(_Hearing, transformers.Qwen3OmniMoeProcessor):
    family = "qwen3_omni_moe"


class InternVLProcessor(Parts, transformers.InternVLProcessor):
    """Refuses videos."""

    def __init__(
        self,
        image_processor: Any,
        tokenizer: Any,
        image_seq_length: int = 256,
        chat_template: str | None = None,
    ):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_seq_length = image_seq_length

    def __call__(
        self, images: Any = None, text: Any = None, videos: Any = None, **kwargs: Any
    ) -> Any:
        if videos is not None:
            raise BackendError("processor: videos need torchvision. Fix: pip install torchvision")
        return super().__call__(images=images, text=text, **kwargs)


class _NoVideoPart(transformers.ProcessorMixin):
    """Behind a processor class that hands a video processor on, which is no part where torchvision is missing."""

    def __init__(self, *args: Any, video_processor: Any = None, **kwargs: Any):
        super().__init__(*args, **kwargs)


def _with(name: str, own: type) -> tuple[type, ...]:
    """Bases of a class that goes before transformers' own; without that one where it can't be imported."""
    try:
        return getattr(transformers, name), own
    except (AttributeError, ImportError):
        return (own,)


class Gemma4Processor(*_with("Gemma4Processor", _NoVideoPart)):  # type: ignore[misc]
    """Its videos have the released settings: those of its pictures are others."""

    def __init__(
        self,
        feature_extractor: Any,
        image_processor: Any,
        tokenizer: Any,
        chat_template: str | None = None,
        image_seq_length: int = 280,
        audio_seq_length: int = 750,
        audio_ms_per_token: int = 40,
    ):
        super().__init__(
            feature_extractor,
            image_processor,
            tokenizer,
            None,
            chat_template,
            image_seq_length,
            audio_seq_length,
            audio_ms_per_token,
        )
        self.video_processor = Videos("gemma4")

    @property
    def model_input_names(self) -> list[str]:
        parts = (self.tokenizer, self.image_processor)
        names = [name for part in parts for name in part.model_input_names]
        videos = ["pixel_values_videos", "video_position_ids", "num_frames_per_video"]
        return [*names, *videos, "mm_token_type_ids"]


class PixtralProcessor(transformers.ProcessorMixin):
    """Mistral 3's. transformers' own can't be imported without torchvision; this writes and returns what it does."""

    # what a call does not say; one's own may be set, as on transformers' class
    text_kwargs: Any = MappingProxyType({"return_tensors": "pt"})
    images_kwargs: Any = MappingProxyType({"return_tensors": "pt"})

    def __init__(
        self,
        image_processor: Any,
        tokenizer: Any,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: str | None = None,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
    ):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.patch_size, self.spatial_merge_size = patch_size, spatial_merge_size
        self.image_token, self.image_break_token = image_token, image_break_token
        self.image_end_token = image_end_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)

    def __call__(
        self,
        images: Any = None,
        text: Any = None,
        videos: Any = None,
        return_mm_token_type_ids: bool = False,
        **kwargs: Any,
    ) -> Any:
        if videos is not None:
            raise BackendError("processor: Mistral 3 has no videos. Fix: pass one image per frame")
        texts = [text] if isinstance(text, str) else list(text)
        for part in ("common_kwargs", "text_kwargs", "images_kwargs", "videos_kwargs"):
            own = kwargs.pop(part, None) or {}
            kwargs |= own if part in ("common_kwargs", "text_kwargs") else {}
        given = (
            {"return_tensors": kwargs.pop("return_tensors")} if "return_tensors" in kwargs else {}
        )
        made: dict[str, Any] = {}
        if images is not None:
            flat = transformers.image_utils.make_flat_list_of_images(images)
            unit = self.patch_size * self.spatial_merge_size
            made = dict(
                self.image_processor(flat, patch_size=unit, **{**self.images_kwargs, **given})
            )
            rows = iter([[int(n) // unit for n in size] for size in made["image_sizes"]])
            texts = [self._expanded(own, rows) for own in texts]
        ids = self.tokenizer(texts, **{**self.text_kwargs, **given, **kwargs})
        return transformers.BatchFeature({**ids, **made})

    def _expanded(self, text: str, sizes: Any) -> str:
        """Each image token as rows of (height, width) of the next of `sizes`."""
        first, *rest = text.split(self.image_token)
        for after in rest:
            height, width = next(sizes)
            row = self.image_token * width
            first += f"{row}{self.image_break_token}" * (height - 1)
            first += f"{row}{self.image_end_token}{after}"
        return first

    @property
    def model_input_names(self) -> list[str]:
        parts = (self.tokenizer, self.image_processor)
        return [name for part in parts for name in part.model_input_names] + ["image_sizes"]


WITHOUT_TORCHVISION: dict[str, Any] = qwen.WITHOUT_TORCHVISION | {
    kind.__name__: kind
    for kind in (
        Qwen2_5OmniProcessor,
        Qwen3OmniMoeProcessor,
        Glm4vProcessor,
        Glm46VProcessor,
        InternVLProcessor,
        Gemma4Processor,
        PixtralProcessor,
    )
}


def hf_processor(name: str, make_video_processor: Callable[[], Any], **parts: Any) -> Any:
    """transformers' processor of class `name`; where torchvision is missing, the same without its video processor."""
    if is_torchvision_available():
        return getattr(transformers, name)(video_processor=make_video_processor(), **parts)
    return WITHOUT_TORCHVISION[name](**parts)
