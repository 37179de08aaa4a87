"""Differences made to look like others: pictures that resemble each other, sizes that mislead, near texts."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps
from support.planting.plants import IM_END, SPLIT, THINK, TOOL, WHOLE, responses
from support.planting.registry import PLANTS, Made, Plant, at, two
from support.planting.world import (
    ANSWER,
    BIG,
    QUESTION,
    encoded,
    ids_of,
    picture,
    pictures,
    recorder,
    side,
    upstream,
)

from mmpack.layout.fingerprint import fingerprint

HARD: dict[str, Plant] = {}


def plant(name: str, *truth: str, **options: Any) -> Callable[[Any], Any]:
    def add(make: Any) -> Any:
        assert name not in PLANTS
        HARD[name] = Plant(make, frozenset(truth), **options)
        return make

    return add


def third(name: str, left: Any, right: Any, *truth: str, **options: Any) -> None:
    """On the third picture only."""
    plant(name, *truth, **options)(lambda: two(left(), right(), 2))


def jpeg(image: Image.Image, quality: int = 75, **options: Any) -> bytes:
    return encoded(image.convert("RGB"), "JPEG", quality=quality, **options)


def tagged(orientation: int, quality: int = 95, size: tuple[int, int] = (400, 240)) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return jpeg(picture(9, size), quality, exif=tags)


def opened(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file))


def plain() -> Image.Image:
    return picture(9, (300, 200))


def clear(seed: int = 9) -> Image.Image:
    return picture(seed, (300, 200), "RGBA")


def over(image: Image.Image, level: int) -> Image.Image:
    ground = Image.new("RGBA", image.size, (level, level, level, 255))
    ground.alpha_composite(image)
    return ground.convert("RGB")


def page(seed: int) -> Image.Image:
    """Lines of words below a dark head: pages look alike from afar."""
    image = Image.new("RGB", (440, 300), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, 440, 60), fill=(10, 10, 90))
    rng = np.random.default_rng(seed)
    for y in range(80, 288, 14):
        x = 12
        while x < 400:
            width = int(rng.integers(4, 30))
            draw.rectangle((x, y, x + width, y + 5), fill=(60, 60, 60))
            x += width + int(rng.integers(4, 12))
    return image


def swapped_channels(image: Image.Image) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(image)[..., ::-1])


def brighter() -> Image.Image:
    return ImageEnhance.Brightness(plain()).enhance(1.06)


# ---- pictures -------------------------------------------------------------------------------------

third("JPEG of 30", lambda: jpeg(plain(), 30), lambda: encoded(plain()), "jpeg_reencode", medium=2)
third(
    "JPEG of 10", lambda: jpeg(plain(), 10), lambda: encoded(plain()), "jpeg_reencode", honest=True
)
third(
    "JPEG of a JPEG",
    lambda: jpeg(plain(), 95),
    lambda: jpeg(opened(jpeg(plain(), 95)), 60),
    "jpeg_reencode",
    medium=2,
)
third(
    "two JPEGs in memory",
    lambda: opened(tagged(6)),
    lambda: opened(tagged(6, 50)),
    "jpeg_reencode",
    honest=True,
)
third("another page, both JPEG", lambda: jpeg(page(1)), lambda: jpeg(page(2)))
third("another page, PNG and JPEG", lambda: jpeg(page(1)), lambda: encoded(page(2)))
third("brighter and JPEG", lambda: jpeg(plain()), lambda: encoded(brighter()))
third("BGR and JPEG", lambda: jpeg(page(1)), lambda: swapped_channels(page(1)))
third("BGR", lambda: encoded(plain()), lambda: swapped_channels(plain()))
third("mirrored and JPEG", lambda: encoded(plain()), lambda: jpeg(ImageOps.mirror(plain())))
third("blurred", lambda: encoded(plain()), lambda: plain().filter(ImageFilter.GaussianBlur(2)))
third(
    "JPEG of a smaller copy",
    lambda: jpeg(picture(9, (600, 420)).resize((300, 210))),
    lambda: encoded(picture(9, (600, 420))),
    *("jpeg_reencode", "resize_twice"),
    honest=True,
)
third(
    "turned by hand, the wrong way",
    lambda: tagged(6),
    lambda: opened(tagged(6)).convert("RGB").rotate(90, expand=True),
)
third(
    "EXIF 5 of a square",
    lambda: tagged(5, size=(300, 300)),
    lambda: opened(tagged(5, size=(300, 300))),
    "exif_rotation",
)
third(
    "turned and resized",
    lambda: tagged(6),
    lambda: opened(tagged(6)).convert("RGB").resize((224, 140)),
    *("exif_rotation", "resize_twice"),
    honest=True,
)
third("over grey", lambda: encoded(clear()), lambda: over(clear(), 128), "alpha", honest=True)
third("another see-through picture", lambda: encoded(clear()), lambda: encoded(clear(10)))
third(
    "over black and resized",
    lambda: encoded(clear()),
    lambda: over(clear(), 0).resize((210, 140)),
    *("alpha", "resize_twice"),
    honest=True,
)
third(
    "over black and JPEG",
    lambda: encoded(clear()),
    lambda: jpeg(over(clear(), 0)),
    *("alpha", "jpeg_reencode"),
)
third(
    "a centre",
    lambda: encoded(picture(9, (460, 300))),
    lambda: picture(9, (460, 300)).crop((23, 15, 437, 285)),
)
third(
    "a centre, resized back",
    lambda: encoded(picture(9, (460, 300))),
    lambda: picture(9, (460, 300)).crop((23, 15, 437, 285)).resize((460, 300)),
)


@plant("turned and limit, one picture", "exif_rotation", "max_pixels")
def turned_and_limit() -> Made:
    file = tagged(6, size=(640, 470))
    other = recorder(upstream(max_pixels=210 * 28 * 28))
    return side(at(2, file)), side(at(2, opened(file)), by=other)


@plant("pictures 1 and 2 in other order under their names", "media_order")
def other_order() -> Made:
    shown = pictures()
    return side(shown), side([shown[0], shown[2], shown[1]])


# ---- words ----------------------------------------------------------------------------------------


def texts(name: str, left: Any, right: Any, *truth: str, **options: Any) -> None:
    plant(name, *truth, decoded=True, **options)(lambda: responses(left, right))


texts("another thought, one answer", THINK + ANSWER, THINK.replace("sum", "angle") + ANSWER)
texts("an empty thought", f"<think>\n\n</think>\n\n{ANSWER}", ANSWER, "rewritten_response")
texts("JSON's true and 1", TOOL.replace("3,", "true,"), TOOL.replace("3,", "1,"))
texts("JSON's 3 and 3.0", TOOL, TOOL.replace("3,", "3.0,"), "rewritten_response")
texts("JSON's other value", TOOL, TOOL.replace("40", "41"))
texts("words joined", "a b c d<|im_end|>", "ab cd<|im_end|>")
texts("another response that has no end", "It can't be known, so", ANSWER)
texts("two ends", ANSWER, f"{ANSWER}<|endoftext|>", "stop_token")
texts(
    "a thought stripped, the rest encoded again",
    [*ids_of(THINK), *SPLIT, IM_END],
    [*WHOLE, IM_END],
    "rewritten_response",
)


@plant("encoded again and limit on 2", "retokenized_response", "max_pixels", decoded=True)
def again_and_limit() -> Made:
    shown = at(2, encoded(picture(9, BIG)))
    other = recorder(upstream(max_pixels=210 * 28 * 28))
    return side(shown, response=[*SPLIT, IM_END]), side(shown, response=[*WHOLE, IM_END], by=other)


@plant("user's turn edited and limit on 2", "max_pixels", honest=True)
def edit_and_limit() -> Made:
    shown = at(2, encoded(picture(9, BIG)))
    other = recorder(upstream(max_pixels=210 * 28 * 28))
    return side(shown), side(shown, question=f"{QUESTION} Now.", by=other)


# ---- settings ---------------------------------------------------------------------------------------


@plant("vocab_size on one side", harmless=True)
def vocabulary() -> Made:
    left, right = side(), side()
    del right.processor["tokenizer"]["vocab_size"]
    right.processor_fingerprint = fingerprint(right.processor)
    return left, right
