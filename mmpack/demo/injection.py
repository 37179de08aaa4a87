"""`mmpack smoke --inject CAUSE`: the train side broken on purpose, by the mechanism that breaks it in practice."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

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


class Injecting(Base):
    """Goes before a Job class. A cause of the layout is put into the train side, or into what the policy sampled."""

    def wrap(self, hf_processor: Any) -> Processor:
        """A processor whose settings differ."""
        right: Processor = super().wrap(hf_processor)
        rule = right.parts.position_rule
        made = partial(
            wrap_processor, hf_processor, position_rule=rule, video_settings=self.sampling
        )
        if self.options.inject == "chat_template":
            template = "{%- set unused = 0 -%}" + hf_processor.chat_template
            return made(chat_template=template.replace("assistant", "expert", 1))
        if self.options.inject == "max_pixels":
            right, settings = made(), right.settings["image"]
            least, most = settings["min_pixels"], settings["max_pixels"]
            size = {"shortest_edge": least, "longest_edge": max(least, most // 4)}
            right.parts.image_processor = type(hf_processor.image_processor)(size=size)
        return right

    def roll(self) -> list[Sample]:
        """The policy emits a placeholder: the first response that is long enough gets one, in place."""
        rollouts = super().roll()
        spans = ((s, s.loss_spans[0]) for s in rollouts)
        long = ((s, span.start) for s, span in spans if span.stop - span.start > 1)
        if self.options.inject == "sampled_placeholder" and (found := next(long, None)):
            sample, start = found
            sample.input_ids[start] = get_family(sample.family).image_token_id
        return rollouts

    def train_sample(self, b: int) -> Sample:
        cause, rolled = self.options.inject, self.rollouts[b]
        messages = self.messages[b // self.options.n]
        response = rolled.input_ids[rolled.loss_indices]
        if cause == "dropped_image":
            messages = without_last_picture(messages)
        elif cause == "retokenized_response":  # text decoded and encoded again
            tokenizer = self.hf_processor.tokenizer
            again = tokenizer(tokenizer.decode(response.tolist()), add_special_tokens=False)
            response = np.asarray(again["input_ids"], dtype=np.int64)
        sample = self.trained(b, messages, response)
        if cause == "loss_mask_shift":
            for span in sample.loss_spans:
                span.start, span.stop = span.start - 1, span.stop - 1
        elif cause == "padding_positions" and sample.position_ids is not None:
            pad = max(len(s) for s in self.rollouts) - len(sample)  # as in a rectangle of all
            sample.position_ids = sample.position_ids + pad
            sample.metadata["padding"] = [pad, 0]
        elif cause == "double_expansion" and sample.modality_spans:
            expand_again(sample)
        return sample


def without_last_picture(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last picture of the conversation is lost."""
    out = list(messages)
    for m, message in reversed(list(enumerate(messages))):
        parts = message["content"]
        pictures = [i for i, part in enumerate(parts) if part["type"] == "image"]
        if pictures:
            out[m] = message | {"content": [p for i, p in enumerate(parts) if i != pictures[-1]]}
            break
    return out


def expand_again(sample: Sample) -> None:
    """Each id of an expanded run is taken for a whole picture: n ids become n · n."""
    repeats = np.ones(len(sample), dtype=np.int64)
    for s in sample.modality_spans:
        repeats[s.start : s.stop] = sample.media[s.media_index].num_tokens
    moved = np.concatenate([[0], np.cumsum(repeats)])
    sample.input_ids = np.repeat(sample.input_ids, repeats)
    sample.position_ids = sample.attention_mask = None
    spans: list[LossSpan | ModalitySpan] = [*sample.modality_spans, *sample.loss_spans]
    for span in spans:
        span.start, span.stop = int(moved[span.start]), int(moved[span.stop])
