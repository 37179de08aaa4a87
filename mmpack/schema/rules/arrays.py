"""MM301, MM302, MM306, MM307, MM309, MM312: arrays beside the ids, and the ids themselves."""

from __future__ import annotations

import numpy as np

from mmpack.families import Family
from mmpack.schema.columns.table import Table
from mmpack.schema.rules.topic import Found, Topic
from mmpack.schema.sample import Sample, vocabulary_size

MOST_LOGPROB = 1e-4  # 0, and what rounding makes of it


def problems(sample: Sample, family: Family) -> Found:
    size = vocabulary_size(sample.processor)
    if size is not None and len(sample) and sample.input_ids.max() >= size:
        at = int(np.argmax(sample.input_ids >= size))
        message = f"is {sample.input_ids[at]}, the vocabulary has {size}"
        yield "MM312", f"input_ids[{at}]", message, (at, at + 1)
    logprobs = sample.rollout_logprobs
    if logprobs is not None:
        if len(logprobs) != sample.num_loss_tokens:
            message = f"has {len(logprobs)} values for {sample.num_loss_tokens} loss tokens"
            yield "MM301", "rollout_logprobs", message, None
        above = np.flatnonzero(logprobs > MOST_LOGPROB)
        if len(above):
            at = int(above[0])
            yield "MM302", f"rollout_logprobs[{at}]", f"is {logprobs[at]:.6g}", None
    if sample.attention_mask is not None and not sample.attention_mask.all():
        at = int(np.argmin(sample.attention_mask))
        yield "MM306", "attention_mask", f"is 0 at token {at}, within the sample", (at, at + 1)
    if sample.position_ids is not None and (sample.position_ids < 0).any():
        at = int(np.argmax((sample.position_ids < 0).any(axis=0)))
        yield "MM307", "position_ids", f"is negative at token {at}", (at, at + 1)
    if (sample.prefix_cached_tokens or 0) > len(sample):
        message = f"is {sample.prefix_cached_tokens}, the sample has {len(sample)} tokens"
        yield "MM309", "prefix_cached_tokens", message, None


# ---- by columns ----------------------------------------------------------------------------------


def valid(table: Table) -> np.ndarray:
    """A mask with a zero, which may be padding, is left to `Sample.from_dict`."""
    ids = table.ids
    ok = _in_vocabulary(table)
    cached = table.values("prefix_cached_tokens")
    counts = [v if type(v) is int else 0 for v in cached]
    ok &= np.array(counts) <= ids.lengths
    positions, mask = table.numbers("position_ids"), table.numbers("attention_mask")
    logprobs, loss = table.numbers("rollout_logprobs"), table.items("loss_spans")
    if positions is not None:
        heights = np.diff(positions.outer)
        row = np.repeat(np.arange(table.rows), heights)
        ok &= (heights == table.family.position_rows) | ~table.present("position_ids")
        ok[row[positions.widths != ids.lengths[row]]] = False
        ok &= positions.each(lambda flat: not flat.size or flat.min() >= 0)
    if mask is not None:
        ok &= (mask.lengths == ids.lengths) | ~table.present("attention_mask")
        ok &= mask.each(lambda flat: (flat == 1).all())
    if logprobs is not None:
        scored = np.bincount(loss.row, loss.numbers("stop") - loss.numbers("start"), table.rows)
        ok &= (logprobs.lengths == scored) | ~table.present("rollout_logprobs")
        most = np.float32(MOST_LOGPROB)
        ok &= logprobs.each(lambda flat: not flat.size or flat.max() <= most)
    return ok


def _in_vocabulary(table: Table) -> np.ndarray:
    """bool [n]: also false for rows with a vocabulary if an id of any row is beyond the smallest one."""
    sizes = [
        vocabulary_size(p) if isinstance(p, dict) else None for p in table.objects("processor")
    ]
    known = [size for size in sizes if size is not None]
    flat = table.ids.flat
    if not known or (flat.size and flat.max() < min(known)):
        return np.ones(table.rows, bool)
    return np.array([size is None for size in sizes], bool)


ARRAYS = Topic(
    codes=("MM301", "MM302", "MM306", "MM307", "MM309", "MM312"),
    fields=(
        "input_ids",
        "position_ids",
        "attention_mask",
        "rollout_logprobs",
        "loss_spans",
        "processor",
        "prefix_cached_tokens",
    ),
    problems=problems,
    valid=valid,
)
