"""OpenRLHF's Actor on packed, prefix-shared batches: its `forward`, which all of PPO's logprobs come from.

Rows are sequences [B, T]; column j of the actions [B, A] speaks of token T - A + j.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from mmpack.adapters.handle import Handle
from mmpack.adapters.openrlhf.rows import rows_to_samples
from mmpack.adapters.transformers.attention import attach, refuse_unpackable
from mmpack.adapters.transformers.logprobs import packed_logprobs
from mmpack.adapters.transformers.rope import pack_shared
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import ModelError
from mmpack.families import family_of_config
from mmpack.packing.batch import Batch
from mmpack.schema.sample import Sample

WHERE = "OpenRLHF actor"


class ActorHandle(Handle):
    """An OpenRLHF Actor whose forward is mmpack's."""

    def __init__(self, actor: Any):
        super().__init__(actor, "forward", WHERE)
        model = unwrap(actor.model, WHERE)
        refuse_unpackable(model)
        self.family = family_of_config(model.config)
        self.start()

    def forward(
        self,
        sequences: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        return_output: bool = False,
        allgather_logits: bool = False,
        return_logprobs: bool = False,
        ring_attn_group: Any = None,
        packed_seq_lens: Any = None,
        return_entropy: bool = False,
        **mm_inputs: Any,
    ) -> Any:
        """OpenRLHF's: float32 [B, A], the logprob of each action, 0 where `action_mask` is 0.

        With `return_output` also an output, whose `entropy` float32 [B, T - 1] is in nats, and 0 where no action is.
        It has no logits: they are never made.

        Args: `sequences`, `attention_mask`: [B, T]. `action_mask`: [B, A]. `mm_inputs`: `merge_mm_train_inputs`'s.
        Raises: ModelError without an action mask, and with ring attention; LayoutError (MM104, MM107) where pictures
        and placeholders differ in number.
        """
        if action_mask is None or attention_mask is None:
            raise ModelError(
                f"{WHERE}: logits or logprobs of all tokens were asked for, and mmpack makes those of actions. "
                "Fix: pass both masks, or stop() mmpack for this pass"
            )
        if ring_attn_group is not None:
            raise ModelError(f"{WHERE}: ring attention is on. Fix: set --ds.ring_attn_size 1")
        samples = rows_to_samples(sequences, attention_mask, action_mask, mm_inputs, self.family)
        batch = pack_shared(samples, self.owner.model).to(sequences.device)
        # a rank without a picture still runs the tower
        vision = "always" if _ranks() > 1 else "auto"
        model, temperature = self.owner.model, self.owner.temperature
        with attach(model):
            values = packed_logprobs(model, batch, temperature, vision, entropy=return_entropy)
        self.stats.update(batch.stats)
        logprobs, entropy = values if isinstance(values, tuple) else (values, None)
        columns = action_mask.shape[1]
        actions = _rectangle(logprobs, batch, samples, sequences.shape[1] - columns, columns)
        if not return_output:
            return actions
        output = CausalLMOutputWithPast()
        if entropy is not None:
            output.entropy = _rectangle(entropy, batch, samples, 1, sequences.shape[1] - 1)
        return actions, output


def use(actor: Any) -> ActorHandle:
    """Let an OpenRLHF `Actor` (policy or reference) compute logprobs and entropies through mmpack, from now on.

    `use(actor)` for good, `with use(actor): …`, or `handle.stop()`. Its model may be in DeepSpeed's engine already, or
    come into one later. The loss, its corrections, KL and metrics stay OpenRLHF's: they are fed with logprobs that
    agree with stock ones within the contract ("one model, two layouts": 1e-5 in fp32).

    Raises: ModelError for an actor that is used already, and for a model that can't be packed; LayoutError (MM006) for
    one of no known family.
    """
    return ActorHandle(actor)


def _rectangle(
    values: torch.Tensor, batch: Batch, samples: list[Sample], first: int, columns: int
) -> torch.Tensor:
    """Values [N] of loss tokens as [B, columns], whose column 0 is token `first` of the row; 0 elsewhere."""
    starts = [b * columns - first + s.metadata["start"] for b, s in enumerate(samples)]
    counts = torch.tensor(batch.loss_counts, device=values.device)
    at = torch.repeat_interleave(torch.tensor(starts, device=values.device), counts)
    out = values.new_zeros(len(samples) * columns)
    return out.index_copy(0, at + batch.loss_token_index.long(), values).view(-1, columns)


def _ranks() -> int:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1
