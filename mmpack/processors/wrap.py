"""`wrap_processor`: one picklable object for data loaders, from messages, media and response ids to a Sample.

Ids [L] are expanded, one a vision token; each distinct medium is processed once, by content.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, LayoutError
from mmpack.families import Family, get_family
from mmpack.layout.fingerprint import cache_key, content_hash, fingerprint
from mmpack.layout.mrope import mrope_positions
from mmpack.layout.runs import placeholder_runs
from mmpack.processors.cache import MediaCache, Processed
from mmpack.processors.images import rgb_pixels
from mmpack.processors.settings import describe, text_hash, vocabulary_hash
from mmpack.schema.media import Medium
from mmpack.schema.sample import RESPONSE_TEXT_KEY, Sample
from mmpack.schema.spans import LossSpan, ModalitySpan, ObservationSpan

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

    Raises: ArgumentError where tokenizer or family are unknown.
    """
    parts = {
        "tokenizer": tokenizer or getattr(hf_processor, "tokenizer", None),
        "image_processor": image_processor or getattr(hf_processor, "image_processor", None),
        "video_processor": video_processor or getattr(hf_processor, "video_processor", None),
    }
    if parts["tokenizer"] is None:
        raise ArgumentError(
            "wrap_processor: no tokenizer. Fix: pass a processor that has one, or tokenizer="
        )
    name = family or _FAMILY_OF_CLASS.get(type(hf_processor).__name__)
    if name is None:
        raise ArgumentError(
            f"wrap_processor: the family of {type(hf_processor).__name__} is unknown. Fix: family="
        )
    template = chat_template or getattr(hf_processor, "chat_template", None)
    return Processor(
        **parts,
        family=get_family(name),
        chat_template=template or getattr(parts["tokenizer"], "chat_template", None),
        position_rule=position_rule,
        tokens_per_second=tokens_per_second,
        media_root=None if media_root is None else Path(media_root),
        cache_bytes=cache_bytes,
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
        self.tokens_per_second = tokens_per_second or family.tokens_per_second
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
            messages: chat messages; media in content parts `{"type": "image", "image": …}` (Pillow, uint8 [h, w, 3],
                bytes or a path below `media_root`), or bare `{"type": "image"}` with `media` in order.
            response_ids: the sampled ids, never decoded and encoded again; all of them are loss tokens.
            rollout_logprobs: float [n], of `response_ids`.
            fields: any other field of Sample, as it is.

        Raises: ArgumentError, LayoutError.
        """
        text = self.render(messages, **(template_kwargs or {}))
        ids = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
        given = media_of(messages, media)
        items = [self.medium(item, f"media[{i}]") for i, item in enumerate(given)]
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
            loss_spans: LossSpan or (start, stop), counted in `input_ids` as given.

        Raises: ArgumentError, LayoutError where runs and media contradict each other.
        """
        ids = _ids(input_ids)
        items = [self.medium(item, f"media[{i}]") for i, item in enumerate(media)]
        spans = [s if isinstance(s, LossSpan) else LossSpan(*s, turn=0) for s in loss_spans]
        if not expanded:
            moved = self._moved(ids, items)
            spans = [
                dataclasses.replace(s, start=int(moved[s.start]), stop=int(moved[s.stop]))
                for s in spans
            ]
            ids = self._expand(ids, items)
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
        `source`: `tool`, `environment`, `screenshot` or `user`. Raises: ArgumentError, LayoutError.
        """
        items = [self.medium(item, f"media[{i}]") for i, item in enumerate(media)]
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
            f.name: copy.copy(getattr(sample, f.name))
            for f in Sample.columns()
            if f.name not in _DERIVED
        }
        kept["observation_spans"] = observations or None
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

    def medium(self, item: Any, where: str = "media") -> Medium:
        """An image (or a Medium, taken as it is) to a Medium with pixels, grid, content hash and cache key."""
        if isinstance(item, Medium):
            return item
        if self.image_processor is None:
            raise ArgumentError(f"{where}: there is no image_processor. Fix: pass one")
        pixels, known = rgb_pixels(item, self.media_root, where)
        content = content_hash("image", pixels)
        part = self.settings["image"]
        seen = cache_key(content, (0, 0, 0), part)  # the grid follows from content and settings
        done = self.cache.get(seen)
        if done is None:
            done = self._process(pixels, part["backend"])
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

    def _process(self, pixels: np.ndarray, backend: str) -> Processed:
        from PIL import Image

        kind = "np" if backend == "pil" else "pt"
        out = self.image_processor(images=[Image.fromarray(pixels)], return_tensors=kind)
        t, h, w = (int(n) for n in out["image_grid_thw"][0])
        return Processed((t, h, w), np.asarray(out["pixel_values"]))

    def _expand(self, ids: np.ndarray, items: Sequence[Medium]) -> np.ndarray:
        """Repeat the one placeholder of each medium once a vision token."""
        return np.repeat(ids, self._repeats(ids, items))

    def _moved(self, ids: np.ndarray, items: Sequence[Medium]) -> np.ndarray:
        """int64 [L+1]: where each index of unexpanded ids lies after expansion."""
        return np.concatenate([[0], np.cumsum(self._repeats(ids, items))])

    def _repeats(self, ids: np.ndarray, items: Sequence[Medium]) -> np.ndarray:
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
        policy = np.zeros(len(ids), dtype=bool)
        for s in loss_spans:
            policy[s.start : s.stop] = True
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
            processor=settings,
            processor_fingerprint=fingerprint(settings),
            rollout_logprobs=_logprobs(logprobs, int(policy.sum())),
            metadata=metadata,
            **fields,
        )


_DERIVED = {
    "schema_version",
    "family",
    "input_ids",
    "media",
    "modality_spans",
    "loss_spans",
    "position_ids",
    "attention_mask",
    "processor",
    "processor_fingerprint",
    "rollout_logprobs",
    "observation_spans",
}


def media_of(messages: Sequence[dict[str, Any]], media: Sequence[Any] | None) -> list[Any]:
    """The media of chat messages in order: from the content parts, or from `media` where the parts are bare."""
    extra = iter(media or ())
    out = []
    for m, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, (list, tuple)) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in ("image", "video"):
                continue
            item = part.get(kind)
            if item is None:
                item = next(extra, None)
            if item is None:
                raise ArgumentError(
                    f"processor: messages[{m}] has an {kind} part without an {kind}. "
                    "Fix: put it into the part, or pass media="
                )
            out.append(item)
    left = list(extra)
    if left:
        raise ArgumentError(
            f"processor: {len(left)} of media= have no part in the messages. "
            'Fix: one {"type": "image"} part each'
        )
    return out


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
    new = _logprobs(more, count) if count else np.zeros(0, dtype=np.float32)
    old = sample.rollout_logprobs if sample.num_loss_tokens else np.zeros(0, dtype=np.float32)
    if new is None or old is None:
        return None
    return np.concatenate([old, new])
