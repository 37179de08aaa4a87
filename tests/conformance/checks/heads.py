"""The head without logits, and a model under LoRA: values and gradients beside full logits in float64."""

from __future__ import annotations

from typing import Any

import torch
from conformance.agree import NotHere, as_exact_as_separate, close, expect
from conformance.oracle import exact, logprobs_and_gradients, relative_difference, separate
from conformance.subject import Subject

from mmpack.adapters.transformers import attach, model_inputs, packed_logprobs
from mmpack.contracts import linear_logprob_bound
from mmpack.errors import installed_version
from mmpack.packing.pack import pack

TEMPERATURE = 0.7


def head(subject: Subject) -> None:
    """Beside logits of every row, by the model's own head; the hidden states are one side's as the other's."""
    model, batch = subject.model, pack(subject.samples, share_prefix=True)
    with attach(model):
        logprobs, entropies = packed_logprobs(model, batch, TEMPERATURE, entropy=True)
        found = _gradients(model, logprobs, entropies)
        logits = model(**model_inputs(batch, model)).logits[0].double() / TEMPERATURE
        rows = torch.log_softmax(logits[batch.loss_rows.long()], -1)
        wanted = rows.gather(1, batch.loss_targets[:, None])[:, 0]
        spread = -(rows.exp() * rows).sum(-1)
        gradients = _gradients(model, wanted, spread)
    bound = linear_logprob_bound(float(logits.detach().abs().max()))
    for ours, full, what in ((logprobs, wanted, "logprobs"), (entropies, spread, "entropies")):
        off = float((ours - full).detach().abs().max())
        expect(off <= bound, f"{what} are off by {off:.2e} from full logits, allowed is {bound}")
    off = relative_difference(found, gradients)
    expect(off <= 1e-5, f"gradients are off by {off:.2e} from full logits, allowed is 1e-5")


def _gradients(model: Any, logprobs: Any, entropies: Any) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    weights = torch.linspace(-1, 1, len(logprobs))
    ((logprobs * weights).sum() + entropies.sum() / 3).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def lora(subject: Subject) -> None:
    """Adapters on every linear layer, tower included: shared beside separate forwards of the same adapters."""
    if installed_version("peft") is None:
        raise NotHere("peft is not installed")
    import peft

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = subject.kit.small(spread=2.0)
        settings = peft.LoraConfig(r=4, target_modules=subject.kit.lora_targets(base))
        model: Any = peft.get_peft_model(base, settings).eval()
        with torch.no_grad():  # adapters start as nothing
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    samples = subject.samples
    (wanted, gradients), (_, apart) = exact(model, samples), separate(model, samples)
    of_tower = [n for n in gradients if "language_model" not in n]
    expect(bool(of_tower), "no adapter of the tower has a gradient")
    with attach(model):
        values, found = logprobs_and_gradients(model, pack(samples, share_prefix=True))
    close(values, wanted, "LoRA, shared")
    as_exact_as_separate(found, apart, gradients, "LoRA, shared")
