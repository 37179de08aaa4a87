"""Heads and forwards that were changed: values and gradients of full logits, by the model's own forward.

By PEFT, by hooks, by accelerate, by hand; softmax in float64.
"""

import functools

import numpy as np
import pytest
import torch
from support.families import mixed_batch
from support.kept_ids import draw_support, values
from support.models import relative_difference, smallest_qwen2_5_vl
from torch.nn.utils import parametrize
from transformers.modeling_outputs import CausalLMOutputWithPast

import mmpack as mp
from mmpack.adapters.transformers import (
    attach,
    heads,
    model_inputs,
    packed_listed_logprobs,
    packed_logprobs,
    prefix_logprobs,
)
from mmpack.adapters.transformers.prefix import kv_bytes_per_token
from mmpack.cache import PrefixIndex, RowStore
from mmpack.errors import ArgumentError, ModelError
from tests.support.kept_ids import restrict
from tests.support.teachers import of_logits

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
    logits = model(**model_inputs(batch, model)).logits.flatten(0, 1).double()
    logp = torch.log_softmax(logits[batch.loss_rows.long()] / 0.7, -1)
    return logp.gather(1, batch.loss_targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def gradients_of(values, model):
    logprobs, entropies = values
    model.zero_grad(set_to_none=True)
    ((logprobs * torch.linspace(-1, 1, len(logprobs))).sum() + entropies.sum() / 3).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_peft_changed(kind, kept, monkeypatch):
    monkeypatch.setattr(heads, "CHUNK", 7)  # several chunks
    model, batch = wrapped(HEADS[kind]), mp.pack(mixed_batch("qwen2_5_vl"), share_prefix=True)
    torch.manual_seed(1)
    batch.kept_ids = draw_support(batch.loss_targets, 151_643) if kept else None
    with attach(model):
        ours = packed_logprobs(model, batch, 0.7, entropy=True)
        found = gradients_of(ours, model)
        wanted = of_full_logits(model, batch)
        if kept:
            logits = model(**model_inputs(batch, model)).logits[0][batch.loss_rows.long()]
            wanted = values(logits.double() / 0.7, batch.loss_targets, batch.kept_ids)
        expected = gradients_of(wanted, model)
        with model.disable_adapter():  # as TRL's reference is
            plain = packed_logprobs(model, batch, 0.7, kept_ids=False)
            reference = of_full_logits(model, batch)[0]
    for own, full in zip((*ours, plain), (*wanted, reference), strict=True):
        assert (own - full).abs().max() <= 1e-5
    assert any("lm_head" in name for name in expected)
    assert relative_difference(found, expected) <= 1e-5
    assert (plain - ours[0]).abs().max() > 1e-2


@pytest.mark.parametrize("kept", [[[1, 2]], "one less", "scored by hand"])
def test_kept_ids_that_are_not_the_batch_s(kept):
    """A head that runs in chunks cuts them, a Linear reads them whole: both say the same."""
    batch = mp.pack(mixed_batch("qwen2_5_vl"))
    lists = draw_support(batch.loss_targets, 50)
    given = {"one less": lists[1:], "scored by hand": lists.ids}
    batch.kept_ids = given[kept] if isinstance(kept, str) else kept
    for head in (torch.nn.Linear(8, 50), torch.nn.Sequential(torch.nn.Linear(8, 50))):
        with pytest.raises(ArgumentError, match=r"kept_ids is .+ one per loss token\. Fix: "):
            heads.reader(head, batch, heads.Asked())


@pytest.mark.parametrize("peft_changed", [False, True])
def test_a_head_without_a_loss_token_and_its_budget(peft_changed):
    model = wrapped(HEADS["LoRA"]) if peft_changed else smallest_qwen2_5_vl()
    batch = mp.pack(mixed_batch("qwen2_5_vl"))
    with attach(model):
        if not peft_changed:
            kept = packed_logprobs(model, batch, memory_budget=2**30)
            assert torch.equal(kept, packed_logprobs(model, batch))
            with pytest.raises(ArgumentError, match=r"memory_budget is -1.*Fix: pass bytes"):
                packed_logprobs(model, batch, memory_budget=-1)
        for name in ("loss_rows", "loss_targets", "loss_rows_unique", "loss_row_inverse"):
            setattr(batch, name, getattr(batch, name)[:0])
        logprobs, entropies = packed_logprobs(model, batch, entropy=True)
    assert logprobs.shape == entropies.shape == (0,)
    gradients = gradients_of((logprobs, entropies), model)
    assert gradients and all((g == 0).all() for g in gradients.values())


def scaled(module, args, out):
    return out * 3


def by_accelerate(head):
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(head, hooks.AlignDevicesHook(execution_device="cpu", offload=True))


def with_forward(module, change):
    own = module.forward

    @functools.wraps(own)
    def forward(*args, **kwargs):
        return change(own, *args, **kwargs)

    module.forward = forward


def scaled_logits(own, *args, **kwargs):
    out = own(*args, **kwargs)
    out.logits = out.logits * 3
    return out


def scaled_in_place(own, *args, **kwargs):
    out = own(*args, **kwargs)
    out.logits *= 3
    return out


def in_bfloat16(own, *args, **kwargs):
    with torch.autocast("cpu", torch.bfloat16):
        return own(*args, **kwargs)


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return weight * 2


# what is done to the head, which packed_logprobs runs
ON_HEADS = {
    "a pre-hook": lambda h: h.register_forward_pre_hook(lambda m, args: (args[0] * 3,)),
    "a hook": lambda h: h.register_forward_hook(scaled),
    "keywords": lambda h: h.register_forward_hook(
        lambda m, args, kwargs, out: out * 3, with_kwargs=True
    ),
    "a hook on [B, T, V]": lambda h: h.register_forward_hook(
        lambda m, args, out: out.index_fill(2, torch.tensor([3, 5]), -50.0)
    ),
    "a forward of its own": lambda h: with_forward(h, lambda own, x: own(x) * 3),
    "a parametrization": lambda h: parametrize.register_parametrization(h, "weight", Doubled()),
    "compiled": lambda h: h.compile(backend="eager"),
    "weight norm": lambda h: torch.nn.utils.weight_norm(h),
    "accelerate's hook": by_accelerate,
}
# the same of the whole model
ON_MODELS = {
    "compiled": lambda m: m.compile(backend="eager"),
    "autocast": lambda m: with_forward(m, in_bfloat16),
    "a hook that reads": lambda m: m.register_forward_hook(lambda m, args, out: None),
    "other embeddings": lambda m: m.get_input_embeddings().register_forward_hook(scaled),
    "accelerate's hook": by_accelerate,
}


def check_runs(model, batch):
    with attach(model):
        ours = packed_logprobs(model, batch, 0.7, entropy=True)
        wanted = of_full_logits(model, batch)
        listed, _ = packed_listed_logprobs(model, batch, 0.7)
        found, expected = gradients_of(ours, model), gradients_of(wanted, model)
    for own, full in zip((*ours, listed), (*wanted, wanted[0]), strict=True):
        assert (own - full).abs().max() <= 1e-5
    assert relative_difference(found, expected) <= 1e-5


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("kind", ON_HEADS)
def test_what_is_put_on_a_head_is_run(kind, monkeypatch):
    monkeypatch.setattr(heads, "CHUNK", 7)
    model, batch = (
        smallest_qwen2_5_vl(tied=False),
        mp.pack(mixed_batch("qwen2_5_vl"), share_prefix=True),
    )
    ON_HEADS[kind](model.lm_head)
    if kind == "weight norm":  # recomputed in each forward
        with torch.no_grad():
            model.lm_head.weight_g.mul_(3)
    check_runs(model, batch)
    (sample,) = mixed_batch("qwen2_5_vl")[-1:]
    wanted = of_full_logits(model, mp.pad([sample]))[0]
    index = PrefixIndex(2**20, bytes_per_token=kv_bytes_per_token(model))
    found = prefix_logprobs(
        model, sample, index, RowStore(index.num_rows), temperature=0.7, weights="1"
    )
    assert (found.logprobs - wanted).abs().max() <= 1e-5


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ON_MODELS)
def test_what_is_put_on_a_model_is_run(kind):
    model, batch = smallest_qwen2_5_vl(), mp.pack(mixed_batch("qwen2_5_vl"), share_prefix=True)
    with attach(model):
        before = packed_logprobs(model, batch, 0.7)
        ON_MODELS[kind](model)
        ours, wanted = packed_logprobs(model, batch, 0.7), of_full_logits(model, batch)[0]
    assert (ours - wanted).abs().max() <= (2e-2 if kind == "autocast" else 1e-5)
    changes = kind in ("autocast", "other embeddings")
    assert ((ours - before).abs().max() > 1e-3) == changes


