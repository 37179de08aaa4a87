"""What a step must compute at the least: its FLOPs, counted from the model's layers and the batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from mmpack.adapters.transformers.modules import decoder_layers, tower_blocks, tower_of
from mmpack.adapters.transformers.tower_attention import sequence_lengths

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Work:
    """What one micro-batch runs.

    `rows`: through the text model. `pairs`: of a query and a key that it sees. `scored`: rows through the head.
    `grids`: of the media that the tower encodes, (t, h, w) in patches. `kept_layers`, `kept_blocks`: the last ones of
    decoder and tower, whose forward does not run again.
    """

    rows: int
    pairs: int
    scored: int
    grids: list[Grid]
    kept_layers: int = 0
    kept_blocks: int = 0

    @property
    def patches(self) -> int:
        return sum(t * h * w for t, h, w in self.grids)


@dataclass(frozen=True)
class Flops:
    """FLOPs of a training step by part; a product's multiplication and addition count as two.

    `left_out`: of them, what torch's checkpoint does not run again: a layer's last product.
    """

    layers: float
    attention: float
    head: float
    tower: float
    tower_attention: float
    left_out: float

    @property
    def total(self) -> float:
        return self.layers + self.attention + self.head + self.tower + self.tower_attention


# A product's backward is two products, attention's five to its forward's two, since it makes the scores again.
_PRODUCT, _ATTENTION = 3, 3.5


def step_flops(model: Any, works: Iterable[Work], head_again: bool = True) -> Flops:
    """FLOPs of forward, backward, and the forward that checkpointed layers run again, of all micro-batches.

    Args: `model`: a Qwen-VL of transformers. `head_again`: the backward makes the logits again.
    """
    each = [_flops(model, work, head_again) for work in works]
    return Flops(*(sum(getattr(f, part.name) for f in each) for part in fields(Flops)))


def _flops(model: Any, work: Work, head_again: bool) -> Flops:
    text, vision = model.config.get_text_config(), model.config.vision_config
    tower: Any = tower_of(model.model)
    heads = text.num_attention_heads
    depth = getattr(text, "head_dim", None) or text.hidden_size // heads
    layers, blocks = list[Any](decoder_layers(model)), list[Any](tower_blocks(model))
    again = layers[: len(layers) - work.kept_layers]
    again_blocks = blocks[: len(blocks) - work.kept_blocks]
    row, patch = 2.0 * work.rows, 2.0 * work.patches
    merged = patch / vision.spatial_merge_size**2
    mergers = [module for name, module in tower.named_children() if "merger" in name]
    pairs = 4.0 * work.pairs * heads * depth
    seen = tower_pairs(vision, work.grids)
    width = blocks[0].attn.qkv.in_features
    return Flops(
        layers=row * (_PRODUCT * _weights(layers) + _weights(again)),
        attention=pairs * (_ATTENTION * len(layers) + len(again)),
        head=(_PRODUCT + head_again) * 2.0 * work.scored * model.lm_head.weight.numel(),
        tower=patch * (_PRODUCT * _weights(blocks) + _weights(again_blocks))
        + merged * _PRODUCT * _weights(mergers)
        # the first product has no gradient of the pixels
        + 2 * patch * tower.patch_embed.proj.weight.numel(),
        tower_attention=4.0 * width * (_ATTENTION * sum(seen) + sum(seen[: len(again_blocks)])),
        left_out=row * _weights(map(_last, again)) + patch * _weights(map(_last, again_blocks)),
    )


def tower_pairs(vision: Any, grids: Iterable[Grid]) -> list[int]:
    """Pairs of patches that see each other in each of the tower's blocks: within windows, or within whole frames."""
    grids = torch.tensor(list(grids), dtype=torch.int64).reshape(-1, 3)
    if not len(grids):
        return [0] * vision.depth
    frames, windows = sequence_lengths(vision, grids)
    if windows is None:
        return [int((frames**2).sum())] * vision.depth
    whole, cut = (int((lengths**2).sum()) for lengths in (frames, windows))
    return [whole if b in vision.fullatt_block_indexes else cut for b in range(vision.depth)]


def _last(layer: Any) -> Any:
    """A layer's last linear one."""
    return [m for m in layer.modules() if isinstance(m, torch.nn.Linear)][-1]


def _weights(modules: Iterable[Any]) -> int:
    """Entries of all linear layers' weights."""
    return sum(
        layer.weight.numel()
        for module in modules
        for layer in module.modules()
        if isinstance(layer, torch.nn.Linear)
    )
