"""OpenRLHF's Actor on packed, prefix-shared batches: its `forward`, which all of PPO's logprobs come from.

Rows are sequences [B, T]; column j of the actions [B, A] speaks of token T - A + j.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from mmpack.adapters.checks import valid_tokens
from mmpack.adapters.handle import Handle
from mmpack.adapters.loss_values import rectangle
from mmpack.adapters.row_sample import row_sample
from mmpack.adapters.transformers.attention import attach, refuse_unpackable
from mmpack.adapters.transformers.logprobs import packed_logprobs
from mmpack.adapters.transformers.rope import pack_shared
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.adapters.trl.batch_rows import media_of_rows, pictures_of
from mmpack.errors import LayoutError, ModelError
from mmpack.families import Family, family_of_config
from mmpack.layout.occurrences import context_ids
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample

WHERE = "OpenRLHF actor"


class ActorHandle(Handle):
    """An OpenRLHF Actor whose forward is mmpack's."""

    def __init__(self, actor: Any):
        super().__init__(actor, WHERE, "forward")
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
        length, starts = sequences.shape[1], [s.metadata["start"] for s in samples]
        own = [start - length + columns for start in starts]
        actions = rectangle(logprobs, batch, own, columns)
        if not return_output:
            return actions
        output = CausalLMOutputWithPast()
        if entropy is not None:
            output.entropy = rectangle(entropy, batch, [s - 1 for s in starts], length - 1)
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


def _ranks() -> int:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


# ---- rows as samples --------------------------------------------------------------------------------

PIXELS = ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids")
# follow from ids and grids
UNREAD = ("mm_token_type_ids", "token_type_ids", "num_soft_tokens_per_image")


def rows_to_samples(
    sequences: torch.Tensor,
    attention_mask: torch.Tensor,
    action_mask: torch.Tensor,
    mm_inputs: Mapping[str, Any],
    family: Family,
) -> list[Sample]:
    """One sample per row: its loss tokens are its actions, and `metadata["start"]` is the column of its first token.

    Args: `sequences`, `attention_mask`: [B, T]. `action_mask`: [B, A], of the last A tokens. `mm_inputs`: pixels and
    grids of all rows' pictures, one after the other.
    Raises: ModelError for other inputs than pictures, and for pictures of several tiles; LayoutError (MM104, MM107)
    where pictures and placeholders differ in number; ArgumentError for an attention mask with holes.
    """
    ids, mask = sequences.cpu().numpy(), attention_mask.cpu().numpy().astype(bool)
    scored = np.zeros_like(mask)
    scored[:, ids.shape[1] - action_mask.shape[1] :] = action_mask.cpu().numpy().astype(bool)
    scored &= mask
    names = [f"{WHERE}: row {b}" for b in range(len(ids))]
    kept = [
        valid_tokens(own, name, "pad at the end only")
        for name, own in zip(names, mask, strict=True)
    ]
    rest = _pictures(mm_inputs, family)
    pictures, out = len(rest), []
    for b, own in enumerate(kept):
        row, actions = ids[b, own], scored[b, own]
        grids = (medium.grid_thw for medium in rest)
        count = pictures_of(context_ids(row, actions, family), family, grids)
        images, rest = rest[:count], rest[count:]
        begin = np.flatnonzero(actions)[:1].tolist() or [len(row)]
        out.append(
            row_sample(
                names[b],
                row,
                {"image": images, "video": []},
                actions,
                family,
                response_start=begin[0],
                sample_id=str(b),
                group_id=str(b),
                metadata={"start": own.start},
            )
        )
    if rest and family.pixel_layout == "tiles":
        raise ModelError(
            f"{WHERE}: {family.name} cut pictures into tiles, and OpenRLHF does not keep how many each has. "
            "Fix: make one tile per picture, by the processor's settings"
        )
    if rest:
        raise LayoutError(
            f"{WHERE}: {pictures} pictures came, {len(rest)} more than the rows have placeholders for "
            "(dropped_image). Fix: keep each row with its own media",
            "MM107",
        )
    return out


def _pictures(mm_inputs: Mapping[str, Any], family: Family) -> list[Medium]:
    """The pictures of all rows, in their order. Equal pixels of equal grids get one cache key."""
    given = {k: v for k, v in mm_inputs.items() if v is not None and k not in UNREAD}
    unknown = sorted(given.keys() - set(PIXELS))
    if unknown:
        raise ModelError(
            f"{WHERE}: {unknown[0]} has no place in a packed batch. Fix: train this model without mmpack"
        )
    pixels, grids, sizes, places = (given.get(name) for name in PIXELS)
    if pixels is None:
        return []
    count = len(pixels) if grids is None else len(grids)
    [media] = media_of_rows(pixels, grids, [count], family, sizes, places, where=WHERE)
    return media
