"""Processors of transformers without their video processor, which needs torchvision: they refuse videos."""

from __future__ import annotations

from typing import Any

import transformers

from mmpack.errors import BackendError


class _ImagesOnly(transformers.ProcessorMixin):
    """Goes before a processor class of transformers, which reads off `__init__` what parts it has."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(
        self, images: Any = None, text: Any = None, videos: Any = None, **kwargs: Any
    ) -> Any:
        if videos is not None:
            raise BackendError("processor: videos need torchvision. Fix: pip install torchvision")
        return super().__call__(images=images, text=text, **kwargs)

    @property
    def model_input_names(self) -> list[str]:
        parts = (self.tokenizer, self.image_processor)
        return [name for part in parts for name in part.model_input_names] + ["mm_token_type_ids"]


# Of the same names as their bases: processors are told apart by them.
class Qwen2VLProcessor(_ImagesOnly, transformers.Qwen2VLProcessor):
    pass


class Qwen2_5_VLProcessor(_ImagesOnly, transformers.Qwen2_5_VLProcessor):
    pass


class Qwen3VLProcessor(_ImagesOnly, transformers.Qwen3VLProcessor):
    pass


class InternVLProcessor(_ImagesOnly, transformers.InternVLProcessor):
    def __init__(
        self,
        image_processor: Any,
        tokenizer: Any,
        image_seq_length: int = 256,
        chat_template: str | None = None,
    ):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_seq_length = image_seq_length


IMAGES_ONLY: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Qwen2VLProcessor, Qwen2_5_VLProcessor, Qwen3VLProcessor, InternVLProcessor)
}
