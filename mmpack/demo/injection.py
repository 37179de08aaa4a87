"""`mmpack smoke --inject CAUSE`: the train side broken on purpose, by the mechanism that breaks it in practice."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from mmpack.errors import ArgumentError
from mmpack.families import get_family
from mmpack.parity.fixes import Injected
from mmpack.processors.wrap import Processor, wrap_processor
from mmpack.schema.sample import Sample
from mmpack.schema.spans import LossSpan, ModalitySpan

if TYPE_CHECKING:
    from mmpack.demo.job import Job

    Base = Job
else:
    Base = object

CAUSES: tuple[str, ...] = get_args(Injected)


def broken_processor(
    cause: str,
    hf_processor: Any,
    position_rule: str = "grid",
    video_settings: Mapping[str, Any] | None = None,
) -> Processor:
    """A wrapped processor whose settings differ, for the causes that are settings; else the right one."""
    if cause not in CAUSES:
        raise ArgumentError(f"inject: {cause!r} is unknown. Fix: use one of {', '.join(CAUSES)}")
    wrap = partial(
        wrap_processor, hf_processor, position_rule=position_rule, video_settings=video_settings
    )
    if cause == "chat_template":
        template = "{%- set unused = 0 -%}" + hf_processor.chat_template
        return wrap(chat_template=template.replace("assistant", "expert", 1))
    right = wrap()
    if cause == "max_pixels":
        settings = right.settings["image"]
        size = {
            "shortest_edge": settings["min_pixels"],
            "longest_edge": max(settings["min_pixels"], settings["max_pixels"] // 4),
        }
        right.parts.image_processor = type(hf_processor.image_processor)(size=size)
    return right


def broken_messages(cause: str, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`dropped_image`: the last picture of the conversation is lost."""
    out = copy.copy(list(messages))
    if cause == "dropped_image":
        for m in range(len(out) - 1, -1, -1):
            parts = out[m]["content"]
            pictures = [i for i, part in enumerate(parts) if part["type"] == "image"]
            if pictures:
                kept = [part for i, part in enumerate(parts) if i != pictures[-1]]
                out[m] = out[m] | {"content": kept}
                break
    return out


def sampled_placeholder(rollouts: Sequence[Sample]) -> None:
    """The policy emits a placeholder: the first response that is long enough gets one, in place."""
    for sample in rollouts:
        span = sample.loss_spans[0]
        if span.stop - span.start > 1:
            sample.input_ids[span.start] = get_family(sample.family).image_token_id
            return


def broken_response(cause: str, ids: np.ndarray, tokenizer: Any) -> np.ndarray:
    """`retokenized_response`: text decoded and encoded again."""
    if cause != "retokenized_response":
        return ids
    text = tokenizer.decode(ids.tolist())
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


def broken_sample(cause: str, sample: Sample, width: int) -> Sample:
    """Breaks that happen after processing. `width`: tokens of the rectangle that the sample was padded to."""
    if cause == "loss_mask_shift":
        sample.loss_spans = [
            LossSpan(s.start - 1, s.stop - 1, s.kind, s.turn) for s in sample.loss_spans
        ]
    elif cause == "padding_positions" and sample.position_ids is not None:
        pad = width - len(sample)
        sample.position_ids = sample.position_ids + pad
        sample.metadata["padding"] = [pad, 0]
    elif cause == "double_expansion" and sample.modality_spans:
        _expand_again(sample)
    return sample


def _expand_again(sample: Sample) -> None:
    """Each id of an expanded run is taken for a whole picture: n ids become n · n."""
    repeats = np.ones(len(sample), dtype=np.int64)
    for s in sample.modality_spans:
        repeats[s.start : s.stop] = sample.media[s.media_index].num_tokens
    moved = np.concatenate([[0], np.cumsum(repeats)])
    sample.input_ids = np.repeat(sample.input_ids, repeats)
    sample.position_ids = sample.attention_mask = None
    sample.modality_spans = [
        ModalitySpan(int(moved[s.start]), int(moved[s.stop]), s.modality, s.media_index)
        for s in sample.modality_spans
    ]
    sample.loss_spans = [
        LossSpan(int(moved[s.start]), int(moved[s.stop]), s.kind, s.turn) for s in sample.loss_spans
    ]


class Injecting(Base):
    """Goes before a Job class. A cause of the layout is put into the train side, or into what the policy sampled."""

    @property
    def cause(self) -> str:
        assert self.options.inject is not None  # else this class is not taken
        return self.options.inject

    def wrap(self, hf_processor: Any) -> Processor:
        right = super().wrap(hf_processor)
        return broken_processor(self.cause, hf_processor, right.parts.position_rule, self.sampling)

    def roll(self) -> list[Sample]:
        rollouts = super().roll()
        if self.cause == "sampled_placeholder":
            sampled_placeholder(rollouts)
        return rollouts

    def train_sample(self, b: int) -> Sample:
        rolled, messages = self.rollouts[b], self.messages[b // self.options.n]
        kept = rolled.input_ids[rolled.loss_indices]
        response = broken_response(self.cause, kept, self.hf_processor.tokenizer)
        sample = self.trained(b, broken_messages(self.cause, messages), response)
        return broken_sample(self.cause, sample, max(len(s) for s in self.rollouts))
