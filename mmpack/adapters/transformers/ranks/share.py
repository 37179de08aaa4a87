"""The media of a step over all ranks: which rank needs each, which encodes it, and where its pixels are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from mmpack.adapters.transformers.ranks.exchange import Route, exchange
from mmpack.adapters.transformers.tower import media_names
from mmpack.errors import SchemaError
from mmpack.families import Family
from mmpack.layout.fingerprint import media_name
from mmpack.packing.batch import PackedBatch
from mmpack.packing.media import held_pixels
from mmpack.packing.pixels import as_floats, float_pixels
from mmpack.planning.media import media_to_ranks
from mmpack.planning.plan import Plan
from mmpack.schema.media import Medium
from mmpack.schema.rules import Problem
from mmpack.schema.sample import Sample

Pixels = Callable[[], Tensor]  # float pixels of one medium


@dataclass
class Share:
    """Each distinct medium of a step, in one order on all ranks."""

    names: list[str]
    media: list[Medium]
    users: list[list[int]]  # ranks whose packs have it, ascending
    encoders: list[int]
    pixels: dict[str, Pixels]  # by name: of those that this rank has, or that it encodes

    def of(self, rank: int) -> list[int]:
        """The media that a rank encodes."""
        return [i for i, encoder in enumerate(self.encoders) if encoder == rank]


def planned(
    plan: Plan, samples: Sequence[Sample], store: Mapping[str, Any] | None, group: Any
) -> Share:
    """From a plan of all ranks' samples: nobody is asked. Pixels are this rank's own samples', or the store's."""
    holders: dict[str, tuple[Medium, Sample]] = {}
    users: dict[str, set[int]] = {}
    for rank, bins in enumerate(plan.ranks):
        for sample in (samples[i] for b in bins for i in plan.bins[b]):
            for medium in sample.media:
                name = media_name(medium)
                first = holders.setdefault(name, (medium, sample))
                if first[0].pixel_values is None and medium.pixel_values is not None:
                    holders[name] = medium, sample
                users.setdefault(name, set()).add(rank)

    def getter(medium: Medium, sample: Sample) -> Pixels:
        def get() -> Tensor:
            (pixels,) = held_pixels([medium], "encode_together", store)
            return as_floats(pixels, medium.modality, sample.processor)

        return get

    media = {name: medium for name, (medium, _) in holders.items()}
    pixels = {name: getter(*both) for name, both in holders.items()}
    return _assigned(media, users, pixels, group)


def agreed(packs: Sequence[PackedBatch], group: Any) -> tuple[Share, dict[str, list[int]]]:
    """From this rank's packs and what the others say of theirs; also the ranks that have the pixels of each medium."""
    pixels: dict[str, Pixels] = {}
    own: dict[str, tuple[Medium, bool]] = {}
    for pack in packs:
        for i, name in enumerate(media_names(pack)):
            medium = pack.media[i]
            held = medium.pixel_values is not None
            bare = dataclasses.replace(medium, pixel_values=None)
            own[name] = bare, held or own.get(name, (bare, False))[1]
            if held:
                pixels.setdefault(name, lambda pack=pack, i=i: float_pixels(pack, [i]))  # type: ignore[misc]
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, own, group=group)
    media: dict[str, Medium] = {}
    users: dict[str, set[int]] = {}
    holders: dict[str, list[int]] = {}
    for rank, theirs in enumerate(found):
        for name, (medium, held) in theirs.items():
            media.setdefault(name, medium)
            users.setdefault(name, set()).add(rank)
            holders.setdefault(name, []).extend([rank] if held else [])
    for name, ranks in holders.items():
        if not ranks:
            problem = Problem(
                "MM404", media[name].media_id, "pixel_values", "is missing on all ranks"
            )
            raise SchemaError([problem], "encode_together")
    return _assigned(media, users, pixels, group), holders


def fetch_pixels(
    share: Share, holders: Mapping[str, list[int]], family: Family, device: torch.device, group: Any
) -> None:
    """Bring pixels to the ranks that encode them and don't have them: from the first that has."""
    routes: list[Route] = []
    own: dict[int, Tensor] = {}
    rank = distributed.get_rank(group)
    moved = []
    for i, name in enumerate(share.names):
        if share.encoders[i] in holders[name]:
            continue
        medium, source = share.media[i], holders[name][0]
        if source == rank:
            own[len(routes)] = share.pixels[name]()
        shape = family.pixel_shape(medium.grid_thw, medium.modality)
        routes.append(Route(source, share.encoders[i], shape))
        moved.append(name)
    got = exchange(routes, own, torch.float32, device, group)
    for n, pixels in got.items():
        share.pixels[moved[n]] = lambda pixels=pixels: pixels  # type: ignore[misc]


def _assigned(
    media: dict[str, Medium], users: dict[str, set[int]], pixels: dict[str, Pixels], group: Any
) -> Share:
    names = sorted(media)
    encoders = media_to_ranks(
        [media[n].num_patches for n in names],
        [media[n].num_tokens for n in names],
        [users[n] for n in names],
        distributed.get_world_size(group),
    )
    return Share(
        names, [media[n] for n in names], [sorted(users[n]) for n in names], encoders, pixels
    )
