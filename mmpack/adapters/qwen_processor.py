"""A transformers processor of Qwen2-VL or Qwen2.5-VL without a model hub: Qwen's tokenizer, Pillow's image processor.

transformers' own classes insist on a video processor, which needs torchvision; where that is missing, the classes here
take none, and refuse videos.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers
from transformers.utils.import_utils import is_torchvision_available

from mmpack.adapters.qwen_vocab import qwen_tokenizer
from mmpack.errors import ArgumentError, BackendError

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

# Renders what the template released with Qwen2.5-VL renders. All whitespace outside of strings is marked to be dropped,
# so that no setting of the Jinja environment matters.
CHAT_TEMPLATE = r"""
{%- set seen = namespace(images=0, videos=0) -%}
{%- for message in messages -%}
  {%- if loop.first and message["role"] != "system" -%}
    {{- "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" -}}
  {%- endif -%}
  {{- "<|im_start|>" ~ message["role"] ~ "\n" -}}
  {%- if message["content"] is string -%}
    {{- message["content"] -}}
  {%- else -%}
    {%- for part in message["content"] -%}
      {%- if part["type"] == "image" or "image" in part or "image_url" in part -%}
        {%- set seen.images = seen.images + 1 -%}
        {%- if add_vision_id -%}{{- "Picture " ~ seen.images ~ ": " -}}{%- endif -%}
        {{- "<|vision_start|><|image_pad|><|vision_end|>" -}}
      {%- elif part["type"] == "video" or "video" in part -%}
        {%- set seen.videos = seen.videos + 1 -%}
        {%- if add_vision_id -%}{{- "Video " ~ seen.videos ~ ": " -}}{%- endif -%}
        {{- "<|vision_start|><|video_pad|><|vision_end|>" -}}
      {%- elif "text" in part -%}
        {{- part["text"] -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "<|im_start|>assistant\n" -}}
{%- endif -%}
"""


def qwen_vl_processor(
    family: str = "qwen2_5_vl",
    *,
    min_pixels: int = 56 * 56,
    max_pixels: int = 16384 * 28 * 28,
    tokenizer: Qwen2Tokenizer | None = None,
) -> transformers.Qwen2VLProcessor | transformers.Qwen2_5_VLProcessor:
    """The processor of a released checkpoint of `family` (`qwen2_vl` or `qwen2_5_vl`), with its chat template.

    `min_pixels`, `max_pixels`: bounds of a resized medium's area in pixels, by default those of released checkpoints.
    `tokenizer`: `qwen_tokenizer()` if not given, which takes some seconds.
    Raises: ArgumentError for another family or bounds; MissingExtraError without dashscope.
    """
    if family not in _CLASSES:
        raise ArgumentError(
            f"qwen_vl_processor: family is {family!r}. Fix: use one of {', '.join(_CLASSES)}"
        )
    if not 0 < min_pixels <= max_pixels:
        raise ArgumentError(
            f"qwen_vl_processor: min_pixels={min_pixels}, max_pixels={max_pixels}. "
            "Fix: 0 < min_pixels <= max_pixels"
        )
    # as `size`: transformers before 5.19 writes min_pixels and max_pixels into the class's own size
    bounds: Any = {"size": {"shortest_edge": min_pixels, "longest_edge": max_pixels}}
    with_videos, images_only = _CLASSES[family]
    parts = {
        "image_processor": transformers.Qwen2VLImageProcessorPil(**bounds),
        "tokenizer": qwen_tokenizer() if tokenizer is None else tokenizer,
        "chat_template": CHAT_TEMPLATE,
    }
    if is_torchvision_available():
        return with_videos(video_processor=transformers.Qwen2VLVideoProcessor(**bounds), **parts)
    return images_only(**parts)


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


_CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen2_vl": (transformers.Qwen2VLProcessor, Qwen2VLProcessor),
    "qwen2_5_vl": (transformers.Qwen2_5_VLProcessor, Qwen2_5_VLProcessor),
}
