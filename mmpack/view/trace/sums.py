"""Figures of the samples on a page: how long they are, what they repeat, and what sharing saves."""

from __future__ import annotations

from collections.abc import Sequence

from mmpack.layout.forest import build_forest
from mmpack.schema.rules import problems_of
from mmpack.schema.sample import Sample
from mmpack.view.bars import histogram
from mmpack.view.tags import Markup, table, tag


def sums(samples: Sequence[Sample]) -> Markup:
    """A part of the page that opens; rows and media are of the samples that break no rule."""
    whole = [sample for sample in samples if not any(problems_of(sample))]
    rows = [
        (name, f"{alone:,}", f"{shared:,}", f"{1 - shared / alone:.1%}" if alone else "–")
        for name, alone, shared in repeated(whole)
    ]
    broken = len(samples) - len(whole)
    left = f" {broken} with broken rules are left out." if broken else ""
    note = f"All samples of this page in one pack.{left}"
    return tag(
        "details",
        tag("summary", "Figures"),
        histogram([len(s) for s in samples], "tokens of a sample"),
        histogram([s.num_loss_tokens for s in samples], "loss tokens of a sample"),
        table(("what", "each sample alone", "shared", "saved"), rows, class_="saves"),
        tag("p", note, class_="note"),
    )


def repeated(samples: Sequence[Sample]) -> list[tuple[str, int, int]]:
    """Name, count of each sample alone, and count where prefixes and media are computed once; samples break no rule."""
    families: dict[str, list[Sample]] = {}
    for sample in samples:
        families.setdefault(sample.family, []).append(sample)
    rows = sum(build_forest(some).num_tokens for some in families.values())
    media = [medium for sample in samples for medium in sample.media]
    once = {(m.cache_key, m.modality): m for m in media}.values()
    return [
        ("rows", sum(map(len, samples)), rows),
        ("media", len(media), len(once)),
        ("patches", sum(m.num_patches for m in media), sum(m.num_patches for m in once)),
    ]
