"""`Trainer(model, data_collator=SampleCollator(model), …)`: a data set of samples, trained by a stock Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from mmpack.adapters.transformers.attention import attach_in_forwards, is_attached
from mmpack.adapters.transformers.guards import IGNORED
from mmpack.adapters.transformers.linear_attention import KEYWORD
from mmpack.adapters.transformers.media_inputs import pixel_inputs, token_types
from mmpack.adapters.transformers.rope import KEYWORD as ROPE_LENGTHS
from mmpack.adapters.transformers.rope import Rules, lengths_of, rope_rules, take_lengths
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import ArgumentError, ModelError
from mmpack.families import Family, family_of_config, get_family
from mmpack.packing.batch import PackedBatch
from mmpack.packing.media import held_pixels
from mmpack.packing.pack import pack
from mmpack.packing.pad import PaddedBatch, pad
from mmpack.schema.sample import Sample


class SampleCollator:
    """Samples (with pixels) to keyword arguments of the model's forward: its loss is the mean over all loss tokens.

    Batches are packed by default: the model is attached only in the forwards of such batches (`generate` has its own
    attention), and logits are made of loss rows only. `padding="left"` or `"right"` gives rectangles and leaves the
    model's own attention; families that can't be packed need it. The collator holds no model, so workers may load with
    it. The tower encodes a medium once per occurrence in the batch. `kept_ids` and `routed_experts` of the samples are
    not used.

    Args: `share_prefix`, `pad_to_multiple_of`: see `mp.pack`.
    Raises: ArgumentError; ModelError and LayoutError as `attach` does, and ModelError for padding an attached model.
    """

    def __init__(
        self,
        model: Any,
        *,
        padding: str | None = None,
        share_prefix: bool | str = False,
        pad_to_multiple_of: int | None = None,
    ):
        if padding not in (None, "left", "right") or (padding and share_prefix):
            raise ArgumentError(
                f"SampleCollator: padding is {padding!r}, share_prefix {share_prefix}. "
                "Fix: pass padding=None to pack, with or without shared prefixes, or 'left' or 'right' to pad"
            )
        if padding is None:
            attach_in_forwards(model)
        elif is_attached(model):
            raise ModelError(
                "SampleCollator: the model is attached, and a padded batch needs its own attention. "
                "Fix: detach it, or pack (padding=None)"
            )
        whole = unwrap(model, "SampleCollator")
        if padding is None and "logits_to_keep" not in inspect.signature(whole.forward).parameters:
            raise ModelError(
                f"SampleCollator: the forward of {type(whole).__name__} has no logits_to_keep, which scoring "
                "packed rows needs. Fix: pass padding='left', or call packed_logprobs in your own step"
            )
        self.family = family_of_config(whole.config).name  # a worker looks it up
        self.padding = padding
        self.rope = rope_rules(whole)
        take_lengths(whole.model)
        self.share_prefix = share_prefix
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Raises: SchemaError for broken rules, and (MM404) for missing pixels; ModelError for another family;
        ArgumentError for a batch without a loss token: the mean over none is NaN.
        """
        family = get_family(self.family)
        if self.padding is None:
            batch = pack(samples, None, self.share_prefix, self.pad_to_multiple_of)
            _refuse_no_loss(samples)
            return _common(batch, family, self.rope) | _packed(batch, family)
        padded = pad(samples, self.padding, pad_to_multiple_of=self.pad_to_multiple_of)
        _refuse_no_loss(samples)
        return _common(padded, family, self.rope) | _padded(padded, family)


def _refuse_no_loss(samples: Sequence[Sample]) -> None:
    if not any(s.num_loss_tokens for s in samples):
        names = ", ".join(s.sample_id for s in samples)
        raise ArgumentError(
            f"SampleCollator: no sample of the batch has a loss token ({names:.200}), and the mean over none is NaN. "
            "Fix: leave out samples whose num_loss_tokens is 0"
        )


def _common(batch: PackedBatch | PaddedBatch, family: Family, rules: Rules) -> dict[str, Any]:
    if batch.family != family.name:
        raise ModelError(
            f"SampleCollator: the samples are of {batch.family}, the model of {family.name}. "
            "Fix: wrap the processor of this model"
        )
    held_pixels(batch.media, "SampleCollator")
    if any(m.modality == "audio" for m in batch.media):
        raise ModelError(
            "SampleCollator: the batch has audio, whose features only model_inputs hands to a forward. "
            "Fix: call model(**model_inputs(batch, model)) in a loop of your own"
        )
    lengths = {ROPE_LENGTHS: lengths_of(batch, rules, "SampleCollator")} if rules else {}
    return {"use_cache": False} | pixel_inputs(batch) | lengths


def _packed(batch: PackedBatch, family: Family) -> dict[str, Any]:
    """Rows repeat in `logits_to_keep` where branches leave one prefix, so each has one label: its target."""
    targets = batch.loss_targets[None]
    positions = batch.position_ids[:, None]
    inputs = {
        "input_ids": batch.input_ids[None],
        "position_ids": positions if family.position_rows > 1 else positions[0],
        "visible_until": batch.visible_until,
        "attention_plan": batch.attention_plan,
        "logits_to_keep": batch.loss_rows.long(),
        "shift_labels": targets,  # what the loss reads
        # one longer than the logits: whoever shifts them, as label smoothing does, gets an error
        "labels": torch.nn.functional.pad(targets, (1, 0), value=IGNORED),
    }
    more = {KEYWORD: batch.segment_plan, "visible_from": batch.visible_from}
    return inputs | {name: x for name, x in more.items() if x is not None}


def _padded(batch: PaddedBatch, family: Family) -> dict[str, Any]:
    types = family.token_types
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "position_ids": batch.position_ids if family.position_rows > 1 else batch.position_ids[0],
        "labels": batch.input_ids.masked_fill(~batch.loss_mask, IGNORED),
    } | ({} if types is None else {types: token_types(batch.input_ids, family)})
