"""Where a step's time goes on a GPU: its kernels by class, the tower's by themselves, and the time without any."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from benchmarks.step.job import Job
from benchmarks.step.peers import Peer
from benchmarks.step.timing import seconds_of, take_step
from mmpack.adapters.transformers.media_inputs import encoded_inputs, pixel_inputs
from mmpack.adapters.transformers.ranks.encode_together import in_forward
from mmpack.adapters.transformers.tower import tower_and_projector
from mmpack.packing.batch import PackedBatch
from mmpack.packing.pack import pack

REST = "elementwise"
# The first that a kernel's name fits.
CLASSES = {
    "collectives": r"nccl",
    REST: r"^triton_(poi|red|per)_",  # torch.compile's, which are named after all that they fuse
    "head": r"statistics_kernel|merge_kernel|target_?s?_kernel|logit_gradient|column_sums|products_kernel|log_?softmax",
    "attention": r"flash|fmha|attn|attention|flex|varlen|softmax",
    "products": r"gemm|nvjet|cutlass|cublas|xmma|_mm_|splitk",
    "copies": r"memcpy|memset|copy|cat|index|gather|scatter|fill",
}


def class_of(kernel: str) -> str:
    """The class of a kernel, by its name."""
    return next((c for c, names in CLASSES.items() if re.search(names, kernel, re.I)), REST)


def profiled(model: Any, job: Job, peer: Peer) -> dict[str, float]:
    """Seconds of one step by class of kernel; `tower`, taken from the other classes; `idle`, without a kernel."""
    model.zero_grad(set_to_none=True)
    whole, wall = _classes(lambda: take_step(model, job, peer), job)
    model.zero_grad(set_to_none=True)
    tower, _ = _classes(lambda: _towers(model, job, peer), job)
    out = {name: max(0.0, whole.get(name, 0.0) - tower.get(name, 0.0)) for name in whole}
    out["tower"] = sum(tower.values())
    out["idle"] = max(0.0, wall - sum(whole.values()))
    return dict(sorted(out.items(), key=lambda item: -item[1]))


def _classes(call: Callable[[], Any], job: Job) -> tuple[dict[str, float], float]:
    """Seconds of kernels by class, and the wall's."""
    from torch.profiler import ProfilerActivity, profile

    call()  # what it compiles is no part of it
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as run:
        wall = seconds_of(call, job.device)
    return seconds_by_class(run.key_averages()), wall


def seconds_by_class(events: Iterable[Any]) -> dict[str, float]:
    """Seconds of the kernels among a profile's averages, by class.

    Annotations, as that of each region that torch compiled, last as long as the kernels within: those count once.
    """
    out: dict[str, float] = {}
    for event in events:
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            name = class_of(event.key)
            out[name] = out.get(name, 0.0) + event.self_device_time_total / 1e6
    return out


def _towers(model: Any, job: Job, peer: Peer) -> None:
    """The tower's forward and backward by itself, on what it encodes of each micro-batch."""
    for members in peer.bins(job):
        samples, _ = job.of(members)
        batch = pack(samples).to(job.device)
        run = partial(_encoded, model, batch, peer.encodes_each)
        features = in_forward(model, tower_and_projector(model), run)  # FSDP2 gathers its weights
        torch.stack([x.float().sum() for x in features]).sum().backward()


def _encoded(model: Any, batch: PackedBatch, each: bool) -> list[torch.Tensor]:
    """Features of all media, each level's; `each`: of every occurrence."""
    if each:
        arguments = pixel_inputs(batch)
        video = "pixel_values_videos" in arguments
        encode = model.model.get_video_features if video else model.model.get_image_features
        outputs = [encode(**arguments, return_dict=True)]
    else:
        made = encoded_inputs(batch, model, batch.input_ids[None])
        outputs = list(made["mm_encoder_outputs"].values())
    parts = [x for out in outputs for x in (out.pooler_output, *_levels(out))]
    return [x for part in parts for x in ([part] if torch.is_tensor(part) else part)]


def _levels(output: Any) -> list[Any]:
    return getattr(output, "deepstack_features", None) or []
