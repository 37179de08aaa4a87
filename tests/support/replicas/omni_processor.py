"""A transformers processor of a Qwen-Omni without a model hub: the tokenizer with its audio tokens, and its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmpack.errors import check_name, needs

with needs("smoke", __name__):
    import transformers

from support.replicas.chat_templates import QWEN2_5_OMNI, QWEN3_OMNI
from support.replicas.without_torchvision import hf_processor

from mmpack.demo.vocabulary import CONTROL_TOKENS, MARKUP_TOKENS, tokenizer_of
from mmpack.families import get_family


def omni_processor(
    family: str, *, min_pixels: int, max_pixels: int, chunk_length: int = 300, tokenizer: Any = None
) -> Any:
    """The processor of a released checkpoint of `family`, with its chat template.

    `family`: `qwen2_5_omni` or `qwen3_omni_moe`. `min_pixels`, `max_pixels`: bounds of a resized medium's area.
    `chunk_length`: seconds that the feature extractor pads to, or cuts at, where it does. `tokenizer`:
    `omni_tokenizer(family)` if not given, which takes some seconds.
    Raises: ArgumentError for another family; MissingExtraError without dashscope.
    """
    check_name("omni_processor", "family", family, _RELEASED)
    released, about = _RELEASED[family], get_family(family)
    settings: Any = {"size": {"shortest_edge": min_pixels, "longest_edge": max_pixels}}
    settings |= {"patch_size": about.patch_size, **released.settings}
    processor = hf_processor(
        about.processors[0],
        lambda: transformers.Qwen2VLVideoProcessor(**settings),
        image_processor=transformers.Qwen2VLImageProcessorPil(**settings),
        feature_extractor=transformers.WhisperFeatureExtractor(
            feature_size=128,
            chunk_length=chunk_length,
            return_attention_mask=True,
            padding_side=released.padding_side,
        ),
        tokenizer=omni_tokenizer(family) if tokenizer is None else tokenizer,
        chat_template=released.chat_template,
    )
    # which it hands to its video processor at each call, in place of that one's own
    processor.videos_kwargs = {"size": settings["size"]}
    return processor


def omni_tokenizer(family: str) -> Any:
    """Qwen's vocabulary with the added tokens of `family`, named as its processor asks for them."""
    check_name("omni_tokenizer", "family", family, _RELEASED)
    released = _RELEASED[family]
    return tokenizer_of(released.control, released.markup, released.named)


@dataclass(frozen=True)
class _Released:
    control: tuple[str, ...]
    markup: tuple[str, ...]
    named: dict[str, str]
    chat_template: str
    settings: dict[str, Any]
    padding_side: str


_OF_2_5 = {
    "<|object_ref_start|>": "<|AUDIO|>",
    "<|object_ref_end|>": "<|audio_bos|>",
    "<|box_start|>": "<|audio_eos|>",
    "<|vision_start|>": "<|vision_bos|>",
    "<|vision_end|>": "<|vision_eos|>",
    "<|image_pad|>": "<|IMAGE|>",
    "<|video_pad|>": "<|VIDEO|>",
}
_THINKING = ("<tool_response>", "</tool_response>", "<think>", "</think>")
_AUDIO = (
    *("<|audio_start|>", "<|audio_end|>"),
    *("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>"),
    "<|audio_pad|>",
)


def _named(image: str, video: str, audio: str, vision: str, sound: str) -> dict[str, str]:
    starts, ends = ("bos", "eos") if "bos" in vision else ("start", "end")
    return {
        "image_token": image,
        "video_token": video,
        "audio_token": audio,
        "vision_bos_token": vision,
        "vision_eos_token": vision.replace(starts, ends),
        "audio_bos_token": sound,
        "audio_eos_token": sound.replace(starts, ends),
    }


_HALF = [0.5, 0.5, 0.5]
_RELEASED = {
    "qwen2_5_omni": _Released(
        tuple(_OF_2_5.get(token, token) for token in CONTROL_TOKENS),
        MARKUP_TOKENS,
        _named("<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>", "<|vision_bos|>", "<|audio_bos|>"),
        QWEN2_5_OMNI,
        {},
        "right",
    ),
    "qwen3_omni_moe": _Released(
        CONTROL_TOKENS,
        (*MARKUP_TOKENS, *_THINKING, *_AUDIO),
        _named(
            *("<|image_pad|>", "<|video_pad|>", "<|audio_pad|>"),
            *("<|vision_start|>", "<|audio_start|>"),
        ),
        QWEN3_OMNI,
        {"image_mean": _HALF, "image_std": _HALF},
        "right",
    ),
}
