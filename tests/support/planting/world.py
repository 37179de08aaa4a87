"""A conversation with three pictures, made by real processors, of which each side may be handed something else.

Words, then picture, three times; a question; a response; an observation; a second response.
"""

from __future__ import annotations

import copy
import io
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

import mmpack as mp
from mmpack.demo.qwen_processor import qwen_vl_processor
from mmpack.demo.vocabulary import qwen_tokenizer

SIZES = ((300, 220), (420, 260), (260, 340))  # width, height; each below LIMIT
BIG, SMALL = (620, 470), (90, 60)
LIMIT = 160 * 28 * 28
NAMES = ("first", "second", "third")
ANSWER = "The angle is 48°, so the answer is B.<|im_end|>"
QUESTION = " Which angle of the triangle in these three drawings is x, and why is it that one?"
TOOL = '<tool_call>\n{"name": "zoom", "arguments": {"x": 3, "y": 40}}\n</tool_call><|im_end|>'
tokenizer = cache(qwen_tokenizer)


@cache
def upstream(
    family: str = "qwen2_5_vl", max_pixels: int = LIMIT, min_pixels: int = 4 * 28 * 28
) -> Any:
    return qwen_vl_processor(
        family, min_pixels=min_pixels, max_pixels=max_pixels, tokenizer=tokenizer()
    )


@cache
def recorder(hf: Any = None, **keywords: Any) -> Any:
    return mp.wrap_processor(upstream() if hf is None else hf, **keywords)


@cache
def picture(seed: int, size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    """A coloured gradient with boxes; in `RGBA` partly see-through."""
    rng = np.random.default_rng(seed)
    w, h = size
    across, down = np.meshgrid(np.linspace(0, 1, w), np.linspace(0, 1, h))
    ends = rng.integers(20, 236, (4, 3))
    pixels = (
        ends[0] * ((1 - across) * (1 - down))[..., None]
        + ends[1] * (across * (1 - down))[..., None]
        + ends[2] * ((1 - across) * down)[..., None]
        + ends[3] * (across * down)[..., None]
    )
    image = Image.fromarray(pixels.astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        x, y = int(rng.integers(0, w * 3 // 4)), int(rng.integers(0, h * 3 // 4))
        draw.rectangle((x, y, x + w // 5, y + h // 6), fill=tuple(rng.integers(0, 256, 3).tolist()))
    if mode == "RGBA":
        image.putalpha(Image.fromarray((across * 255).astype(np.uint8)))
    return image


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    options = {"compress_level": 1, **options} if kind == "PNG" else options
    image.save(out, kind, **options)
    return out.getvalue()


@cache
def _files() -> list[bytes]:
    return [encoded(picture(k, SIZES[k])) for k in range(3)]


def pictures(**at: Any) -> list[Any]:
    """PNG files of the three, or `p1=…` instead of the second."""
    return [at.get(f"p{k}", file) for k, file in enumerate(_files())]


def messages(
    shown: Any, system: str | None = None, question: str = QUESTION, between: Any = None
) -> list[Any]:
    words = ["Look at this:", " then at this:", " and last:"] if between is None else between
    parts: list[Any] = []
    for k, image in enumerate(shown):
        parts.append({"type": "text", "text": words[k % len(words)]})
        parts.append({"type": "image", "image": image})
    parts.append({"type": "text", "text": question})
    out = [{"role": "user", "content": parts}]
    return out if system is None else [{"role": "system", "content": system}, *out]


def ids_of(text: str) -> list[int]:
    return list(_ids_of(text))


@cache
def _ids_of(text: str) -> tuple[int, ...]:
    return tuple(tokenizer()(text, add_special_tokens=False)["input_ids"])


def side(
    shown: Any = None,
    response: str | list[int] = ANSWER,
    second: str | list[int] | None = "So B.<|im_end|>",
    tool: str = "\n<|im_start|>tool\nzoomed to 3, 40<|im_end|>\n<|im_start|>assistant\n",
    by: Any = None,
    names: Any = NAMES,
    finish: str | None = "stop",
    chat: Any = None,
    **keywords: Any,
) -> mp.Sample:
    made = recorder() if by is None else by
    shown = pictures() if shown is None else shown
    first = ids_of(response) if isinstance(response, str) else response
    files = all(isinstance(image, bytes) for image in shown)
    if chat is None and files and not keywords.get("between"):
        sample = copy.deepcopy(_asked(made, tuple(shown), tuple(first), **keywords))
    else:
        asked = messages(shown, **keywords) if chat is None else chat
        sample = made(asked, response_ids=first, sample_id="s0")
    if second is not None:
        last = ids_of(second) if isinstance(second, str) else second
        sample = made.append(sample, observation_ids=ids_of(tool), response_ids=last)
    sample.finish_reason = finish
    for medium, name in zip(sample.media, names or (), strict=False):
        medium.media_id = name
    return sample


@cache
def _asked(made: Any, files: tuple[bytes, ...], response: tuple[int, ...], **keywords: Any) -> Any:
    """A sample of picture files and its response, without pixels, to be copied: most sides are one of a few."""
    sample = made(messages(files, **keywords), response_ids=list(response), sample_id="s0")
    for medium in sample.media:
        medium.pixel_values = None
    return sample


def cut(sample: mp.Sample, start: int, stop: int, keep_media: bool = False) -> mp.Sample:
    """Tokens [start, stop) as truncation leaves them; media without a token go, unless kept."""
    out = copy.deepcopy(sample)
    out.input_ids = sample.input_ids[start:stop]
    if sample.position_ids is not None:
        out.position_ids = sample.position_ids[:, start:stop]
    if sample.attention_mask is not None:
        out.attention_mask = sample.attention_mask[start:stop]
    for name in ("modality_spans", "loss_spans", "observation_spans"):
        spans = []
        for span in copy.deepcopy(getattr(sample, name) or []):
            span.start, span.stop = max(span.start, start) - start, min(span.stop, stop) - start
            if span.start < span.stop:
                spans.append(span)
        setattr(out, name, spans)
    if not keep_media:
        left = sorted({s.media_index for s in out.modality_spans})
        out.media = [out.media[i] for i in left]
        for span in out.modality_spans:
            span.media_index = left.index(span.media_index)
    return out
