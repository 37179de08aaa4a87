"""Packs of rows for tests of attention: what their rule says, and attention by explicit weights."""

from __future__ import annotations

import sys
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


def sees(until):
    """bool [B or 1, T, T]: what row q (of visible_until alone) sees of row k."""
    until = torch.atleast_2d(until)
    at = torch.arange(until.shape[1], device=until.device)
    return (at[None] <= at[:, None]) & (at[:, None] < until[:, None])


def within(lengths):
    """bool [1, T, T]: rows of one sequence."""
    own = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return (own[:, None] == own)[None]


def dense(q, k, v, seen, scale=None):
    """softmax of all scores that are `seen`, in the dtype of q: [B, T, heads, d], and log-sum-exp [B, heads, T]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2), torch.logsumexp(scores, -1)


def with_lse(function, q, k, v, grad, weight):
    """Of a function that returns both: output, log-sum-exp, and gradients to q, k, v of both at once."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = function(*leaves)
    found = torch.autograd.grad((out, lse), leaves, (grad.to(out.dtype), weight.to(lse.dtype)))
    return [out.detach(), lse.detach(), *found]


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


def packages_on_the_cpu(patch, calls):
    """flash-attn and flash-attn-4 by their own signatures, by explicit softmax; `calls`: what they were told."""

    def told(name, q, cu_q, cu_k, *sizes):
        longest = [int(cu.diff().max()) for cu in (cu_q, cu_k)]
        assert list(sizes) == longest
        calls.append((name, q.shape[-1]))
        return cu_q.tolist(), cu_k.tolist()

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        cu = told("flash_attn", q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        seen = of_window((window_size[0], 0 if causal else window_size[1]))
        out, lse = one_sequence_after_the_other(q, k, v, *cu, softmax_scale, **seen)
        return (out, lse, None) if return_attn_probs else out

    def options(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, **rest):
        cu = told("flash_attn_4", q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        left = rest.get("window_size_left")
        return cu, {"causal": causal, "window": None if left is None else left + 1}

    def forward(q, k, v, *, softmax_scale, return_lse, **rest):
        cu, seen = options(q, **rest)
        found = one_sequence_after_the_other(q, k, v, *cu, softmax_scale, **seen)
        return *found, None, None, None

    def backward(q, k, v, out, dout, lse, *, softmax_scale, deterministic, **rest):
        cu, seen = options(q, **rest)
        assert {x.shape[-1] for x in (k, v, out, dout)} == {q.shape[-1]}
        return gradients_in_turn(q, k, v, dout, *cu, **seen, scale=softmax_scale)

    interface = stand_in("interface", _flash_attn_fwd=forward, _flash_attn_bwd=backward)
    first = stand_in("flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    for name, module in (
        ("flash_attn", first),
        ("flash_attn.cute", stand_in("flash_attn.cute")),
        ("flash_attn.cute.interface", interface),
    ):
        patch.setitem(sys.modules, name, module)


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
        scale = next((x for x in rest if isinstance(x, float)), None)
        cu = cu_q.tolist(), cu_k.tolist()
        return gradients_in_turn(q, k, v, grad, *cu, **of_window(window), scale=scale)

    torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", forward, lib=library)
    torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", backward, lib=library)
