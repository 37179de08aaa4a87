"""Teachers' lists for loss tokens, and logprobs and divergences over them by torch in float64."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from mmpack.ops.logprobs.support import ScoredSupport, Support
from tests.support.kept_ids import support_of


def draw_lists(count: int, vocab: int, longest: int = 9, empty: float = 0.3) -> Support:
    """Lists of rising ids, `empty` of them without any, most of the others short."""
    lists = []
    for _ in range(count):
        length = min(int(longest ** float(torch.rand(()))), vocab)
        length = 0 if float(torch.rand(())) < empty else length
        lists.append(torch.randperm(vocab)[:length].sort().values)
    return support_of(lists)


def tokens_of(lists: Support) -> Tensor:
    return torch.repeat_interleave(lists.offsets.diff())


def scored(lists: Support, logits: Tensor) -> ScoredSupport:
    """The lists [N] with their logprobs under a teacher's logits [N, V]."""
    full = logits.double().log_softmax(-1)
    found = full[tokens_of(lists), lists.ids].float()
    return ScoredSupport(lists.offsets, lists.ids, found)


def of_logits(z: Tensor, targets: Tensor, lists: Mapping[str, Support]) -> dict[str, Tensor]:
    """Logprobs by name ("": of targets; "entropy") of logits [N, V] after the temperature, by torch's log_softmax."""
    full = z.log_softmax(-1)
    found = {"": full.gather(1, targets[:, None])[:, 0]}
    found["entropy"] = -(full.exp() * full).sum(-1)
    return found | {name: full[tokens_of(own), own.ids] for name, own in lists.items()}


def divergence(
    logprobs: Tensor, teacher: ScoredSupport, kind: str, tail: str, beta: float = 0.5
) -> Tensor:
    """[N], list by list, by torch's kl_div in the dtype of `logprobs`; differentiable."""
    offsets, values = teacher.offsets.tolist(), []
    for first, last in pairwise(offsets):
        a = logprobs[first:last]
        b = teacher.logprobs[first:last].to(a)
        if first == last:
            values.append(logprobs.new_zeros(()))
            continue
        if tail == "renormalize":
            a, b = a.log_softmax(0), b.log_softmax(0)
        if tail == "bucket":
            a, b = (torch.cat([x, torch.log1p(-x.exp().sum())[None]]) for x in (a, b))
        middle = torch.log((1 - beta) * a.exp() + beta * b.exp())
        values.append(
            {
                "forward_kl": lambda a=a, b=b: _kl(b, a),
                "reverse_kl": lambda a=a, b=b: _kl(a, b),
                "jsd": lambda a=a, b=b, m=middle: beta * _kl(b, m) + (1 - beta) * _kl(a, m),
            }[kind]()
        )
    return torch.stack(values) if values else logprobs.new_zeros(0)


def _kl(of: Tensor, to: Tensor) -> Tensor:
    """KL(of ‖ to)."""
    return functional.kl_div(to, of, reduction="sum", log_target=True)
