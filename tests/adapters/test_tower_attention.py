"""The vision tower under mmpack's attention: features and gradients of its own, one window after the other."""

import pytest
import torch
from support.families import mixed_batch
from support.float64 import Wide, wide_copy
from support.models import (
    relative_difference,
    small_model,
    smallest_qwen2_5_vl,
)
from support.towers import CASES, encode, media_of, relative

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs, packed_logprobs
from mmpack.adapters.transformers import tower_attention as adapter
from mmpack.adapters.transformers.attention import is_attached
from mmpack.adapters.transformers.tower_attention import TOWER, tower_of
from mmpack.contracts import parameter_gradient_fp32_bound
from mmpack.versions import towers_take_known

pytestmark = pytest.mark.adapter


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name):
        if name not in made:
            made.clear()  # one at a time
            made[name] = model = small_model(name)
            with torch.no_grad():  # attention far from uniform
                for parameter in tower_of(model.model).parameters():
                    if parameter.ndim == 2:
                        parameter.mul_(4)
        return made[name]

    return get


@pytest.mark.slow
@pytest.mark.parametrize(("family", "grids"), CASES)
def test_features_and_gradients_are_those_of_one_by_one(models, family, grids):
    model, (modality, media) = models(family), media_of(family, grids)
    own, own_gradients = encode(model, modality, media)
    wide = wide_copy(model)
    with Wide():
        exact, exact_gradients = encode(wide, modality, media)
    assert exact[0].dtype == torch.float64
    with attach(model, text=False):
        levels, gradients = encode(model, modality, media)
    for found, apart, wanted in zip(levels, own, exact, strict=True):
        assert relative(found, wanted) <= max(1.5 * relative(apart, wanted), 1e-6)
    assert gradients.keys() == own_gradients.keys() == exact_gradients.keys()
    for kind in ("pixels", "parameters"):
        of = [
            {n: g for n, g in set_.items() if (n == "pixels") == (kind == "pixels")}
            for set_ in (gradients, own_gradients, exact_gradients)
        ]
        off, apart = (relative_difference(x, of[2]) for x in of[:2])
        assert off <= parameter_gradient_fp32_bound(apart), (kind, off, apart)


known = pytest.mark.skipif(
    not towers_take_known(), reason="this transformers' towers make all by themselves"
)


@known
@pytest.mark.parametrize(("family", "grids"), [(f, g) for f, g in CASES if g == "videos"])
def test_what_the_tower_is_told_is_what_it_makes(models, family, grids, monkeypatch):
    model, (modality, media) = models(family), media_of(family, grids)
    with attach(model, text=False):
        told, gradients = encode(model, modality, media)
        with monkeypatch.context() as patch:
            patch.setattr(adapter, "towers_take_known", lambda: False)
            untold, expected = encode(model, modality, media)
    assert all(torch.equal(a, b) for a, b in zip(told, untold, strict=True))
    assert relative_difference(gradients, expected) == 0

    def hide(tower, args, kwargs):
        return args, kwargs | {"grid_thw": kwargs["grid_thw"].to("meta")}

    with attach(model, text=False):
        hook = tower_of(model.model).register_forward_pre_hook(hide, with_kwargs=True)
        try:
            blind, _ = encode(model, modality, media)  # nobody can read the grids
        finally:
            hook.remove()
    assert torch.equal(blind[0], told[0])


@known
def test_offsets_that_the_caller_gives_are_obeyed(models):
    """Frames in two halves, each of which sees itself alone."""
    model = models("qwen2_vl")
    _, media = media_of("qwen2_vl", "one picture")
    given = {"cu_seqlens": torch.tensor([0, 128, 256], dtype=torch.int32), "max_seqlen": 128}
    with torch.no_grad():
        own = model.model.get_image_features(**media, **given).last_hidden_state
        with attach(model, text=False):
            found = model.model.get_image_features(**media, **given).last_hidden_state
            whole = model.model.get_image_features(**media).last_hidden_state
    assert relative(found, own) <= 1e-6 < 1e-2 < relative(whole, own)


def test_generate_and_padded_batches_are_the_models_own(models):
    """With text=False: masks, caches and the tokens that are generated stay."""
    model, samples = models("qwen2_5_vl"), mixed_batch("qwen2_5_vl")
    inputs = model_inputs(mp.pad(samples[:1]), model)
    inputs.pop("use_cache")
    ids = inputs["input_ids"]
    types = (ids == model.config.image_token_id) + 2 * (ids == model.config.video_token_id)
    options = {"max_new_tokens": 4, "do_sample": False, "mm_token_type_ids": types.long()}
    tokens = model.generate(**inputs, **options, pad_token_id=151643)
    with attach(model, text=False), torch.no_grad():
        assert not is_attached(model) and TOWER.is_attached(tower_of(model.model))
        assert torch.equal(model.generate(**inputs, **options, pad_token_id=151643), tokens)
        with pytest.raises(mp.ModelError, match="the model's attention ignores visible_until"):
            packed_logprobs(model, mp.pack(samples))


def names(model):
    return model.config.get_text_config()._attn_implementation, tower_of(
        model.model
    ).config._attn_implementation


@pytest.mark.parametrize(("reentrant", "own"), [(True, "sdpa"), (False, "eager")])
def test_backward_after_detach_under_checkpointing(reentrant, own, monkeypatch):
    """What is run again is the attention of the forward: it is asked for once more per layer, and no other."""
    modality, media = media_of("qwen2_5_vl", "pictures that windows don't divide")
    model = smallest_qwen2_5_vl().train()
    with attach(model, text=False):
        _, expected = encode(model, modality, media)
    model.set_attn_implementation({"vision_config": own})
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    asked = []
    attend = adapter.sequence_attention

    def attended(*operands, **options):
        asked.append(1)
        return attend(*operands, **options)

    monkeypatch.setattr(adapter, "sequence_attention", attended)
    tower = tower_of(model.model)
    pixels = media["pixel_values"].clone().requires_grad_()
    with attach(model, text=False):
        out = model.model.get_image_features(pixels, media["image_grid_thw"], return_dict=True)
    assert names(model)[1] == own and len(asked) == len(tower.blocks)
    features = torch.cat(tuple(out.pooler_output))
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    (features * torch.randn(features.shape)).sum().backward()
    assert len(asked) == 2 * len(tower.blocks) and names(model)[1] == own
    found = {n: p.grad for n, p in tower.named_parameters() if p.grad is not None}
    assert relative_difference({"pixels": pixels.grad} | found, expected) <= 1e-6


def test_a_forced_backend_that_cannot_run_is_an_error(models, monkeypatch):
    model, (modality, media) = models("internvl"), media_of("internvl", "tiles")
    monkeypatch.setenv("MMPACK_TOWER_ATTENTION", "varlen")
    encode(model, modality, media)  # its own attention is not asked
    with (
        attach(model, text=False),
        pytest.raises(mp.BackendError, match="tower attention: varlen was requested, but varl"),
    ):
        encode(model, modality, media)
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(mp.ModelError, match="an attention_mask was passed"):
        adapter.tower_attention(torch.nn.Module(), q, q, q, torch.zeros(1, 1, 4, 4))
