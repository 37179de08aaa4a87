"""Differences planted into pairs that real processors made, each with the causes that it is.

`truth`: the causes; empty where the catalogue has none (parity must say `unknown`). `harmless`: nothing may be found.
"""

from __future__ import annotations

import io
import json
import sys
from functools import partial
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from support.planting.registry import PLANTS, Made, at, count, plant, two
from support.planting.world import (
    ANSWER,
    BIG,
    LIMIT,
    NAMES,
    QUESTION,
    SMALL,
    TOOL,
    cut,
    encoded,
    ids_of,
    messages,
    picture,
    pictures,
    recorder,
    side,
    upstream,
)

from mmpack.video.policies.resize import utils_size

IMAGE, IM_START, IM_END, EOS = 151655, 151644, 151645, 151643


# ---- pictures, on the first, second and third -------------------------------------------------------


def limit(k: int, low: bool = False) -> Made:
    shown = at(k, encoded(picture(9, SMALL if low else BIG)))
    other = upstream(min_pixels=40 * 28 * 28) if low else upstream(max_pixels=210 * 28 * 28)
    return side(shown), side(shown, by=recorder(other))


def twice(k: int) -> Made:
    image = picture(9, (130, 455))
    small = image.resize(utils_size(image.size, 28, 4 * 784, 60 * 784), Image.Resampling.BICUBIC)
    return two(small, image, k)


def exif(k: int, orientation: int = 6) -> Made:
    tags = Image.Exif()
    tags[0x0112] = orientation
    file = encoded(picture(9, (400, 240)), "JPEG", quality=95, exif=tags)
    return two(file, Image.open(io.BytesIO(file)), k)


def both_turned(k: int) -> Made:
    """EXIF obeyed on both sides; the pixels differ by another cause."""
    tags = Image.Exif()
    tags[0x0112] = 6
    one, other = (encoded(picture(s, (400, 240)), "JPEG", exif=tags) for s in (9, 10))
    return two(one, other, k)


def alpha(k: int) -> Made:
    image = picture(9, (300, 200), "RGBA")
    return two(encoded(image), image.convert("RGB"), k)


def opaque(k: int) -> Made:
    """RGBA on both sides, alpha 255 everywhere; the pixels differ by another cause."""
    one, other = picture(9, (300, 200)), picture(10, (300, 200))
    return two(encoded(one.convert("RGBA")), encoded(other.convert("RGBA")), k)


def jpeg(k: int) -> Made:
    image = picture(9, (300, 200))
    return two(encoded(image, "JPEG", quality=75), encoded(image), k)


def stranger(k: int) -> Made:
    return two(encoded(picture(9, (300, 200))), encoded(picture(10, (300, 200))), k)


def black(k: int) -> Made:
    return two(encoded(picture(9, (300, 200))), Image.new("RGB", (300, 200)), k)


def gray(k: int) -> Made:
    image = picture(9, (300, 200))
    return two(encoded(image), encoded(image.convert("L")), k)


def cropped(k: int) -> Made:
    image = picture(9, (460, 300))
    return two(encoded(image), image.crop((0, 0, 448, 280)), k)


def squared(k: int) -> Made:
    image = picture(9, (460, 300))
    return two(encoded(image), ImageOps.pad(image, (460, 460)), k)


def dropped(k: int) -> Made:
    shown = pictures()
    left = side(shown)
    kept = shown[:k] + shown[k + 1 :]
    right = side(kept, names=NAMES[:k] + NAMES[k + 1 :], between=_words(k))
    return left, right


def _words(k: int) -> list[str]:
    words = ["Look at this:", " then at this:", " and last:"]
    return [*words[:k], words[k] + words[k + 1], *words[k + 2 :]]


