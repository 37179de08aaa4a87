"""Figures of the samples on a page: how long they are, what they repeat, what sharing saves, and their forest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmpack.layout.forest import build_forest
from mmpack.schema.rules import problems_of
from mmpack.schema.sample import Sample
from mmpack.view.bars import histogram, saved_parts, score_histograms
from mmpack.view.forest import forest_drawing
from mmpack.view.parts import Figure, Grid, Heading, Line, Part
from mmpack.view.trace.roles import ROLES, roles_of

OF_ROLE = tuple(f"mm-of {name}" for name in ROLES)  # the class of each role on a page of samples
NAMED = 8  # names of rewards and costs that have a histogram


def sums(samples: Sequence[Sample]) -> list[Part]:
    """Figures of the page; rows, media and the forest are of the samples that break no rule."""
    whole = [sample for sample in samples if not any(problems_of(sample))]
    saved = repeated(whole)
    broken = len(samples) - len(whole)
    left = f" {broken} that break rules are left out." if broken else ""
    return [
        Grid(figures(samples)),
        *saved_parts(saved, "shared"),
        Line(f"All samples of this page in one pack.{left}", soft=True),
        *forest(whole),
    ]


def figures(samples: Sequence[Sample]) -> list[Figure]:
    """Histograms of lengths, media, rewards, costs and logprobs, as far as the samples have them."""
    out = [
        histogram([len(s) for s in samples], "tokens of a sample"),
        histogram([s.num_loss_tokens for s in samples], "loss tokens of a sample"),
    ]
    media = {(m.cache_key, m.modality): m.num_patches for s in samples for m in s.media}
    if media:
        out.append(histogram([len(s.media) for s in samples], "media of a sample"))
        out.append(histogram(list(media.values()), "patches of a medium"))
    scores = (
        (kind, score)
        for s in samples
        for kind, some in (("reward", s.rewards), ("cost", s.costs))
        for score in some or ()
    )
    out += score_histograms(scores)[:NAMED]
    logprobs = [s.rollout_logprobs for s in samples if s.rollout_logprobs is not None]
    if logprobs:
        out.append(histogram(np.concatenate(logprobs), "rollout's logprob of a loss token"))
    return out


def repeated(samples: Sequence[Sample]) -> list[tuple[str, int, int]]:
    """Name, count of each sample alone, and count where prefixes and media are computed once; samples break no rule."""
    rows = sum(build_forest(some).num_tokens for some in _by_family(samples).values())
    media = [medium for sample in samples for medium in sample.media]
    once = {(m.cache_key, m.modality): m for m in media}.values()
    return [
        ("rows", sum(map(len, samples)), rows),
        ("media", len(media), len(once)),
        ("patches", sum(m.num_patches for m in media), sum(m.num_patches for m in once)),
    ]


def forest(samples: Sequence[Sample]) -> list[Part]:
    """The forest of each family's samples, with what the tokens are."""
    parts: list[Part] = []
    for family, some in _by_family(samples).items():
        found = build_forest(some)
        role, loss = np.zeros(found.num_tokens, np.int8), np.zeros(found.num_tokens, bool)
        ends: dict[int, list[str]] = {}
        for b, sample in enumerate(some):
            rows, roles = found.rows(b), roles_of(sample)
            own = roles.loss | ~loss[rows]  # a sample's loss stays, where another has it as context
            role[rows[own]] = roles.role[own]
            loss[rows] |= roles.loss
            ends.setdefault(int(found.sample_segment[b]), []).append(sample.sample_id)
        offsets, parents = found.segment_offsets.tolist(), found.segment_parent.tolist()
        drawing, more = forest_drawing(offsets, parents, ends, role, loss, OF_ROLE)
        note = "Each box is a segment, as wide as its tokens, and continues the one above it. "
        note += "A line below marks the loss."
        note += f" {more:,} more segments are not drawn." if more else ""
        parts += [Heading(f"Forest of {family}"), drawing, Line(note, soft=True)]
    return parts


def _by_family(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        families.setdefault(sample.family, []).append(sample)
    return families
