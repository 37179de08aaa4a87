"""What stands at an entry, in words; and what the rows that part there suggest."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mmpack.probe.places import BEFORE
from mmpack.probe.record import IN, Entry

if TYPE_CHECKING:
    from mmpack.probe.report import First

MEDIA = {"image", "video", "audio"}
ONE_SIDED = 8  # logprobs that are lower on one side: by chance in 1 of 128 cases, were each as likely higher
OF_ANGLES = "rotary angles part at plain text too: theta, scaling, or the dtype of positions"
DROPPED_ROWS = (
    "kernel_positions: rotary angles part at media and behind them only, as where mRoPE's height and width rows are "
    "dropped or swapped"
)
OF_WEIGHTS = (
    "this module: a stale or rounded weight, a missing adapter, another epsilon or activation"
)
OF_SUM = "what is added there, and in which order; or a hook or wrapper that changes what a part of this layer puts out"
OF_LOGPROBS = "temperature, target or head: the hidden states agree"
OF_SUPPORT = (
    "truncated_support: the hidden states agree, and one side's logprobs are lower at every token that parts, as where "
    "it takes the softmax over all ids and the other over those that top-k, top-p or min-p left (kept_ids); else a "
    "lower temperature, where the targets are unlikely ids"
)
OF_ATTENTION = (
    "attention: mask, scale, heads, rotary embedding; state_leak if only samples behind others part"
)
ONLY_MEDIA = (
    "image_mask: attention parts at media only, as where image tokens should see each other and don't; or "
    "kernel_positions, in a fused kernel"
)
BEHIND_MEDIA = (
    "kernel_positions: attention parts at media and behind them only, as in a fused kernel"
)
OF_PIXELS = (
    "pixels: resizing, normalisation, or the order of media (mmpack parity names the setting)"
)
OF_MERGE = "features of media: another picture's, stale ones, or a wrong order"
# of what goes into a module: what computed it is no module itself
INPUTS = (
    (r"rotary", "the position ids"),
    (r"patch_embed", "the pixels"),
    (r"(self_attn\.o_proj|attn\.proj|attention\.projection_layer)$", "rotary embedding or attention"),
    (r"(down_proj|linear_fc2|mlp\.fc2)$", "the activation of the MLP, its gate times up"),
    (r"layers\.0\.[^.]*norm[^.]*$", "the merge of media features into token embeddings"),
    (r"(blocks|layer)\.0\.[^.]*norm[^.]*$", "what precedes the tower's blocks: window order, position embedding"),
    (r"(q_norm|k_norm)$", "the split of heads"),
    (r"(merger|deepstack_merger_list\.\d+|projector)\.", "the merge of patches"),
    (r"norm", "the residual sum, or features added to it (deepstack)"),
    (r"lm_head$", "the choice of rows that predict"),
)  # fmt: skip
OUTPUTS = (
    (r"embed_tokens$", "token embedding"),
    (r"rotary", "rotary angles"),
    (r"logprobs$", "selected logprob: head, temperature, target"),
    (r"lm_head$", "LM head"),
    (r"(layers|blocks|layer)\.\d+$", "residual sum"),
)


def stage_of(entry: Entry, after: str | None) -> str:
    """Which stage an entry shows."""
    table = INPUTS if entry.side == IN else OUTPUTS
    found = next((words for pattern, words in table if re.search(pattern, entry.module)), None)
    if entry.side == IN:
        between = f"between {after} and {entry.name}" if after else f"before {entry.name}"
        return f"{between}: {found}" if found else between
    if found == "residual sum":
        return (
            f"between {after} and the end of {entry.module}: the residual sum" if after else found
        )
    return found or "the module itself: its weights, its settings or its arithmetic"


def suggestion(first: First, parted: dict[str, int], lower: int = 0) -> str:
    """What is worth a look, by where and in which rows the sides part first.

    Args: `parted`: rows by modality. `lower`: of `logprobs`, how many parted rows are lower on one and the same side;
    0 unless all are.
    """
    kinds = {name for name, count in parted.items() if count}
    media, plain = kinds & MEDIA, BEFORE in kinds
    if "rotary" in first.module:
        return _of_rotary(first.side, plain)
    if first.side != IN and "residual sum" in first.stage:
        return OF_SUM
    if first.side != IN:
        if first.module != "logprobs":
            return OF_WEIGHTS
        return OF_SUPPORT if lower >= ONE_SIDED else OF_LOGPROBS
    if "attention" in first.stage:
        if first.medium is not None or plain:
            return OF_ATTENTION
        return ONLY_MEDIA if kinds == media else BEHIND_MEDIA
    if "pixels" in first.stage:
        return OF_PIXELS
    return OF_MERGE if "merge of media" in first.stage else "what runs between these two modules"


def _of_rotary(side: str, plain: bool) -> str:
    if side == IN:
        return "position ids differ: compare the layouts first (mmpack parity)"
    return OF_ANGLES if plain else DROPPED_ROWS
