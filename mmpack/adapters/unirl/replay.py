"""`replay` of UniRL's AR stages, [total tokens]: all of its algorithms, trainers and anchors get logprobs from it.

A row is a prompt [B, P], padded right, with its pictures, and a response: a part of the segment's tokens [total].
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary
from unirl.models.qwen3.ar import Qwen3ARStage
from unirl.models.qwen_vl.ar import QwenVLARStage
from unirl.models.types.replay_result import ReplayResult

from mmpack.adapters.checks import valid_tokens
from mmpack.adapters.handle import Handle
from mmpack.adapters.processed_media import media_of_inputs
from mmpack.adapters.row_sample import row_sample
from mmpack.adapters.transformers.attention import attach, refuse_unpackable
from mmpack.adapters.transformers.heads import Asked, head_of, logit_cap, read_in_forward, reader
from mmpack.adapters.transformers.inputs import model_inputs
from mmpack.adapters.transformers.rope import pack_shared
from mmpack.adapters.transformers.unwrap import unwrap
from mmpack.errors import ArgumentError, ModelError
from mmpack.families import FAMILIES, family_of_config
from mmpack.families.qwen3 import QWEN3
from mmpack.families.register import register_family
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample

WHERE = "UniRL replay"
if QWEN3.name not in FAMILIES:
    register_family(QWEN3)


class Replay(Handle):
    """A UniRL stage whose replay is mmpack's, logits never made. Sampling (`autoregress`) stays UniRL's."""

    def __init__(self, stage: Any):
        super().__init__(stage, WHERE, "replay")
        if not isinstance(stage, QwenVLARStage | Qwen3ARStage):
            raise ModelError(
                f"{WHERE}: {type(stage).__name__} scores in a way of its own. Fix: leave mmpack out, or train "
                "Qwen2.5-VL, Qwen3 or Qwen3-MoE (QwenVLARStage, Qwen3ARStage)"
            )
        model = unwrap(stage.model.transformer, WHERE)
        refuse_unpackable(model)
        self.family = family_of_config(model.config)
        # pixels [patches, patch_dim] -> their media, while a step holds them: hashed once for all passes
        self.media = WeakIdKeyDictionary()
        self.start()

    def replay(
        self,
        conditions: Any,
        *,
        segment: Any,
        temperature: float = 1.0,
        return_values: bool = False,
    ) -> Any:
        """UniRL's: float32 [total tokens], the logprob of each response token; with `return_values` a `ReplayResult`.

        Raises: ModelError for values of a model without a value head; as `samples`.
        """
        whole = self.owner.model.transformer
        model = unwrap(whole, WHERE)
        values = getattr(model, "value_head", None) if return_values else None
        if return_values and values is None:
            raise ModelError(
                f"{WHERE}: values were asked for, and the model has no value head. Fix: set use_value_head=True "
                "in the pipeline's config"
            )
        device = next(model.parameters()).device
        batch = pack_shared(self.samples(conditions, segment), model).to(device)
        head = head_of(model)
        asked = Asked(temperature if temperature > 0 else 1.0)
        logprobs = reader(head, batch, asked, logit_cap(model))

        def read(hidden: torch.Tensor) -> torch.Tensor:
            own = logprobs(hidden)
            if values is None:
                return own
            rows = hidden.reshape(-1, hidden.shape[-1])[batch.loss_rows.long()]
            return torch.cat([own, values(rows)])

        with attach(model), self._autocast(device):
            made = read_in_forward(whole, model, head, read, model_inputs(batch, whole))
        self.stats.update(batch.stats)
        made = made.to(getattr(self.owner, "logprob_dtype", torch.float32))
        if values is None:
            return made
        own, valued = made.chunk(2)
        return ReplayResult(log_probs=own, values=valued.float())

    def samples(self, conditions: Any, segment: Any) -> list[Sample]:
        """One sample per row; every token of its response is scored, as UniRL does: `loss_mask` is the loss's.

        Raises: ArgumentError without prompts or tokens, and for an attention mask with holes; LayoutError (MM104,
        MM107) where pictures and placeholders differ in number.
        """
        prompt = conditions.prompt
        if prompt is None or prompt.input_ids is None or prompt.attention_mask is None:
            raise ArgumentError(f"{WHERE}: conditions.prompt has no ids. Fix: pass those of embed")
        if segment.tokens is None or segment.cu_seqlens is None:
            raise ArgumentError(f"{WHERE}: the segment has no tokens. Fix: use TextSegment.pack")
        ids = prompt.input_ids.cpu().numpy()
        mask = prompt.attention_mask.cpu().numpy().astype(bool)
        tokens, out = segment.tokens.cpu().numpy(), list[Sample]()
        pixels, grids = (
            getattr(conditions, name, None) or [None] * len(ids)
            for name in ("pixel_values", "image_grid_thw")
        )
        for b, (start, stop) in enumerate(pairwise(segment.cu_seqlens.tolist())):
            where = f"{WHERE}: row {b}"
            own = ids[b, valid_tokens(mask[b], where, "pad prompts at one end only")]
            row = np.concatenate([own, tokens[start:stop]])
            out.append(
                row_sample(
                    where,
                    row,
                    self._media(pixels[b], grids[b], where),
                    np.arange(len(row)) >= len(own),
                    self.family,
                    response_start=len(own),
                    sample_id=str(b),
                    group_id=str(b),
                )
            )
        return out

    def _media(self, pixels: Any, grids: Any, where: str) -> dict[str, list[Medium]]:
        if pixels is None:
            return {"image": [], "video": []}
        found = self.media.get(pixels)
        if found is None:
            # detached: a view of the tensor would keep it
            given = {"pixel_values": pixels.detach(), "image_grid_thw": grids}
            found = self.media[pixels] = media_of_inputs(given, self.family, where)
        media: dict[str, list[Medium]] = found
        return media

    def _autocast(self, device: torch.device) -> Any:
        """That of Qwen3's stage; Qwen2.5-VL's has none."""
        dtype = getattr(self.owner, "autocast_dtype", None)
        half = dtype in (torch.float16, torch.bfloat16) and device.type == "cuda"
        return torch.autocast("cuda", dtype) if half else nullcontext()
