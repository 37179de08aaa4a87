"""transformers processors of Gemma 3 and 4 without a model hub: a small tokenizer, Pillow's image processors."""

from __future__ import annotations

from typing import Any

from mmpack.errors import needs

with needs("smoke", __name__):
    import transformers

from support.replicas.chat_templates import GEMMA3, GEMMA4
from support.replicas.gemma_vocabulary import gemma3_tokenizer, gemma4_tokenizer
from support.replicas.without_torchvision import hf_processor


def gemma3_processor(*, side: int = 896, tokenizer: Any = None, **settings: Any) -> Any:
    """The processor of Gemma 3, with its chat template, for squares of `side` pixels.

    `settings`: of the image processor, such as `do_pan_and_scan`. `tokenizer`: `gemma3_tokenizer()` if not given.
    """
    return transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessorPil(
            size={"height": side, "width": side},
            **settings,  # type: ignore[arg-type]
        ),
        tokenizer=gemma3_tokenizer() if tokenizer is None else tokenizer,
        image_seq_length=(side // 56) ** 2,
        chat_template=GEMMA3,
    )


def gemma4_processor(
    *, max_soft_tokens: int = 280, frame_tokens: int = 70, tokenizer: Any = None
) -> Any:
    """The processor of Gemma 4, with its chat template.

    Args: `max_soft_tokens`: of a picture. `frame_tokens`: of a frame of a video. `tokenizer`: `gemma4_tokenizer()` if
    not given.
    """
    return hf_processor(
        "Gemma4Processor",
        lambda: transformers.Gemma4VideoProcessor(max_soft_tokens=frame_tokens),
        feature_extractor=transformers.Gemma4AudioFeatureExtractor(),
        image_processor=transformers.Gemma4ImageProcessorPil(max_soft_tokens=max_soft_tokens),
        tokenizer=gemma4_tokenizer() if tokenizer is None else tokenizer,
        chat_template=GEMMA4,
    )
