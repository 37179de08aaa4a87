"""Kinds of weights: what the gradient of a model is compared by."""

from __future__ import annotations

import re

from torch import Tensor

_STACKS = "layers|blocks|deepstack_merger_list"  # modules that are numbered and alike
_FUSED = {r"visual\.blocks\.\*\.attn\.qkv\.(weight|bias)": ("q", "k", "v")}  # kinds of equal parts


def parts_of_weight(name: str, gradient: Tensor) -> dict[str, Tensor]:
    """A weight's gradient by kind: one module's weight or bias over all layers; of a tower's fused qkv three kinds.

    Example:
        >>> import torch
        >>> from benchmarks.step.kinds import parts_of_weight
        >>> list(parts_of_weight("model.language_model.layers.7.mlp.up_proj.weight", torch.ones(4, 2)))
        ['layers.*.mlp.up_proj.weight']
        >>> parts = parts_of_weight("model.visual.blocks.0.attn.qkv.bias", torch.arange(6))
        >>> parts["visual.blocks.*.attn.qkv.bias[k]"]
        tensor([2, 3])
    """
    kind = name.removeprefix("model.").removeprefix("language_model.")
    kind = re.sub(rf"\b({_STACKS})\.\d+\.", r"\1.*.", kind)
    names = next((parts for form, parts in _FUSED.items() if re.fullmatch(form, kind)), ())
    if not names:
        return {kind: gradient}
    return {
        f"{kind}[{part}]": own for part, own in zip(names, gradient.chunk(len(names)), strict=True)
    }
