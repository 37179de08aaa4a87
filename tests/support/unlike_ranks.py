"""Ranks of unlike samples: one has pictures, one a video, one text alone. Steps of them, beside one process."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from support.models import small_model, with_pixels
from support.ranks import assert_gradients, here
from support.samples import make_sample
from torch.nn.parallel import DistributedDataParallel

import mmpack as mp
from mmpack.adapters.transformers import attach, in_step, packed_logprobs
from mmpack.adapters.transformers.modules import decoder_layers, tower_blocks
from mmpack.adapters.transformers.tower import tower_and_projector
from mmpack.families import get_family


def samples_of(family: str) -> list[list[list[Any]]]:
    """By rank, by micro-batch: pictures and a video; the video; text. Then text, text and nothing."""
    video = ("video", (2, 4, 4), "f") if has_video(family) else ("image", (1, 4, 4), "f")
    size = (1, 4, 4) if not has_video(family) else (1, 4, 6)
    prompt = [("text", range(5)), ("image", size, "x"), ("text", [7])]

    def sample(parts: list[Any], name: str) -> Any:
        return make_sample(parts, name, family=family)

    seen = [
        sample([*prompt, ("response", range(3))], "a"),
        sample([*prompt, ("image", size, "y"), ("response", range(4))], "b"),
        sample([("image", size, "z"), video, ("response", [9, 8])], "c"),
    ]
    filmed = [sample([("text", [3]), video, ("response", range(5))], "d")]
    text = [[sample([("text", range(n)), ("response", range(6))], f"t{n}")] for n in (2, 5, 6)]
    for some in (seen, filmed):
        with_pixels(some)
    return [[seen, text[0]], [filmed, text[1]], [text[2]]]


def has_video(family: str) -> bool:
    return get_family(family).video_token_id is not None


def loss_of(model: Any, batch: Any, **kwargs: Any) -> torch.Tensor:
    """A sum over loss tokens whose weights follow from ids: the same in any pack."""
    values = packed_logprobs(model, batch, **kwargs)
    weights = torch.cos(batch.loss_targets.float()).to(values.dtype)
    return (values * weights).sum()


def sharded(model: Any, ranks: int, blocks: bool = True) -> Any:
    """By FSDP2: layers, blocks of the tower, and the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(here().type, (ranks,))
    for unit in (*decoder_layers(model), *(tower_blocks(model) if blocks else ()), model):
        fully_shard(unit, mesh=mesh)
    return model


def frozen_words(model: Any) -> Any:
    """Embeddings and head are not trained: the rest is quick, and layers of text get no gradient to their inputs."""
    model.get_input_embeddings().requires_grad_(False)
    model.lm_head.requires_grad_(False)
    return model


def wrapped(family: str, how: str, ranks: int, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model as a framework has it; `frozen`: DDP's, of a tower that is not trained."""
    model = frozen_words(small_model(family)).to(here(), dtype)
    if how == "fsdp":
        return sharded(model, ranks)
    if how == "frozen":
        for p in tower_and_projector(model).parameters():
            p.requires_grad_(False)
    return DistributedDataParallel(model)


def wanted_of(family: str, ranks: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Gradients of one process, of the mean over ranks."""
    model = frozen_words(small_model(family)).to(here(), dtype)
    with attach(model):
        for packs in samples_of(family)[:ranks]:
            for samples in packs:
                (loss_of(model, mp.pack(samples).to(here())) / ranks).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def unlike_step(rank: int, ranks: int, family: str, hows: tuple[str, ...]) -> None:
    """A step of unlike ranks, which agree by `in_step`; `hows`: see `wrapped`."""
    wanted = wanted_of(family, ranks)
    own = samples_of(family)[rank]
    for how in hows:
        model = wrapped(family, how, ranks)
        step = in_step(model, [mp.pack(samples).to(here()) for samples in own])
        assert len(step.packs) == 2 and step.total_samples == 7
        assert step.total_tokens == 3 + 4 + 2 + 5 + 3 * 6
        with attach(model):
            for pack in step.packs:
                last = pack is step.packs[-1]
                with contextlib.nullcontext() if how == "fsdp" or last else model.no_sync():
                    loss_of(model, pack).backward()
        assert_gradients(model, wanted, how)
        first, second = (pack.stats["patches_encoded"] for pack in step.packs)
        assert second == 0  # no rank has a medium there
        assert (first > 0) == (bool(step.packs[0].media) or how == "fsdp"), (rank, how)
        assert step.packs[1].tower_runs == (0, 0) and step.packs[0].tower_runs[0] >= 1
    assert in_step(model, []).packs == []
