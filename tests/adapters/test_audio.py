"""Thinkers over packed, shared and padded batches with audio, against their own forward of each sample alone."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from support.float64 import Wide, wide_copy
from support.heard import HEARING, alone, layouts, some_samples
from support.kits import get_kit
from support.models import relative_difference

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs, packed_logprobs
from mmpack.contracts import TOLERANCES

pytestmark = [
    pytest.mark.adapter,
    pytest.mark.skipif(
        not get_kit(HEARING[0]).available,
        reason="this transformers keeps an Omni's towers beside its text model",
    ),
]


@pytest.fixture(scope="module", params=HEARING)
def case(request):
    """A model, samples, and what each sample is by itself."""
    model, samples = get_kit(request.param).small(), some_samples(request.param)
    with torch.no_grad():
        return model, samples, alone(model, samples)


@pytest.mark.parametrize("layout", ["shared", "padded left"])
def test_logprobs_are_those_of_separate_forwards(case, layout):
    model, samples, wanted = case
    assert not mp.validate(samples)
    batch = layouts(samples)[layout]()
    with attach(model), torch.no_grad():
        found = packed_logprobs(model, batch)
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCES["layouts"].value)


def test_each_audio_is_encoded_once(case, monkeypatch):
    model, samples, _ = case
    heard = []
    tower = model.model.audio_tower
    kept = tower.forward
    monkeypatch.setattr(
        tower,
        "forward",
        lambda *args, **kwargs: (
            heard.append(kwargs["feature_lens"].tolist()),
            kept(*args, **kwargs),
        )[1],
    )
    batch = mp.pack(samples, share_prefix=True)
    with attach(model), torch.no_grad():
        packed_logprobs(model, batch)
    assert sorted(n for call in heard for n in call) == [37, 230, 260]
    assert batch.stats["patches_encoded"] == sum(m.num_patches for m in batch.media)


@pytest.mark.slow
def test_gradients_are_those_of_separate_forwards(case):
    """Against the same passes in float64, as the contract of parameter gradients has it."""
    model, samples, _ = case
    wide = wide_copy(model)
    weights = torch.linspace(0.5, 1.5, sum(s.num_loss_tokens for s in samples))
    with Wide():
        (alone(wide, samples) * weights.double()).sum().backward()
    with attach(model):
        (packed_logprobs(model, mp.pack(samples, share_prefix=True)) * weights).sum().backward()
    exact = {n: p.grad for n, p in wide.named_parameters() if p.grad is not None}
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert any("audio_tower" in name for name in exact)
    assert relative_difference(found, exact) <= 1e-5
    model.zero_grad(set_to_none=True)


def test_every_tower_has_gradients_where_a_batch_lacks_its_media(case):
    """What DistributedDataParallel waits for."""
    model, samples, _ = case
    towers = [model.model.audio_tower, model.model.visual]
    text = samples[0]
    for batch in (mp.pack(samples[2:3]), mp.pack([_text_of(text)])):
        with attach(model):
            logits = model(**model_inputs(batch, model, vision="always")).logits
        logits.float().sum().backward()
        for tower in towers:
            assert all(p.grad is not None for p in tower.parameters() if _is_used(tower, p))
        model.zero_grad(set_to_none=True)


def _text_of(sample):
    ids = sample.input_ids[sample.loss_indices]
    return mp.Sample("t", "t", sample.family, ids, [], [], [mp.LossSpan(1, len(ids))])


def _is_used(tower, parameter):
    """Qwen2.5-Omni's tower has an embedding that its forward does not read."""
    unused = getattr(tower, "audio_bos_eos_token", None)
    return unused is None or parameter is not unused.weight
