"""Gradients of linear_selected_logprobs on Triton at |z / temperature| of 1 to thousands, by random search."""

import pytest
import torch
from support.linear_oracle import by_torch, draw, ours, sums_of_terms

from mmpack.contracts import TOLERANCES
from mmpack.ops.logprobs.linear import blocks

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(1000), marks=pytest.mark.gpu)])
def test_gradients_in_bf16(device, seeds, stored, monkeypatch):
    """Rounding to bf16 hides that of the logits, but where softcap is flat and leaves next to no gradient."""
    monkeypatch.setattr(blocks, "MIN_ROWS", 1)
    cut = 2 if device.type == "cpu" else 1  # the interpreter cuts bf16 off where a GPU rounds
    bound = TOLERANCES["gradient_bf16"].value * cut
    for seed in seeds:
        problem = draw(seed, dtype=torch.bfloat16, most=40)
        terms, _ = sums_of_terms(problem)
        want = by_torch(problem, torch.float64)
        for name in ("factors", "targets", "rows", "up"):
            value = getattr(problem, name)
            moved = [x.to(device) for x in value] if name == "factors" else value.to(device)
            setattr(problem, name, tuple(moved) if name == "factors" else moved)
        got = ours(problem, memory_budget=1 << 40 if stored else None)
        for a, b, sizes in zip(got, want, terms, strict=True):
            error = (a.cpu().double() - b).norm()
            assert error <= bound * sizes.norm(), seed