@pytest.mark.parametrize(
    "put",
    [
        lambda m: with_forward(m, scaled_logits),
        lambda m: with_forward(m, scaled_in_place),
        lambda m: m.register_forward_hook(lambda m, args, out: scaled_logits(lambda: out)),
        lambda m: with_forward(m, lambda own, **inputs: own(**inputs | {"logits_to_keep": 5})),
    ],
    ids=["logits", "in place", "a hook", "some rows"],
)
def test_a_forward_that_changes_its_logits(put):
    """`model(**model_inputs(…))` has what the model's forward makes; packed_logprobs would not."""
    model, batch = smallest_qwen2_5_vl(), mp.pack(mixed_batch("qwen2_5_vl"))
    put(model)
    says = r"(the model's forward changes the logits .* Fix: .*selected_logprobs|gets 5 of the ba)"
    for inference in (False, True):
        with attach(model), torch.inference_mode(inference):
            for passed in (packed_logprobs, packed_listed_logprobs):
                with pytest.raises(ModelError, match=says):
                    passed(model, batch)


def test_forwards_of_ones_own_that_run_no_head():
    """A cached prefix runs no forward of its own."""

    class Own(type(smallest_qwen2_5_vl())):
        def forward(self, **inputs):
            hidden = self.model(**inputs).last_hidden_state
            return CausalLMOutputWithPast(logits=hidden @ self.lm_head.weight.T)

    model, samples = smallest_qwen2_5_vl(), mixed_batch("qwen2_5_vl")[-1:]
    index = PrefixIndex(2**20, bytes_per_token=kv_bytes_per_token(model))
    with_forward(model, scaled_logits)
    with pytest.raises(ModelError, match="the model's forward was changed"):
        prefix_logprobs(model, samples[0], index, RowStore(index.num_rows))
    del model.forward
    model.__class__ = Own
    with attach(model), pytest.raises(ModelError, match="does not run its head"):
        packed_logprobs(model, mp.pack(samples))


