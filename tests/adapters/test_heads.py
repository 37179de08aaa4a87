"""Heads that PEFT changed: values and gradients of full logits, made by the model's own forward and float64 softmax."""

import pytest
import torch
from support.families import mixed_batch
from support.kept_ids import draw_support, values
from support.models import relative_difference, smallest_qwen2_5_vl

import mmpack as mp
from mmpack.adapters.transformers import attach, heads, model_inputs, packed_logprobs
from mmpack.errors import ArgumentError

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.adapter

HEADS = {
    "a copy that is trained": {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
    "LoRA": {"target_modules": ["q_proj", "lm_head"]},
    "DoRA": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
}


def wrapped(settings):
    torch.manual_seed(0)
    model = peft.get_peft_model(smallest_qwen2_5_vl(), peft.LoraConfig(r=4, **settings)).eval()
    with torch.no_grad():  # adapters start as nothing
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def of_full_logits(model, batch):
    """Logprobs and entropies [N] of logits [T, V] of every row, by the model's own forward and torch's softmax."""
    logits = model(**model_inputs(batch, model)).logits[0].double()
    logp = torch.log_softmax(logits[batch.loss_rows.long()] / 0.7, -1)
    return logp.gather(1, batch.loss_targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def gradients_of(values, model):
    logprobs, entropies = values
    model.zero_grad(set_to_none=True)
    ((logprobs * torch.linspace(-1, 1, len(logprobs))).sum() + entropies.sum() / 3).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_peft_changed(kind, monkeypatch):
    monkeypatch.setattr(heads, "CHUNK", 7)  # several chunks
    model, batch = wrapped(HEADS[kind]), mp.pack(mixed_batch("qwen2_5_vl"), share_prefix=True)
    with attach(model):
        ours = packed_logprobs(model, batch, 0.7, entropy=True)
        found = gradients_of(ours, model)
        wanted = of_full_logits(model, batch)
        expected = gradients_of(wanted, model)
        with model.disable_adapter():  # as TRL's reference is
            plain = packed_logprobs(model, batch, 0.7)
            reference = of_full_logits(model, batch)[0]
    for own, full in zip(ours, wanted, strict=True):
        assert (own - full).abs().max() <= 1e-5
    assert any("lm_head" in name for name in expected)
    assert relative_difference(found, expected) <= 1e-5
    assert (plain - reference).abs().max() <= 1e-5
    assert (plain - ours[0]).abs().max() > 1e-2


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_peft_changed_over_kept_ids(kind, monkeypatch):
    monkeypatch.setattr(heads, "CHUNK", 7)
    model, batch = wrapped(HEADS[kind]), mp.pack(mixed_batch("qwen2_5_vl"), share_prefix=True)
    torch.manual_seed(1)
    batch.kept_ids = draw_support(batch.loss_targets, 151_643)
    with attach(model):
        ours = packed_logprobs(model, batch, 0.7, entropy=True)
        found = gradients_of(ours, model)
        logits = model(**model_inputs(batch, model)).logits[0][batch.loss_rows.long()]
        wanted = values(logits.double() / 0.7, batch.loss_targets, batch.kept_ids)
        expected = gradients_of(wanted, model)
        whole = packed_logprobs(model, batch, 0.7, kept_ids=False)
        over_all = of_full_logits(model, batch)[0]
    for own, full in zip((*ours, whole), (*wanted, over_all), strict=True):
        assert (own - full).abs().max() <= 1e-5
    assert relative_difference(found, expected) <= 1e-5


@pytest.mark.parametrize("kept", [[[1, 2]], "one less", "scored by hand"])
def test_kept_ids_that_are_not_the_batch_s(kept):
    """A head that runs in chunks cuts them, a Linear reads them whole: both say the same."""
    batch = mp.pack(mixed_batch("qwen2_5_vl"))
    lists = draw_support(batch.loss_targets, 50)
    given = {"one less": lists[1:], "scored by hand": lists.ids}
    batch.kept_ids = given[kept] if isinstance(kept, str) else kept
    for head in (torch.nn.Linear(8, 50), torch.nn.Sequential(torch.nn.Linear(8, 50))):
        with pytest.raises(ArgumentError, match=r"kept_ids is .+ one per loss token\. Fix: "):
            heads.reader(head, batch, 1.0, False)


def test_a_changed_head_without_a_loss_token():
    model = wrapped(HEADS["LoRA"])
    with attach(model):
        batch = mp.pack(mixed_batch("qwen2_5_vl"))
        for name in ("loss_rows", "loss_targets", "loss_rows_unique", "loss_row_inverse"):
            setattr(batch, name, getattr(batch, name)[:0])
        logprobs, entropies = packed_logprobs(model, batch, entropy=True)
    assert logprobs.shape == entropies.shape == (0,)
    gradients = gradients_of((logprobs, entropies), model)
    assert gradients and all((g == 0).all() for g in gradients.values())


def test_the_head_gets_its_budget():
    model, batch = smallest_qwen2_5_vl(), mp.pack(mixed_batch("qwen2_5_vl"))
    with attach(model):
        kept = packed_logprobs(model, batch, memory_budget=2**30)
        assert torch.equal(kept, packed_logprobs(model, batch))
        with pytest.raises(
            mp.ArgumentError, match=r"memory_budget is -1.*Fix: pass bytes, or None"
        ):
            packed_logprobs(model, batch, memory_budget=-1)
