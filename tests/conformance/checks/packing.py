"""Packed, shared and padded rows give each sample what the model's own attention gives it alone."""

from __future__ import annotations

import torch
from conformance.agree import as_exact_as_separate, close, expect
from conformance.oracle import logprobs_and_gradients
from conformance.subject import Subject

from mmpack.adapters.transformers import attach, packed_logprobs
from mmpack.packing.batch import Batch
from mmpack.packing.pack import pack as pack_samples
from mmpack.packing.pad import pad
from mmpack.schema.rules import validate


def pack(subject: Subject) -> None:
    samples = subject.samples
    expect(validate(samples) == [], f"a rule is broken: {validate(samples)}")
    _attached(
        subject,
        {
            "packed": pack_samples(samples),
            "packed, rounded up": pack_samples(samples, pad_to_multiple_of=64),
        },
    )


def share(subject: Subject) -> None:
    samples = subject.samples
    batch = pack_samples(samples, share_prefix=True)
    whole = sum(len(s) for s in samples)
    expect(batch.num_tokens < whole, f"nothing is shared: {batch.num_tokens} rows of {whole}")
    rounded = pack_samples(samples, share_prefix=True, pad_to_multiple_of=64)
    _attached(subject, {"shared, rounded up": rounded, "shared": batch})


def padded(subject: Subject) -> None:
    """Attached and not: a rectangle goes both ways."""
    samples = subject.samples
    left, right = pad(samples), pad(samples, side="right", pad_to_multiple_of=16)
    wanted, _ = subject.exact
    with torch.no_grad():
        for side, batch in (("left", left), ("right", right)):
            close(packed_logprobs(subject.model, batch), wanted, f"{side}, the model's attention")
    _attached(subject, {"right": right, "left": left})


def _attached(subject: Subject, batches: dict[str, Batch]) -> None:
    """Values of each batch; gradients of the last one, those of the tower by themselves too."""
    (wanted, gradients), (_, apart) = subject.exact, subject.separate
    *others, last = batches
    with attach(subject.model):
        with torch.no_grad():
            for where in others:
                close(packed_logprobs(subject.model, batches[where]), wanted, where)
        values, found = logprobs_and_gradients(subject.model, batches[last])
    close(values, wanted, last)
    as_exact_as_separate(found, apart, gradients, last)
    names = tower_names(subject, gradients)
    own, alone, exact = ({n: g[n] for n in names} for g in (found, apart, gradients))
    as_exact_as_separate(own, alone, exact, f"{last}, tower")


def tower_names(subject: Subject, gradients: dict[str, torch.Tensor]) -> list[str]:
    """Parameters with a gradient that are below the head and not of the text model."""
    core = subject.model.model
    text = {id(p) for p in core.get_decoder().parameters()}
    named = dict(subject.model.named_parameters())
    inside = {id(p) for p in core.parameters()} - text
    return [n for n in gradients if id(named[n]) in inside]
