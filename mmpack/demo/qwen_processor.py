"""A transformers processor of a Qwen-VL without a model hub: Qwen's tokenizer, Pillow's image processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmpack.errors import ArgumentError, check_name, needs

with needs("smoke", __name__):
    import transformers
    from transformers.utils.import_utils import is_torchvision_available

from mmpack.adapters.transformers.without_torchvision import WITHOUT_TORCHVISION
from mmpack.demo.chat_templates import QWEN2_5_VL, QWEN3_VL
from mmpack.demo.vocabulary import qwen_tokenizer
from mmpack.families import get_family

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer


def qwen_vl_processor(
    family: str = "qwen2_5_vl",
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    tokenizer: Qwen2Tokenizer | None = None,
) -> Any:
    """The processor of a released checkpoint of `family`, with its chat template.

    `family`: `qwen2_vl`, `qwen2_5_vl`, `qwen3_vl` or `qwen3_vl_moe`, whose vocabulary is one. `min_pixels`,
    `max_pixels`: bounds of a resized medium's area in pixels, by default those of released checkpoints. `tokenizer`:
    `qwen_tokenizer()` if not given, which takes some seconds.
    Raises: ArgumentError for another family or bounds; MissingExtraError without dashscope.
    """
    check_name("qwen_vl_processor", "family", family, _RELEASED)
    released = _RELEASED[family]
    least = released.min_pixels if min_pixels is None else min_pixels
    most = released.max_pixels if max_pixels is None else max_pixels
    if not 0 < least <= most:
        raise ArgumentError(
            f"qwen_vl_processor: min_pixels={least}, max_pixels={most}. "
            "Fix: pass 0 < min_pixels <= max_pixels"
        )
    # as `size`: transformers before 5.19 writes min_pixels and max_pixels into the class's own size
    settings: Any = {"size": {"shortest_edge": least, "longest_edge": most}, **released.settings}
    name = get_family(family).processors[0]
    parts: dict[str, Any] = {
        "image_processor": transformers.Qwen2VLImageProcessorPil(**settings),
        "tokenizer": qwen_tokenizer() if tokenizer is None else tokenizer,
        "chat_template": released.chat_template,
    }
    if not is_torchvision_available():
        return WITHOUT_TORCHVISION[name](**parts)
    videos = getattr(transformers, released.video_processor)(**settings)
    return getattr(transformers, name)(video_processor=videos, **parts)


@dataclass(frozen=True)
class _Released:
    min_pixels: int
    max_pixels: int
    settings: dict[str, Any]
    chat_template: str
    video_processor: str


_QWEN2 = _Released(56 * 56, 16384 * 28 * 28, {}, QWEN2_5_VL, "Qwen2VLVideoProcessor")
_HALF = [0.5, 0.5, 0.5]
_QWEN3 = _Released(
    256 * 256,
    4096 * 4096,
    {"patch_size": 16, "image_mean": _HALF, "image_std": _HALF},
    QWEN3_VL,
    "Qwen3VLVideoProcessor",
)
_RELEASED = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
}
