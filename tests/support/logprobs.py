"""Problems for all ops of logprobs, as one: of logits or hidden states, over the vocabulary, kept ids or lists of ids.

Values go by name: "" for the targets, "entropy", and teachers' lists. The oracle is torch.log_softmax in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from support.kept_ids import draw_support, restrict, some
from support.teachers import draw_lists, of_logits
from torch import Tensor

import mmpack as mp
from mmpack.contracts import (
    TOLERANCES,
    gradient_fp32_bound,
    linear_logprob_bound,
    selected_logprob_bound,
)
from mmpack.ops.logprobs.lists import hidden as op_of_hidden

LOGITS = ("logits", "kept logits", "listed logits")
# kept ids of hidden states: gathered, or by products with the whole head
HIDDEN = ("hidden", "kept", "multiplied", "listed")
STORED = 1 << 40  # a budget that fits anything
Named = dict[str, Tensor]


@dataclass
class Problem:
    """Rows of the first leaf repeat; those that no token reads hold NaN. `options` are those of the public function."""

    kind: str
    leaves: list[Tensor]  # logits [T, V], or hidden [T, H], weight [V, H], bias [V]
    targets: Tensor
    rows: Tensor
    support: mp.ops.Support | None = None
    lists: dict[str, mp.ops.Support] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def unread(self) -> Tensor:
        every = torch.ones(len(self.leaves[0]), dtype=torch.bool, device=self.rows.device)
        return every.index_fill(0, self.rows.long(), False)

    def of(self, tokens: Tensor) -> Problem:
        """Of these tokens, in their order."""
        kept = None if self.support is None else some(self.support, tokens)
        own = {name: some(x, tokens) for name, x in self.lists.items()}
        return replace(
            self, targets=self.targets[tokens], rows=self.rows[tokens], support=kept, lists=own
        )

    def counted(self) -> Problem:
        """With its rows as distinct ones and their index."""
        unique, inverse = self.rows.unique(return_inverse=True)
        known = {"rows_unique": unique, "row_inverse": inverse}
        return replace(self, options=self.options | known)

    def values(self, leaves: list[Tensor], **options: Any) -> Named:
        """By the public function."""
        options = self.options | {"rows": self.rows, "entropy": True} | options
        first, *head = leaves
        if head:
            arguments, options["bias"] = (first, head[0], self.targets), head[1]
        else:
            arguments = first, self.targets
        if self.lists:
            run = mp.ops.linear_listed_logprobs if head else mp.ops.listed_logprobs
            out = run(*arguments, self.lists, **options)
            return {"": out.targets, "entropy": out.entropy, **out.lists}
        run = mp.linear_selected_logprobs if head else mp.selected_logprobs
        lp, entropy = run(*arguments, support=self.support, **options)
        return {"": lp, "entropy": entropy}

    def step(self, up: Named | None = None, **options: Any) -> tuple[Named, list[Tensor], Named]:
        """Values, gradients to the leaves, and what came in from above."""
        leaves = [x.clone().requires_grad_() for x in self.leaves]
        found = self.values(leaves, **options)
        up = drawn(found) if up is None else up
        grads = torch.autograd.grad(dotted(found, up), leaves)
        return {n: x.detach() for n, x in found.items()}, list(grads), up

    def exact(self, dtype: torch.dtype = torch.float64) -> tuple[Named, list[Tensor], float]:
        """Values and leaves by torch's log_softmax, and the largest |logit| after the temperature."""
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in self.leaves]
        z = leaves[0][self.rows.long()]
        if len(leaves) > 1:
            z = z @ leaves[1].T + leaves[2]
        if (softcap := self.options.get("softcap")) is not None:
            z = softcap * torch.tanh(z / softcap)
        z = z / self.options.get("temperature", 1.0)
        if self.support is not None:
            z = restrict(z, self.support)
        finite = z.detach()[z.detach().isfinite()].abs()
        found = of_logits(z, self.targets, self.lists)
        logs = z.log_softmax(-1)
        terms = torch.where(logs.isfinite(), logs.exp() * logs.clamp(min=-1e30), 0.0)
        found["entropy"] = torch.where(logs.isnan().any(-1), torch.nan, -terms.sum(-1))
        return found, leaves, float(finite.max()) if finite.numel() else 0.0


