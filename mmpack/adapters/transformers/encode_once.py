"""`with encode_once(model, packs) as features`: a step's media go through the tower once, and back once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mmpack.adapters.transformers.inputs import packs_of, refuse_options
from mmpack.adapters.transformers.tower import encode_media, media_names, tower_and_projector
from mmpack.adapters.transformers.unwrap import is_engine, is_parallel, unwrap
from mmpack.cache.summed import SummedFeatures
from mmpack.errors import ModelError
from mmpack.families import family_of_config
from mmpack.packing.batch import PackedBatch
from mmpack.packing.pixels import float_pixels
from mmpack.schema.media import Medium


@contextlib.contextmanager
def encode_once(
    model: Any, packs: Sequence[PackedBatch], *, max_patches: int | None = None
) -> Iterator[SummedFeatures]:
    """Encode the media of all `packs`, each once, for the passes in the block; the tower's backward runs at its end.

    `packed_logprobs(model, pack, features=features)` reads them. What their backwards bring is added in float32 and
    rounded once; leaving the block runs one backward through the tower, after an exception none. A tower that is
    not trained is only encoded. Dropout of the tower, if it has some, is drawn once for the step.

    Under DistributedDataParallel pass the wrapper, on every rank, with that rank's packs (they may have no media): the
    tower's gradients are reduced when the block is left, unless that happens in `no_sync()`.

    Args:
        packs: those of the step, with pixels, on any device. Each is run forward and backward in the block.
        max_patches: see `model_inputs`. Chunks bound what a forward and backward of the tower hold.

    Raises: ModelError for a sharded tower, transformers before 5.19, and what `model_inputs` refuses; on leaving the
    block where a pack had no backward, or weights changed within.
    """
    whole = unwrap(model, "encode_once")
    if is_engine(model):
        raise ModelError(
            "encode_once: a DeepSpeed engine reduces gradients in its own backward only. "
            "Fix: leave encode_once out, or train under DistributedDataParallel"
        )
    packs = packs_of(packs, whole, "encode_once")
    refuse_options(whole, None, max_patches, "encode_once")
    tower = tower_and_projector(whole)
    keys = [media_names(pack) for pack in packs]
    places: dict[str, tuple[PackedBatch, int]] = {}  # of each medium, the first
    for pack, own in zip(packs, keys, strict=True):
        for i, key in enumerate(own):
            places.setdefault(key, (pack, i))
    first = list(places.values())
    media: list[Medium] = [pack.media[i] for pack, i in first]

    def chosen(indices: list[int]) -> torch.Tensor:
        return torch.cat(
            [float_pixels(first[i][0], [first[i][1]]).to(tower.device) for i in indices]
        )

    family = family_of_config(whole.config)
    made = encode_media(whole, family, media, chosen, max_patches) if media else []
    features = SummedFeatures(tower, list(places), made, keys)
    del made
    try:
        yield features
        reduced = is_parallel(model) and model.require_backward_grad_sync
        features.backward(model.process_group if reduced else None)
    finally:
        features.release()
