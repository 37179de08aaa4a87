"""`wrap_processor`: one picklable object for data loaders, from messages, media and response ids to a Sample.

Ids [L] are expanded, one per vision token; each distinct medium is processed once, by content.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, check_name, check_number, kind_of, require
from mmpack.families import Family
from mmpack.layout.fingerprint import cache_key, content_hash, fingerprint
from mmpack.layout.occurrences import context_ids
from mmpack.processors.append import Observation, append_turn
from mmpack.processors.arguments import as_ids, as_spans, check_messages, items_of, template_options
from mmpack.processors.audio import audio_medium, audio_settings, check_extractor
from mmpack.processors.build import build_sample
from mmpack.processors.cache import MediaCache
from mmpack.processors.conversation import assistant_turns, sources
from mmpack.processors.data_url import loaded
from mmpack.processors.expand import expanded_ids, repeated, with_runs
from mmpack.processors.images import path_below, rgb_pixels
from mmpack.processors.kinds import HEAD, is_picture, kind_of_file, kind_of_item
from mmpack.processors.messages import media_of, parts_of, plain_parts
from mmpack.processors.pixels import PIXELS, process
from mmpack.processors.replay import Replay
from mmpack.processors.resolve import (
    as_called,
    check_settings,
    family_of,
    numbers_pictures,
    own_video_processor,
    video_markers,
)
from mmpack.processors.sampling import resolved_sampling
from mmpack.processors.settings import (
    TokenizerHash,
    describe,
    vision_settings,
    vocab_size,
)
from mmpack.processors.videos import Clip, VideoReader
from mmpack.processors.views import counted, cut, media_of_cut, pictures
from mmpack.schema.media import Medium
from mmpack.schema.ragged import Ragged
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, ObservationSpan, covered
from mmpack.video.cache import FrameCache
from mmpack.video.decoding import check_threads
from mmpack.video.files.container import open_file
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
    parts = {
        name: getattr(hf_processor, name, None) if part is None else part
        for name, part in given.items()
    }
    for name, part in parts.items():
        if part is not None and type(part).__module__ == "builtins":
            raise ArgumentError(
                f"wrap_processor: {name} is {kind_of(part)}. Fix: pass a loaded one, as of transformers.AutoProcessor"
            )
    if parts["tokenizer"] is None:
        raise ArgumentError(
            "wrap_processor: no tokenizer. Fix: pass a processor that has one, or tokenizer="
        )
    about = family_of(hf_processor, family)
    rule = about.position_rules[0] if position_rule is None else position_rule
    check_settings(about, parts["image_processor"], rule, tokens_per_second)
    if feature_extractor is None and "audio" in dict(about.unread):
        parts["feature_extractor"] = None  # a part of its processor, of what is not read
    check_extractor(parts["feature_extractor"], about)
    if chat_template is None:
        chat_template = getattr(hf_processor, "chat_template", None)
    if chat_template is None:
        chat_template = getattr(parts["tokenizer"], "chat_template", None)
    if not isinstance(chat_template, str | None):
        raise ArgumentError(
            f"wrap_processor: chat_template is {type(chat_template).__name__}, expected a text. "
            "Fix: pass the one to use as chat_template="
        )
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
        given_settings = {} if video_settings is None else video_settings
        if video_processor is None:
            parts["video_processor"] = as_called(hf_processor, parts["video_processor"])
        sampling = resolved_sampling(video_policy, given_settings, parts["video_processor"], about)
        check_threads(decode_threads, "wrap_processor: decode_threads")
        if not isinstance(frame_cache, FrameCache | None):
            raise ArgumentError(
                f"wrap_processor: frame_cache is {type(frame_cache).__name__}. "
                "Fix: mp.video.FrameCache(folder, max_bytes)"
            )
        reader = VideoReader(sampling, root, decode_threads, frame_cache, pixels)
    elif video_policy is not None or video_settings:
        why = "takes a video as images" if about.video_token_id is None else "has no video policy"
        raise ArgumentError(
            f"wrap_processor: {about.name} {why}. Fix: drop video_policy and video_settings"
        )
    if pixels == "uint8":
        for name in ("image_processor", "video_processor"):
            if parts[name] is not None:
                byte_values(vision_settings(parts[name]))  # raises where there is no such table
    return Processor(
        **parts,
        family=about,
        chat_template=chat_template,
        position_rule=rule,
        tokens_per_second=tokens_per_second,
        video_markers=video_markers(hf_processor),
        media_root=root,
        cache_bytes=cache_bytes,
        videos=reader,
        kept_as=pixels,
        numbered=numbers_pictures(about, hf_processor, parts["image_processor"]),
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
        kept_as: str = "float32",
        numbered: bool = False,
        feature_extractor: Any = None,
    ):
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.video_processor = video_processor
        self.feature_extractor = feature_extractor
        self.family = family
        self.chat_template = chat_template
        self.position_rule = position_rule
        seconds = family.tokens_per_second if tokens_per_second is None else tokens_per_second
        self.tokens_per_second = None if seconds is None else float(seconds)
        self.video_markers = video_markers
        self.media_root = media_root
        self.videos = videos
        self.kept_as = kept_as  # what pixels are held as
        self.numbered = numbered  # writes each picture's number before its views
        self.cache = MediaCache(cache_bytes)
        self._tokenizer_hash = TokenizerHash()

    def __getstate__(self) -> dict[str, Any]:
        """Workers start with an empty cache: pixels are not worth sending."""
        return self.__dict__ | {"cache": MediaCache(self.cache.max_bytes)}

    @property
    def settings(self) -> dict[str, Any]:
        """`Sample.processor`: every setting that decides the layout, as the parts have it now."""
        out = describe(
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
            self._audio_settings(),
        )
        if self.family.views is not None and out["image"] is not None:
            out["image"]["use_image_id"] = self.numbered
        return out

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return vocab_size(self.family, self.tokenizer)

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
        assistant_loss: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Sample:
        """Messages (chat template, generation prompt) and what was sampled to a Sample.

        Args:
            messages: chat messages; images in content parts `{"type": "image", "image": …}` (Pillow, uint8 [h, w, 3],
                bytes, a `data:` URL or a path below `media_root`), `{"type": "image", "path": …}`, or bare
                `{"type": "image"}` with `media` in order. Videos likewise, `{"type": "video", "video": …}`: bytes or a
                path; either with the plan of the other side, `(file, plan)`; frames that were sampled already (uint8
                [n, h, w, 3] or pictures), `(frames, {"fps": …})`; or a `Medium`.
            response_ids: the sampled ids, never decoded and encoded again; all of them are loss tokens.
            rollout_logprobs: float [n], of the loss tokens.
            assistant_loss: the assistant's turns among the messages are loss tokens, turn by turn, each with its end of
                turn; what stands between them are observations. Then without response_ids no generation prompt follows.
            template_kwargs: of the chat template, such as `tools` or `enable_thinking`.
            fields: any other field of Sample, as it is.

        Raises: ArgumentError, LayoutError, VideoError.
        """
        items = [
            view
            for i, (kind, item) in enumerate(parts_of(messages, media))
            for view in self.views(item, f"processor: media[{i}]", kind)
        ]
        options = {"add_generation_prompt": response_ids is not None or not assistant_loss}
        options |= template_options(template_kwargs)
        text = self.render(messages, **options)
        turns = []
        if assistant_loss:
            render = functools.partial(self.render, **template_options(template_kwargs))
            turns = assistant_turns(render, messages, text)
        prompt, spans = self._encoded_turns(text, turns, items)
        response = as_ids(
            () if response_ids is None else response_ids, self.vocab_size, "response_ids"
        )
        if response_ids is not None:
            start = len(prompt)
            spans.append(LossSpan(start, start + len(response), turn=len(turns)))
        if assistant_loss and fields.get("observation_spans") is None:
            gaps = zip(spans, spans[1:], sources(messages)[1:], strict=False)
            between = [ObservationSpan(a.stop, b.start, who, b.turn) for a, b, who in gaps]
            fields["observation_spans"] = [s for s in between if s.start < s.stop] or None
        return build_sample(
            self,
            np.concatenate([prompt, response]),
            items,
            spans,
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
            input_ids: int [L]; `expanded` says whether a picture has one id per vision token, or one in all.
            media: Pillow, arrays, bytes, paths, pairs of a video or `Medium`s, one for each medium that has
                placeholders outside the loss spans. Of a recorded video with a `source` below `media_root` the very
                frames are decoded again.
            loss_spans: LossSpan or (start, stop), counted in `input_ids` as given. A placeholder within them was
                sampled: it stands for no medium, and `validate` names it.
            fields: any other field of Sample, as it is (spans counted in expanded ids).

        Raises: ArgumentError, LayoutError where runs and media contradict each other.
        """
        ids = as_ids(input_ids, self.vocab_size)
        items = self.media_from(media)
        spans = as_spans(loss_spans, len(ids))
        if not expanded:
            sampled = covered(spans, len(ids))
            context = context_ids(ids, sampled, self.family)
            whole, moved = expanded_ids(
                context,
                items,
                self.family,
                self.tokenizer,
                self.video_markers,
                self.numbers_after(()),
                self.tokens_per_second,
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
        messages: Sequence[dict[str, Any]] | None = None,
        media: Sequence[Any] = (),
        expanded: bool = True,
        source: str | None = None,
        response_ids: Sequence[int] | np.ndarray = (),
        rollout_logprobs: Sequence[float] | np.ndarray | None = None,
        template_kwargs: dict[str, Any] | None = None,
        kept_ids: Ragged | None = None,
        teachers: dict[str, Ragged] | None = None,
        routed_experts: np.ndarray | None = None,
    ) -> Sample:
        """One more turn: what the environment said (with its pictures), then what the policy answered.

        `observation_ids` and `response_ids` are ids as the engine saw them; `sample` stays as it was. `expanded` says
        whether a picture has one of `observation_ids` per vision token, or one in all. In place of ids, `messages` (of
        role `tool` or `user`): the chat template writes them between the answer and the next generation prompt, with
        the end of turn if the answer lacks it; `media` and `template_kwargs` as in `__call__`.
        `source`: `tool`, `environment`, `screenshot` or `user`; by default `tool`, of messages their role's.
        `rollout_logprobs` are of `response_ids`; they are kept if every turn has them. `finish_reason` was the last
        turn's: a new response drops it. `kept_ids` and `teachers` have a list per response id; `routed_experts` are of
        all tokens, those of the sample included, and must agree with it.
        Raises: ArgumentError, LayoutError.
        """
        return append_turn(
            self,
            sample,
            Observation(observation_ids, messages, media, expanded, source, template_kwargs),
            response_ids,
            rollout_logprobs,
            Replay(kept_ids, teachers, routed_experts),
        )

    def numbers_after(self, media: Sequence[Medium]) -> Counter[str] | None:
        """How many pictures and videos `media` (in order of appearance) are; None: their numbers are not written."""
        return counted(media) if self.numbered else None

    def encoded(
        self, text: str, items: Sequence[Medium], before: Sequence[Medium] = ()
    ) -> np.ndarray:
        """int64 [L]: a rendered text, each placeholder as many times as its medium has vision tokens.

        `before`: the media in front of it, where pictures are numbered.
        """
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise ArgumentError(
                "processor: the text holds a lone surrogate, which no encoding has. "
                "Fix: text.encode('utf-8', 'replace').decode()"
            )
        numbers = self.numbers_after(before)
        text = with_runs(text, items, self.family, self.tokenizer, self.video_markers, numbers)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = np.asarray(ids, dtype=np.int64)
        return repeated(ids, items, self.family, self.tokens_per_second)

    def _encoded_turns(
        self, text: str, turns: Sequence[tuple[int, int]], items: Sequence[Medium]
    ) -> tuple[np.ndarray, list[LossSpan]]:
        """Ids of `text`, each turn encoded by itself, as a policy is prompted; and the turns in them."""
        pads = self.tokenizer.convert_ids_to_tokens(list(self.family.prompt_ids.values()))
        left, done = pictures(items), 0
        pieces: list[np.ndarray] = []
        spans: list[LossSpan] = []
        before: list[Medium] = []

        def add(piece: str, shown: Sequence[Sequence[Medium]]) -> tuple[int, int]:
            media = [view for views in shown for view in views]
            start = sum(map(len, pieces))
            pieces.append(self.encoded(piece, media, before))
            before.extend(media)
            return start, start + len(pieces[-1])

        for k, (start, stop) in enumerate(turns):
            context, turn = text[done:start], text[start:stop]
            if any(pad in turn for pad in pads):
                raise ArgumentError(
                    f"processor: the assistant's turn {k} holds a picture or its placeholder, which no policy writes. "
                    "Fix: put the picture into a user's or a tool's message"
                )
            count = sum(context.count(pad) for pad in pads)
            add(context, left[:count])
            left, done = left[count:], stop
            spans.append(LossSpan(*add(turn, ()), turn=k))
        add(text[done:], left)
        return np.concatenate(pieces), spans

    def render(self, messages: Sequence[dict[str, Any]], **template_kwargs: Any) -> str:
        """The prompt's text by the chat template, one placeholder per medium, with the generation prompt."""
        if self.chat_template is None:
            raise ArgumentError(
                "processor: there is no chat template. Fix: wrap_processor(…, chat_template=…)"
            )
        check_messages(messages)
        options = {"add_generation_prompt": True} | template_kwargs
        template_error = require("jinja2", "hf", "a chat template").TemplateError
        try:
            text: str = self.tokenizer.apply_chat_template(
                plain_parts(messages), chat_template=self.chat_template, tokenize=False, **options
            )
        except (template_error, TypeError, RecursionError) as error:
            why = " ".join(str(error).split())[:200]
            raise ArgumentError(
                f"processor: the chat template can't write these messages ({why}). "
                "Fix: roles and contents that the template knows"
            ) from None
        return text

    def medium(self, item: Any, where: str = "processor: media", kind: str | None = None) -> Medium:
        """A medium with pixels (features), grid, content hash and cache key; see `views`.

        Raises: as `views` does; ArgumentError for a picture of several views.
        """
        found = self.views(item, where, kind)
        if len(found) > 1:
            raise ArgumentError(
                f"{where}: {self.family.name} cuts this picture into {len(found)} views, each a medium. Fix: views(…), "
                "messages, or an image processor with slice_mode=False"
            )
        return found[0]

    def views(
        self, item: Any, where: str = "processor: media", kind: str | None = None
    ) -> list[Medium]:
        """An image, a video or an audio to Mediums with pixels (features), grid, content hash and cache key.

        One; of a family that cuts a picture into views one for each: the whole, then its slices row by row. `kind`:
        `image`, `video`, `audio`, or `sound`: an audio that lies among the placeholders of the video before it. None:
        as `item` is, of files by their first bytes. A Medium is taken as it is, but of a video without pixels whose
        `source` lies below `media_root` the recorded frames are decoded again.
        Raises: ArgumentError (also where the file is no longer the one that was recorded), LayoutError, VideoError,
        AudioError.
        """
        item = loaded(item, where)
        if kind == "sound":
            medium = copy.copy(self.medium(item, where, "audio"))
            medium.in_video = True
            return [medium]
        if isinstance(item, Medium):
            again = item.modality == "video" and item.pixel_values is None and item.source
            if not again or self.media_root is None or item.frame_indices is None:
                return [item]
        kind = self._kind(item, kind, where)
        if kind == "audio":
            return [self._audio(item, where)]
        if kind == "video":
            part = self.settings["video"]
            reader = self._reader(where)
            return [reader.medium(item, self.video_processor, part, self.cache, where)]
        pixels, known = self.rgb_pixels(item, where)
        content = content_hash("image", pixels)
        part = self.settings["image"]
        # the grid follows from content and settings
        seen = cache_key(content, (0, 0, 0), part)
        done = self.cache.get(seen)
        if self.family.views is not None:
            if done is None:
                done = cut(
                    self.image_processor, pixels, part["backend"], self.family, where, self.kept_as
                )
                self.cache.put(seen, done)
            return media_of_cut(done, content, part, self.family, known)
        if done is None:
            done = process(
                self.image_processor, pixels, part["backend"], self.family, where, self.kept_as
            )
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
        return [medium]

    def _audio(self, item: Any, where: str) -> Medium:
        part = self._audio_settings()
        if part is None:
            raise ArgumentError(
                f"{where}: {self.family.name} hears nothing. Fix: a model that does"
                if self.family.audio is None
                else f"{where}: there is no feature_extractor. Fix: pass one"
            )
        return audio_medium(
            item, self.feature_extractor, part, self.family, self.media_root, self.cache, where
        )

    def _audio_settings(self) -> dict[str, Any] | None:
        audio = self.family.audio
        return None if audio is None else audio_settings(self.feature_extractor, audio)

    def clip(self, item: Any, where: str = "processor: media") -> Clip:
        """The frames of a video as its loader hands them to a processor, and their plan: what an engine is given.

        Raises: ArgumentError, VideoError.
        """
        return self._reader(where).clip(loaded(item, where), self.settings["video"], where)

    def _reader(self, where: str) -> VideoReader:
        if self.videos is None:
            why, fix = "takes a video as images", "one image part per frame"
            if self.family.video_token_id is not None:
                why = "has no video policy, so mmpack can't lay a video out"
                fix = "a Medium with the pixels and the grid that its own processor made"
            raise ArgumentError(f"{where}: {self.family.name} {why}. Fix: {fix}")
        return self.videos

    def _kind(self, item: Any, asked: str | None, where: str) -> str:
        """`image`, `video` or `audio`. Raises: ArgumentError where a file is plainly not what was asked for."""
        kind = kind_of_item(item)
        if (
            kind is not None or asked == "audio"
        ):  # of which there are too many to know by first bytes
            return asked or str(kind)
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
        """`views` of each item."""
        return [
            view
            for i, item in enumerate(items_of(items, "media"))
            for view in self.views(item, f"processor: media[{i}]")
        ]
