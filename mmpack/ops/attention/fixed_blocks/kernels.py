"""The kernels of fixed blocks: forward, gradients to keys and values, gradient to queries.

Sequence s has `len_q` queries at the end of its `len_k` keys; its query i stands at place i + len_k - len_q of the
path. Blocks count from place 0. Scores are in units of log 2. Softmax of a row runs over the blocks of its keys in
rising order, as in FlashAttention-2 (Dao 2023, algorithm 1); a block that a row does not see leaves it as it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mmpack.ops.products.triton import exact_dot


@triton.jit
def span(cu_ptr, sequence):
    """Start and length."""
    start = tl.load(cu_ptr + sequence)
    return start, tl.load(cu_ptr + sequence + 1) - start


@triton.jit
def load_rows(ptr, rows, inside, row_stride, size, SIZE: tl.constexpr):
    """[rows, SIZE]; zeros for rows that are not inside, and beyond `size`."""
    d = tl.arange(0, SIZE)
    at = ptr + rows.to(tl.int64)[:, None] * row_stride + d[None, :]
    return tl.load(at, mask=inside[:, None] & (d < size)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, value, rows, inside, row_stride, size, SIZE: tl.constexpr):
    d = tl.arange(0, SIZE)
    at = ptr + rows.to(tl.int64)[:, None] * row_stride + d[None, :]
    tl.store(at, value.to(ptr.dtype.element_ty), mask=inside[:, None] & (d < size)[None, :])


@triton.jit
def see_blocks(
    maximum,
    total,
    out,
    q,
    k_ptr,
    v_ptr,
    start_k,
    len_k,
    places,
    first_block,
    last_block,
    k_stride,
    v_stride,
    size,
    scale,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
):
    for block in range(first_block, last_block):
        keys = block * KEYS + tl.arange(0, KEYS)
        there = keys < len_k
        k = load_rows(k_ptr, start_k + keys, there, k_stride, size, SIZE)
        s = exact_dot(q, tl.trans(k), tl.zeros((q.shape[0], KEYS), tl.float32), PRECISION) * scale
        if MASKED:
            seen = there[None, :]
            if CAUSAL:
                seen = seen & (keys[None, :] <= places[:, None])
            s = tl.where(seen, s, -float("inf"))
        highest = tl.maximum(maximum, tl.max(s, 1))
        p = tl.exp2(s - highest[:, None])
        shrink = tl.exp2(maximum - highest)
        total = total * shrink + tl.sum(p, 1)
        v = load_rows(v_ptr, start_k + keys, there, v_stride, size, SIZE)
        out = exact_dot(p.to(v.dtype), v, out * shrink[:, None], PRECISION)
        maximum = highest
    return maximum, total, out


# Counts of rows that grow with the batch are no constants of the compiler.
@triton.jit(do_not_specialize=["num_rows"])
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,  # [heads, num_rows] float32
    cu_q_ptr,
    cu_k_ptr,
    num_rows,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    out_row,
    out_head,
    size,
    scale,  # of the scores, times log2 e
    CAUSAL: tl.constexpr,
    GROUPS: tl.constexpr,  # heads of queries to one of keys
    PRECISION: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
):
    head, sequence = tl.program_id(1), tl.program_id(2)
    start_q, len_q = span(cu_q_ptr, sequence)
    start_k, len_k = span(cu_k_ptr, sequence)
    above = len_k - len_q
    # the longest first
    block = tl.cdiv(len_k, QUERIES) - 1 - tl.program_id(0)
    if block >= above // QUERIES and len_q > 0:
        places = block * QUERIES + tl.arange(0, QUERIES)
        rows, inside = start_q + places - above, (places >= above) & (places < len_k)
        q = load_rows(q_ptr + head * q_head.to(tl.int64), rows, inside, q_row, size, SIZE)
        k_ptr += head // GROUPS * k_head.to(tl.int64)
        v_ptr += head // GROUPS * v_head.to(tl.int64)
        maximum = tl.full((QUERIES,), -float("inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        out = tl.zeros((QUERIES, SIZE), tl.float32)
        if CAUSAL:
            whole = block * QUERIES // KEYS
            blocks = tl.cdiv(min((block + 1) * QUERIES, len_k), KEYS)
        else:
            whole = len_k // KEYS
            blocks = tl.cdiv(len_k, KEYS)
        maximum, total, out = see_blocks(
            maximum, total, out, q, k_ptr, v_ptr, start_k, len_k, places, 0, whole, k_row, v_row,
            size, scale, CAUSAL, False, PRECISION, KEYS, SIZE,
        )  # fmt: skip
        maximum, total, out = see_blocks(
            maximum, total, out, q, k_ptr, v_ptr, start_k, len_k, places, whole, blocks, k_row,
            v_row, size, scale, CAUSAL, True, PRECISION, KEYS, SIZE,
        )  # fmt: skip
        out = out / total[:, None]
        store_rows(out_ptr + head * out_head.to(tl.int64), out, rows, inside, out_row, size, SIZE)
        at = lse_ptr + head.to(tl.int64) * num_rows + rows
        tl.store(at, maximum + tl.log2(total), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def delta_kernel(
    out_ptr,  # [num_rows, heads, size], contiguous, as grad
    grad_ptr,
    delta_ptr,  # [heads, num_rows] float32
    num_rows,
    num_heads,
    size,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Sum of out · grad of each row and head."""
    rows, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    inside = rows < num_rows
    stride = num_heads * size
    out = load_rows(out_ptr + head * size, rows, inside, stride, size, SIZE)
    grad = load_rows(grad_ptr + head * size, rows, inside, stride, size, SIZE)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + head.to(tl.int64) * num_rows + rows, delta, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    to_k_ptr,  # [K, kv heads, size], contiguous, as to_v
    to_v_ptr,
    cu_q_ptr,
    cu_k_ptr,
    num_rows,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    grad_row,
    grad_head,
    size,
    scale,  # of the scores
    CAUSAL: tl.constexpr,
    GROUPS: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Gradients to a block of keys and values: over the heads of its group, and the blocks of queries in order."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    start_q, len_q = span(cu_q_ptr, sequence)
    start_k, len_k = span(cu_k_ptr, sequence)
    above, first = len_k - len_q, tl.program_id(0) * KEYS
    if first < len_k:
        keys = first + tl.arange(0, KEYS)
        there = keys < len_k
        k_ptr += head * k_head.to(tl.int64)
        v_ptr += head * v_head.to(tl.int64)
        k = load_rows(k_ptr, start_k + keys, there, k_row, size, SIZE)
        v = load_rows(v_ptr, start_k + keys, there, v_row, size, SIZE)
        to_k, to_v = tl.zeros((KEYS, SIZE), tl.float32), tl.zeros((KEYS, SIZE), tl.float32)
        low = above // QUERIES
        if CAUSAL:
            low = max(low, first // QUERIES)
        high = tl.cdiv(len_k, QUERIES)
        for group in range(GROUPS):
            query_head = head * GROUPS + group
            q_head_ptr = q_ptr + query_head * q_head.to(tl.int64)
            grad_head_ptr = grad_ptr + query_head * grad_head.to(tl.int64)
            line = query_head.to(tl.int64) * num_rows
            for block in range(low, high):
                places = block * QUERIES + tl.arange(0, QUERIES)
                rows, inside = start_q + places - above, (places >= above) & (places < len_k)
                q = load_rows(q_head_ptr, rows, inside, q_row, size, SIZE)
                lse = tl.load(lse_ptr + line + rows, mask=inside, other=0.0)
                s = exact_dot(k, tl.trans(q), tl.zeros((KEYS, QUERIES), tl.float32), PRECISION)
                seen = there[:, None] & inside[None, :]
                if CAUSAL:
                    seen = seen & (keys[:, None] <= places[None, :])
                p = tl.where(seen, tl.exp2(s * (scale * 1.4426950408889634) - lse[None, :]), 0.0)
                grad = load_rows(grad_head_ptr, rows, inside, grad_row, size, SIZE)
                to_v = exact_dot(p.to(grad.dtype), grad, to_v, PRECISION)
                dp = exact_dot(v, tl.trans(grad), tl.zeros((KEYS, QUERIES), tl.float32), PRECISION)
                delta = tl.load(delta_ptr + line + rows, mask=inside, other=0.0)
                ds = p * (dp - delta[None, :])
                to_k = exact_dot(ds.to(q.dtype), q, to_k, PRECISION)
        stride = tl.num_programs(1) * size
        store_rows(to_k_ptr + head * size, to_k * scale, start_k + keys, there, stride, size, SIZE)
        store_rows(to_v_ptr + head * size, to_v, start_k + keys, there, stride, size, SIZE)


@triton.jit(do_not_specialize=["num_rows"])
def queries_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    to_q_ptr,  # [num_rows, heads, size], contiguous
    cu_q_ptr,
    cu_k_ptr,
    num_rows,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    grad_row,
    grad_head,
    size,
    scale,
    CAUSAL: tl.constexpr,
    GROUPS: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Gradient to a block of queries, over the blocks of keys in order."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    start_q, len_q = span(cu_q_ptr, sequence)
    start_k, len_k = span(cu_k_ptr, sequence)
    above = len_k - len_q
    block = tl.cdiv(len_k, QUERIES) - 1 - tl.program_id(0)
    if block >= above // QUERIES and len_q > 0:
        places = block * QUERIES + tl.arange(0, QUERIES)
        rows, inside = start_q + places - above, (places >= above) & (places < len_k)
        q = load_rows(q_ptr + head * q_head.to(tl.int64), rows, inside, q_row, size, SIZE)
        grad_ptr += head * grad_head.to(tl.int64)
        grad = load_rows(grad_ptr, rows, inside, grad_row, size, SIZE)
        line = head.to(tl.int64) * num_rows
        lse = tl.load(lse_ptr + line + rows, mask=inside, other=0.0)
        delta = tl.load(delta_ptr + line + rows, mask=inside, other=0.0)
        k_ptr += head // GROUPS * k_head.to(tl.int64)
        v_ptr += head // GROUPS * v_head.to(tl.int64)
        to_q = tl.zeros((QUERIES, SIZE), tl.float32)
        blocks = tl.cdiv(len_k, KEYS)
        if CAUSAL:
            blocks = tl.cdiv(min((block + 1) * QUERIES, len_k), KEYS)
        for i in range(blocks):
            keys = i * KEYS + tl.arange(0, KEYS)
            there = keys < len_k
            k = load_rows(k_ptr, start_k + keys, there, k_row, size, SIZE)
            v = load_rows(v_ptr, start_k + keys, there, v_row, size, SIZE)
            s = exact_dot(q, tl.trans(k), tl.zeros((QUERIES, KEYS), tl.float32), PRECISION)
            seen = there[None, :] & inside[:, None]
            if CAUSAL:
                seen = seen & (keys[None, :] <= places[:, None])
            p = tl.where(seen, tl.exp2(s * (scale * 1.4426950408889634) - lse[:, None]), 0.0)
            dp = exact_dot(grad, tl.trans(v), tl.zeros((QUERIES, KEYS), tl.float32), PRECISION)
            ds = p * (dp - delta[:, None])
            to_q = exact_dot(ds.to(k.dtype), k, to_q, PRECISION)
        stride = tl.num_programs(1) * size
        store_rows(to_q_ptr + head * size, to_q * scale, rows, inside, stride, size, SIZE)
