"""The chain's step: drawn samples, forward, GRPO loss with KL and backward in some batches, recorded by canonical rows.

A canonical row is a token of a sample, a patch or vision token of a medium, or a loss token; there are K of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import transformers
from chain.tape import LAST_NORM, TOWER, Entry, Key, Tape
from tokenizers import Tokenizer, models
from torch import Tensor

from mmpack.adapters.transformers.attention import attach
from mmpack.adapters.transformers.logprobs import packed_logprobs
from mmpack.adapters.transformers.tower import media_names
from mmpack.families import get_family
from mmpack.layout.fingerprint import media_name
from mmpack.losses.kl import kl_divergence
from mmpack.losses.policy.loss import policy_loss
from mmpack.packing.batch import Batch, PackedBatch
from mmpack.processors.wrap import wrap_processor
from mmpack.schema.sample import Sample
from mmpack.versions import takes_encoded_media

KL_COEF = 0.1
HEAD_ROWS = 8  # of a sample, whose logits are made
_IDS = 150_000  # ids below the special ones


@dataclass
class Cells:
    """Values of one place [K, D] by canonical row, NaN where the run has none.

    `gradient`: [K, D] in a wider dtype. Rows that share one, as those of a shared prefix, have its sum at the first of
    them, `of[k]`, and 0 elsewhere.
    """

    values: Tensor
    of: Tensor
    gradient: Tensor | None = None


@dataclass
class Record:
    """A run: `cells` by stage and place, in order of execution, and gradients of weights by name."""

    cells: dict[Key, Cells] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def put(self, key: Key, count: int, at: Tensor, value: Tensor, gradient: Any = None,
            of: Any = None) -> None:  # fmt: skip
        """Values of the rows `at` and their gradients, added to those that `of` has already."""
        if key not in self.cells:
            nothing = value.new_full((count, value.shape[1]), torch.nan)
            self.cells[key] = Cells(nothing, torch.arange(count, device=value.device))
        cells = self.cells[key]
        cells.values[at] = value
        if gradient is None:
            return
        if cells.gradient is None:
            wide = torch.float32 if gradient.element_size() == 2 else torch.float64
            cells.gradient = gradient.new_zeros(count, gradient.shape[1], dtype=wide)
        of = at if of is None else of
        cells.of[at] = of
        first = of == at  # one gradient of several rows is added once
        cells.gradient.index_add_(0, at[first], gradient[first].to(cells.gradient.dtype))


@dataclass
class Problem:
    """Samples with pictures (B of them, N loss tokens), on the model's device."""

    samples: list[Sample]
    companions: list[Sample]  # others, whose loss is not taken
    advantages: Tensor  # [B] float32
    old: Tensor  # [N] float32, natural log
    ref: Tensor  # [N]

    @cached_property
    def tokens(self) -> list[int]:
        """First canonical row of each sample, and their number: [B + 1]."""
        return [0, *np.cumsum([len(s) for s in self.samples]).tolist()]

    @cached_property
    def loss_tokens(self) -> list[int]:
        """The same of loss tokens."""
        return [0, *np.cumsum([s.num_loss_tokens for s in self.samples]).tolist()]

    @cached_property
    def media(self) -> dict[str, tuple[int, int]]:
        """By name, once each: first patch and number of patches."""
        out: dict[str, tuple[int, int]] = {}
        for medium in (m for sample in self.samples for m in sample.media):
            start = sum(n for _, n in out.values())
            out.setdefault(media_name(medium), (start, medium.num_patches))
        return out


def make_problem(
    samples: list[Sample], companions: list[Sample], logprobs: Tensor, seed: int
) -> Problem:
    """Return a problem whose old and reference logprobs lie about the policy's `logprobs` [N]."""
    rng = np.random.default_rng(seed)
    noise = torch.from_numpy(rng.standard_normal((2, len(logprobs)))).to(logprobs.device)
    advantages = torch.from_numpy(rng.standard_normal(len(samples))).float().to(logprobs.device)
    old, ref = (logprobs.double() + s * n for s, n in zip((0.02, 0.1), noise, strict=True))
    return Problem(samples, companions, advantages, old.float(), ref.float())


