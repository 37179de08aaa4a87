"""Random forests of segments with inputs of linear attention, and transformers' own layers on each path by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch.nn import functional

# Depth 4, an empty segment with a child, segments of one row and of more than two chunks.
OFFSETS, PARENTS = [0, 70, 200, 201, 201, 215, 218, 222], [-1, 0, 1, 1, 3, 0, -1]


def rows_of(offsets: list[int], parents: list[int]) -> list[list[int]]:
    """For each segment the rows of its path, root first."""
    paths: list[list[int]] = []
    for g, parent in enumerate(parents):
        above = paths[parent] if parent >= 0 else []
        paths.append(above + list(range(offsets[g], offsets[g + 1])))
    return paths


@st.composite
def forests(draw, most, lengths):
    """Offsets and parents of up to `most` segments."""
    parents, sizes = [], []
    for g in range(draw(st.integers(1, most))):
        parents.append(draw(st.integers(-1, g - 1)))
        sizes.append(draw(lengths))
    return [0, *np.cumsum(sizes).tolist()], parents


def inputs(rows: int, heads: tuple[int, int], dims: tuple[int, int], seed: int = 0, **options):
    """q, k, v, g, beta as a trained layer gives them: decays from none to almost all."""
    made = torch.Generator().manual_seed(seed)
    dtype = options.get("dtype", torch.float32)

    def normal(*shape):
        return torch.randn(shape, generator=made, dtype=torch.float64)

    q, k = normal(rows, heads[0], dims[0]), normal(rows, heads[0], dims[0])
    v = normal(rows, heads[1], dims[1])
    g = -functional.softplus(normal(rows, heads[1])) * torch.linspace(0.01, 4, heads[1])
    beta = normal(rows, heads[1]).sigmoid()
    return [x.to(dtype) for x in (q, k, v, g, beta)]


def of_transformers(name: str):
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    return getattr(modeling, name)


def for_each_value_head(tensors) -> list[torch.Tensor]:
    """q and k [1, T, Hk, Dk] repeated for the value heads that share them, as layers do before transformers 5.20."""
    q, k, v, *others = tensors
    each = v.shape[2] // k.shape[2]
    return [q.repeat_interleave(each, 2), k.repeat_interleave(each, 2), v, *others]


def rule_alone(tensors, offsets, parents, recurrent: bool = True) -> torch.Tensor:
    """Each segment's path through transformers' rule in float64; the segment's own rows are kept. [T, Hv, Dv]"""
    rule = of_transformers(f"torch_{'recurrent' if recurrent else 'chunk'}_gated_delta_rule")
    rule = getattr(rule, "__wrapped__", rule)
    from support.float64 import Wide

    pieces = []
    for g, rows in enumerate(rows_of(offsets, parents)):
        own = offsets[g + 1] - offsets[g]
        if not own:
            continue
        index = torch.tensor(rows)
        with Wide():
            paths = for_each_value_head(x.double()[index][None] for x in tensors)
            out, _ = rule(
                *paths,
                initial_state=None,
                output_final_state=False,
                use_qk_l2norm_in_kernel=True,
            )
        pieces.append(out[0, len(rows) - own :])
    return torch.cat(pieces)


def conv_alone(x, weight, bias, activation, offsets, parents) -> torch.Tensor:
    """The same for transformers' convolution."""
    convolve = of_transformers("causal_conv1d_fn")
    convolve = getattr(convolve, "__wrapped__", convolve)
    pieces = []
    for g, rows in enumerate(rows_of(offsets, parents)):
        own = offsets[g + 1] - offsets[g]
        if not own:
            continue
        path = x.double()[torch.tensor(rows)].T[None]
        wide = None if bias is None else bias.double()
        out = convolve(path, weight.double(), wide, activation=activation)
        pieces.append(out[0].T[len(rows) - own :])
    return torch.cat(pieces)


def values_and_gradients(run, tensors, upstream):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = run(leaves)
    gradients = torch.autograd.grad(out, leaves, upstream.to(out.dtype))
    return [out.detach(), *gradients]


def assert_near(found, wanted, bound):
    for name, a, b in zip(("out", "q", "k", "v", "g", "beta"), found, wanted, strict=True):
        assert a.shape == b.shape
        off = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)
        assert off <= bound, (name, float(off))
