"""`with encode_together(model, packs) as features`: a step's media, each encoded by one rank, for all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from mmpack.adapters.transformers.heads import forward_of
from mmpack.adapters.transformers.ranks.in_step import checked
from mmpack.adapters.transformers.tower import (
    Idle,
    encode_media,
    has_sharded_tower,
    media_names,
    tower_and_projector,
)
from mmpack.adapters.transformers.unwrap import is_engine, is_parallel, unwrap
from mmpack.cache.summed import SummedFeatures, tower_backward
from mmpack.cache.tower import Levels, Tower
from mmpack.errors import ArgumentError, ModelError, SchemaError, check_whole
from mmpack.families import Family, family_of_config
from mmpack.layout.fingerprint import media_name
from mmpack.packing.batch import PackedBatch
from mmpack.packing.calls import NONE, Counts, calls_of, counts_of, most_of
from mmpack.packing.media import held_pixels
from mmpack.packing.pixels import as_floats, float_pixels
from mmpack.planning.media import media_to_ranks
from mmpack.planning.plan import Plan
from mmpack.schema.media import Medium
from mmpack.schema.rules import Problem
from mmpack.schema.sample import Sample
from mmpack.versions import refuse_old_forward

# ---- tensors from rank to rank ----------------------------------------------------------------------


class Route(NamedTuple):
    """A tensor of `shape` that one rank of the group has and another needs."""

    source: int
    target: int
    shape: tuple[int, ...]


def exchange(
    routes: Sequence[Route],
    own: Mapping[int, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    group: Any = None,
) -> dict[int, Tensor]:
    """What the routes bring to this rank, by their numbers. A route that ends where it begins costs nothing.

    Args: `routes`: the same on all ranks. `own`: the tensors of those that begin here. `dtype`: of all of them.
    Every rank of the group takes part, unless no route leaves its rank.
    """
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    here = {n: own[n] for n, r in enumerate(routes) if r.source == r.target == rank}
    if all(r.source == r.target for r in routes):
        return here
    width = torch.empty(0, dtype=dtype).element_size()
    leaving = [
        [n for n, r in enumerate(routes) if (r.source, r.target) == (rank, t)] for t in range(ranks)
    ]
    coming = [
        [n for n, r in enumerate(routes) if (r.source, r.target) == (s, rank)] for s in range(ranks)
    ]
    leaving[rank] = coming[rank] = []
    sizes = [width * math.prod(r.shape) for r in routes]
    numbers = [n for to in leaving for n in to]
    flat = [own[n].detach().to(device, dtype).reshape(-1) for n in numbers]
    sent = torch.cat([torch.empty(0, dtype=dtype, device=device), *flat]).view(torch.uint8)
    bytes_in = [sum(sizes[n] for n in some) for some in coming]
    got = torch.empty(sum(bytes_in), dtype=torch.uint8, device=device)
    distributed.all_to_all_single(
        got, sent, bytes_in, [sum(sizes[n] for n in to) for to in leaving], group=group
    )
    arrived = [n for some in coming for n in some]
    parts = got.split([sizes[n] for n in arrived])
    return here | {
        n: part.view(dtype).view(routes[n].shape) for n, part in zip(arrived, parts, strict=True)
    }


# ---- which rank needs, encodes and has each medium --------------------------------------------------

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


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class SharedFeatures(SummedFeatures):
    """Features for this rank's packs. `patches`: those that each rank encodes; each medium of the step counts once."""

    patches: list[int]


