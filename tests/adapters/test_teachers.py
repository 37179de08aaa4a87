"""A batch with teachers through a model: values and gradients of full logits and torch's float64 softmax."""

import numpy as np
import pytest
import torch
from support.families import mixed_batch
from support.models import relative_difference, smallest_qwen2_5_vl

import mmpack as mp
from mmpack.adapters.transformers import (
    attach,
    heads,
    model_inputs,
    packed_listed_logprobs,
    packed_logprobs,
)
from tests.support.kept_ids import restrict
from tests.support.teachers import of_logits

pytestmark = pytest.mark.adapter


def taught(kept=False, share_prefix=True):
    """A pack in which one teacher knows every sample, and another two of them, with words on some tokens."""
    rng, samples = np.random.default_rng(0), mixed_batch("qwen2_5_vl")
    for k, sample in enumerate(samples):
        targets = sample.input_ids[sample.loss_indices]
        sample.teachers = {"7B": lists(rng, targets, 6)}
        if k in (1, 3):
            sample.teachers["maths"] = lists(rng, targets, 3, some=True)
        if kept:
            sample.kept_ids = mp.Ragged.of(
                [np.unique([t, *rng.integers(0, 151643, 3)]) for t in targets]
            )
    return mp.pack(samples, share_prefix=share_prefix)


def lists(rng, targets, longest, some=False):
    ids = [np.unique([t, *rng.integers(0, 151643, rng.integers(0, longest))]) for t in targets]
    ids = [[] if some and n % 2 else list(own) for n, own in enumerate(ids)]
    scores = [list(np.log(rng.dirichlet(np.ones(len(own) + 1))[:-1])) if own else [] for own in ids]
    return mp.Ragged.of(ids, scores)


def of_full_logits(model, batch):
    """Logprobs for the loss, and the others by name, of logits [T, V] of every row."""
    logits = model(**model_inputs(batch, model)).logits[0].double()[batch.loss_rows.long()] / 0.7
    found = of_logits(logits, batch.loss_targets, batch.teachers)
    kept = found[""]
    if batch.kept_ids is not None:
        own = restrict(logits, batch.kept_ids).log_softmax(-1)
        kept = own.gather(1, batch.loss_targets[:, None])[:, 0]
    return {"kept": kept, **found}


def ours(model, batch, entropy=True):
    kept, out = packed_listed_logprobs(model, batch, 0.7, entropy=entropy)
    found = {"kept": kept, "": out.targets, **out.lists}
    return found | {"entropy": out.entropy} if entropy else found


def gradients_of(values, model):
    model.zero_grad(set_to_none=True)
    sum((x * torch.linspace(-1, 1, len(x))).sum() for x in values.values()).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def agree(model, batch):
    with attach(model):
        found, wanted = ours(model, batch), of_full_logits(model, batch)
        assert found.keys() == wanted.keys() == {"kept", "", "entropy", "7B", "maths"}
        for name, x in found.items():
            assert (x - wanted[name]).abs().max() <= 1e-5, name
        gradients = gradients_of(found, model), gradients_of(wanted, model)
    assert relative_difference(*gradients) <= 1e-5


@pytest.mark.parametrize("kept", [False, True])
def test_a_plain_head(kept):
    model, batch = smallest_qwen2_5_vl(), taught(kept)
    agree(model, batch)
    with attach(model), torch.no_grad():
        own, out = packed_listed_logprobs(model, batch, 0.7)
        if not kept:
            assert torch.equal(own, packed_logprobs(model, batch, 0.7)) and own is out.targets
        assert out.entropy is None
        bare = mp.pack(mixed_batch("qwen2_5_vl"))  # without teachers
        own, out = packed_listed_logprobs(model, bare)
        assert out.lists == {} and torch.equal(own, packed_logprobs(model, bare))


def test_a_head_that_is_run_in_chunks(monkeypatch):
    monkeypatch.setattr(heads, "CHUNK", 5)
    model = smallest_qwen2_5_vl(tied=False)
    model.lm_head.register_forward_hook(lambda module, args, out: out * 3)
    agree(model, taught(kept=True))
