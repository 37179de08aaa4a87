"""`mmpack smoke --inject CAUSE`: one side is broken on purpose, and the run must name the cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmpack.demo import injection as broken
from mmpack.processors.wrap import Processor
from mmpack.schema.sample import Sample

if TYPE_CHECKING:
    from mmpack.demo.job import Job

    Base = Job
else:
    Base = object


class Injecting(Base):
    """Goes before a Job class. A cause of the layout is put into the train side, or into what the policy sampled."""

    @property
    def cause(self) -> str:
        assert self.options.inject is not None  # else this class is not taken
        return self.options.inject

    def wrap(self, hf_processor: Any) -> Processor:
        right = super().wrap(hf_processor)
        return broken.broken_processor(
            self.cause, hf_processor, right.parts.position_rule, self.sampling
        )

    def roll(self) -> list[Sample]:
        rollouts = super().roll()
        if self.cause == "sampled_placeholder":
            broken.sampled_placeholder(rollouts)
        return rollouts

    def train_sample(self, b: int) -> Sample:
        rolled, messages = self.rollouts[b], self.messages[b // self.options.n]
        kept = rolled.input_ids[rolled.loss_indices]
        response = broken.broken_response(self.cause, kept, self.hf_processor.tokenizer)
        sample = self.trained(b, broken.broken_messages(self.cause, messages), response)
        return broken.broken_sample(self.cause, sample, max(len(s) for s in self.rollouts))