@contextlib.contextmanager
def encode_together(
    model: Any,
    packs: Sequence[PackedBatch],
    *,
    plan: Plan | None = None,
    samples: Sequence[Sample] | None = None,
    media: Mapping[str, Any] | None = None,
    max_patches: int | None = None,
    group: Any = None,
) -> Iterator[SharedFeatures]:
    """`encode_once` over all ranks: each medium of the step is encoded by one rank, all ranks encode as many patches.

    Features go to the ranks whose packs have the medium, and the gradients that their packs bring come back the same
    way: in float32, added in the order of ranks, rounded once. `packed_logprobs(model, pack, features=features)` reads
    them. Every rank enters and leaves the block together, also one without media. Of a tower that FSDP2 shards, all
    ranks run it as often; DistributedDataParallel's tower gets the mean of the ranks' gradients on leaving (pass the
    wrapper; not within `no_sync()`); a frozen one is only encoded. The loss is as without: each rank's own, scaled for
    the mean over ranks.

    Args:
        packs: this rank's of the step. Each is run forward and backward in the block.
        plan, samples: what `mp.plan` made for as many ranks, and all its samples (`step.plan`, `step.samples`): all
            ranks then know who encodes what, and take pixels from the samples or from `media` (cache key -> pixels);
            packs need none. Without, ranks tell each other their packs' media, and send pixels to whom they lack.
        max_patches: see `model_inputs`; of a tower that is not sharded.
        group: the process group of the plan's ranks; None: all.

    Raises: as `encode_once`; ArgumentError for a plan of another number of ranks; SchemaError (MM404) for pixels that
    are missing.
    """
    whole = unwrap(model, "encode_together")
    if is_engine(model):
        raise ModelError(
            "encode_together: a DeepSpeed engine reduces gradients in its own backward only. "
            "Fix: leave encode_together out, or train under DistributedDataParallel or FSDP2"
        )
    packs = checked(packs, whole, "encode_together", pixels=False)
    _refuse(whole, plan, samples, media, max_patches, group)
    family, tower = family_of_config(whole.config), tower_and_projector(whole)
    device = whole.get_input_embeddings().weight.device
    if plan is not None:
        share = planned(plan, samples or (), media, group)
    else:
        share, holders = agreed(packs, group)
        fetch_pixels(share, holders, family, device, group)
    rank = distributed.get_rank(group)
    sharded = has_sharded_tower(whole)
    idle = Idle(_runs(share, family, group) if sharded else NONE)
    made = _encoded(model, whole, family, share, rank, idle, max_patches, device)
    features, shapes, dtype = _handed_out(share, family, made, packs, tower, sharded, device, group)
    try:
        yield features
        if features.trained:
            sums = features.totals()
            features.release()
            totals = _brought_back(share, shapes, sums, dtype, device, group)
            pairs = [
                (level, total.to(level.dtype))
                for i, total_of in totals.items()
                for level, total in zip(made[i], total_of, strict=True)
                if level.requires_grad
            ]
            pairs += [(x, torch.zeros_like(x)) for x in idle.outputs if x.requires_grad]
            made.clear()
            reduced = is_parallel(model) and model.require_backward_grad_sync
            tower_backward(tower, pairs, model.process_group if reduced else None)
    finally:
        features.release()


def _runs(share: Share, family: Family, group: Any) -> Counts:
    """How often the towers run on the rank that runs them most."""
    ranks = range(distributed.get_world_size(group))
    return most_of(
        counts_of(calls_of(family, [share.media[i] for i in share.of(r)])) for r in ranks
    )


def _encoded(
    model: Any,
    whole: Any,
    family: Family,
    share: Share,
    rank: int,
    idle: Idle,
    max_patches: int | None,
    device: torch.device,
) -> dict[int, Levels]:
    """Levels of the media that this rank encodes, by their numbers."""
    mine = share.of(rank)

    def pixels(chosen: list[int]) -> Tensor:
        return torch.cat([share.pixels[share.names[mine[k]]]().to(device) for k in chosen])

    def run() -> list[Tensor]:
        media = [share.media[i] for i in mine]
        found = encode_media(whole, family, media, pixels, max_patches, idle)
        counts.extend(map(len, found))
        return [level for levels in found for level in levels] + idle.outputs

    counts: list[int] = []
    flat = in_forward(model, tower_and_projector(whole), run)
    levels = iter(flat)
    out = {i: tuple(next(levels) for _ in range(n)) for i, n in zip(mine, counts, strict=True)}
    idle.outputs = list(levels)
    return out


def _handed_out(
    share: Share,
    family: Family,
    made: dict[int, Levels],
    packs: Sequence[PackedBatch],
    tower: Tower,
    sharded: bool,
    device: torch.device,
    group: Any,
) -> tuple[SharedFeatures, list[tuple[int, ...]], torch.dtype]:
    """Features of this rank's media, the shape [levels, tokens, H] of each medium of the step, dtype of their sums."""
    heads = {
        heard: _head(share, heard, made, device, group)
        for heard in (False, True)
        if any((m.modality == "audio") == heard for m in share.media)
    }
    head_of = [heads[m.modality == "audio"] for m in share.media]
    shapes: list[tuple[int, ...]] = [
        (levels, family.tokens_in(m), width)
        for m, (levels, width, _) in zip(share.media, head_of, strict=True)
    ]
    got: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(DTYPES[head[2]] for head in heads.values()):
        some = [i for i, head in enumerate(head_of) if DTYPES[head[2]] == dtype]
        where = [(i, user) for i in some for user in share.users[i]]
        routes = [Route(share.encoders[i], user, shapes[i]) for i, user in where]
        own = {
            n: torch.stack([x.detach() for x in made[i]])
            for n, (i, _) in enumerate(where)
            if i in made
        }
        arrived = exchange(routes, own, dtype, device, group)
        got |= {where[n][0]: x for n, x in arrived.items()}
    mine = sorted(got)
    features = SharedFeatures(
        tower,
        [share.names[i] for i in mine],
        [got[i].unbind(0) for i in mine],
        [media_names(pack) for pack in packs],
        whole=not sharded,
    )
    features.patches = [
        sum(share.media[i].num_patches for i in share.of(r))
        for r in range(distributed.get_world_size(group))
    ]
    wide = torch.float32
    for head in heads.values():
        wide = torch.promote_types(wide, DTYPES[head[2]])
    return features, shapes, wide