for k in range(3):
    plant(f"max_pixels binds on {k}", "max_pixels", medium=k)(partial(limit, k))
    plant(f"min_pixels binds on {k}", "max_pixels", medium=k)(partial(limit, k, low=True))
    plant(f"resized twice {k}", "resize_twice", medium=k)(partial(twice, k))
    plant(f"exif 6 on {k}", "exif_rotation", medium=k)(partial(exif, k))
    plant(f"exif 3 on {k}", "exif_rotation", medium=k)(partial(exif, k, 3))
    plant(f"both turned, other pixels {k}")(partial(both_turned, k))
    plant(f"alpha {k}", "alpha", medium=k)(partial(alpha, k))
    plant(f"opaque alpha, other pixels {k}")(partial(opaque, k))
    plant(f"jpeg {k}", "jpeg_reencode", medium=k)(partial(jpeg, k))
    plant(f"another picture of one name {k}")(partial(stranger, k))
    plant(f"black instead of {k}")(partial(black, k))
    plant(f"gray {k}")(partial(gray, k))
    plant(f"cropped {k}")(partial(cropped, k))
    plant(f"padded to a square {k}")(partial(squared, k))
    plant(f"dropped {k}", "dropped_image", medium=k)(partial(dropped, k)) if k < 2 else None


@plant("dropped 2", "dropped_image", medium=2)
def dropped_last() -> Made:
    shown = pictures()
    return side(shown), side(shown[:2], names=NAMES[:2], question=f" and last:{QUESTION}")


@plant("one picture shown twice, once in train", "dropped_image")
def showing() -> Made:
    shown = pictures()
    asked = messages([shown[0], shown[1], shown[0]])
    lost = messages([shown[0], shown[1]], question=f" and last:{QUESTION}")
    return side(chat=asked), side(chat=lost)


@plant("two pictures in other order", "media_order")
def swapped() -> Made:
    shown = pictures()
    names = (NAMES[1], NAMES[0], NAMES[2])
    return side(shown), side([shown[1], shown[0], shown[2]], names=names)


@plant("the second picture replaced by the first", "media_order")
def neighbour() -> Made:
    shown = pictures()
    return side(shown, names=()), side([shown[0], shown[0], shown[2]], names=())


# ---- two at once --------------------------------------------------------------------------------


@plant("limit on 2 and another template", "max_pixels", "chat_template")
def limit_and_template() -> Made:
    shown = at(2, encoded(picture(9, BIG)))
    template = upstream().chat_template.replace("a helpful assistant", "an expert")
    other = recorder(upstream(max_pixels=210 * 28 * 28), chat_template=template)
    return side(shown), side(shown, by=other)


@plant("limit on 1, exif on 2", "max_pixels", "exif_rotation")
def limit_and_exif() -> Made:
    tags = Image.Exif()
    tags[0x0112] = 6
    file = encoded(picture(9, (400, 240)), "JPEG", quality=95, exif=tags)
    shown = pictures(p1=encoded(picture(8, BIG)), p2=file)
    other = recorder(upstream(max_pixels=210 * 28 * 28))
    return side(shown), side([*shown[:2], Image.open(io.BytesIO(file))], by=other)


@plant("jpeg on 0, alpha on 2", "jpeg_reencode", "alpha")
def jpeg_and_alpha() -> Made:
    image, clear = picture(9, (300, 200)), picture(10, (260, 200), "RGBA")
    left = pictures(p0=encoded(image, "JPEG", quality=75), p2=encoded(clear))
    right = pictures(p0=encoded(image), p2=clear.convert("RGB"))
    return side(left), side(right)


@plant("limit on 0 and a stop token", "max_pixels", "stop_token")
def limit_and_stop() -> Made:
    shown = at(0, encoded(picture(9, BIG)))
    other = recorder(upstream(max_pixels=210 * 28 * 28))
    return side(shown), side(shown, by=other, second="So B.")


@plant("dropped 1 and jpeg on 2", "dropped_image", "jpeg_reencode")
def dropped_and_jpeg() -> Made:
    image = picture(9, (300, 200))
    left = side(at(2, encoded(image)))
    kept = [pictures()[0], encoded(image, "JPEG", quality=75)]
    words = ["Look at this:", " then at this: and last:"]
    return left, side(kept, names=(NAMES[0], NAMES[2]), between=words)


