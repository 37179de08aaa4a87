"""MM301, MM302, MM306, MM307, MM309, MM312, MM321 to MM336: ids and arrays, codec ids, what is replayed."""

from __future__ import annotations

import numpy as np

from mmpack.families import Family
from mmpack.schema.codes import Found
from mmpack.schema.ragged import Ragged
from mmpack.schema.routes import rows_read
from mmpack.schema.sample import Sample, vocabulary_size

MOST_LOGPROB = 1e-4  # 0, and what rounding makes of it
MOST_SHARE = 1.02  # of a teacher's list: 1, and what bfloat16 makes of it


def array_problems(sample: Sample, family: Family) -> Found:
    """MM301, MM302, MM306, MM307, MM309, MM312."""
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


def codec_problems(sample: Sample, family: Family) -> Found:
    """MM321 to MM323: ids of audio codecs."""
    for i, audio in enumerate(sample.codec_ids or ()):
        field = f"codec_ids[{i}]"
        levels, frames = audio.codes.shape
        if levels != len(audio.codebook_sizes) or not levels or not frames:
            message = f"has ids [{levels}, {frames}] of {len(audio.codebook_sizes)} codebooks"
            yield "MM322", field, message, None
        else:
            sizes = np.array(audio.codebook_sizes)
            beyond = audio.codes.max(axis=1) >= sizes
            if beyond.any():
                level = int(beyond.argmax())
                frame = int(audio.codes[level].argmax())
                message = f"is {audio.codes[level, frame]}, its codebook has {audio.codebook_sizes[level]}"
                yield "MM321", f"{field}.codes[{level}][{frame}]", message, None
        if not audio.frame_rate > 0:
            yield "MM323", f"{field}.frame_rate", f"is {audio.frame_rate:g}", None


def replay_problems(sample: Sample, family: Family) -> Found:
    """MM331 to MM336: kept ids, teachers' lists, routes of experts."""
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
