"""`Processor`: messages or ids, media and sampled ids to a Sample; one picklable object for data loaders."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmpack.errors import LossWarning, callers_level
from mmpack.families import Family
from mmpack.layout.occurrences import context_ids
from mmpack.processors.append import Observation, Replay, append_turn
from mmpack.processors.arguments import as_ids, as_spans, check_names, template_options
from mmpack.processors.build import SETTABLE, build_sample
from mmpack.processors.cache import MediaCache
from mmpack.processors.conversation import assistant_turns, sources
from mmpack.processors.media_maker import MediaMaker
from mmpack.processors.prompts import PromptWriter
from mmpack.processors.settings import Parts
from mmpack.processors.videos import VideoReader
from mmpack.schema.ragged import Ragged
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, ObservationSpan, covered


class Processor(MediaMaker):
    """Made by `wrap_processor`; see its methods `__call__`, `from_ids` and `append`.

    `parts`: transformers' objects and their settings; `prompts`: messages to ids.
    """

    def __init__(self, parts: Parts, reader: VideoReader | None, cache_bytes: int):
        self.parts, self.reader = parts, reader
        self.prompts, self.cache = PromptWriter(parts), MediaCache(cache_bytes)

    @property
    def family(self) -> Family:
        """The model family."""
        return self.parts.family

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer."""
        return self.parts.tokenizer

    @property
    def settings(self) -> dict[str, Any]:
        """`Sample.processor`: every setting that decides the layout, as the parts have it now."""
        return self.parts.settings

    @property
    def fingerprint(self) -> str:
        """`sha256:<64 hex>` of `settings`."""
        return self.parts.fingerprint

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return self.parts.vocab_size

    def __repr__(self) -> str:
        parts = {
            "tokenizer": self.tokenizer,
            "image_processor": self.parts.image_processor,
            "video_processor": self.parts.video_processor,
            "feature_extractor": self.parts.feature_extractor,
        }
        held = [f"{k}={type(v).__name__}" for k, v in parts.items() if v is not None]
        return f"{type(self).__name__}({', '.join([repr(self.family.name), *held])})"

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
                bytes, a `data:` URL, a cell `{"bytes": …, "path": …}` or a path below `media_root`), `{"type": "image",
                "path": …}`, OpenAI's and vLLM's `image_url` and `image_pil`, or bare `{"type": "image"}` with `media`
                in order. Videos likewise, `{"type": "video", "video": …}`: bytes or a
                path; either with the plan of the other side, `(file, plan)`; frames that were sampled already (uint8
                [n, h, w, 3] or pictures), `(frames, {"fps": …})`; or a `Medium`.
            response_ids: the sampled ids, never decoded and encoded again; all of them are loss tokens.
            rollout_logprobs: float [n], of the loss tokens.
            assistant_loss: the assistant's turns among the messages are loss tokens, turn by turn, each with its end of
                turn; what stands between them are observations. Then without response_ids no generation prompt follows.
            template_kwargs: of the chat template, such as `tools` or `enable_thinking`.
            fields: any other field of Sample, as it is.

        Raises: ArgumentError, also for each part, key, tool call or keyword that the template does not write, or not
        all of; LayoutError, VideoError. Warns (TemplateWarning) where a turn begins with what only the template says,
        and where the template leaves out thoughts of earlier turns.
        """
        check_names(fields, SETTABLE, "processor", "Sample", templates=True)
        items = self.media_of(messages, media)
        follows = response_ids is not None or not assistant_loss
        given = template_options(template_kwargs, follows if assistant_loss else None)
        options = {"add_generation_prompt": follows} | given
        text = self.prompts.rendered(messages, options, scored=assistant_loss)
        turns = []
        if assistant_loss:
            turns = assistant_turns(
                lambda given, **more: self.prompts.rendered(
                    given, {**options, **more}, since=len(given)
                ),
                messages,
                text,
            )
        prompt, spans = self.prompts.encoded_turns(text, turns, items)
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
            self.parts,
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
        loss_spans: Sequence[LossSpan | tuple[int, int]] | None = None,
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
                sampled: it stands for no medium, and `validate` names it. None: nothing is trained, which is a
                LossWarning; a context passes ().
            fields: any other field of Sample, as it is (spans counted in expanded ids).

        Raises: ArgumentError, LayoutError where runs and media contradict each other.
        """
        ids = as_ids(input_ids, self.vocab_size)
        items = self.media_from(media)
        spans = as_spans(() if loss_spans is None else loss_spans, len(ids))
        if not expanded:
            sampled = covered(spans, len(ids))
            context = context_ids(ids, sampled, self.family)
            whole, moved = self.prompts.expanded(context, items)
            whole[moved[:-1][sampled]] = ids[sampled]
            spans = [
                dataclasses.replace(s, start=int(moved[s.start]), stop=int(moved[s.stop]))
                for s in spans
            ]
            ids = whole
        if loss_spans is None:
            warnings.warn(
                f"from_ids: {sample_id!r:.60} has no loss_spans, so nothing of it is trained. "
                "Fix: pass the spans of sampled ids, or loss_spans=() for a context",
                LossWarning,
                stacklevel=callers_level(),
            )
        return build_sample(
            self.parts, ids, items, spans, sample_id=sample_id, group_id=group_id, **fields
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

    def render(self, messages: Sequence[dict[str, Any]], **template_kwargs: Any) -> str:
        """The prompt's text by the chat template, one placeholder per medium, with the generation prompt.

        Raises: ArgumentError, also for a part, a key, a tool call or a keyword that the template does not write.
        """
        return self.prompts.rendered(messages, template_kwargs)
