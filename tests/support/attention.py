"""Packs of rows for tests of attention: what their rule says, and attention by explicit weights."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import torch

from mmpack.ops.attention import plan_attention


def forest(trees: list, padding: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """visible_until [T] and padding [T] of trees; a tree is a length, or a (length, [trees below it])."""
    until: list[int] = []

    def lay(tree) -> None:
        length, below = tree if isinstance(tree, tuple) else (tree, [])
        first = len(until)
        until.extend([0] * length)
        for child in below:
            lay(child)
        until[first : first + length] = [len(until)] * length

    for tree in trees:
        lay(tree)
    total = len(until)
    until += range(total + 1, total + padding + 1)
    return np.array(until), np.arange(total + padding) >= total


def packed(trees: list, padding: int = 0, device: str = "cpu"):
    """visible_until as a tensor, its plan, and bool [T]: rows that hold a token."""
    until, pad = forest(trees, padding)
    seen = torch.from_numpy(until.astype(np.int32)).to(device)
    return seen, plan_attention(until, pad).to(device), torch.from_numpy(~pad).to(device)


def draw(lines, heads, kv_heads, width, dim, dtype, device="cpu"):
    """query, key, value and a gradient of the output, [B, heads, T, d]; out's is [B, T, heads, d]."""
    shapes = [(lines, width, h, dim) for h in (heads, kv_heads, kv_heads)]
    q, k, v = (
        torch.randn(s, device=device, dtype=torch.float32).to(dtype).transpose(1, 2) for s in shapes
    )
    return q, k, v, torch.randn(shapes[0], device=device, dtype=torch.float32).to(dtype)


def gradients(function, q, k, v, grad):
    """The output and the gradients to q, k, v."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def by_weights(q, k, v, until, scale=None):
    """softmax of all scores under the dense rule, in the dtype of q: [B, T, heads, d]."""
    at = torch.arange(q.shape[2], device=q.device)
    seen = (at[None] <= at[:, None]) & (at[:, None] < until.view(-1, 1, q.shape[2]))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = torch.softmax(scores.masked_fill(~seen[:, None], -torch.inf), -1)
    return (weights @ v).transpose(1, 2)


def in_sequence(queries, keys, causal=True, window=None):
    """bool [queries, keys]: what kernels of sequences let see. The last query stands at the last key."""
    place = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)
    seen = key <= place if causal else torch.ones(queries, keys, dtype=torch.bool)
    return seen if window is None else seen & (place - key < window)


def one_sequence_after_the_other(q, k, v, cu_q, cu_k, scale=None, causal=True, window=None):
    """What a varlen kernel does, [rows, heads, d]: also log-sum-exp [heads, rows]."""
    pieces, sums = [], []
    for s in range(len(cu_q) - 1):
        own_q = q[cu_q[s] : cu_q[s + 1]].transpose(0, 1)
        groups = q.shape[1] // k.shape[1]
        own_k, own_v = (
            x[cu_k[s] : cu_k[s + 1]].transpose(0, 1).repeat_interleave(groups, 0) for x in (k, v)
        )
        scores = own_q @ own_k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        seen = in_sequence(own_q.shape[1], own_k.shape[1], causal, window)
        scores = scores.masked_fill(~seen, -torch.inf)
        pieces.append((torch.softmax(scores, -1) @ own_v).transpose(0, 1))
        sums.append(torch.logsumexp(scores, -1).float())
    return torch.cat(pieces), torch.cat(sums, 1)


def gradients_in_turn(q, k, v, grad, cu_q, cu_k, causal=True, window=None, scale=None):
    """Of `one_sequence_after_the_other`, by the formulas of the FlashAttention paper (Dao et al., 2022, appendix B)."""
    found = [torch.zeros_like(x) for x in (q, k, v)]
    groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    for s in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        for h in range(q.shape[1]):
            own_q, own_k, own_v = q[rows, h], k[keys, h // groups], v[keys, h // groups]
            scores = own_q @ own_k.T * scale
            seen = in_sequence(len(own_q), len(own_k), causal, window)
            weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
            back = grad[rows, h] @ own_v.T
            back = weights * (back - (back * weights).sum(1, keepdim=True)) * scale
            found[0][rows, h] = back @ own_k
            found[1][keys, h // groups] += back.T @ own_q
            found[2][keys, h // groups] += weights.T @ grad[rows, h]
    return tuple(found)


def of_window(window):
    """Keywords of the two above from a kernel's (left, right)."""
    left, right = window
    return {"causal": right == 0, "window": None if left == -1 else left + 1}


def stand_in(name, **functions):
    """A package of this name with these functions."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None, is_package=True)
    vars(made).update(functions)
    return made


def run_varlen_on_the_cpu(library: torch.library.Library) -> None:
    """Give torch's varlen op a kernel on the CPU, for as long as `library` lives: causal, bottom-right, or not."""

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None, window=None, *rest):
        assert window[1] in (0, -1)
        assert max_q == int(cu_q.diff().max()) and max_k == int(cu_k.diff().max())
        out, lse = one_sequence_after_the_other(
            q, k, v, cu_q.tolist(), cu_k.tolist(), scale, **of_window(window)
        )
        return out, lse, torch.zeros(2, dtype=torch.uint64)

    def backward(grad, q, k, v, out, lse, cu_q, cu_k, *rest):
        (window,) = (x for x in rest if isinstance(x, list))
        return gradients_in_turn(q, k, v, grad, cu_q.tolist(), cu_k.tolist(), **of_window(window))

    torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", forward, lib=library)
    torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", backward, lib=library)