def problem(
    kind: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.5,
    sizes: tuple[int, int, int, int] | None = None,
    **options: Any,
) -> Problem:
    """`sizes`: rows, width (of hidden states), vocabulary, loss tokens; if not given, more of all on a GPU."""
    usual = (360, 168, 6321, 540) if device.type == "cuda" else (40, 24, 301, 60)
    num_rows, width, vocab, count = sizes or usual
    rows = torch.randint(0, num_rows - 10, (count,))
    targets = torch.randint(0, vocab, (count,))
    targets[1::3] = vocab - 1
    if kind in LOGITS:
        leaves = [torch.randn(num_rows, vocab) * 8 * scale]
    else:
        leaves = [torch.randn(num_rows, width), torch.randn(vocab, width) * scale]
        leaves.append(torch.randn(vocab))
    support = draw_support(targets, vocab, 40) if kind in ("kept logits", *HIDDEN[1:3]) else None
    lists = {}
    if kind.startswith("listed"):  # of two teachers, of which the second often says nothing
        lists = {"7B": draw_lists(count, vocab, 40, 0.1), "32B": draw_lists(count, vocab, 9, 0.8)}
    made = Problem(
        kind,
        [x.to(device, dtype) for x in leaves],
        targets.to(device),
        rows.to(device),
        support and support.to(device),
        {name: x.to(device) for name, x in lists.items()},
        options,
    )
    made.leaves[0][made.unread] = torch.nan
    return made


def choose_route(kind: str, patch: pytest.MonkeyPatch) -> None:
    """Kept ids of hidden states go the way that `kind` names."""
    patch.setattr(op_of_hidden, "by_products", lambda *_: kind == "multiplied")


def drawn(found: Mapping[str, Tensor]) -> Named:
    return {name: torch.randn(x.shape, device=x.device) for name, x in found.items()}


def dotted(found: Mapping[str, Tensor], up: Mapping[str, Tensor]) -> Tensor:
    """What comes in from above, as one number."""
    parts = [
        torch.where(up[n] == 0, 0.0, x.double() * up[n].double()).sum() for n, x in found.items()
    ]
    return torch.stack(parts).sum()


def assert_values(p: Problem, got: Named, want: Named, peak: float) -> None:
    """-inf and NaN where they should be, all else within the contract."""
    for name, x in got.items():
        assert x.shape == want[name].shape
        assert x.dtype == torch.promote_types(p.leaves[0].dtype, torch.float32)
        assert torch.equal(x.isneginf(), want[name].isneginf())
        assert torch.equal(x.isnan(), want[name].isnan()), name
        error = torch.where(want[name].isfinite(), x.double() - want[name], 0.0).abs()
        if p.kind in HIDDEN:
            bound = linear_logprob_bound(peak)
        elif name == "entropy":
            bound = TOLERANCES["linear_logprob"].value
        else:
            bound = torch.where(want[name].isfinite(), selected_logprob_bound(want[name]), 0.0)
        assert (error <= bound).all(), name


def assert_gradients(p: Problem, got: list[Tensor], want: list[Tensor], peak: float = 0.0) -> None:
    """Exactly 0 in rows that no token reads; elsewhere within the contract."""
    for i, (grad, wide) in enumerate(zip(got, want, strict=True)):
        grad = grad.to_dense() if grad.is_sparse else grad
        keep = ~p.unread if i == 0 else slice(None)
        off, wide = grad.double()[keep] - wide[keep], wide[keep]
        if grad.dtype in (torch.float32, torch.float64):
            # At logits of some hundred the products' own rounding moves every probability.
            grown = max(1.0, peak / 50) if p.kind in HIDDEN else 1.0
            most = wide.abs().max().clamp(min=0.1)  # where all cancels, what cancelled counts
            assert off.abs().max() <= gradient_fp32_bound(most) * grown, i
        else:  # the interpreter cuts bf16 off where a GPU rounds
            cut = 1 if grad.is_cuda else 2
            assert off.norm() <= cut * TOLERANCES["gradient_bf16"].value * wide.norm(), i
    assert not got[0].to_dense()[p.unread].any()


def check(p: Problem, **options: Any) -> tuple[Named, list[Tensor], Named]:
    """Values and gradients of one step against the oracle; returns the step."""
    want, wide, peak = p.exact()
    up = drawn(want)
    for name, x in want.items():  # nobody trains on what is impossible
        up[name] = torch.where(x.isfinite(), up[name], 0.0)
    made = p.step(up, **options)
    assert_values(p, made[0], want, peak)
    sound = (~want[""].isnan()).nonzero().flatten()  # a NaN of one token would be in every sum
    if len(sound) < len(p.targets):
        at = entries(p, sound)
        want, wide, _ = p.of(sound).exact()
        up = {name: x[at[name]] for name, x in up.items()}
    exact = torch.autograd.grad(dotted(want, up), wide)
    assert_gradients(p, made[1], [g.nan_to_num() for g in exact], peak)
    return made


def entries(p: Problem, tokens: Tensor) -> Named:
    """Where each value of `p.of(tokens)` stands among those of p."""
    found = {"": tokens, "entropy": tokens}
    for name, own in p.lists.items():
        places = torch.arange(len(own.ids), device=own.ids.device)
        found[name] = some(type(own)(own.offsets, places), tokens).ids
    return found
