"""`with encode_together(model, packs) as features`: a step's media, each encoded by one rank, for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from mmpack.adapters.transformers.ranks.exchange import Route, exchange
from mmpack.adapters.transformers.ranks.in_step import checked
from mmpack.adapters.transformers.ranks.sharded import in_forward
from mmpack.adapters.transformers.ranks.share import Share, agreed, fetch_pixels, planned
from mmpack.adapters.transformers.tower import (
    Idle,
    encode_media,
    has_sharded_tower,
    media_names,
    takes_encoded_media,
    tower_and_projector,
)
from mmpack.adapters.transformers.unwrap import is_engine, is_parallel, unwrap
from mmpack.cache.summed import SummedFeatures, tower_backward
from mmpack.cache.tower import Levels, Tower
from mmpack.errors import ArgumentError, ModelError, check_whole, installed_version
from mmpack.families import Family, family_of_config
from mmpack.packing.batch import PackedBatch
from mmpack.packing.calls import NONE, Counts, calls_of, counts_of, most_of
from mmpack.planning.plan import Plan
from mmpack.schema.sample import Sample

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
    if not takes_encoded_media(whole):
        raise ModelError(
            f"encode_together: the forward of transformers {installed_version('transformers')} takes no media "
            "encoded beforehand. Fix: install transformers 5.19 or newer"
        )
    if max_patches is not None:
        check_whole("encode_together", "max_patches", max_patches)
        if has_sharded_tower(whole):
            raise ModelError(
                "encode_together: the tower is sharded (FSDP2), and all ranks must call it equally often. "
                "Fix: leave out max_patches"
            )
