"""FlexAttention: blocks of 128 × 128 that no query sees are skipped, blocks seen in part are masked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from mmpack.ops.attention.rule import FLEX_BLOCK, Rule, blocks_of
from mmpack.ops.attention.sequence_plan import SequencePlan
from mmpack.ops.first_use import watch_inductor

# Each head size, dtype, autocast and pass with or without gradients is a graph. Past torch's limit, 8, it would hold
# all scores [T, T], and say so in a log only.
DYNAMO: dict[str, Any] = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}
_compiled = torch.compile(flex_attention)


def block_mask(rule: Rule) -> BlockMask:
    """The rule as blocks; made on its device, and nothing waits for it."""
    mixed, full = blocks_of(rule)
    width = rule.until.shape[1]
    return BlockMask.from_kv_blocks(
        *_listed(mixed),
        *_listed(full),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=_mask_mod(rule),
        seq_lengths=(width, width),
    )


def _mask_mod(rule: Rule) -> Callable[..., Tensor]:
    """The rule of one query and one key. Whatever it does not ask for is not in the kernel.

    It holds tensors alone: a number that differs from call to call becomes an input of the graph, which
    FlashAttention-4 does not take.
    """
    until, start, path, window = rule

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < until[b, k])

    def two_way(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (start[b, k] <= q) & (q < until[b, k])  # type: ignore[index]

    seen = causal if start is None else two_way
    if path is None or window is None:
        return seen
    before = path - window  # path of the last row that a query does not see

    def within(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return seen(b, h, q, k) & (path[b, k] > before[b, q])

    return within


def block_mask_of_sequences(plan: SequencePlan) -> BlockMask:
    """Rows that see their own sequence, as blocks; made on the plan's device, and nothing waits for it."""
    ends = plan.cu_seqlens[1:]
    count = -(-plan.rows // FLEX_BLOCK)
    row = torch.arange(count * FLEX_BLOCK, device=ends.device, dtype=ends.dtype)
    owner = torch.searchsorted(ends, row, right=True)  # beyond the last row: no sequence's number
    first, last = owner.view(1, count, FLEX_BLOCK).aminmax(dim=2)
    seen = (first[:, :, None] <= last[:, None]) & (first[:, None] <= last[:, :, None])
    alone = first == last
    full = seen & alone[:, :, None] & alone[:, None]

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return owner[q] == owner[k]

    return BlockMask.from_kv_blocks(
        *_listed(seen & ~full),
        *_listed(full),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=visible,
        seq_lengths=(plan.rows, plan.rows),
    )


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scale: float | None,
    flash: bool,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """query [B, heads, T, d], key and value [B, kv heads, T, d] -> [B, T, heads, d], log-sum-exp [B, heads, T] or None.

    `flash`: by FlashAttention-4, whose log-sum-exp some versions of torch scale as if it were a log of base 2.
    """
    options: dict[str, Any] = {"return_aux": AuxRequest(lse=True)} if return_lse else {}
    with contextlib.nullcontext() if torch.compiler.is_compiling() else _on_its_own():
        made: Any = _compiled(
            query,
            key,
            value,
            block_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            kernel_options=_kernel(query, flash),
            **options,
        )
    out, lse = (made[0], made[1].lse) if return_lse else (made, None)
    return out.transpose(1, 2).contiguous(), lse


def _kernel(query: Tensor, flash: bool) -> Any:
    """On a GPU by name: left to choose, torch takes its decoding kernel for few rows, which has no tile for some."""
    if query.is_cuda:
        return {"BACKEND": "FLASH" if flash else "TRITON"}
    return None


@contextlib.contextmanager
def _on_its_own() -> Iterator[None]:
    with torch._dynamo.config.patch(DYNAMO), watch_inductor("FlexAttention"):  # type: ignore[attr-defined]
        yield


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, n, n] -> int32: how many blocks of each row are True [B, 1, n], and their columns first [B, 1, n, n]."""
    order = torch.argsort(blocks.int(), dim=2, descending=True, stable=True)
    return blocks.sum(2, dtype=torch.int32)[:, None], order.int()[:, None]
