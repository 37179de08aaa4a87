"""`wrap_processor`: one picklable object for data loaders, from messages, media and response ids to a Sample.

Ids [L] are expanded, one a vision token; each distinct medium is processed once, by content.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, LayoutError
from mmpack.families import FAMILIES, Family, get_family
from mmpack.layout.fingerprint import cache_key, content_hash, fingerprint
from mmpack.processors.append import append_turn
from mmpack.processors.build import as_ids, build_sample, loss_mask
from mmpack.processors.cache import MediaCache
from mmpack.processors.expand import KEPT, REPLACED, expanded_ids, repeated, with_runs
from mmpack.processors.frames import FrameProcessor
from mmpack.processors.images import path_below, rgb_pixels
from mmpack.processors.kinds import HEAD, is_picture, kind_of_file, kind_of_item
from mmpack.processors.messages import media_of, parts_of
from mmpack.processors.pixels import process
from mmpack.processors.sampling import resolved_sampling
from mmpack.processors.settings import TokenizerHash, describe
from mmpack.processors.videos import Clip, VideoReader
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan
from mmpack.video.cache import FrameCache
from mmpack.video.container import open_file
from mmpack.video.decode import check_threads

__all__ = ["Processor", "media_of", "wrap_processor"]

MEDIA_CACHE_BYTES = 1 << 30
DECODE_THREADS = 2


def wrap_processor(
    hf_processor: Any = None,
    *,
    tokenizer: Any = None,
    image_processor: Any = None,
    video_processor: Any = None,
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
) -> Processor:
    """Wrap a Hugging Face processor, or its parts.

    Args:
        family: needed with parts alone; else known from the processor's class and image token.
        chat_template: instead of the processor's own.
        position_rule, tokens_per_second: how positions are counted; see `mrope_positions`. By default the rule of
            the newest transformers.
        media_root: directory below which paths in messages may be opened.
        cache_bytes: pixels kept for media that come again.
        video_policy: which frames of a video are taken; see `mp.video.sample`. By default transformers' rule of the
            family, with the settings of the video processor.
        video_settings: of the policy, in place of the video processor's: `{"fps": 2.0, "max_frames": 64}`.
        frame_cache: decoded frames, shared among processes.
        decode_threads: of the decoder, a video.

    Without a video processor (transformers' need torchvision) mmpack lays frames out itself, with the image processor's
    settings. Raises: ArgumentError without a tokenizer or a family, and for settings that the family or the policy does
    not have; LayoutError (MM006) for a family that mmpack doesn't know.
    """
    given = {
        "tokenizer": tokenizer,
        "image_processor": image_processor,
        "video_processor": video_processor,
    }
    parts = {
        name: getattr(hf_processor, name, None) if part is None else part
        for name, part in given.items()
    }
    if parts["tokenizer"] is None:
        raise ArgumentError(
            "wrap_processor: no tokenizer. Fix: pass a processor that has one, or tokenizer="
        )
    about = _family_of(hf_processor, family)
    rule = about.position_rules[0] if position_rule is None else position_rule
    _check_settings(about, parts["image_processor"], rule, tokens_per_second)
    if chat_template is None:
        chat_template = getattr(hf_processor, "chat_template", None)
    if chat_template is None:
        chat_template = getattr(parts["tokenizer"], "chat_template", None)
    if not isinstance(chat_template, str | None):
        raise ArgumentError(
            f"wrap_processor: chat_template is {type(chat_template).__name__}, expected a text. "
            "Fix: pass the one to use as chat_template="
        )
    root = None if media_root is None else Path(media_root)
    reader = None
    if about.video_token_id is not None:
        if parts["video_processor"] is None:
            parts["video_processor"] = _own_video_processor(about, parts["image_processor"])
        given_settings = {} if video_settings is None else video_settings
        sampling = resolved_sampling(video_policy, given_settings, parts["video_processor"], about)
        check_threads(decode_threads, "wrap_processor: decode_threads")
        if not isinstance(frame_cache, FrameCache | None):
            raise ArgumentError(
                f"wrap_processor: frame_cache is {type(frame_cache).__name__}. "
                "Fix: mp.video.FrameCache(folder, max_bytes)"
            )
        reader = VideoReader(sampling, root, decode_threads, frame_cache)
    elif video_policy is not None or video_settings:
        raise ArgumentError(
            f"wrap_processor: {about.name} takes a video as images. Fix: drop video_policy and video_settings"
        )
    return Processor(
        **parts,
        family=about,
        chat_template=chat_template,
        position_rule=rule,
        tokens_per_second=tokens_per_second,
        video_markers=_video_markers(hf_processor),
        media_root=root,
        cache_bytes=cache_bytes,
        videos=reader,
    )


def _own_video_processor(family: Family, image_processor: Any) -> FrameProcessor:
    """With the image processor's settings, as transformers loads a checkpoint that has one file for both."""
    known = {} if image_processor is None else image_processor.to_dict()
    return FrameProcessor(family, **known)


def _family_of(hf_processor: Any, given: str | None) -> Family:
    """The one given, or by the processor's class; of several that share it, the one with its image token."""
    name = type(hf_processor).__name__
    families = [f for f in FAMILIES.values() if name in f.processors]
    if given is not None:
        families = [get_family(given)]
    if not families:
        what = "parts alone" if hf_processor is None else name
        raise ArgumentError(
            f"wrap_processor: the family of {what} is unknown. "
            f"Fix: family=, one of {', '.join(FAMILIES)}"
        )
    token = getattr(hf_processor, "image_token_id", None)
    for family in families:
        if token in (None, family.image_token_id):
            return family
    known = ", ".join(f"{f.name} {f.image_token_id}" for f in families)
    raise ArgumentError(
        f"wrap_processor: the image token of this {name} is {token}, known are {known}. "
        "Fix: the tokenizer of a checkpoint of these families"
    )


def _video_markers(hf_processor: Any) -> str:
    """See `expand`: transformers has had a method of this name for as long as the markers stay."""
    old = hf_processor is not None and not hasattr(hf_processor, "replace_video_token")
    return REPLACED if old else KEPT


def _check_settings(
    family: Family, image_processor: Any, rule: str, tokens_per_second: float | None
) -> None:
    if rule not in family.position_rules:
        known = ", ".join(family.position_rules)
        raise ArgumentError(
            f"wrap_processor: position_rule {rule!r} is unknown. Fix: use one of {known}"
        )
    if tokens_per_second is not None and family.tokens_per_second is None:
        raise ArgumentError(
            f"wrap_processor: {family.name} does not count tokens a second. Fix: drop tokens_per_second"
        )
    if tokens_per_second is not None and not 0 < tokens_per_second < math.inf:
        raise ArgumentError(
            f"wrap_processor: tokens_per_second={tokens_per_second}. Fix: a positive number"
        )
    for name, own in (
        ("merge_size", family.spatial_merge_size),
        ("patch_size", family.patch_size),
        ("temporal_patch_size", family.temporal_patch_size),
    ):
        found = getattr(image_processor, name, own)
        if found != own:
            raise ArgumentError(
                f"wrap_processor: image_processor.{name} is {found}, {family.name} has {own}. "
                "Fix: the image processor of this family"
            )


class Processor:
    """Made by `wrap_processor`; see its methods `__call__`, `from_ids` and `append`."""

    def __init__(
        self,
        tokenizer: Any,
        image_processor: Any,
        video_processor: Any,
        family: Family,
        chat_template: str | None,
        position_rule: str,
        tokens_per_second: float | None,
        video_markers: str,
        media_root: Path | None,
        cache_bytes: int,
        videos: VideoReader | None,
    ):
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.video_processor = video_processor
        self.family = family
        self.chat_template = chat_template
        self.position_rule = position_rule
        seconds = family.tokens_per_second if tokens_per_second is None else tokens_per_second
        self.tokens_per_second = None if seconds is None else float(seconds)
        self.video_markers = video_markers
        self.media_root = media_root
        self.videos = videos
        self.cache = MediaCache(cache_bytes)
        self._tokenizer_hash = TokenizerHash()

    def __getstate__(self) -> dict[str, Any]:
        """Workers start with an empty cache: pixels are not worth sending."""
        return self.__dict__ | {"cache": MediaCache(self.cache.max_bytes)}

    @property
    def settings(self) -> dict[str, Any]:
        """`Sample.processor`: every setting that decides the layout, as the parts have it now."""
        return describe(
            self.family,
            self.tokenizer,
            self.image_processor,
            self.video_processor,
            self.chat_template,
            self.position_rule,
            self.tokens_per_second,
            self.video_markers,
            self._tokenizer_hash,
            None if self.videos is None else self.videos.sampling,
        )

    @property
    def fingerprint(self) -> str:
        """`sha256:<64 hex>` of `settings`."""
        return fingerprint(self.settings)

    def __call__(
        self,
        messages: Sequence[dict[str, Any]],
        response_ids: Sequence[int] | np.ndarray | None = None,
        *,
        sample_id: str,
        group_id: str | None = None,
        media: Sequence[Any] | None = None,
        rollout_logprobs: Sequence[float] | np.ndarray | None = None,
        template_kwargs: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Sample:
        """Messages (chat template, generation prompt) and what was sampled to a Sample.

        Args:
            messages: chat messages; images in content parts `{"type": "image", "image": …}` (Pillow, uint8 [h, w, 3],
                bytes or a path below `media_root`), `{"type": "image", "path": …}`, or bare `{"type": "image"}` with
                `media` in order. Videos likewise, `{"type": "video", "video": …}`: bytes or a path; either with the
                plan of the other side, `(file, plan)`; frames that were sampled already (uint8 [n, h, w, 3] or
                pictures), `(frames, {"fps": …})`; or a `Medium`.
            response_ids: the sampled ids, never decoded and encoded again; all of them are loss tokens.
            rollout_logprobs: float [n], of `response_ids`.
            fields: any other field of Sample, as it is.

        Raises: ArgumentError, LayoutError, VideoError.
        """
        items = [
            self.medium(item, f"processor: media[{i}]", kind)
            for i, (kind, item) in enumerate(parts_of(messages, media))
        ]
        text = with_runs(
            self.render(messages, **(template_kwargs or {})),
            items,
            self.family,
            self.tokenizer,
            self.video_markers,
        )
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        prompt = repeated(np.asarray(ids, dtype=np.int64), items, self.family)
        response = as_ids(() if response_ids is None else response_ids)
        spans = [] if response_ids is None else [(len(prompt), len(prompt) + len(response))]
        return build_sample(
            self,
            np.concatenate([prompt, response]),
            items,
            [LossSpan(a, b, turn=0) for a, b in spans],
            sample_id=sample_id,
            group_id=group_id,
            rollout_logprobs=rollout_logprobs,
            **fields,
        )

    def from_ids(
        self,
        input_ids: Sequence[int] | np.ndarray,
        media: Sequence[Any] = (),
        expanded: bool = True,
        loss_spans: Sequence[LossSpan | tuple[int, int]] = (),
        *,
        sample_id: str,
        group_id: str | None = None,
        **fields: Any,
    ) -> Sample:
        """What an engine returned, not rendered again.

        Args:
            input_ids: int [L]; `expanded` says whether a picture has one id a vision token, or one in all.
            media: Pillow, arrays, bytes, paths, pairs of a video or `Medium`s, one for each medium that has
                placeholders outside the loss spans. Of a recorded video with a `source` below `media_root` the very
                frames are decoded again.
            loss_spans: LossSpan or (start, stop), counted in `input_ids` as given. A placeholder inside of them was
                sampled: it stands for no medium, and `validate` names it.
            fields: any other field of Sample, as it is (spans counted in expanded ids).

        Raises: ArgumentError, LayoutError where runs and media contradict each other.
        """
        ids = as_ids(input_ids)
        items = self.media_from(media)
        spans = [s if isinstance(s, LossSpan) else LossSpan(*s, turn=0) for s in loss_spans]
        _check_spans(spans, len(ids))
        if not expanded:
            sampled = loss_mask(spans, len(ids))
            context = np.where(sampled, self.family.pad_token_id, ids)
            whole, moved = expanded_ids(
                context, items, self.family, self.tokenizer, self.video_markers
            )
            whole[moved[:-1][sampled]] = ids[sampled]
            spans = [
                dataclasses.replace(s, start=int(moved[s.start]), stop=int(moved[s.stop]))
                for s in spans
            ]
            ids = whole
        return build_sample(
            self, ids, items, spans, sample_id=sample_id, group_id=group_id, **fields
        )

    def append(
        self,
        sample: Sample,
        *,
        observation_ids: Sequence[int] | np.ndarray = (),
        media: Sequence[Any] = (),
        expanded: bool = True,
        source: str = "tool",
        response_ids: Sequence[int] | np.ndarray = (),
        rollout_logprobs: Sequence[float] | np.ndarray | None = None,
    ) -> Sample:
        """One more turn: what the environment said (with its pictures), then what the policy answered.

        `observation_ids` and `response_ids` are ids as the engine saw them; `sample` stays as it was.
        `source`: `tool`, `environment`, `screenshot` or `user`. `rollout_logprobs` are of `response_ids`; they are
        kept if every turn has them. `finish_reason` was the last turn's: a new response drops it.
        Raises: ArgumentError, LayoutError.
        """
        return append_turn(
            self, sample, observation_ids, media, expanded, source, response_ids, rollout_logprobs
        )

    def render(self, messages: Sequence[dict[str, Any]], **template_kwargs: Any) -> str:
        """The prompt's text by the chat template, one placeholder a medium, with the generation prompt."""
        if self.chat_template is None:
            raise ArgumentError(
                "processor: there is no chat template. Fix: wrap_processor(…, chat_template=…)"
            )
        options = {"add_generation_prompt": True} | template_kwargs
        text: str = self.tokenizer.apply_chat_template(
            list(messages), chat_template=self.chat_template, tokenize=False, **options
        )
        return text

    def medium(self, item: Any, where: str = "processor: media", kind: str | None = None) -> Medium:
        """An image or a video to a Medium with pixels, grid, content hash and cache key.

        `kind`: `image` or `video`; None: as `item` is, of files by their first bytes. A Medium is taken as it is, but
        of a video without pixels whose `source` lies below `media_root` the recorded frames are decoded again.
        Raises: ArgumentError (also where the file is no longer the one that was recorded), LayoutError, VideoError.
        """
        if isinstance(item, Medium):
            again = item.modality == "video" and item.pixel_values is None and item.source
            if not again or self.media_root is None or item.frame_indices is None:
                return item
        if self._kind(item, kind, where) == "video":
            part = self.settings["video"]
            return self._reader(where).medium(item, self.video_processor, part, self.cache, where)
        pixels, known = self.rgb_pixels(item, where)
        content = content_hash("image", pixels)
        part = self.settings["image"]
        seen = cache_key(content, (0, 0, 0), part)  # the grid follows from content and settings
        done = self.cache.get(seen)
        if done is None:
            done = process(self.image_processor, pixels, part["backend"], self.family, where)
            self.cache.put(seen, done)
        medium = Medium(
            media_id=f"image:{content[:16]}",
            modality="image",
            cache_key=cache_key(content, done.grid_thw, part),
            grid_thw=done.grid_thw,
            num_tokens=self.family.vision_tokens(done.grid_thw),
            content_hash=content,
            **known,
        )
        medium.pixel_values = done.pixel_values
        return medium

    def clip(self, item: Any, where: str = "processor: media") -> Clip:
        """The frames of a video as its loader hands them to a processor, and their plan: what an engine is given.

        Raises: ArgumentError, VideoError.
        """
        return self._reader(where).clip(item, self.settings["video"], where)

    def _reader(self, where: str) -> VideoReader:
        if self.videos is None:
            raise ArgumentError(
                f"{where}: {self.family.name} takes a video as images. Fix: one image part a frame"
            )
        return self.videos

    def _kind(self, item: Any, asked: str | None, where: str) -> str:
        """`image` or `video`. Raises: ArgumentError where a file is plainly not what was asked for."""
        kind = kind_of_item(item)
        if kind is not None:
            return asked or kind
        if isinstance(item, (bytes, bytearray)):
            head = bytes(item[:HEAD])
        else:
            with open_file(path_below(item, self.media_root, where)[0]) as file:
                head = file.read(HEAD)
        kind = kind_of_file(head)
        if asked == ("video" if is_picture(head) else "image") != kind:
            raise ArgumentError(
                f'{where} is in a part of type {asked}, the file is of another. Fix: {{"type": "{kind}", …}}'
            )
        return asked or kind

    def rgb_pixels(
        self, image: Any, where: str = "processor: media"
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """uint8 [h, w, 3] as the image processor sees `image`, and Medium fields; see `images.rgb_pixels`.

        What becomes of transparency is the image processor's choice (transformers: dropped, from 5.23 on over white).
        """
        if self.image_processor is None:
            raise ArgumentError(f"{where}: there is no image_processor. Fix: pass one")
        return rgb_pixels(image, self.media_root, where, self._to_rgb)

    def _to_rgb(self, image: Any) -> np.ndarray:
        part = self.image_processor
        channels_first = part.process_image(image, do_convert_rgb=part.do_convert_rgb)
        return np.ascontiguousarray(np.moveaxis(np.asarray(channels_first), 0, -1))

    def media_from(self, items: Sequence[Any]) -> list[Medium]:
        """`medium` of each item."""
        return [self.medium(item, f"processor: media[{i}]") for i, item in enumerate(items)]


def _check_spans(spans: Sequence[LossSpan], length: int) -> None:
    for i, s in enumerate(spans):
        if not 0 <= s.start <= s.stop <= length:
            raise LayoutError(
                f"processor: loss_spans[{i}] [{s.start}, {s.stop}) is out of range, there are {length} ids. "
                "Fix: count in the ids as given",
                "MM201",
                (s.start, s.stop),
            )
