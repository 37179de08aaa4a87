"""What a step must compute at the least: its FLOPs, counted from the model's layers and the batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Grid = tuple[int, int, int]


@dataclass
class Work:
    """What was run, of one micro-batch or of many.

    `rows`: through the text model. `pairs`: of a query and a key that it sees. `scored`: rows through the head.
    `grids`: of the media that the tower encoded, (t, h, w) in patches.
    """

    rows: int = 0
    pairs: int = 0
    scored: int = 0
    grids: list[Grid] = field(default_factory=list)

    def add(self, other: Work) -> None:
        self.rows += other.rows
        self.pairs += other.pairs
        self.scored += other.scored
        self.grids += other.grids

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


# A product's backward is two products. A checkpointed layer runs forward once more; so does a head that keeps no
# logits. Attention's backward is five products to its forward's two, since it makes the scores again.
_PRODUCT, _AGAIN = 3, 1
_ATTENTION = 4.5


def step_flops(model: Any, work: Work, head_again: bool = True) -> Flops:
    """FLOPs of forward, backward, and the forward that checkpointed layers run again.

    Args: `model`: a Qwen-VL of transformers. `head_again`: the backward makes the logits again.
    """
    text, vision = model.config.get_text_config(), model.config.vision_config
    tower = model.model.visual
    decoder = model.model.language_model
    heads = text.num_attention_heads
    depth = getattr(text, "head_dim", None) or text.hidden_size // heads
    merge = vision.spatial_merge_size**2
    blocks = 2 * work.patches * _weights(tower.blocks)
    mergers = (
        2 * work.patches // merge * _weights(m for n, m in tower.named_children() if "merger" in n)
    )
    # the first product has no gradient of the pixels
    embedding = 2 * work.patches * tower.patch_embed.proj.weight.numel()
    last = 2 * work.rows * _weights(map(_last, decoder.layers))
    last += 2 * work.patches * _weights(map(_last, tower.blocks))
    width = tower.blocks[0].attn.qkv.in_features
    return Flops(
        layers=(_PRODUCT + _AGAIN) * 2.0 * work.rows * _weights(decoder.layers),
        attention=_ATTENTION * 4.0 * work.pairs * heads * depth * len(decoder.layers),
        head=(_PRODUCT + head_again) * 2.0 * work.scored * model.lm_head.weight.numel(),
        tower=(_PRODUCT + _AGAIN) * blocks + _PRODUCT * mergers + 2.0 * embedding,
        tower_attention=_ATTENTION * 4.0 * width * tower_pairs(vision, work.grids),
        left_out=_AGAIN * last,
    )


def tower_pairs(vision: Any, grids: Iterable[Grid]) -> int:
    """Pairs of patches that see each other, summed over the tower's blocks: windows, or whole frames."""
    depth = vision.depth
    window = getattr(vision, "window_size", None)
    whole = len(vision.fullatt_block_indexes) if window else depth
    total = 0
    for t, h, w in grids:
        total += whole * t * (h * w) ** 2
        if window:
            side = window // vision.spatial_merge_size // vision.patch_size
            side *= vision.spatial_merge_size
            cut = sum(a * a for a in _cut(h, side)) * sum(a * a for a in _cut(w, side))
            total += (depth - whole) * t * cut
    return total


def _cut(length: int, side: int) -> list[int]:
    return [side] * (length // side) + [length % side]


def _last(layer: Any) -> Any:
    """A layer's last linear one."""
    import torch

    return [m for m in layer.modules() if isinstance(m, torch.nn.Linear)][-1]


def _weights(modules: Iterable[Any]) -> int:
    """Entries of all linear layers' weights."""
    import torch

    return sum(
        layer.weight.numel()
        for module in modules
        for layer in module.modules()
        if isinstance(layer, torch.nn.Linear)
    )