# ---- a batch with teachers through a model ----


def taught(kept=False, share_prefix=True):
    """A pack in which one teacher knows every sample, and another two of them, with words on some tokens."""
    rng, samples = np.random.default_rng(0), mixed_batch("qwen2_5_vl")
    for k, sample in enumerate(samples):
        targets = sample.input_ids[sample.loss_indices]
        sample.teachers = {"7B": lists(rng, targets, 6)}
        if k in (1, 3):
            sample.teachers["maths"] = lists(rng, targets, 3, some=True)
        if kept:
            sample.kept_ids = mp.schema.Ragged.of(
                [np.unique([t, *rng.integers(0, 151643, 3)]) for t in targets]
            )
    return mp.pack(samples, share_prefix=share_prefix)


def lists(rng, targets, longest, some=False):
    ids = [np.unique([t, *rng.integers(0, 151643, rng.integers(0, longest))]) for t in targets]
    ids = [[] if some and n % 2 else list(own) for n, own in enumerate(ids)]
    scores = [list(np.log(rng.dirichlet(np.ones(len(own) + 1))[:-1])) if own else [] for own in ids]
    return mp.schema.Ragged.of(ids, scores)


def of_full_logits_teachers(model, batch):
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


def gradients_of_teachers(values, model):
    model.zero_grad(set_to_none=True)
    sum((x * torch.linspace(-1, 1, len(x))).sum() for x in values.values()).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def agree(model, batch):
    with attach(model):
        found, wanted = ours(model, batch), of_full_logits_teachers(model, batch)
        assert found.keys() == wanted.keys() == {"kept", "", "entropy", "7B", "maths"}
        for name, x in found.items():
            assert (x - wanted[name]).abs().max() <= 1e-5, name
        gradients = gradients_of_teachers(found, model), gradients_of_teachers(wanted, model)
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
