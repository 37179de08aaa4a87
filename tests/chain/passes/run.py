"""Runs of a problem in some batches: forward, loss and backward on tape, and the record by canonical rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from chain.passes.problem import HEAD_ROWS, Problem, loss_rows_of, take_loss
from chain.passes.tape import Entry, Tape, rows_of
from chain.record import Cells, Key, Record, joined
from chain.stages import TOWER
from torch import Tensor

from mmpack.adapters.transformers.attention import attach
from mmpack.adapters.transformers.encode_once import encode_once
from mmpack.adapters.transformers.logprobs import packed_logprobs
from mmpack.adapters.transformers.tower import Features, media_names, takes_encoded_media
from mmpack.layout.fingerprint import media_name
from mmpack.packing.batch import Batch, PackedBatch

LAST_NORM = ("rms_norm", "language_model.norm")
STORE_BYTES = 1 << 30  # of feature stores
Logprobs = Callable[[Any, Batch], Tensor]
Logits = Callable[[Tensor], Tensor]
Gather = Callable[[Key, Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """One batch of a run. `samples[b]`: the problem's sample at place b of the batch, None for a companion."""

    batch: Batch
    samples: tuple[int | None, ...]

    @property
    def own(self) -> list[int]:
        return [s for s in self.samples if s is not None]


@dataclass
class Way:
    """How a model is called; each has the plain way as its default.

    `logprobs`: [N] of a batch's loss tokens. `logits`: hidden [n, H] -> [n, V]. `gather`: a rank's part of a value ->
    the whole; `gradient` the same of a weight's, by name. `features`: where features are kept. `once`: encode all
    batches' media before the first. `tower`: whether the tower runs the media of a batch in their order.
    """

    attached: bool = True
    logprobs: Logprobs | None = None
    logits: Logits | None = None
    gather: Gather | None = None
    gradient: Callable[[str, Tensor], Tensor] | None = None
    features: Features | None = None
    once: bool = False
    tower: bool = True


def run(model: Any, problem: Problem, parts: Sequence[Part], way: Way | None = None) -> Record:
    """The record of a step: forward, loss and backward of each part, and gradients of the weights."""
    way = way or Way()
    model.zero_grad(set_to_none=True)
    outside = attach(model) if way.attached else contextlib.nullcontext()
    taken = []
    with outside, _encoded(model, parts, way) as (features, tower):
        for part in parts:
            taken.append(_taken(model, problem, part, way, features))
    record = joined([_record(*one, model, problem, way) for one in taken])
    if tower is not None:
        packs = [part.batch for part in parts]
        record.cells |= _tower_cells(tower.entries, packs, model, problem, way)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    whole = way.gradient or (lambda name, gradient: gradient)
    record.parameters = {name: whole(name, gradient) for name, gradient in found.items()}
    model.zero_grad(set_to_none=True)
    return record


@contextlib.contextmanager
def _encoded(model: Any, parts: Sequence[Part], way: Way) -> Iterator[tuple[Any, Tape | None]]:
    """The features that the parts read, and the tape of a tower that runs before them."""
    if not way.once:
        yield way.features, None
        return
    packs = [part.batch for part in parts]
    assert all(isinstance(pack, PackedBatch) for pack in packs)
    with contextlib.ExitStack() as stack:
        tape = Tape(model)
        with tape:
            features = stack.enter_context(encode_once(model, packs))  # type: ignore[arg-type]
        yield features, tape


def _taken(
    model: Any, problem: Problem, part: Part, way: Way, features: Any
) -> tuple[Part, Tape, dict[Key, Cells]]:
    with Tape(model) as tape:
        if way.logprobs is not None:
            logprobs = way.logprobs(model, part.batch)
        else:
            logprobs = packed_logprobs(model, part.batch, features=features)
        pieces = logprobs.split(part.batch.loss_counts)
        own = [x for x, s in zip(pieces, part.samples, strict=True) if s is not None]
        loss, cells = take_loss(problem, torch.cat(own), part.own)
        loss.backward()
    return part, tape, cells


