"""What stands at an entry, in words; and what the rows that part there suggest."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mmpack.probe.places import BEFORE
from mmpack.probe.record import IN, Entry

if TYPE_CHECKING:
    from mmpack.probe.report import First

VISION = re.compile(r"visual|vision|patch_embed|merger|projector")
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
        return f"between {after} and the end of {entry.module}: the residual sum" if after else found
    return found or "the module itself: its weights, its settings or its arithmetic"


def suggestion(first: First, parted: dict[str, int]) -> str:
    """What is worth a look, by where and in which rows the sides part first."""
    kinds = {name for name, count in parted.items() if count}
    media = kinds & {"image", "video"}
    text = kinds - {"image", "video"}
    tower = bool(VISION.search(first.module)) and first.medium is not None
    if re.search(r"rotary", first.module):
        if first.side == IN:
            return "position ids differ: compare the layouts first (mmpack parity)"
        if BEFORE not in kinds:
            return "kernel_positions: rotary angles part at media or behind them only, as where mRoPE's height and width rows are dropped or swapped"
        return "rotary angles part at plain text too: theta, scaling, or the dtype of positions"
    if first.side == IN and "attention" in first.stage:
        if media and not text and not tower:
            return "image_mask: attention parts at media only: whether image tokens see each other, or kernel_positions in a fused kernel"
        if not media and text and BEFORE not in kinds:
            return "attention parts behind media only: kernel_positions in a fused kernel, or keys of media"
        return "attention: mask, scale, rotary inside the kernel, head mapping; state_leak if only samples behind others part"
    if first.side == IN and "pixels" in first.stage:
        return "pixels differ: resizing, normalisation, or the order of media (mmpack parity names the setting)"
    if "merge of media" in first.stage and media:
        return "features of media: another picture's, stale ones, or a wrong order"
    if "logprob" in first.stage:
        return "temperature, target or head: the hidden states agree"
    if first.side != IN:
        return "weights of this module: a stale or rounded copy, a missing adapter, or another epsilon or activation"
    return "what runs between these two modules"