# ---- truncation ---------------------------------------------------------------------------------


def truncated(where: str, keep: bool = False, back: bool = False) -> Made:
    left = side(finish="length" if where == "response, length" else "stop")
    runs = [(s.start, s.stop) for s in left.modality_spans]
    loss = left.loss_spans[-1]
    stop = {
        "text": left.loss_spans[0].start - 12,
        "picture 1": (runs[1][0] + runs[1][1]) // 2,
        "picture 2": runs[2][0] + 5,
        "first response": left.loss_spans[0].start + 6,
        "observation": left.loss_spans[0].stop + 6,
        "response, length": loss.stop - 2,
    }.get(where)
    start = {
        "left text": 5,
        "left picture 0": runs[0][0] + 7,
        "left after picture 0": runs[0][1] + 3,
        "left picture 1": runs[1][1] - 4,
    }.get(where, 0)
    right = cut(left, start, len(left) if stop is None else stop, keep)
    if start:  # positions counted anew
        right.position_ids = None
    return (right, left) if back else (left, right)


@plant("the last turn lost")
def last_turn() -> Made:
    left = side()
    return left, cut(left, 0, left.loss_spans[0].stop)


for place in ("text", "first response", "observation", "response, length", "left text"):
    plant(f"truncated at {place}", "truncated")(partial(truncated, place))
for place in ("picture 1", "picture 2", "left picture 0", "left picture 1"):
    plant(f"truncated in {place}", "truncated", "truncated_medium")(partial(truncated, place))
plant("truncated in picture 1, media kept", "truncated", "truncated_medium")(
    partial(truncated, "picture 1", keep=True)
)
plant("truncated after picture 0", "truncated")(partial(truncated, "left after picture 0"))
plant("truncated rollout", "truncated")(partial(truncated, "text", back=True))


@plant("limit on 0 and truncated", "max_pixels", "truncated")
def limit_and_cut() -> Made:
    shown = at(0, encoded(picture(9, BIG)))
    right = side(shown, by=recorder(upstream(max_pixels=210 * 28 * 28)))
    return side(shown), cut(right, 0, right.loss_spans[0].start + 5)


# ---- words --------------------------------------------------------------------------------------

plant("system prompt under one template", "chat_template")(
    lambda: (side(system="Answer shortly."), side(system="Answer in one word."))
)
plant("default system prompt against another", "chat_template")(
    lambda: (side(), side(system="You are an expert."))
)


@plant("no system prompt in train", "chat_template")
def no_system() -> Made:
    template = upstream("qwen3_vl").chat_template
    return side(), side(by=recorder(chat_template=template))


plant("user turn edited at its end")(lambda: (side(), side(question=f"{QUESTION} Be brief.")))
plant("user turn edited before the pictures")(
    lambda: (side(), side(between=["See here:", " then at this:", " and last:"]))
)


def edited(system: str | None) -> Made:
    """A user's turn of words, then the assistant's, then the pictures."""
    shown = pictures()
    turns = []
    for text in ("I have a question.", "I have two questions."):
        chat = messages(shown, system)
        head = chat[:-1]
        chat = [
            *head,
            {"role": "user", "content": text},
            {"role": "assistant", "content": "Ask."},
            chat[-1],
        ]
        turns.append(chat)
    no_default = recorder(chat_template=upstream("qwen3_vl").chat_template)
    return side(chat=turns[0], by=no_default), side(chat=turns[1], by=no_default)


plant("first user turn edited, no system prompt")(partial(edited, None))
plant("first user turn edited, a system prompt")(partial(edited, "Answer shortly."))


