"""The stages of a step, in order of execution: what each one's value is, and what its gradient.

Values of text stages are rows [tokens, width], of `tower` [patches, width], of `projector` [vision tokens, width], of
the loss's stages [loss tokens].
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """`gradient`: what the backward row of the stage compares, where it isn't the gradient to its output."""

    name: str
    about: str
    gradient: str = "to its output"


STAGES = {
    stage.name: stage
    for stage in (
        Stage("tower", "each block of the vision tower"),
        Stage("projector", "mergers of the tower, of all deepstack levels"),
        Stage("embedding", "token embeddings"),
        Stage("merge", "embeddings with the pictures' features in them"),
        Stage("rms_norm", "norms of the layers, of queries and keys, and the last one"),
        Stage("qkv", "products of queries, keys and values"),
        Stage("rotary", "queries and keys, turned by their positions"),
        Stage("attention", "attention's output, before the output product"),
        Stage("o", "the output product"),
        Stage("mlp", "gate, up and down products"),
        Stage("head", "logits of rows that predict loss tokens", "to the hidden states"),
        Stage("logprob", "logprobs of loss tokens, without logits", "of the loss, to logprobs"),
        Stage("ratio", "ratio to the old logprobs", "of ratio · advantage, to logprobs"),
        Stage("kl", "k3 to the reference", "of its sum, to logprobs"),
        Stage("loss", "the step's loss", "of the loss, to logprobs"),
    )
}

_WEIGHTS = {  # beginnings of names of the model's weights, the longest first
    "model.visual.merger": "projector",
    "model.visual.deepstack_merger_list": "projector",
    "model.visual": "tower",
    "model.language_model.embed_tokens": "embedding",
    "lm_head": "head",
}
_LINEAR_ATTENTION = r"language_model\.layers\.\d+\.linear_attn\.(conv1d\.weight|A_log|dt_bias)"
_MODULES = {  # names below the head, without wrappers
    r"visual\.blocks\.\d+": "tower",
    r"visual\.(merger|deepstack_merger_list\.\d+)": "projector",
    r"language_model\.embed_tokens": "embedding",
    r"language_model\.layers\.\d+\.(input_layernorm|post_attention_layernorm)": "rms_norm",
    r"language_model\.layers\.\d+\.self_attn\.[qk]_norm": "rms_norm",
    r"language_model\.norm": "rms_norm",
    r"language_model\.layers\.\d+\.self_attn\.[qkv]_proj": "qkv",
    r"language_model\.layers\.\d+\.self_attn\.o_proj": "o",
    r"language_model\.layers\.\d+\.linear_attn\.in_proj_(qkv|z|b|a)": "qkv",
    r"language_model\.layers\.\d+\.linear_attn\.norm": "rms_norm",
    r"language_model\.layers\.\d+\.linear_attn\.out_proj": "o",
    r"language_model\.layers\.\d+\.mlp\.(gate|up|down)_proj": "mlp",
}
TOWER = ("tower", "projector")
TOKENS = ("logprob", "ratio", "kl", "loss")  # one number per loss token, or of the step


def stage_of(module: str) -> str | None:
    """The stage that a module's output belongs to, by its name below the head; None for all others.

    Example:
        >>> from chain.stages import stage_of
        >>> stage_of("language_model.layers.3.self_attn.q_proj"), stage_of("language_model.layers.3")
        ('qkv', None)
    """
    return next((stage for form, stage in _MODULES.items() if re.fullmatch(form, module)), None)


def stage_of_weight(name: str) -> str | None:
    """The stage that a weight of the whole model belongs to.

    Example:
        >>> from chain.stages import stage_of_weight
        >>> stage_of_weight("model.language_model.layers.0.mlp.up_proj.weight"), stage_of_weight("lm_head.weight")
        ('mlp', 'head')
    """
    for start, stage in _WEIGHTS.items():
        if name.startswith(start):
            return stage
    name = name.removeprefix("model.")
    if re.fullmatch(_LINEAR_ATTENTION, name):
        return "attention"
    return stage_of(name.rpartition(".")[0])
