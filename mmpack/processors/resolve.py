"""What `wrap_processor` finds out about the parts that it is given. Raises: ArgumentError."""

from __future__ import annotations

import copy
from typing import Any

from mmpack.errors import ArgumentError, check_number
from mmpack.families import FAMILIES, Family, get_family
from mmpack.processors.differences import size_of_videos
from mmpack.processors.frame_processor import FrameProcessor
from mmpack.processors.pixels import view_side


def own_video_processor(family: Family, image_processor: Any) -> FrameProcessor:
    """With the image processor's settings, as transformers loads a checkpoint that has one file for both."""
    known = {} if image_processor is None else image_processor.to_dict()
    return FrameProcessor(family, **known)


def as_called(hf_processor: Any, video_processor: Any) -> Any:
    """The video processor with the size that the whole processor hands it at each call, where it does."""
    size = size_of_videos(hf_processor)
    if size is None or video_processor is None:
        return video_processor
    changed = copy.copy(video_processor)
    changed.size = type(changed.size)(**size)
    return changed


def family_of(hf_processor: Any, given: str | None) -> Family:
    """The one given, or by the processor's class; of several that share it, the one with its image token."""
    name = type(hf_processor).__name__
    families = [f for f in FAMILIES.values() if name in f.processors]
    if given is not None:
        families = [get_family(given)]
    if not families:
        what = "parts without a processor" if hf_processor is None else name
        raise ArgumentError(
            f"wrap_processor: the family of {what} is unknown. "
            f"Fix: use a processor of one of {', '.join(FAMILIES)} (family= names it for a class of your own)"
        )
    token = getattr(hf_processor, "image_token_id", None)
    for family in families:
        if token in (None, family.image_token_id, family.image_prompt_id):
            return family
    known = ", ".join(f"{f.name} {f.image_token_id}" for f in families)
    raise ArgumentError(
        f"wrap_processor: the image token of this {name} is {token}, expected one of {known}. "
        "Fix: use the tokenizer of a supported checkpoint"
    )


def numbers_pictures(family: Family, hf_processor: Any, image_processor: Any) -> bool:
    """Whether the processor writes each picture's number before its views: its own setting, else the image part's."""
    if family.views is None or family.views.number is None:
        return False
    own = getattr(hf_processor, "use_image_id", None)
    return bool(getattr(image_processor, "use_image_id", False) if own is None else own)


def check_processor(family: Family, hf_processor: Any, image_processor: Any) -> None:
    """Raise ArgumentError where the processor writes other placeholders than the family has."""
    for name, own in family.images.fixed_of_processor:
        found = getattr(hf_processor, name, own)
        if found != own:
            raise ArgumentError(
                f"wrap_processor: {name} of the processor is {found!r:.60}, {family.name} has {own!r}. "
                "Fix: pass this family's processor"
            )
    written, side = getattr(hf_processor, "image_seq_len", None), view_side(image_processor)
    if written is None or side is None:
        return
    expected = family.vision_tokens((1, side // family.patch_size, side // family.patch_size))
    if written != expected:
        raise ArgumentError(
            f"wrap_processor: image_seq_len is {written}, but {family.name} has {expected} tokens per view of {side} "
            "pixels. Fix: register a family with this checkpoint's patch_size and spatial_merge_size"
        )


def check_settings(
    family: Family, image_processor: Any, rule: str, tokens_per_second: float | None
) -> None:
    """Raise ArgumentError for settings that the family does not have."""
    if rule not in family.position_rules:
        known = ", ".join(family.position_rules)
        raise ArgumentError(
            f"wrap_processor: position_rule {rule!r} is unknown. Fix: use one of {known}"
        )
    if tokens_per_second is not None and family.tokens_per_second is None:
        raise ArgumentError(
            f"wrap_processor: {family.name} does not count tokens per second. Fix: leave out tokens_per_second"
        )
    if tokens_per_second is not None:
        check_number("wrap_processor", "tokens_per_second", tokens_per_second, above=0)
    if family.pixel_layout == "canvas":
        return  # its image processor is told the size
    for name, own in (
        ("merge_size", family.spatial_merge_size),
        ("pooling_kernel_size", family.spatial_merge_size),
        ("patch_size", family.patch_size),
        ("temporal_patch_size", family.temporal_patch_size),
        *family.images.fixed,
    ):
        found = getattr(image_processor, name, own)
        if found != own:
            raise ArgumentError(
                f"wrap_processor: image_processor.{name} is {found}, {family.name} has {own}. "
                "Fix: pass this family's image processor"
            )