@plant("first of two user turns edited")
def two_user_turns() -> Made:
    by = recorder(chat_template=upstream("qwen3_vl").chat_template)
    chats = [
        [{"role": "user", "content": text}, *messages(pictures())]
        for text in ("I have a question.", "I have two questions.")
    ]
    return side(chat=chats[0], by=by), side(chat=chats[1], by=by)


plant("observation edited")(
    lambda: (
        side(),
        side(tool="\n<|im_start|>tool\nzoomed to 4, 41<|im_end|>\n<|im_start|>assistant\n"),
    )
)


@plant("generation prompt opens a thought", "chat_template")
def thought() -> Made:
    chat, by = messages(pictures()), recorder()
    left = by(chat, response_ids=ids_of(ANSWER), sample_id="s0")
    ids = left.input_ids.tolist()
    start = left.loss_spans[0].start
    ids = ids[:start] + ids_of("<think>\n") + ids[start:]
    more = len(ids) - len(left)
    stop = left.loss_spans[0].stop + more
    right = by.from_ids(ids, media=pictures(), loss_spans=[(start + more, stop)], sample_id="s0")
    for sample in (left, right):
        sample.finish_reason = "stop"
        for medium, name in zip(sample.media, NAMES, strict=True):
            medium.media_id = name
    return left, right


def responses(one: Any, other: Any, **keywords: Any) -> Made:
    return side(response=one, second=None, **keywords), side(
        response=other, second=None, **keywords
    )


THINK = "<think>\nThe sum is 180.\n</think>\n\n"
RESPACED = TOOL.replace(
    '{"name": "zoom", "arguments": {"x": 3, "y": 40}}',
    json.dumps({"name": "zoom", "arguments": {"x": 3, "y": 40}}, separators=(",", ":")),
)
REORDERED = TOOL.replace('{"x": 3, "y": 40}', '{"y": 40, "x": 3}')
SPLIT = ids_of("They are perp") + ids_of("endicular, so B.")
WHOLE = ids_of("They are perpendicular, so B.")
for tail, decoded in (("", False), (", decoded", True)):
    options = {"decoded": decoded, "honest": not decoded}
    plant(f"another response{tail}", decoded=decoded)(
        partial(responses, ANSWER, "It can't be known, so C.<|im_end|>")
    )
    plant(f"stripped thinking{tail}", "rewritten_response", **options)(
        partial(responses, THINK + ANSWER, ANSWER)
    )
    plant(f"re-spaced tool call{tail}", "rewritten_response", **options)(
        partial(responses, TOOL, RESPACED)
    )
    plant(f"re-ordered tool call{tail}", "rewritten_response", **options)(
        partial(responses, TOOL, REORDERED)
    )
    plant(f"another stop token{tail}", "stop_token", decoded=decoded)(
        partial(responses, ANSWER, ANSWER.replace("<|im_end|>", "<|endoftext|>"))
    )
    plant(f"stop token cut{tail}", "stop_token", decoded=decoded)(
        partial(responses, ANSWER, ANSWER.replace("<|im_end|>", ""))
    )
    plant(f"stop string cut{tail}", decoded=decoded)(
        partial(responses, "I zoom in.\nObservation:", "I zoom in.")
    )
    plant(f"prefix of finish length{tail}", "truncated", decoded=decoded)(
        partial(responses, ANSWER, ids_of(ANSWER)[:-4], finish="length")
    )
    plant(f"retokenized{tail}", "retokenized_response", decoded=decoded)(
        partial(responses, [*SPLIT, IM_END], [*WHOLE, IM_END])
    )
    plant(f"retokenized and stop cut{tail}", "retokenized_response", "stop_token", **options)(
        partial(responses, [*SPLIT, IM_END], WHOLE)
    )


# ---- positions ----------------------------------------------------------------------------------


def shifted(by: int, pad: list[int] | None = None) -> Made:
    left, right = side(), side()
    right.position_ids = right.position_ids + by
    if pad is not None:
        right.metadata["padding"] = pad
    return left, right