def _record(
    part: Part, tape: Tape, cells: dict[Key, Cells], model: Any, problem: Problem, way: Way
) -> Record:
    out = Record()
    batch, gather = part.batch, way.gather or _as_is
    rows, at = _text_rows(part, problem)
    count = batch.input_ids.numel()
    used, group = rows.unique(return_inverse=True)
    if not way.tower:
        pass
    elif not isinstance(batch, PackedBatch) or takes_encoded_media(model):
        out.cells |= _tower_cells(tape.entries, [batch], model, problem, way)
    else:
        out.cells |= _tower_cells(tape.entries, [batch], model, problem, way, occurrences=True)
    for key, entry in tape.entries.items():
        if key[0] in TOWER:
            continue
        value = rows_of(gather(key, entry.value), count)
        made = Cells(value[rows], at)
        if entry.gradient is not None:
            made.gradient, made.group = rows_of(gather(key, entry.gradient), count)[used], group
        out.cells[key] = made
    norm = tape.entries[LAST_NORM]
    slope = None if norm.gradient is None else gather(LAST_NORM, norm.gradient)
    norm = Entry(gather(LAST_NORM, norm.value), slope)
    out.cells[("head", "lm_head")] = _head(norm, part, model, problem, way)
    out.cells |= cells
    return out


def _text_rows(part: Part, problem: Problem) -> tuple[Tensor, Tensor]:
    """Of each token of the problem's samples in the batch: its row there, and its canonical row."""
    batch, first = part.batch, problem.tokens
    pieces = batch.token_rows.split(batch.token_counts)
    rows = [x for x, s in zip(pieces, part.samples, strict=True) if s is not None]
    at = torch.cat([torch.arange(first[s], first[s + 1]) for s in part.own])
    joined_rows = torch.cat(rows)
    return joined_rows, at.to(joined_rows.device)


def _head(norm: Entry, part: Part, model: Any, problem: Problem, way: Way) -> Cells:
    """Logits of the first loss tokens of each sample, and the gradient to all hidden states that are read."""
    batch = part.batch
    hidden = rows_of(norm.value, batch.input_ids.numel())
    pieces = batch.loss_rows.long().split(batch.loss_counts)
    own = [x for x, s in zip(pieces, part.samples, strict=True) if s is not None]
    at = loss_rows_of(problem, part.own, hidden.device)
    some = torch.cat([x[:HEAD_ROWS] for x in own])
    counts = [len(x) for x in own]
    at_some = torch.cat([x[:HEAD_ROWS] for x in at.split(counts)])
    with torch.no_grad():
        logits = (way.logits or model.lm_head)(hidden[some])
    out = Cells(logits, at_some)
    if norm.gradient is not None:
        used, group = some.unique(return_inverse=True)
        out.gradient, out.group = rows_of(norm.gradient, len(hidden))[used], group
    return out


def _tower_cells(
    entries: dict[Key, Entry],
    batches: Sequence[Batch],
    model: Any,
    problem: Problem,
    way: Way,
    occurrences: bool = False,
) -> dict[Key, Cells]:
    """Of the tower's entries: their media are those of the batches, each once, or each time that one occurs."""
    found = {key: entry for key, entry in entries.items() if key[0] in TOWER}
    if not found:
        return {}
    ran = _media_run(batches, occurrences)
    out = {}
    merged = model.config.vision_config.spatial_merge_size**2
    for key, entry in found.items():
        unit = merged if key[0] == "projector" else 1
        at, keep, start = [], [], 0
        for name, patches in ran:
            length = patches // unit
            if name in problem.media:
                first = problem.media[name][1 if key[0] == "projector" else 0]
                at.append(torch.arange(first, first + length))
                keep.append(torch.arange(start, start + length))
            start += length
        value = rows_of(entry.value, start)
        if not at:
            continue
        rows, places = torch.cat(keep).to(value.device), torch.cat(at).to(value.device)
        cells = Cells(value[rows], places)
        if entry.gradient is not None:
            cells.gradient = rows_of(entry.gradient, start)[rows]
            cells.group = torch.arange(len(rows), device=value.device)
        out[key] = cells
    return out


def _media_run(batches: Sequence[Batch], occurrences: bool) -> list[tuple[str, int]]:
    """Names and patches of the media that the tower ran, in its order: pictures, as samples have no videos."""
    out: dict[Any, tuple[str, int]] = {}
    for batch in batches:
        if isinstance(batch, PackedBatch) and not occurrences:
            names = media_names(batch)
            order = list(range(len(batch.media)))
        else:
            names = [media_name(m) for m in batch.media]
            order = batch.media_order
        for i in order:
            key = len(out) if occurrences or not isinstance(batch, PackedBatch) else names[i]
            out.setdefault(key, (names[i], batch.media[i].num_patches))
    return list(out.values())


def _as_is(key: Key, x: Tensor) -> Tensor:
    return x
