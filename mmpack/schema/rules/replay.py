"""MM331 to MM336: what the engine did, to be replayed: kept ids, teachers' lists, routes of experts."""

from __future__ import annotations

import numpy as np

from mmpack.families import Family
from mmpack.schema.columns.table import Table
from mmpack.schema.ragged import Ragged
from mmpack.schema.routes import RoutesSpec, rows_read
from mmpack.schema.rules.arrays import MOST_LOGPROB
from mmpack.schema.rules.topic import Found, Topic
from mmpack.schema.sample import Sample, vocabulary_size

MOST_SHARE = 1.02  # of a teacher's list: 1, and what bfloat16 makes of it


def problems(sample: Sample, family: Family) -> Found:
    size = vocabulary_size(sample.processor)
    kept = sample.kept_ids
    if kept is not None:
        yield from _of_lists(kept, "kept_ids", sample, size)
        yield from _of_targets(kept, sample)
    for name, lists in (sample.teachers or {}).items():
        field = f"teachers[{name!r:.40}]"
        yield from _of_lists(lists, field, sample, size)
        yield from _of_scores(lists, field)
    if sample.routed_experts is not None:
        read = sample.routed_experts[: rows_read(len(sample), sample.loss_indices)]
        twice = repeated_experts(read)
        if len(twice):
            token, layer = (int(i) for i in twice[0])
            message = f"has {read[token, layer].tolist()} at token {token}, layer {layer}"
            yield "MM336", "routed_experts", message, (token, token + 1)


def repeated_experts(routes: np.ndarray) -> np.ndarray:
    """int64 [m, 2]: token and layer where routes [L, layers, k] name an expert twice."""
    ordered = np.sort(routes, axis=-1)
    return np.argwhere((ordered[..., 1:] == ordered[..., :-1]).any(axis=-1))


def _of_lists(lists: Ragged, field: str, sample: Sample, size: int | None) -> Found:
    if len(lists) != sample.num_loss_tokens:
        message = f"has {len(lists)} lists for {sample.num_loss_tokens} loss tokens"
        yield "MM331", field, message, None
    beyond = np.flatnonzero(lists.ids >= (np.inf if size is None else size))
    if len(beyond):
        at = int(beyond[0])
        yield "MM332", f"{field}.ids[{at}]", f"is {lists.ids[at]}, the vocabulary has {size}", None
    falls = _falls(lists.ids, lists.offsets)
    if len(falls):
        at = int(falls[0])
        message = f"is {lists.ids[at]}, after {lists.ids[at - 1]} in its list"
        yield "MM334", f"{field}.ids[{at}]", message, None


def _of_targets(kept: Ragged, sample: Sample) -> Found:
    indices = sample.loss_indices
    if len(kept) != len(indices):  # MM331, or MM201
        return
    targets = sample.input_ids[indices]
    lacks = np.flatnonzero(~_has_target(kept.ids, kept.lengths, targets))
    if len(lacks):
        k, token = int(lacks[0]), int(indices[lacks[0]])
        count = int(kept.lengths[k])
        message = f"has no {targets[k]} among its {count} ids, the token that was sampled"
        yield "MM333", f"kept_ids[{k}]", message, (token, token + 1)


def _of_scores(lists: Ragged, field: str) -> Found:
    scores = lists.logprobs
    if scores is None:
        return
    above = np.flatnonzero(scores > MOST_LOGPROB)
    if len(above):
        at = int(above[0])
        yield "MM335", f"{field}.logprobs[{at}]", f"is {scores[at]:.6g}", None
        return
    owner = np.repeat(np.arange(len(lists)), lists.lengths)
    share = np.bincount(owner, np.exp(scores.astype(np.float64)), len(lists))
    over = np.flatnonzero(share > MOST_SHARE)
    if len(over):
        k = int(over[0])
        yield "MM335", f"{field}[{k}]", f"adds up to {share[k]:.6g} over its ids", None


def _falls(ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Where an id is no larger than the one before it in its list."""
    falls = np.concatenate([np.zeros(min(1, len(ids)), bool), ids[1:] <= ids[:-1]])
    starts = offsets[:-1]
    falls[starts[starts < len(ids)]] = False
    return np.flatnonzero(falls)


def _has_target(ids: np.ndarray, lengths: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """bool [n]: whether list k holds targets[k]."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    found = np.zeros(len(lengths), bool)
    found[owner[ids == targets[owner]]] = True
    return found


# ---- by columns ----------------------------------------------------------------------------------


def valid(table: Table) -> np.ndarray:
    """Rows with teachers are left to `problems`."""
    ok = ~table.present("teachers")
    if table.present("kept_ids").any():
        ok &= _kept_valid(table)
    if table.present("routed_experts").any():
        ok &= _routes_valid(table)
    return ok


def _kept_valid(table: Table) -> np.ndarray:
    kept, loss, ids = table.numbers("kept_ids"), table.items("loss_spans"), table.ids
    has = table.present("kept_ids")
    if kept is None:
        return ~has
    start, stop = (loss.numbers(name).astype(np.int64) for name in ("start", "stop"))
    whole = (start <= stop) & (stop <= ids.lengths[loss.row])
    ok = np.ones(table.rows, bool)
    ok[loss.row[~whole]] = False
    counts = np.bincount(loss.row, stop - start, table.rows)
    ok &= np.diff(kept.outer) == counts
    offsets = np.concatenate([[0], np.cumsum(kept.widths, dtype=np.int64)])
    falls = _falls(kept.flat, offsets)
    ok[np.searchsorted(kept.bounds, falls, "right") - 1] = False
    sizes = [
        vocabulary_size(p) if isinstance(p, dict) else None for p in table.objects("processor")
    ]
    known = [size for size in sizes if size is not None]
    if known and kept.flat.size and kept.flat.max() >= min(known):
        ok &= np.array([size is None for size in sizes], bool)
    # lists and loss tokens of the rows that are left come in one order
    spans = (ok & has)[loss.row]
    first = ids.bounds[loss.row[spans]].astype(np.int64)
    targets = ids.flat[_ranges(first + start[spans], stop[spans] - start[spans])]
    row = np.repeat(np.arange(table.rows), np.diff(kept.outer))
    lists = (ok & has)[row]
    flat = kept.flat[np.repeat(lists, kept.widths)]
    ok[row[lists][~_has_target(flat, kept.widths[lists], targets)]] = False
    return ok | ~has


def _ranges(start: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64: the indices of all [start, start + length), one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(start - (ends - lengths), lengths)


def _routes_valid(table: Table) -> np.ndarray:
    """One row of routes per token, no expert twice in those that are read."""
    ok, spec, loss = np.ones(table.rows, bool), RoutesSpec(), table.items("loss_spans")
    stops = np.ones(table.rows, np.int64)
    np.maximum.at(stops, loss.row, loss.numbers("stop").astype(np.int64))
    for k, stored in enumerate(table.objects("routed_experts")):
        if stored is None:
            continue
        ok[k] = spec.reads(stored) and stored["shape"][0] == table.ids.lengths[k]
        if ok[k]:
            ok[k] = not len(repeated_experts(spec.read(stored, "")[: stops[k] - 1]))
    return ok


REPLAY_RULES = Topic(
    codes=("MM331", "MM332", "MM333", "MM334", "MM335", "MM336"),
    fields=(
        "schema_version",
        "input_ids",
        "loss_spans",
        "processor",
        "kept_ids",
        "teachers",
        "routed_experts",
    ),
    problems=problems,
    valid=valid,
)