plant("positions go on from another packed row")(partial(shifted, 117))
plant("positions count from 1")(partial(shifted, 1))
plant("positions count the recorded padding", "padding_positions")(partial(shifted, 9, [9, 0]))
plant("positions shifted by what is no padding")(partial(shifted, 4, [9, 0]))

# ---- decisive settings --------------------------------------------------------------------------


@plant("another family's processor", "model_family", "chat_template")
def families() -> Made:
    limits = {"max_pixels": 256 * 32 * 32, "min_pixels": 4 * 28 * 28}
    return side(by=recorder(upstream("qwen2_5_vl", **limits))), side(
        by=recorder(upstream("qwen3_vl", **limits))
    )


@plant("qwen2_vl against qwen2_5_vl", "model_family")
def near_families() -> Made:
    return side(by=recorder(upstream("qwen2_vl"))), side(by=recorder(upstream("qwen2_5_vl")))


def geometry(**sizes: int) -> Made:
    """Train's image processor has another patch or merge size; its grids are what transformers makes of them."""
    import transformers

    left = side()
    limits = {"shortest_edge": 4 * 784, "longest_edge": LIMIT}
    made = transformers.Qwen2VLImageProcessorPil(size=limits, **sizes)
    right = side()
    images = [Image.open(io.BytesIO(data)).convert("RGB") for data in pictures()]
    grids = made(images=images, return_tensors="np")["image_grid_thw"]
    patch, merge = sizes.get("patch_size", 14), sizes.get("merge_size", 2)
    for part in ("image", "video"):
        right.processor[part] |= {"patch_size": patch, "merge_size": merge}
    ids, spans, last = [], [], 0
    moved = np.zeros(len(right) + 1, dtype=int)
    for span, grid in zip(right.modality_spans, grids, strict=True):
        count = int(np.prod(grid)) // merge**2
        ids += [*right.input_ids[last : span.start].tolist(), *[IMAGE] * count]
        moved[span.stop :] += count - (span.stop - span.start)
        spans.append((len(ids) - count, len(ids)))
        last = span.stop
        medium = right.media[span.media_index]
        medium.grid_thw, medium.num_tokens = tuple(int(n) for n in grid), count
        medium.cache_key = medium.cache_key[::-1]
    ids += right.input_ids[last:].tolist()
    for span, (start, stop) in zip(right.modality_spans, spans, strict=True):
        span.start, span.stop = start, stop
    for span in [*right.loss_spans, *(right.observation_spans or [])]:
        span.start, span.stop = (int(n + moved[n]) for n in (span.start, span.stop))
    right.input_ids = np.asarray(ids)
    right.attention_mask, right.position_ids = np.ones(len(ids), np.int8), None
    right.processor_fingerprint = None
    return left, right


plant("patch size", "model_family")(partial(geometry, patch_size=16))
plant("merge size", "model_family")(partial(geometry, merge_size=1))

# ---- harmless -----------------------------------------------------------------------------------

plant("the same", harmless=True)(lambda: (side(), side()))


@plant("same pixels from another file", harmless=True)
def repacked() -> Made:
    image = picture(9, (300, 200))
    return two(encoded(image), encoded(image, "PNG", compress_level=0), 1)


@plant("padding recorded, positions right", harmless=True)
def padded() -> Made:
    left, right = side(), side()
    right.metadata["padding"] = [9, 0]
    return left, right


@plant("exif read, both turned", harmless=True)
def turned_alike() -> Made:
    tags = Image.Exif()
    tags[0x0112] = 6
    file = encoded(picture(9, (400, 240)), "JPEG", quality=95, exif=tags)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
    return two(file, upright, 1)


@plant("opaque RGBA against RGB", harmless=True)
def flattened() -> Made:
    image = picture(9, (300, 200))
    return two(encoded(image.convert("RGBA")), encoded(image), 2)


if __name__ == "__main__":
    count(PLANTS, loud="-v" in sys.argv)