@dataclass(frozen=True)
class Part:
    """One batch of a run. `samples[b]`: the problem's sample at place b of the batch, None for a companion."""

    batch: Batch
    samples: tuple[int | None, ...]

    def own(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Of a piece for each place, those of the problem's samples."""
        return [x for x, s in zip(pieces, self.samples, strict=True) if s is not None]

    def at(self, first: list[int]) -> list[Tensor]:
        """Canonical rows of each of these samples."""
        device = self.batch.loss_targets.device
        return [torch.arange(first[s], first[s + 1], device=device) for s in self.samples if s is not None]  # fmt: skip


def run(
    model: Any,
    problem: Problem,
    parts: Sequence[Part],
    logprobs_of: Callable[[Any, Batch], Tensor] | None = None,
) -> Record:
    """Return the record of a step: forward, loss and backward of each part, and gradients of the weights.

    `logprobs_of`: [N] of a batch's loss tokens by a model that mmpack is not attached to.
    """
    model.zero_grad(set_to_none=True)
    record = Record()
    with attach(model) if logprobs_of is None else contextlib.nullcontext():
        for part in parts:
            with Tape(model) as tape:
                logprobs = (logprobs_of or packed_logprobs)(model, part.batch)
                own = torch.cat(part.own(logprobs.split(part.batch.loss_counts)))
                loss, found = _loss(problem, part, own)
                loss.backward()
            _put_tower(record, tape.entries, model, problem, part)
            _put_text(record, tape.entries, model, problem, part)
            at = torch.cat(part.at(problem.loss_tokens))
            for stage, value, gradient in found:
                record.put((stage, stage), len(problem.old), at, value[:, None], gradient[:, None])
            total = record.cells.setdefault(
                ("loss", "loss"), Cells(own.new_zeros(1, 1), at[:1] * 0)
            )
            total.values += loss.detach()
    record.parameters = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return record


def _loss(
    problem: Problem, part: Part, logprobs: Tensor
) -> tuple[Tensor, list[tuple[str, Tensor, Tensor]]]:
    """The loss of these samples' logprobs [n], whose parts add up over batches; values and gradients on the way."""
    at = part.at(problem.loss_tokens)
    counts = torch.tensor([len(x) for x in at], device=logprobs.device)
    rows, chosen = torch.cat(at), [s for s in part.samples if s is not None]
    advantages = problem.advantages[chosen]
    old, ref = problem.old[rows], problem.ref[rows]
    loss = policy_loss(
        logprobs,
        advantages,
        torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        old_logprobs=old,
        ref_logprobs=ref,
        kl_coef=KL_COEF,
        total_tokens=len(problem.old),
        total_samples=len(problem.samples),
    ).loss
    leaf = logprobs.detach().requires_grad_()
    ratio, kl = (leaf - old).exp(), kl_divergence(leaf, ref)
    (of_ratio,) = torch.autograd.grad((ratio * advantages.repeat_interleave(counts)).sum(), leaf)
    (of_kl,) = torch.autograd.grad(kl.sum(), leaf)
    (slope,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
    values = (logprobs.detach(), ratio.detach(), kl.detach().float())
    return loss, list(
        zip(("logprob", "ratio", "kl"), values, (slope, of_ratio, of_kl), strict=True)
    )


def _put_text(
    record: Record, entries: dict[Key, Entry], model: Any, problem: Problem, part: Part
) -> None:
    """Rows of tokens: where each is in the batch, and in the problem."""
    count = part.batch.input_ids.numel()
    rows = torch.cat(part.own(part.batch.token_rows.split(part.batch.token_counts))).long()
    at = torch.cat(part.at(problem.tokens))
    first = at.new_full((count,), problem.tokens[-1])
    of = first.scatter_reduce(0, rows, at, "amin")[rows]
    for key, entry in entries.items():
        if key[0] not in TOWER:
            value = entry.value.reshape(count, -1)[rows]
            gradient = None if entry.gradient is None else entry.gradient.reshape(count, -1)[rows]
            record.put(key, problem.tokens[-1], at, value, gradient, of)
    hidden = entries[LAST_NORM].value.reshape(count, -1)
    pieces = part.own(part.batch.loss_rows.long().split(part.batch.loss_counts))
    for i, some in zip((s for s in part.samples if s is not None), pieces, strict=True):
        with torch.no_grad():
            logits = model.lm_head(hidden[some[:HEAD_ROWS]])
        name = f"lm_head of {problem.samples[i].sample_id}"
        record.put(("head", name), len(logits), torch.arange(len(logits)).to(some), logits)


def _put_tower(
    record: Record, entries: dict[Key, Entry], model: Any, problem: Problem, part: Part
) -> None:
    """Rows of media: a pack has each once where transformers takes encoded media, else each time it occurs."""
    batch = part.batch
    if isinstance(batch, PackedBatch) and takes_encoded_media(model):
        ran = dict(zip(media_names(batch), [m.num_patches for m in batch.media], strict=True))
        runs = list(ran.items())
    else:
        media = [batch.media[i] for i in batch.media_order]
        runs = [(media_name(m), m.num_patches) for m in media]
    merged = model.config.vision_config.spatial_merge_size**2
    total = sum(n for _, n in problem.media.values())
    for key, entry in entries.items():
        if key[0] not in TOWER:
            continue
        unit, start = merged if key[0] == "projector" else 1, 0
        value = entry.value.reshape(sum(n for _, n in runs) // unit, -1)
        for name, patches in runs:
            length = patches // unit
            if name in problem.media:
                first, here = problem.media[name][0] // unit, slice(start, start + length)
                at = torch.arange(first, first + length, device=value.device)
                gradient = entry.gradient
                own = None if gradient is None else gradient.reshape(value.shape)[here]
                record.put(key, total // unit, at, value[here], own)
            start += length


def draw(name: str, size: str, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Return four samples, and companions with 0, 1 and 3 pictures: noise by a real image processor, drawn ids.

    Two samples share a prompt with a picture, one has two pictures, one has none.
    """
    family, rng = get_family(name), np.random.default_rng(seed)
    settings: dict[str, Any] = {"size": {"shortest_edge": 56 * 56, "longest_edge": 1024 * 28 * 28}}
    if family.patch_size == 16:
        half = [0.5, 0.5, 0.5]
        settings |= {"patch_size": 16, "image_mean": half, "image_std": half}
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))  # ids are drawn, no text is read
    processor = wrap_processor(
        tokenizer=transformers.PreTrainedTokenizerFast(tokenizer_object=words),
        image_processor=transformers.Qwen2VLImageProcessorPil(**settings),
        family=name,
    )
    text, side = (1, family.patch_size * 4) if size == "tiny" else (24, family.patch_size * 28)

    def ids(n: int) -> list[int]:
        return rng.integers(0, _IDS, n * text).tolist()

    def picture(w: int, h: int) -> np.ndarray:
        return rng.integers(0, 256, (side * h // 2, side * w // 2, 3), dtype=np.uint8)

    def sample(sample_id: str, parts: list[Any], n: int) -> Sample:
        """`parts`: ids or pictures."""
        one = [*family.starts, family.placeholder_ids["image"], *family.ends]
        out = [i for part in parts for i in (part if isinstance(part, list) else one)]
        return processor.from_ids(
            out + ids(n),
            media=[part for part in parts if not isinstance(part, list)],
            expanded=False,
            loss_spans=[(len(out), len(out) + n * text)],
            sample_id=sample_id,
            group_id=sample_id[0],
        )

    prompt = [ids(6), picture(3, 2), ids(4)]
    return [
        sample("a0", prompt, 5),
        sample("a1", prompt, 8),
        sample("b0", [ids(5), picture(2, 2), ids(3), picture(4, 2), ids(2)], 6),
        sample("c0", [ids(9)], 7),
    ], [
        sample("d0", [ids(11)], 3),
        sample("d1", [ids(2), picture(5, 2), ids(3)], 4),
        sample("d3", [ids(3), picture(2, 3), ids(1), picture(2, 2), picture(3, 2)], 2),
    ]
