"""`wrap_processor`: one picklable object for data loaders, from messages, media and response ids to a Sample.

Ids [L] are expanded, one a vision token; each distinct medium is processed once, by content.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, LayoutError, require
from mmpack.families import FAMILIES, Family, get_family
from mmpack.layout.fingerprint import cache_key, content_hash, fingerprint
from mmpack.layout.mrope import mrope_positions
from mmpack.layout.runs import placeholder_runs
from mmpack.processors.cache import MediaCache, Processed
from mmpack.processors.images import rgb_pixels
from mmpack.processors.settings import describe, text_hash, vocabulary_hash
from mmpack.schema.media import Medium
from mmpack.schema.sample import RESPONSE_TEXT_KEY, Sample
from mmpack.schema.spans import (
    OBSERVATION_SOURCES,
    LossSpan,
    ModalitySpan,
    ObservationSpan,
)

_FAMILY_OF_CLASS = {"Qwen2VLProcessor": "qwen2_vl", "Qwen2_5_VLProcessor": "qwen2_5_vl"}
MEDIA_CACHE_BYTES = 1 << 30


def wrap_processor(
    hf_processor: Any = None,
    *,
    tokenizer: Any = None,
    image_processor: Any = None,
    video_processor: Any = None,
    family: str | None = None,
    chat_template: str | None = None,
    position_rule: str = "grid",
    tokens_per_second: float | None = None,
    media_root: str | Path | None = None,
    cache_bytes: int = MEDIA_CACHE_BYTES,
) -> Processor:
    """Wrap a Hugging Face processor, or its parts.

    Args:
        family: needed with parts alone; else known from the processor's class.
        chat_template: instead of the processor's own.
        position_rule, tokens_per_second: how positions are counted; see `mrope_positions`.
        media_root: directory below which paths in messages may be opened.
        cache_bytes: pixels kept for media that come again.

    Raises: ArgumentError without a tokenizer or a family, and for settings that the family does not have;
    LayoutError (MM006) for a family that mmpack doesn't know.
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
    name = family or _FAMILY_OF_CLASS.get(type(hf_processor).__name__)
    if name is None:
        what = "parts alone" if hf_processor is None else type(hf_processor).__name__
        raise ArgumentError(
            f"wrap_processor: the family of {what} is unknown. "
            f"Fix: family=, one of {', '.join(FAMILIES)}"
        )
    about = get_family(name)
    _check_settings(about, parts["image_processor"], position_rule, tokens_per_second)
    if chat_template is None:
        chat_template = getattr(hf_processor, "chat_template", None)
    if chat_template is None:
        chat_template = getattr(parts["tokenizer"], "chat_template", None)
    if not isinstance(chat_template, str | None):
        raise ArgumentError(
            f"wrap_processor: chat_template is {type(chat_template).__name__}, expected a text. "
            "Fix: pass the one to use as chat_template="
        )
    return Processor(
        **parts,
        family=about,
        chat_template=chat_template,
        position_rule=position_rule,
        tokens_per_second=tokens_per_second,
        media_root=None if media_root is None else Path(media_root),
        cache_bytes=cache_bytes,
    )


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
    merge = family.spatial_merge_size
    if image_processor is not None and image_processor.merge_size != merge:
        raise ArgumentError(
            f"wrap_processor: image_processor.merge_size is {image_processor.merge_size}, "
            f"{family.name} merges {merge}. Fix: the image processor of this family"
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
        media_root: Path | None,
        cache_bytes: int,
    ):
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.video_processor = video_processor
        self.family = family
        self.chat_template = chat_template
        self.position_rule = position_rule
        seconds = family.tokens_per_second if tokens_per_second is None else tokens_per_second
        self.tokens_per_second = None if seconds is None else float(seconds)
        self.media_root = media_root
        self.cache = MediaCache(cache_bytes)
        self._vocab_sha256 = vocabulary_hash(tokenizer)

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
            self._vocab_sha256,
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
                `media` in order. Videos come as `Medium`s, already laid out.
            response_ids: the sampled ids, never decoded and encoded again; all of them are loss tokens.
            rollout_logprobs: float [n], of `response_ids`.
            fields: any other field of Sample, as it is.

        Raises: ArgumentError, LayoutError.
        """
        text = self.render(messages, **(template_kwargs or {}))
        ids = np.asarray(
            self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64
        )
        items = self._media(media_of(messages, media))
        prompt = self._expand(ids, items)
        response = _ids(() if response_ids is None else response_ids)
        spans = [] if response_ids is None else [(len(prompt), len(prompt) + len(response))]
        return self._sample(
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
            media: Pillow, arrays, bytes, paths or `Medium`s, one for each run of placeholders outside the loss spans.
            loss_spans: LossSpan or (start, stop), counted in `input_ids` as given. A placeholder inside of them was
                sampled: it stands for no medium, and `validate` names it.
            fields: any other field of Sample, as it is (spans counted in expanded ids).

        Raises: ArgumentError, LayoutError where runs and media contradict each other.
        """
        ids = _ids(input_ids)
        items = self._media(media)
        spans = [s if isinstance(s, LossSpan) else LossSpan(*s, turn=0) for s in loss_spans]
        _check_spans(spans, len(ids))
        if not expanded:
            repeats = self._repeats(
                np.where(_mask(spans, len(ids)), self.family.pad_token_id, ids), items
            )
            moved = np.concatenate([[0], np.cumsum(repeats)])
            spans = [
                dataclasses.replace(s, start=int(moved[s.start]), stop=int(moved[s.stop]))
                for s in spans
            ]
            ids = np.repeat(ids, repeats)
        return self._sample(ids, items, spans, sample_id=sample_id, group_id=group_id, **fields)

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
        if source not in OBSERVATION_SOURCES:
            raise ArgumentError(
                f"processor.append: source {source!r} is unknown. Fix: use one of {', '.join(OBSERVATION_SOURCES)}"
            )
        made_by = sample.processor_fingerprint or self.fingerprint
        if (sample.family, made_by) != (self.family.name, self.fingerprint):
            raise ArgumentError(
                f"processor.append: {sample.sample_id!r:.60} was made by a processor of other settings. "
                "Fix: append with the one that made it"
            )
        items = self._media(media)
        observed = _ids(observation_ids)
        observed = observed if expanded else self._expand(observed, items)
        response = _ids(response_ids)
        start = len(sample)
        middle, stop = start + len(observed), start + len(observed) + len(response)
        turn = 1 + max((s.turn or 0 for s in sample.loss_spans), default=-1)
        spans = list(sample.loss_spans)
        observations = list(sample.observation_spans or ())
        if len(observed):
            observations.append(ObservationSpan(start, middle, source, turn))
        if len(response):
            spans.append(LossSpan(middle, stop, turn=turn))
        kept = {
            name: copy.copy(getattr(sample, name))
            for name in Sample.columns()
            if name not in _DERIVED
        }
        kept["observation_spans"] = observations or None
        if len(response):
            kept["finish_reason"] = None
        kept["rollout_logprobs"] = _joined_logprobs(sample, rollout_logprobs, len(response))
        runs = [sample.media[s.media_index] for s in sample.modality_spans if not s.frame]
        return self._sample(
            np.concatenate([sample.input_ids, observed, response]), runs + items, spans, **kept
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

    def medium(self, item: Any, where: str = "processor: media") -> Medium:
        """An image (or a Medium, taken as it is) to a Medium with pixels, grid, content hash and cache key."""
        if isinstance(item, Medium):
            return item
        pixels, known = self.rgb_pixels(item, where)
        content = content_hash("image", pixels)
        part = self.settings["image"]
        seen = cache_key(content, (0, 0, 0), part)  # the grid follows from content and settings
        done = self.cache.get(seen)
        if done is None:
            done = self._process(pixels, part["backend"], where)
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

    def _process(self, pixels: np.ndarray, backend: str, where: str) -> Processed:
        image = require("PIL.Image", "hf", where).fromarray(pixels)
        kind = "np" if backend == "pil" else "pt"
        try:
            out = self.image_processor(images=[image], return_tensors=kind)
        except ValueError as error:  # a shape that it can't resize
            why = " ".join(str(error).split())[:200]
            raise ArgumentError(
                f"{where}: the image processor refuses an image of {image.width}×{image.height} ({why}). "
                "Fix: another image"
            ) from None
        t, h, w = (int(n) for n in out["image_grid_thw"][0])
        return Processed((t, h, w), np.asarray(out["pixel_values"]))

    def _media(self, items: Sequence[Any]) -> list[Medium]:
        return [self.medium(item, f"processor: media[{i}]") for i, item in enumerate(items)]

    def _expand(self, ids: np.ndarray, items: Sequence[Medium]) -> np.ndarray:
        """Repeat the one placeholder of each medium once a vision token."""
        return np.repeat(ids, self._repeats(ids, items))

    def _repeats(self, ids: np.ndarray, items: Sequence[Medium]) -> np.ndarray:
        """int64 [L]: how often each of the unexpanded ids comes after expansion."""
        kinds = {v: k for k, v in self.family.placeholder_ids.items()}
        at = np.flatnonzero(np.isin(ids, list(kinds)))
        found = [kinds[int(ids[i])] for i in at]
        if found != [m.modality for m in items]:
            raise LayoutError(
                f"processor: the ids have placeholders {found}, "
                f"the media are {[m.modality for m in items]}. "
                "Fix: one placeholder a medium, in order (expanded ids: expanded=True)",
                "MM107" if len(found) < len(items) else "MM104",
            )
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[at] = [m.num_tokens for m in items]
        return repeats

    def _sample(
        self,
        ids: np.ndarray,
        runs: Sequence[Medium],
        loss_spans: list[LossSpan],
        *,
        sample_id: str,
        group_id: str | None,
        **fields: Any,
    ) -> Sample:
        """Check runs against their media (one for each run outside the loss), and derive all the rest."""
        unknown = [name for name in fields if name not in Sample.columns() or name in _COMPUTED]
        if unknown:
            raise ArgumentError(
                f"processor: {unknown[0]!r} is no field of Sample, or one that follows from the ids. Fix: drop it"
            )
        policy = _mask(loss_spans, len(ids))
        # a placeholder that the policy sampled stands for nothing: to the engine it was a word
        context = np.where(policy, self.family.pad_token_id, ids)
        positions, _ = mrope_positions(
            context,
            self.family,
            image_grid_thw=[m.grid_thw for m in runs if m.modality == "image"],
            video_grid_thw=[m.grid_thw for m in runs if m.modality == "video"],
            second_per_grid_ts=[
                1.0 if m.second_per_grid_ts is None else m.second_per_grid_ts
                for m in runs
                if m.modality == "video"
            ],
            rule=self.position_rule,
            tokens_per_second=self.tokens_per_second,
        )
        found = placeholder_runs(context, self.family)
        kinds = ["video" if video else "image" for video in found.is_video]
        if kinds != [m.modality for m in runs]:
            raise LayoutError(
                f"processor: the ids have runs of {kinds}, the media are {[m.modality for m in runs]}. "
                "Fix: media in the order of their placeholders",
                "MM106",
            )
        media, index = _distinct(runs)
        spans = [
            ModalitySpan(int(a), int(b), media[i].modality, i)
            for a, b, i in zip(found.starts, found.stops, index, strict=True)
        ]
        logprobs = fields.pop("rollout_logprobs", None)
        metadata = dict(fields.pop("metadata", None) or {})
        if policy.any():
            metadata[RESPONSE_TEXT_KEY] = text_hash(self.tokenizer.decode(ids[policy].tolist()))
        settings = self.settings
        return Sample(
            sample_id=sample_id,
            group_id=sample_id if group_id is None else group_id,
            family=self.family.name,
            input_ids=ids,
            media=media,
            modality_spans=spans,
            loss_spans=loss_spans,
            position_ids=positions,
            attention_mask=np.ones(len(ids), dtype=np.int8),
            processor=settings,
            processor_fingerprint=fingerprint(settings),
            rollout_logprobs=_logprobs(logprobs, int(policy.sum())),
            metadata=metadata,
            **fields,
        )


_COMPUTED = {
    "schema_version",
    "family",
    "input_ids",
    "media",
    "modality_spans",
    "loss_spans",
    "position_ids",
    "processor",
    "processor_fingerprint",
}
_DERIVED = _COMPUTED | {"attention_mask", "rollout_logprobs", "observation_spans"}


def media_of(messages: Sequence[dict[str, Any]], media: Sequence[Any] | None) -> list[Any]:
    """The media of chat messages in order: from the content parts, or from `media` where the parts are bare.

    Raises: ArgumentError, also for a video that is no Medium yet: videos are not decoded here.
    """
    extra = iter(() if media is None else media)
    out = []
    for m, message in enumerate(messages):
        content = message.get("content")
        for p, part in enumerate(content if isinstance(content, (list, tuple)) else ()):
            where = f"processor: messages[{m}].content[{p}]"
            kind = _kind_of(part, where)
            if kind is None:
                continue
            item = part.get(kind, part.get("path"))
            if item is None:
                item = next(extra, None)
            if item is None:
                raise ArgumentError(
                    f"{where} is of type {kind} and has none. Fix: put it into the part, or pass media="
                )
            if kind != (item.modality if isinstance(item, Medium) else "image"):
                raise ArgumentError(
                    f"{where} is of type {kind}, what it holds is not. "
                    "Fix: images in image parts; videos as Medium, with their grid"
                )
            out.append(item)
    left = len(list(extra))
    if left:
        raise ArgumentError(
            f"processor: {left} of media= have no part in the messages. "
            'Fix: one {"type": "image"} part each'
        )
    return out


def _kind_of(part: Any, where: str) -> str | None:
    """`image`, `video`, or None for text."""
    if not isinstance(part, dict):
        raise ArgumentError(
            f'{where} is {type(part).__name__}. Fix: an object such as {{"type": "text", …}}'
        )
    remote = [name for name in ("url", "image_url", "video_url", "base64") if name in part]
    if remote or part.get("type") in ("image_url", "video_url"):
        raise ArgumentError(
            f"{where} has a {(remote or [part['type']])[0]!r}, mmpack fetches nothing. "
            'Fix: {"type": "image", "image": …} with the picture, its bytes or a path below media_root'
        )
    for kind in ("image", "video"):
        if part.get("type") == kind or kind in part:
            return kind
    return None


def _distinct(runs: Sequence[Medium]) -> tuple[list[Medium], list[int]]:
    """Distinct media in order of first use, and the index of each run's."""
    place: dict[str, int] = {}
    media: list[Medium] = []
    index = []
    for m in runs:
        at = place.setdefault(m.cache_key, len(media))
        if at == len(media):
            media.append(m)
        index.append(at)
    return media, index


def _mask(spans: Sequence[LossSpan], length: int) -> np.ndarray:
    """bool [L]: is the token in a loss span?"""
    inside = np.zeros(length, dtype=bool)
    for s in spans:
        inside[s.start : s.stop] = True
    return inside


def _check_spans(spans: Sequence[LossSpan], length: int) -> None:
    for i, s in enumerate(spans):
        if not 0 <= s.start <= s.stop <= length:
            raise LayoutError(
                f"processor: loss_spans[{i}] [{s.start}, {s.stop}) is out of range, there are {length} ids. "
                "Fix: count in the ids as given",
                "MM201",
                (s.start, s.stop),
            )


def _ids(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentError(
            f"processor: ids have shape {list(array.shape)} and dtype {array.dtype}, "
            "expected integers [n]. Fix: pass token ids"
        )
    return array.astype(np.int64)


def _logprobs(values: Any, count: int) -> np.ndarray | None:
    if values is None:
        return None
    array = np.asarray(values, dtype=np.float32)
    if array.shape != (count,):
        raise ArgumentError(
            f"processor: rollout_logprobs has shape {list(array.shape)}, expected [{count}]. "
            "Fix: one value for each sampled token"
        )
    return array


def _joined_logprobs(sample: Sample, more: Any, count: int) -> np.ndarray | None:
    """The logprobs of all turns, or None if a turn has none."""
    new, old = _logprobs(more, count), sample.rollout_logprobs
    if new is None and not count:
        return old
    if old is None and not sample.num_loss_tokens:
        return new
    return None if new is None or old is None else np.concatenate([old, new])
