"""Their Sample (tokens, response_length, loss_mask, rollout_log_probs) as samples and back.

Neither is on the package index: this adapter follows the fields that their sources and docs name, and its tests use a
class of those fields. It takes their objects, or the dicts of `to_dict`, and gives what `from_dict` takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mmpack.adapters.checks import check_each, refuse_reward_on_no_token
from mmpack.adapters.json_values import Held, held
from mmpack.adapters.loss_values import columns_of, values_by_name
from mmpack.adapters.processed_media import (
    inputs_of_media,
    media_of_inputs,
    name_images,
    pixels_of,
    rest_of,
)
from mmpack.adapters.row_sample import response_start, row_sample
from mmpack.adapters.vime.responses import kept_lists
from mmpack.errors import ArgumentError, kind_of
from mmpack.layout.names import numbered_in_groups
from mmpack.packing.batch import Batch
from mmpack.processors.wrap import Processor
from mmpack.schema.ragged import Ragged
from mmpack.schema.routes import compact_routes
from mmpack.schema.sample import Sample
from mmpack.schema.spans import PolicyVersion, Score

KEY = "vime"  # in Sample.metadata
FINISHED = {"completed": "stop", "truncated": "length", "aborted": "abort"}
# one value per response token: their name -> that of `mp.policy_loss`
COLUMNS = {
    "rollout_log_probs": "rollout_logprobs",
    "teacher_log_probs": "teacher_logprobs",
    "log_probs": "old_logprobs",
    "ref_log_probs": "ref_logprobs",
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
}


def to_samples(
    items: Sequence[Any],
    processor: Processor,
    *,
    images: Sequence[Sequence[Any] | None] | None = None,
    sampling: dict[str, Any] | None = None,
    num_experts: int | None = None,
) -> list[Sample]:
    """vime's or slime's samples as mmpack's, called `<group_index>/<k>`; without one, by index, or the item's number.

    Loss spans are where loss_mask is 1 (None: all of the response; remove_sample: nowhere), `rollout_log_probs` there
    become `rollout_logprobs`, `rollout_top_p_token_ids` `kept_ids`, `teacher_log_probs` the teacher "teacher", which
    scores the tokens themselves, and `rollout_routed_experts` `routed_experts`. The rest stays in `metadata["vime"]`.

    Args:
        items: their Sample objects, or the dicts of `to_dict`.
        processor: `mp.wrap_processor` of their processor.
        images: of each; None: those of `multimodal_inputs["images"]`, where all can be opened. Media
            without images are known by their processed pixels.
        sampling: `temperature`, `top_p`, …, and `logprobs`: "processed" or "raw", of rollout_log_probs.
        num_experts: per layer, which decides the bytes of a route; None: as many as the routes of `items` name.

    Raises: ArgumentError for columns of another length than the response, a response longer than tokens, a reward that
    is no number; LayoutError where grids, placeholders and images differ in number, and for a reward of an empty
    response (`empty_response`).
    """
    check_each("to_samples", len(items), "items", {"images": images})
    out = []
    dicts = [dict(x) if isinstance(x, Mapping) else dict(x.to_dict()) for x in items]
    experts = most_experts(dicts) if num_experts is None else num_experts
    for i, given in enumerate(dicts):
        if given.get("tokens") is None:
            raise ArgumentError(
                f"to_samples: items[{i}] has no tokens. Fix: pass samples that were generated"
            )
        named = (given.get("group_index"), given.get("index"), i)
        group = next(str(name) for name in named if name is not None)
        own = _open_images(given) if images is None else images[i] or []
        out.append(
            _sample(f"to_samples: items[{i}]", given, processor, own, group, sampling, experts)
        )
    for sample, sample_id in zip(out, numbered_in_groups([s.group_id for s in out]), strict=True):
        sample.sample_id = sample_id
    return out


def from_batch(batch: Batch, samples: Sequence[Sample], sample_class: Any = None) -> list[Any]:
    """`from_samples` of a batch of `samples`, with the batch's `loss_columns` at the loss tokens.

    Raises: ArgumentError if `samples` are not those of the batch, in its order.
    """
    return from_samples(samples, columns_of(batch, samples), pixels_of(batch), sample_class)


def from_samples(
    samples: Sequence[Sample],
    columns: Mapping[str, Sequence[Any]] | None = None,
    media: Mapping[str, Any] | None = None,
    sample_class: Any = None,
) -> list[Any]:
    """What `Sample.from_dict` of vime and slime takes, one dict per sample; with `sample_class`, what it makes of it.

    Args:
        columns: name -> one [n] array per sample, written at the loss tokens of a list over the response, under their
            names (`old_logprobs` as log_probs, `ref_logprobs` as ref_log_probs).
        media: cache key -> pixels, of samples that were read from a trace.

    Raises: SchemaError (MM404) for missing pixels.
    """
    check_each("from_samples", len(samples), "samples", columns or {})
    own = [held(s.metadata, KEY) for s in samples]
    recorded = [known["fields"].get("group_index") for known in own if known is not None]
    first = 1 + max((g for g in recorded if isinstance(g, int)), default=-1)
    groups: dict[str, int] = {}
    out = []
    for b, (sample, known) in enumerate(zip(samples, own, strict=True)):
        given = {name: values[b] for name, values in (columns or {}).items()}
        if known is None:
            group = groups.setdefault(sample.group_id, first + len(groups))
            known = _unrecorded(sample, group, b)
        made = _dict(sample, known, given, media)
        out.append(made if sample_class is None else sample_class.from_dict(made))
    return out


def _sample(
    where: str,
    given: dict[str, Any],
    processor: Processor,
    images: Sequence[Any] | None,
    group: str,
    sampling: dict[str, Any] | None,
    num_experts: int,
) -> Sample:
    ids = np.asarray(given["tokens"], dtype=np.int64)
    length = int(given.get("response_length") or 0)
    mask = given.get("loss_mask")
    logprobs = given.get("rollout_log_probs")
    for name, values in (("loss_mask", mask), ("rollout_log_probs", logprobs)):
        if values is not None and len(values) != length:
            raise ArgumentError(
                f"{where}: {name} has {len(values)} values for {length} response tokens (loss_mask_shift). "
                "Fix: pass one value per response token, tool tokens included"
            )
    start = len(ids) - length
    if start < 0:
        raise ArgumentError(
            f"{where}: response_length is {length}, of {len(ids)} tokens. Fix: let tokens hold prompt and response"
        )
    scored = np.zeros(len(ids), dtype=bool)
    if not given.get("remove_sample"):  # their trainers zero the mask of one
        scored[start:] = True if mask is None else np.asarray(mask, dtype=bool)
    reward = given.get("reward")
    if reward is not None and not length:
        refuse_reward_on_no_token(where)
    inputs = given.get("multimodal_train_inputs")
    media = media_of_inputs(inputs, processor.family, where)
    if images is not None and media["image"]:
        name_images(media, images, processor, where)
    versions = given.get("weight_versions") or []
    cached = (given.get("prefix_cache_info") or {}).get("cached_tokens")
    replay, record = replayed(where, given, ids, scored, num_experts)
    elsewhere = ("tokens", "multimodal_train_inputs")
    kept = {k: None if k in MOVED else v for k, v in given.items() if k not in elsewhere}
    others = None if inputs is None else rest_of(inputs)
    return row_sample(
        where,
        ids,
        media,
        scored,
        processor.family,
        response_start=start,
        processor=processor,
        sample_id="",
        group_id=group,
        sampling=sampling,
        rollout_logprobs=None
        if logprobs is None
        else np.asarray(logprobs, dtype=np.float32)[scored[start:]],
        rewards=None if reward is None else _scores(where, reward),
        finish_reason=FINISHED.get(str(given.get("status"))),
        policy_versions=[PolicyVersion(start, len(ids), str(versions[0]))]
        if len(set(versions)) == 1
        else None,
        prefix_cached_tokens=cached,
        metadata={KEY: Held({"fields": kept, "inputs": others, "replay": record})},
        **replay,
    )


def _scores(where: str, reward: Any) -> list[Score]:
    """A reward is a number, or several by name."""
    if isinstance(reward, Mapping):
        return [
            Score(str(k), float(v))
            for k, v in reward.items()
            if isinstance(v, int | float) and not isinstance(v, bool)
        ]
    try:
        return [Score("reward", float(reward))]
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(
            f"{where}: its reward is {reward!r}. Fix: pass a number, or numbers by name"
        ) from None


def _open_images(given: dict[str, Any]) -> list[Any] | None:
    """The images that a sample carries, if all are open ones; else None."""
    inputs = given.get("multimodal_inputs")
    raw = inputs.get("images") if isinstance(inputs, Mapping) else None
    return None if not raw or any(isinstance(p, str) for p in raw) else list(raw)


def _dict(
    sample: Sample,
    known: dict[str, Any],
    columns: Mapping[str, Any],
    media: Mapping[str, Any] | None,
) -> dict[str, Any]:
    out: dict[str, Any] = dict(known["fields"])
    start = len(sample) - int(out["response_length"])
    out["tokens"] = sample.input_ids.tolist()
    inputs = inputs_of_media(sample, media)
    others = known["inputs"]
    out["multimodal_train_inputs"] = (
        inputs | (others or {}) if inputs or others is not None else None
    )
    length = int(out["response_length"])
    out |= replayed_fields(sample, start, length, known.get("replay", {}))
    teacher = teacher_logprobs(sample)
    if teacher is not None:
        columns = {"teacher_logprobs": teacher, **columns}
    places = sample.loss_indices - start
    for name, values in values_by_name(sample, columns, COLUMNS).items():
        column = list(out.get(name) or [0.0] * int(out["response_length"]))
        for at, value in zip(places.tolist(), values.tolist(), strict=True):
            # a double that rounds to the recorded float32 is that value, in full
            column[at] = column[at] if np.float32(column[at]) == np.float32(value) else value
        out[name] = column
    return out


def _unrecorded(sample: Sample, group: int, index: int) -> dict[str, Any]:
    start = response_start(sample)
    mask = np.zeros(len(sample) - start, dtype=int)
    mask[sample.loss_indices - start] = 1
    status = {v: k for k, v in FINISHED.items()}.get(sample.finish_reason or "", "pending")
    fields = {
        "group_index": group,
        "index": index,
        "prompt": "",
        "response": "",
        "response_length": len(mask),
        "label": None,
        "reward": sum(s.value for s in sample.rewards) if sample.rewards else None,
        "loss_mask": mask.tolist(),
        "status": status,
        "metadata": {"sample_id": sample.sample_id, "group_id": sample.group_id},
    }
    return {"fields": fields, "inputs": None}


# ---- what the engine did ----------------------------------------------------------------------------

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
    ids, offsets = kept_lists(where, (IDS, OFFSETS), columns, length)
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
