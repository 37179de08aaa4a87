"""`register_family`: register a custom model family.

What mmpack reads of a family is what the built-in ones say; a declaration beyond that is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mmpack.errors import ArgumentError, kind_of
from mmpack.families import FAMILIES
from mmpack.families.base import Family

# fields and the words that they may hold; None: those that built-in families use
_WORDS: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(("video_layout", "pixel_layout", "coordinates")),
    "packing": ("yes", "kernels-only", "no"),
    "sharing": ("tree", "none"),
    "audio.interleaving": ("chunks", "time"),
    "audio.halvings": ("up", "down"),
    "texts.frame_time": ("first", "middle"),
    "video.resize": ("area", "budget"),
}
_SIZES = ("patch_size", "temporal_patch_size", "spatial_merge_size", "pooled_frames", "vocab_size")


def register_family(family: Family) -> Family:
    """Make a family known by its name, its model types and its processors, in this process; returns it.

    Call it where your program starts: before traces are read, and in every worker that is spawned.

    Raises: ArgumentError for what is no `Family`, a name or model type that is taken, and fields that contradict each
    other or that mmpack could not follow.

    Example: a checkpoint whose vocabulary differs from its family's.
        >>> from dataclasses import replace
        >>> import mmpack as mp
        >>> from mmpack.families import get_family
        >>> mine = replace(
        ...     get_family("internvl"),
        ...     name="internvl_long",
        ...     model_types=("internvl_long",),
        ...     processors=("InternVLLongProcessor",),
        ...     image_token_id=151671,
        ... )
        >>> mp.register_family(mine).name
        'internvl_long'
    """
    if not isinstance(family, Family):
        raise ArgumentError(
            f"register_family: {kind_of(family)} is not a Family. "
            "Fix: pass mp.Family(name=…), or dataclasses.replace(…) of one"
        )
    for why, fix in problems(family):
        raise ArgumentError(f"register_family: {family.name!r:.60} {why}. Fix: {fix}")
    FAMILIES[family.name] = family
    return family


def problems(family: Family) -> Iterable[tuple[str, str]]:
    """Why a family can't be registered, and the fix of each."""
    others = [f for f in FAMILIES.values() if f is not family]
    if not (isinstance(family.name, str) and re.fullmatch(r"[a-z][a-z0-9_]*", family.name)):
        yield (
            "is not a name",
            "use lowercase letters, digits and _, as in transformers' model_type",
        )
        return
    if any(f.name == family.name for f in others):
        yield "exists already", "choose another name; a family is registered once"
    yield from _types(family, others)
    yield from _ids(family)
    yield from _sizes(family)
    yield from _words(family, others)
    yield from _positions(family, others)


def _types(family: Family, others: list[Family]) -> Iterable[tuple[str, str]]:
    for name in ("model_types", "processors"):
        value = getattr(family, name)
        if not (isinstance(value, tuple) and value and all(isinstance(v, str) for v in value)):
            yield f"has {name}={value!r:.60}", f"pass a tuple of names, such as {name}=('…',)"
            return
    for other in others:
        taken = set(family.model_types) & set(other.model_types)
        if taken and family.image_token_id == other.image_token_id:
            yield (
                f"has the model type {min(taken)!r}, which belongs to {other.name}",
                f"use get_family({other.name!r}), or name the model type of your own config",
            )


def _ids(family: Family) -> Iterable[tuple[str, str]]:
    names = ("image_token_id", "video_token_id", "vision_start_id", "vision_end_id", "pad_token_id")
    ids = {name: getattr(family, name) for name in names}
    for name, value in ids.items():
        if value is None and name != "pad_token_id":
            continue
        if not _whole(value) or not 0 <= value < family.vocab_size:
            yield (
                f"has {name}={value!r:.40}, expected an id below vocab_size={family.vocab_size}",
                "pass the tokenizer's id, and the embedding's number of rows as vocab_size",
            )
    held = set(family.placeholder_ids.values())
    for name in ("vision_start_id", "vision_end_id", "pad_token_id"):
        if ids[name] in held:
            yield (
                f"has {name}={ids[name]}, which is a placeholder",
                "pass another id; a placeholder's id is for vision tokens only",
            )


def _sizes(family: Family) -> Iterable[tuple[str, str]]:
    for name in _SIZES:
        value = getattr(family, name)
        if not _whole(value) or value < 1:
            yield f"has {name}={value!r:.40}", "pass a whole number of 1 or more"
    per_second = family.tokens_per_second
    if per_second is not None and not (isinstance(per_second, int | float) and per_second > 0):
        yield f"has tokens_per_second={per_second!r:.40}", "pass a number above 0, or None"


def _words(family: Family, others: list[Family]) -> Iterable[tuple[str, str]]:
    for path, words in _WORDS.items():
        part, _, name = path.rpartition(".")
        holder = getattr(family, part) if part else family
        if holder is None:
            continue
        value = getattr(holder, name)
        known = {getattr(f, name) for f in others} if words is None else set(words)
        free = {None} if name == "coordinates" else set()  # not known
        if not {*(value if isinstance(value, tuple) else (value,))} <= known | free:
            yield f"has {path}={value!r:.40}", f"use one of {', '.join(sorted(map(repr, known)))}"
    media = family.placeholder_ids
    seen = () if family.two_way is None else family.two_way.media
    if not (isinstance(seen, tuple) and set(seen) <= media.keys()):
        yield (
            f"has two_way with media={seen!r:.40}",
            f"pass a tuple of modalities that have placeholders: {', '.join(media)}",
        )
    if family.video_token_id is None and family.video_layout != "images":
        yield (
            f"has video_layout={family.video_layout!r} but no video_token_id",
            "set video_layout='images', or pass the id",
        )


def _positions(family: Family, others: list[Family]) -> Iterable[tuple[str, str]]:
    known = {rule for other in others for rule in other.position_rules}
    rules = family.position_rules
    if not (isinstance(rules, tuple) and rules and set(rules) <= known):
        yield (
            f"has position_rules={rules!r:.60}",
            f"pass a tuple of {', '.join(sorted(known))}; the first is what the newest transformers does",
        )
    elif "count" in rules and len(rules) > 1:
        yield (
            f"has position_rules={rules!r:.60}, of which 'count' gives one row and the others three",
            "pass ('count',), or the others",
        )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
