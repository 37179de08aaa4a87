"""`class Trainer(MmpackDPO, DPOTrainer)` and `class Trainer(MmpackSFT, SFTTrainer)`: their forwards on packed batches.

Rows are those of TRL's own collators, [B, S]. TRL calls its models with `fused_lm_head=True`, and gets values per label
[B, S - 1]: here its fused head reads the loss rows of a pack. Losses and metrics are TRL's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, ClassVar

import torch

from mmpack.adapters.loss_values import rectangle
from mmpack.adapters.transformers.attention import attach
from mmpack.adapters.transformers.inputs import model_inputs
from mmpack.adapters.transformers.rope import pack_shared
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.adapters.trl.batch_rows import media_of_rows, pictures_of, rows_to_samples
from mmpack.adapters.trl.mixin import TrainerMixin
from mmpack.errors import ModelError

# what a packed forward makes itself of the ids
MADE = {"use_cache", "mm_token_type_ids", "token_type_ids", "output_router_logits"}


class _FusedHead(TrainerMixin):
    """What both have in common: the forward of a pack in the place of a rectangle's."""

    _tested = "1.15 to 1.16"

    def __init__(self, *args: Any, **kwargs: Any):
        self._check_trl("trl")
        super().__init__(*args, **kwargs)
        unpadded = getattr(self.args, "packing", False) or getattr(self, "padding_free", False)
        self._start_packing(
            [("packing or padding_free", unpadded, "turn it off: packs have no padding")]
        )

    def _packed(self, model: Any) -> Callable[..., Any]:
        return functools.partial(self._forward, model)

    def _forward(
        self, model: Any, *, labels: Any = None, fused_lm_head: bool = False, **inputs: Any
    ) -> Any:
        """TRL's output of its fused head, from a pack of the rows."""
        if not fused_lm_head:
            return model(**inputs) if labels is None else model(**inputs, labels=labels)
        ids, mask, family = (
            inputs.pop("input_ids"),
            inputs.pop("attention_mask"),
            self._mmpack_family,
        )
        pixels, grids = inputs.pop("pixel_values", None), inputs.pop("image_grid_thw", None)
        sizes, places = inputs.pop("image_sizes", None), inputs.pop("image_position_ids", None)
        for name in inputs.keys() - MADE:
            raise ModelError(
                f"{self._mixin().__name__}: {name} is not supported in a packed batch. "
                f"Fix: train this model with plain {self._trainer}"
            )
        each = None if grids is None else iter(grids.tolist())
        rows = [] if pixels is None else [*zip(ids.cpu(), mask.cpu().bool(), strict=True)]
        counts = [pictures_of(row[kept].numpy(), family, each) for row, kept in rows]
        media = media_of_rows(pixels, grids, counts, family, sizes, places)
        samples = rows_to_samples(ids, mask, 1, family, media, labels != -100)
        batch = pack_shared(samples, model).to(ids.device)
        loss_rows = batch.loss_rows.long()

        def at_loss_rows(module: Any, args: Any, output: Any) -> Any:
            output.last_hidden_state = output.last_hidden_state[:, loss_rows]
            return output

        with self.accelerator.autocast(), attach(model):
            features = self._features_of(model, batch)
            given = model_inputs(batch, model, self._vision, features=features)
            hook = unwrap(model, self._mixin().__name__).base_model.register_forward_hook(
                at_loss_rows
            )
            try:
                out = model(**given, shift_labels=batch.loss_targets[None], fused_lm_head=True)
            finally:
                hook.remove()
        self._count(batch, samples, ids.shape[1])
        starts = (mask.cpu().argmax(dim=1) - 1).tolist()  # a label stands before its token

        def padded(values: Any) -> Any:
            shaped = torch.is_tensor(values) and values.ndim == 2
            return rectangle(values[0], batch, starts, ids.shape[1] - 1) if shaped else values

        return type(out)(**{f.name: padded(getattr(out, f.name)) for f in fields(out)})


class MmpackDPO(_FusedHead):
    """Mix in before `trl.DPOTrainer`; takes its arguments. `mmpack_stats` adds up what was computed.

    A prompt and its pictures are computed once for chosen and rejected, in the policy's and the reference's pass.
    `feature_bytes`: as of `MmpackGRPO`. Every `loss_type` is TRL's own code. TRL 1.15 or newer.

    Raises, when built: as `MmpackGRPO` does, and ModelError for `padding_free`.
    """

    _trainer = "DPOTrainer"
    _methods: ClassVar = {
        "_compute_loss": ("model", "inputs", "return_outputs"),
        "compute_ref_log_probs": ("model", "inputs"),
    }

    precompute_ref_logps: bool

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        held = self.precompute_ref_logps
        if not held:
            chosen, rejected = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
            inputs = {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        self.precompute_ref_logps = True
        try:
            return super()._compute_loss(self._packed(model), inputs, return_outputs)
        finally:
            self.precompute_ref_logps = held

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
        built = hasattr(self, "mmpack_stats")  # what TRL precomputes while it is built is stock
        return super().compute_ref_log_probs(self._packed(model) if built else model, inputs)


class MmpackSFT(_FusedHead):
    """Mix in before `trl.SFTTrainer`; takes its arguments. `mmpack_stats` adds up what was computed.

    Rows are packed without padding, prefixes and pictures that rows of a batch share once. Placeholders of pictures are
    no labels; stock TRL scores them unless `completion_only_loss` or `assistant_only_loss` is on. TRL 1.15 or newer.

    Raises, when built: as `MmpackGRPO` does, and ModelError for `packing` and `padding_free`.
    """

    _trainer = "SFTTrainer"
    _methods: ClassVar = {"compute_loss": ("model", "inputs", "num_items_in_batch")}

    data_collator: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        placeholders = [*self._mmpack_family.placeholder_ids.values()]
        self.data_collator = _TextLabels(self.data_collator, placeholders)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(self._packed(model), inputs, *args, **kwargs)


class _TextLabels:
    """A collator whose labels are -100 at placeholders."""

    def __init__(self, collator: Any, placeholders: Sequence[int]):
        self.collator, self.placeholders = collator, torch.tensor(placeholders)

    def __call__(self, examples: Any) -> Any:
        batch = self.collator(examples)
        at = torch.isin(batch["input_ids"], self.placeholders)
        batch["labels"] = batch["labels"].masked_fill(at, -100)
        return batch
