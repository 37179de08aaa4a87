"""What the engine did, in vime's and slime's Sample and in mmpack's: kept ids, a teacher's logprobs, routes.

Theirs are columns over the R response tokens, or over the L - 1 tokens that the engine ran; mmpack's are one list per
loss token, or [L, layers, k].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from mmpack.adapters.vime.kept import fits, whole_numbers
from mmpack.errors import ArgumentError, kind_of
from mmpack.schema.ragged import Ragged
from mmpack.schema.routes import compact_routes
from mmpack.schema.sample import Sample

IDS, OFFSETS, TEACHER, ROUTES = (
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "teacher_log_probs",
    "rollout_routed_experts",
)
NAME = "teacher"  # in Sample.teachers
MOVED = (IDS, OFFSETS, ROUTES)  # what `replayed_fields` can make of a sample again


def most_experts(items: Iterable[Mapping[str, Any]]) -> int:
    """One more than the largest expert id of all routes: samples of one rollout share a dtype."""
    routes = (_routes_array("items", item) for item in items)
    return max((int(r.max()) + 1 for r in routes if r is not None and r.size), default=1)


def replayed(
    where: str, given: Mapping[str, Any], ids: np.ndarray, scored: np.ndarray, num_experts: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of a Sample, and a record of how theirs looked.

    Args: `given`: their `to_dict`. `ids`: [L]. `scored`: bool [L], the loss tokens. `num_experts`: of each layer.

    Raises: ArgumentError for columns of another length.
    """
    fields: dict[str, Any] = {}
    record: dict[str, Any] = {}
    start = len(ids) - int(given.get("response_length") or 0)
    places = np.flatnonzero(scored) - start
    kept = _kept(where, given, places, len(ids) - start)
    if kept is not None:
        fields["kept_ids"] = kept
        again = _kept_columns(kept, places, len(ids) - start)
        if not all(_same(given[name], again[name]) for name in (IDS, OFFSETS)):
            record["kept"] = {name: given[name] for name in (IDS, OFFSETS)}
    teacher = given.get(TEACHER)
    if teacher is not None:
        if len(teacher) != len(ids) - start:
            raise ArgumentError(
                f"{where}: {TEACHER} has {len(teacher)} values for {len(ids) - start} response tokens "
                "(loss_mask_shift). Fix: pass one value per response token, tool tokens included"
            )
        logprobs = np.asarray(teacher, dtype=np.float32)[places]
        at = np.arange(len(places) + 1, dtype=np.int64)
        fields["teachers"] = {NAME: Ragged(at, ids[scored].astype(np.int32), logprobs)}
    routes = _routes_array(where, given)
    if routes is not None:
        if len(routes) != len(ids) - 1:
            raise ArgumentError(
                f"{where}: {ROUTES} has {len(routes)} rows for {len(ids)} tokens, expected {len(ids) - 1} (routing). "
                "Fix: pass one row per token that the engine ran, which is all but the last"
            )
        compact = compact_routes(routes, num_experts)
        # nothing reads the row of the last token, which the engine never ran
        fields["routed_experts"] = np.concatenate([compact, np.zeros_like(compact[:1])])
        record["routes"] = "list" if isinstance(given[ROUTES], list) else str(routes.dtype)
    return fields, record


def replayed_fields(
    sample: Sample, start: int, length: int, record: Mapping[str, Any]
) -> dict[str, Any]:
    """Theirs of a sample whose response [length] begins at token `start`: kept ids and routes, where it has them."""
    out: dict[str, Any] = {}
    places = sample.loss_indices - start
    if sample.kept_ids is not None:
        out = _kept_columns(sample.kept_ids, places, length)
        theirs = record.get("kept", {})
        if theirs and _kept("from_samples", theirs, places, length) == sample.kept_ids:
            out = theirs
    if sample.routed_experts is not None:
        kind = record.get("routes", "int32")
        routes = sample.routed_experts[:-1].astype("int32" if kind == "list" else kind)
        out[ROUTES] = routes.tolist() if kind == "list" else torch.from_numpy(routes)
    return out


def teacher_logprobs(sample: Sample) -> np.ndarray | None:
    """float32 [n]: what the teacher gives each loss token; None where it does not score all of them."""
    lists = (sample.teachers or {}).get(NAME)
    if lists is None or lists.logprobs is None:
        return None
    targets = sample.input_ids[sample.loss_indices]
    found = lists.ids == np.repeat(targets, lists.lengths)
    token = np.repeat(np.arange(len(lists)), lists.lengths)[found]
    return lists.logprobs[found] if np.array_equal(token, np.arange(len(targets))) else None


def _kept(where: str, given: Mapping[str, Any], places: np.ndarray, length: int) -> Ragged | None:
    """Lists of the response tokens `places`."""
    columns = [_loaded(given.get(name)) for name in (IDS, OFFSETS)]
    if all(x is None for x in columns):
        return None
    if any(x is None for x in columns):
        raise ArgumentError(
            f"{where}: {IDS} and {OFFSETS} must be passed together. Fix: pass both or neither"
        )
    ids, offsets = (
        whole_numbers(name, where, x) for name, x in zip((IDS, OFFSETS), columns, strict=True)
    )
    if len(offsets) != length + 1 or not fits(offsets, len(ids)):
        raise ArgumentError(
            f"{where}: {OFFSETS} has {len(offsets)} entries for {length} response tokens and {len(ids)} ids, "
            "expected one offset per token and one more, rising from 0 to the number of ids (kept_ids). "
            "Fix: pass the rollout's own"
        )
    return Ragged.of([ids[offsets[k] : offsets[k + 1]] for k in places.tolist()])


def _kept_columns(kept: Ragged, places: np.ndarray, length: int) -> dict[str, Any]:
    """Over the response: empty lists at what is no loss token."""
    offsets = kept.spread(places, length).offsets.astype(np.int32)
    return {IDS: torch.from_numpy(kept.ids.copy()), OFFSETS: torch.from_numpy(offsets)}


def _routes_array(where: str, given: Mapping[str, Any]) -> np.ndarray | None:
    """[rows, layers, k] integers of what they hold: a tensor, lists, chunks of tokens, or a reference to a file."""
    value = _loaded(given.get(ROUTES))
    if value is None:
        return None
    try:
        if isinstance(value, list) and value and all(isinstance(x, torch.Tensor) for x in value):
            value = torch.cat(value)
        array = (
            value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        )
    except (TypeError, ValueError, OverflowError, RuntimeError):
        array = np.zeros(0, object)
    if array.ndim != 3 or array.dtype.kind not in "iu":
        raise ArgumentError(
            f"{where}: {ROUTES} is {kind_of(value)}, expected integers [tokens - 1, layers, k]. "
            "Fix: pass the engine's own"
        )
    return array


def _loaded(value: Any) -> Any:
    """vime's references to tensors in files have a `load`."""
    return value.load() if hasattr(value, "load") else value


def _same(given: Any, again: torch.Tensor) -> bool:
    return (
        isinstance(given, torch.Tensor)
        and given.dtype == again.dtype
        and torch.equal(given.cpu(), again)
    )
