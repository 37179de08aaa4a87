"""The chain with cached prefixes: what follows a prefix whose KV comes from a store, forward only."""

from __future__ import annotations

from typing import Any

import torch
from chain.passes.problem import HEAD_ROWS, Problem, take_loss
from chain.passes.run import LAST_NORM, STORE_BYTES
from chain.passes.tape import Tape, rows_of
from chain.record import Cells, Record, joined
from chain.stages import TOWER

from mmpack.adapters.transformers.prefix import kv_bytes_per_token, prefix_logprobs
from mmpack.cache.features import FeatureStore
from mmpack.cache.index import PrefixIndex
from mmpack.cache.rows import RowStore

BLOCK = 4


def prefix_run(model: Any, problem: Problem) -> Record:
    """Each sample twice; the second time its prefix is cached, up to the row before the first loss token."""
    size = kv_bytes_per_token(model)
    tokens = sum(len(s) + BLOCK for s in problem.samples)
    index = PrefixIndex(
        tokens * size, bytes_per_token=size, block_size=BLOCK, features=FeatureStore(STORE_BYTES)
    )
    kv = RowStore(index.num_rows)
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        # each forward may leave notes on the model (transformers keeps rope_deltas): so does this first one
        for sample in problem.samples:
            prefix_logprobs(model, sample, index, kv, weights="chain")
        return joined([_one(model, problem, i, index, kv) for i in range(len(problem.samples))])
    finally:
        for p in trained:
            p.requires_grad_(True)


def _one(model: Any, problem: Problem, i: int, index: PrefixIndex, kv: RowStore) -> Record:
    sample = problem.samples[i]
    with Tape(model) as tape:
        found = prefix_logprobs(model, sample, index, kv, weights="chain")
    cached = found.cached_tokens
    rows = len(sample) - cached
    first, device = problem.tokens[i], found.logprobs.device
    at = torch.arange(first + cached, first + len(sample), device=device)
    out = Record()
    for key, entry in tape.entries.items():
        if key[0] not in TOWER:
            out.cells[key] = Cells(rows_of(entry.value, rows), at)
    hidden = rows_of(tape.entries[LAST_NORM].value, rows)
    chosen = torch.tensor(list(sample.loss_indices[:HEAD_ROWS]), device=device) - 1 - cached
    start = problem.loss_tokens[i]
    at_head = torch.arange(start, start + len(chosen), device=device)
    with torch.no_grad():
        out.cells[("head", "lm_head")] = Cells(model.lm_head(hidden[chosen]), at_head)
        _, cells = take_loss(problem, found.logprobs, [i])
    for made in cells.values():  # their gradients have no way back into the cached rows
        made.gradient = made.group = None
    return Record(out.cells | cells)