def _head(
    share: Share, heard: bool, made: dict[int, Levels], device: torch.device, group: Any
) -> tuple[int, int, int]:
    """Levels, width and dtype (a number) of features of sound or of pictures; of another rank if none are here."""
    some = [i for i, m in enumerate(share.media) if (m.modality == "audio") == heard]
    encoders = {share.encoders[i] for i in some}
    mine = next((made[i] for i in some if i in made), None)
    own = [0, 0, 0] if mine is None else [len(mine), mine[0].shape[1], DTYPES.index(mine[0].dtype)]
    if len(encoders) < distributed.get_world_size(group):
        head, first = torch.tensor(own, device=device), min(encoders)
        source = first if group is None else distributed.get_global_rank(group, first)
        distributed.broadcast(head, source, group=group)
        own = head.tolist()
    levels, width, dtype = own
    return levels, width, dtype


def _brought_back(
    share: Share,
    shapes: list[tuple[int, ...]],
    sums: Mapping[str, Sequence[Tensor | None]],
    dtype: torch.dtype,
    device: torch.device,
    group: Any,
) -> dict[int, Levels]:
    """The gradient of each medium that this rank encoded, level by level: the sum over the ranks that have it."""
    where = [(i, user) for i, users in enumerate(share.users) for user in users]
    own: dict[int, Tensor] = {}
    for n, (i, user) in enumerate(where):
        if user == distributed.get_rank(group):
            nothing = torch.zeros(shapes[i][1:], dtype=dtype, device=device)
            parts = [nothing if x is None else x.to(dtype) for x in sums[share.names[i]]]
            own[n] = torch.stack(parts)
    routes = [Route(user, share.encoders[i], shapes[i]) for i, user in where]
    totals: dict[int, Tensor] = {}
    for n, x in sorted(exchange(routes, own, dtype, device, group).items()):
        i = where[n][0]
        totals[i] = totals[i] + x if i in totals else x
    return {i: x.unbind(0) for i, x in totals.items()}


def _refuse(
    whole: Any,
    plan: Plan | None,
    samples: Sequence[Sample] | None,
    media: Any,
    max_patches: int | None,
    group: Any,
) -> None:
    if (plan is None) != (samples is None) or (plan is None and media is not None):
        raise ArgumentError(
            "encode_together: plan and samples (with media) must be passed together. "
            "Fix: pass plan=step.plan, samples=step.samples, and "
            "media where samples hold no pixels; or none of them"
        )
    ranks = distributed.get_world_size(group)
    if plan is not None and len(plan.ranks) != ranks:
        raise ArgumentError(
            f"encode_together: the plan is of {len(plan.ranks)} ranks, the group has {ranks}. "
            f"Fix: pass mp.plan(…, ranks={ranks})"
        )
    refuse_old_forward(whole, "encode_together", "leave it out")
    if max_patches is not None:
        check_whole("encode_together", "max_patches", max_patches)
        if has_sharded_tower(whole):
            raise ModelError(
                "encode_together: the tower is sharded (FSDP2), and all ranks must call it equally often. "
                "Fix: leave out max_patches"
            )


# ---- a tower that FSDP2 shards ----------------------------------------------------------------------


def in_forward(model: Any, tower: Tower, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What `run` returns, by the forward of the outermost FSDP2 module around the tower; without one, as it is.

    FSDP2 gathers weights before that module's forward, and before the backward of what it returns.
    """
    root = _root(model, tower)
    if root is None:
        return run()
    dtypes: list[torch.dtype] = []

    def forward(_: None) -> list[Tensor]:
        made = run()
        dtypes.extend(x.dtype for x in made)
        return [_uncast(x) for x in made]

    with forward_of(root, forward):
        out = root(None)  # without an argument, FSDP2 of torch 2.11 raises on a GPU
    return [_as_before(x, dtype) for x, dtype in zip(out, dtypes, strict=True)]


def _root(model: Any, tower: Tower) -> Any:
    if not torch.distributed.is_available():
        return None
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        inside: Any = module
        if isinstance(module, FSDPModule) and any(tower.modules[0] is m for m in inside.modules()):
            return module
    return None


def _uncast(x: Tensor) -> Tensor:
    """A policy's output_dtype casts real numbers: float32 [tokens, H] passes as complex ones, if H is even. No view."""
    if x.dtype != torch.float32 or x.shape[-1] % 2:
        return x.clone()
    return torch.complex(x[..., ::2], x[..., 1::2])


def _as_before(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_real(x).flatten(-2) if x.is_complex() else x.to(dtype)
