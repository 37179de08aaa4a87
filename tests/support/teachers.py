"""Teachers' lists for loss tokens, and logprobs and divergences over them by torch in float64."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmpack.ops.logprobs.listed import linear_listed_logprobs
from mmpack.ops.logprobs.support import ScoredSupport, Support
from tests.support.kept_ids import support_of
from tests.support.logprob_oracle import from_hidden as one_id


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


def from_hidden(
    factors: list[Tensor],
    targets: Tensor,
    rows: Tensor,
    lists: Mapping[str, Support],
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[dict[str, Tensor], list[Tensor], float]:
    """Logprobs by name ("": of targets; "entropy"), float64 leaves, and the largest |logit|, by torch's log_softmax."""
    _, _, _, peak = one_id(*factors, targets, rows, temperature, softcap)
    leaves = [x.detach().double().requires_grad_() for x in factors]
    z = leaves[0][rows] @ leaves[1].T + leaves[2]
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return of_logits(z / temperature, targets, lists), leaves, peak


def of_logits(z: Tensor, targets: Tensor, lists: Mapping[str, Support]) -> dict[str, Tensor]:
    """As `from_hidden`, of logits [N, V] after the temperature."""
    full = z.log_softmax(-1)
    found = {"": full.gather(1, targets[:, None])[:, 0]}
    found["entropy"] = -(full.exp() * full).sum(-1)
    return found | {name: full[tokens_of(own), own.ids] for name, own in lists.items()}


def named(out: Any) -> dict[str, Tensor]:
    """ListedLogprobs, as the oracle names them."""
    found = {"": out.targets, **out.lists}
    return found if out.entropy is None else found | {"entropy": out.entropy}


def dotted(found: Mapping[str, Tensor], up: Mapping[str, Tensor]) -> Tensor:
    """What comes in from above, as one number."""
    return sum(x.double() @ up[name].double() for name, x in found.items())  # type: ignore[return-value]


def ups(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.randn(x.shape, device=x.device) for name, x in found.items()}


def step(
    factors: list[Tensor],
    targets: Tensor,
    rows: Tensor | None,
    lists: Mapping[str, Support],
    up: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], list[Tensor], dict[str, Tensor]]:
    """linear_listed_logprobs with `up` coming in: values by name, gradients to hidden, weight and bias, and `up`."""
    leaves = [x.clone().requires_grad_() for x in factors]
    out = linear_listed_logprobs(
        leaves[0], leaves[1], targets, lists, rows, leaves[2], entropy=True, **options
    )
    found = named(out)
    up = ups(found) if up is None else up
    dotted(found, up).backward()
    return {n: x.detach() for n, x in found.items()}, [x.grad for x in leaves], dict(up)  # type: ignore[misc]


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
