"""Which samples of a step can't be used, before it is planned: the totals of a step hold for what is really in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mmpack.errors import MmpackError
from mmpack.families import FAMILIES
from mmpack.packing.collate import Item, sample_and_columns
from mmpack.planning.plan import Plan
from mmpack.schema.dead_letters import DeadLetter, letter_of
from mmpack.schema.media import Medium
from mmpack.schema.sample import Sample

Pair = tuple[Sample, Mapping[str, Any]]


class Sorted(NamedTuple):
    """`alive`: the pairs to plan, and their `numbers` among the items. `dead`: why others are not. `pixels`: cache key
    -> what the store gave for them."""

    alive: list[Pair]
    numbers: list[int]
    dead: list[DeadLetter]
    pixels: dict[str, Any]


def sorted_out(
    items: Sequence[Item | DeadLetter], media: Mapping[str, Any] | None, ranks: int, where: str
) -> Sorted:
    """Items that are letters already, and samples whose media the store has not, leave the step.

    One rank alone reads its media now, so that whatever is wrong with one is found. Of several each asks whether they
    are there, and reads only its own batches' when they are packed: all ranks have to leave out the same samples.
    """
    found = Sorted([], [], [], {})
    for i, item in enumerate(items):
        place = f"{where}, samples[{i}]"
        if isinstance(item, DeadLetter):
            found.dead.append(item)
            continue
        pair = sample_and_columns(item, i, "PackLoader")
        letter = None if media is None else _without_media(pair[0], media, found, ranks, place)
        if letter is None:
            found.alive.append(pair)
            found.numbers.append(i)
        else:
            found.dead.append(letter)
    return found


def dropped_letters(
    plan: Plan, samples: Sequence[Sample], numbers: Sequence[int], where: str
) -> list[DeadLetter]:
    """A letter per sample that a plan leaves out: the first rule that it breaks, and all of them as the reason."""
    return [
        DeadLetter(
            d.problems[0].code, d.reason, f"{where}, samples[{numbers[d.index]}]", samples[d.index]
        )
        for d in plan.dropped
    ]


def _without_media(
    sample: Sample, media: Mapping[str, Any], found: Sorted, ranks: int, place: str
) -> DeadLetter | None:
    """The letter of a sample with a medium that can't be had."""
    for m, medium in enumerate(sample.media):
        key = medium.cache_key
        if medium.pixel_values is not None or key in found.pixels:
            continue
        try:
            there = key in media if ranks > 1 else (pixels := media.get(key)) is not None
        except (MmpackError, OSError) as error:
            return letter_of(error, place, sample)
        if not there:
            return DeadLetter("MM404", f"media[{m}] {key:.16}… is in no store", place, sample)
        if ranks == 1:
            wrong = _wrong_shape(sample, medium, pixels)
            if wrong:
                return DeadLetter("MM404", f"media[{m}] {key:.16}… {wrong}", place, sample)
            found.pixels[key] = pixels
    return None


def _wrong_shape(sample: Sample, medium: Medium, pixels: Any) -> str | None:
    family = FAMILIES.get(sample.family)
    if family is None:  # which the plan says
        return None
    needed = tuple(family.pixel_shape(medium.grid_thw, medium.modality))
    if tuple(pixels.shape) == needed:
        return None
    return f"has shape {list(pixels.shape)}, its grid needs {list(needed)}"
