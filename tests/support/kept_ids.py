"""Lists of kept ids for loss tokens, and the softmax over them by torch in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from mmpack.ops.logprobs.support import Support


def draw_support(targets: Tensor, vocab: int, longest: int = 9) -> Support:
    """For each target a list of 1 to `longest` ids that holds it; most are short, on the targets' device."""
    lists = []
    for target in targets.tolist():
        length = min(int(longest ** float(torch.rand(()))), vocab)
        others = torch.randperm(vocab)[: length - 1].tolist()
        lists.append(torch.tensor(sorted({target, *others})))
    return support_of(lists, targets.device)


def support_of(lists: list[Tensor], device: torch.device | str = "cpu") -> Support:
    lengths = torch.tensor([0, *(len(ids) for ids in lists)])
    ids = torch.cat([torch.zeros(0, dtype=torch.int64), *lists])
    return Support(lengths.cumsum(0), ids).to(device)


def some(support: Support, tokens: Tensor) -> Support:
    """The lists of these tokens, in their order."""
    offsets, ids = support.offsets.tolist(), support.ids
    lists = [ids[offsets[n] : offsets[n + 1]].cpu() for n in tokens.tolist()]
    return support_of(lists, ids.device)


def restrict(logits: Tensor, support: Support) -> Tensor:
    """Logits [N, V] with -inf at the ids that a row's list lacks."""
    mask = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
    tokens = torch.repeat_interleave(support.offsets.diff())
    mask[tokens, support.ids] = False
    return logits.masked_fill(mask, -torch.inf)


def values(logits: Tensor, targets: Tensor, support: Support) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of logits [N, V] after the temperature, over each row's list."""
    full = torch.log_softmax(restrict(logits, support), -1)
    terms = torch.where(full.isfinite(), full.exp() * full.clamp(min=-1e30), 0.0)
    return full.gather(1, targets[:, None])[:, 0], -terms.sum(-1)
