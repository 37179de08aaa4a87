"""The same samples in every layout: logprobs, and gradients to the text model's input, by sample."""

from __future__ import annotations

from typing import Any

import torch
from support.models import weights_of, with_pixels
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.transformers import packed_logprobs
from mmpack.families import get_family
from mmpack.schema.sample import Sample


def some_samples(family: str) -> list[Sample]:
    """Three answers to one prompt with a picture, a short text, and a sample with several media.

    No two of the last have a medium in common with the others: its features' gradient would sum.
    """
    if family == "internvl":
        first, second = ("image", (1, 4, 4), "x"), ("image", (2, 4, 4), "f")
    else:
        first = ("image", (1, 8, 6), "x")
        second = (
            "video" if "video" in get_family(family).placeholder_ids else "image",
            (2, 4, 4),
            "f",
        )
    prompt = [("text", range(40)), first, ("text", [7, 8])]
    parts = [[*prompt, ("response", range(k, k + n))] for k, n in ((100, 20), (200, 31), (110, 5))]
    parts += [
        [("text", [1, 2]), ("response", [3])],
        [second, ("text", [5]), (*first[:2], "z"), ("response", range(6, 75))],
    ]
    return with_pixels([make_sample(p, f"s{i}", family=family) for i, p in enumerate(parts)])


def layouts_of(samples: list[Sample]) -> dict[str, Any]:
    return {
        "packed": mp.pack(samples, pad_to_multiple_of=64),
        "reversed": mp.pack(samples[::-1]),
        "shared": mp.pack(samples, share_prefix=True),
        "left": mp.pad(samples, side="left"),
        "right": mp.pad(samples, side="right"),
    }


def logprobs_by_sample(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    """[n] of each sample, by its id."""
    with torch.no_grad():
        values = batch.unpack_loss(packed_logprobs(model, batch))
    return dict(zip(batch.sample_ids, values, strict=True))


def gradients_by_sample(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    """[L, H] of each sample: of the weighted sum of its logprobs, to what the decoder's first layer reads."""
    seen: list[torch.Tensor] = []

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["inputs_embeds"])

    handle = model.model.get_decoder().register_forward_pre_hook(keep, with_kwargs=True)
    try:
        logprobs = packed_logprobs(model, batch)
        (gradient,) = torch.autograd.grad((logprobs * weights_of(batch)).sum(), seen[0])
    finally:
        handle.remove()
    rows = batch.unpack_tokens(gradient.flatten(0, 1))
    return dict(zip(batch.sample_ids, rows, strict=True))


def alone(
    by_sample: Any, model: Any, samples: list[Sample], device: Any = "cpu"
) -> dict[str, torch.Tensor]:
    """`logprobs_by_sample` or `gradients_by_sample` of each sample in a batch of its own."""
    found: dict[str, torch.Tensor] = {}
    for sample in samples:
        found |= by_sample(model, mp.pack([sample]).to(device))
    return found


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Samples whose bits are not the same."""
    assert found.keys() == expected.keys()
    return [name for name, x in found.items() if not torch.equal(x, expected[name])]
