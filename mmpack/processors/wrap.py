"""`wrap_processor`: one picklable object for data loaders, from messages, media and response ids to a Sample.

Ids [L] are expanded, one per vision token; each distinct medium is processed once, by content.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmpack.errors import ArgumentError, check_name, check_number, kind_of
from mmpack.families import FAMILIES, Family, get_family
from mmpack.processors.audio import check_extractor
from mmpack.processors.frame_processor import FrameProcessor
from mmpack.processors.messages import media_of
from mmpack.processors.pixels import PIXELS, view_side
from mmpack.processors.processor import Processor
from mmpack.processors.sampling import resolved_sampling
from mmpack.processors.settings import Parts, vision_settings
from mmpack.processors.videos import VideoReader
from mmpack.versions import size_of_videos, video_markers
from mmpack.video.cache import FrameCache
from mmpack.video.decoding import check_threads
from mmpack.video.pixel_settings import byte_values

__all__ = ["Processor", "media_of", "wrap_processor"]

MEDIA_CACHE_BYTES = 1 << 30
DECODE_THREADS = 2


def wrap_processor(
    hf_processor: Any = None,
    *,
    tokenizer: Any = None,
    image_processor: Any = None,
    video_processor: Any = None,
    feature_extractor: Any = None,
    family: str | None = None,
    chat_template: str | None = None,
    position_rule: str | None = None,
    tokens_per_second: float | None = None,
    media_root: str | Path | None = None,
    cache_bytes: int = MEDIA_CACHE_BYTES,
    video_policy: str | None = None,
    video_settings: Mapping[str, Any] | None = None,
    frame_cache: FrameCache | None = None,
    decode_threads: int = DECODE_THREADS,
    pixels: str = "float32",
) -> Processor:
    """Wrap a Hugging Face processor, or its parts.

    Args:
        family: needed where only parts are given; else known from the processor's class and image token.
        chat_template: instead of the processor's own.
        position_rule, tokens_per_second: how positions are counted; see `mrope_positions`. By default the rule of
            the newest transformers.
        media_root: directory below which paths in messages may be opened.
        cache_bytes: pixels kept for media that come again.
        video_policy: which frames of a video are taken; see `mp.video.sample`. By default transformers' rule of the
            family, with the settings of the video processor.
        video_settings: of the policy, in place of the video processor's: `{"fps": 2.0, "max_frames": 64}`.
        frame_cache: decoded frames, shared among processes.
        decode_threads: of the decoder, per video.
        pixels: what media hold them as: "float32", normalised, or "uint8", as the resize made them. Bytes take a
            quarter of the memory and of the way to the device, where they become what the processor makes of them, bit
            for bit. Hashes and keys are the same.

    Without a video processor (transformers' need torchvision) mmpack lays frames out itself, with the image processor's
    settings. Raises: ArgumentError without a tokenizer or a family, for settings that the family or the policy does not
    have, and for "uint8" where a processor does not rescale and normalise; LayoutError (MM006) for a family that mmpack
    doesn't know.
    """
    given = {
        "tokenizer": tokenizer,
        "image_processor": image_processor,
        "video_processor": video_processor,
        "feature_extractor": feature_extractor,
    }
    parts = _parts(hf_processor, given)
    about = family_of(hf_processor, family)
    rule = about.position_rules[0] if position_rule is None else position_rule
    seconds = about.tokens_per_second if tokens_per_second is None else tokens_per_second
    check_settings(about, parts["image_processor"], rule, tokens_per_second)
    check_processor(about, hf_processor, parts["image_processor"])
    if feature_extractor is None and "audio" in dict(about.unread):
        parts["feature_extractor"] = None  # a part of its processor, of what is not read
    check_extractor(parts["feature_extractor"], about)
    template = _chat_template(chat_template, hf_processor, parts["tokenizer"])
    check_name("wrap_processor", "pixels", pixels, PIXELS)
    if not isinstance(media_root, str | os.PathLike | None):
        raise ArgumentError(
            f"wrap_processor: media_root is {kind_of(media_root)}, expected a folder. Fix: pass its path"
        )
    root = None if media_root is None else Path(media_root)
    check_number("wrap_processor", "cache_bytes", cache_bytes, least=0, finite=False)
    reader = None
    if about.video_token_id is not None and about.video_policies:
        if parts["video_processor"] is None:
            parts["video_processor"] = own_video_processor(about, parts["image_processor"])
        if video_processor is None:
            parts["video_processor"] = as_called(hf_processor, parts["video_processor"])
        settings = {} if video_settings is None else video_settings
        sampling = resolved_sampling(video_policy, settings, parts["video_processor"], about)
        _check_decoding(decode_threads, frame_cache)
        reader = VideoReader(sampling, root, decode_threads, frame_cache, pixels)
    elif video_policy is not None or video_settings:
        raise _no_policies(about)
    if pixels == "uint8":
        for name in ("image_processor", "video_processor"):
            if parts[name] is not None:
                values = byte_values(
                    vision_settings(parts[name])
                )  # raises where there is no such table
                if about.pixel_layout == "padded" and (values != values[0]).any():
                    raise ArgumentError(
                        f"wrap_processor: pixels='uint8', but {name} normalises the channels of {about.name} unlike, "
                        "and its patches hold them last. Fix: pass pixels='float32'"
                    )
    own = Parts(
        **parts,
        family=about,
        chat_template=template,
        position_rule=rule,
        tokens_per_second=None if seconds is None else float(seconds),
        video_markers=video_markers(hf_processor),
        media_root=root,
        kept_as=pixels,
        numbered=numbers_pictures(about, hf_processor, parts["image_processor"]),
        sampling=None if reader is None else reader.sampling,
    )
    return Processor(own, reader, cache_bytes)


def _parts(hf_processor: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Each part as given, else the processor's own."""
    if isinstance(hf_processor, Processor):
        raise ArgumentError("wrap_processor: hf_processor is wrapped already. Fix: use it as it is")
    parts = {
        name: getattr(hf_processor, name, None) if part is None else part
        for name, part in given.items()
    }
    for name, part in parts.items():
        if part is not None and type(part).__module__ == "builtins":
            raise ArgumentError(
                f"wrap_processor: {name} is {kind_of(part)}, expected a loaded object. "
                "Fix: pass what transformers' AutoProcessor.from_pretrained(…) returns"
            )
    if parts["tokenizer"] is None:
        raise ArgumentError(
            f"wrap_processor: hf_processor is {kind_of(hf_processor)} and has no tokenizer. "
            "Fix: pass what transformers' AutoProcessor.from_pretrained(…) returns, or tokenizer="
        )
    return parts


def _chat_template(given: str | None, hf_processor: Any, tokenizer: Any) -> str | None:
    """The one given, else the processor's, else the tokenizer's."""
    found: Any = given
    for holder in (hf_processor, tokenizer):
        if found is None:
            found = getattr(holder, "chat_template", None)
    if not isinstance(found, str | None):
        raise ArgumentError(
            f"wrap_processor: chat_template is {type(found).__name__}, expected a text. "
            "Fix: pass the template's text as chat_template="
        )
    return found


def _check_decoding(threads: int, frame_cache: FrameCache | None) -> None:
    check_threads(threads, "wrap_processor: decode_threads")
    if not isinstance(frame_cache, FrameCache | None):
        raise ArgumentError(
            f"wrap_processor: frame_cache is {type(frame_cache).__name__}. "
            "Fix: pass mp.video.FrameCache(folder, max_bytes)"
        )


def _no_policies(family: Family) -> ArgumentError:
    why = "takes a video as images" if family.video_token_id is None else "has no video policy"
    return ArgumentError(
        f"wrap_processor: {family.name} {why}. Fix: leave out video_policy and video_settings"
    )


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
