"""Every family's tiny model: packed, shared and padded rows give each sample what its own attention gives it alone."""

import pytest
import torch
from support.families import mixed_batch, some_slow
from support.models import (
    logprobs_and_gradients,
    small_model,
    with_pixels,
)
from support.samples import make_sample

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs, packed_logprobs
from mmpack.families import FAMILIES

pytestmark = pytest.mark.adapter
PACKABLE = [name for name, family in FAMILIES.items() if family.packing == "yes"]


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name):
        if name not in made:
            made.clear()  # one at a time
            made[name] = small_model(name)
        return made[name]

    return get


@pytest.mark.parametrize("level", [0, 1, 2])
def test_every_deepstack_level_matters(models, level):
    """Of images and of videos."""
    model, samples = models("qwen3_vl"), mixed_batch("qwen3_vl")
    tower = model.model.visual.deepstack_merger_list[level]
    with attach(model), torch.no_grad():
        batch = mp.pack(samples, share_prefix=True)
        right = packed_logprobs(model, batch)
        hook = tower.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
        try:
            lost = packed_logprobs(model, batch)
        finally:
            hook.remove()
    of = dict(zip(batch.sample_ids, batch.unpack_loss((right - lost).abs()), strict=True))
    assert of["s0"].max() > 1e-3 and of["s3"].max() > 1e-3
    assert (of["s4"] == 0).all()  # text


@pytest.mark.few(2)
@pytest.mark.parametrize("name", some_slow(FAMILIES))
def test_an_idle_tower_runs_all_of_the_tower_and_changes_nothing(models, name):
    model = models(name)
    samples = [make_sample([("text", [1, 2]), ("response", [3, 4])], family=name)]
    batch = mp.pack(samples) if name in PACKABLE else mp.pad(samples)
    with attach(model) if name in PACKABLE else torch.enable_grad():
        values, gradients = logprobs_and_gradients(model, batch)
        idle, with_tower = logprobs_and_gradients(model, batch, vision="always")
    assert torch.equal(idle, values)
    used = {n for n, _ in model.named_parameters() if "visual" in n or "vision" in n}
    used |= {n for n, _ in model.named_parameters() if "multi_modal_projector" in n}
    used -= {n for n in used if "lambda" in n or "mask_token" in n}
    assert used <= with_tower.keys() and not used & gradients.keys()
    assert all((with_tower[n] == 0).all() for n in used)
    assert all(torch.equal(with_tower[n], gradients[n]) for n in gradients)


def test_one_layout_two_models():
    """A sample of Qwen3-VL goes into its model with experts: ids, grids and positions are the same."""
    samples = mixed_batch("qwen3_vl")
    model = small_model("qwen3_vl_moe")
    with attach(model), torch.no_grad():
        found = packed_logprobs(model, mp.pack(samples))
        renamed = mixed_batch("qwen3_vl_moe")
        assert torch.equal(found, packed_logprobs(model, mp.pack(renamed)))
        with pytest.raises(
            mp.ModelError, match="batch is of qwen2_5_vl, the model of qwen3_vl_moe"
        ):
            packed_logprobs(model, mp.pack(mixed_batch("qwen2_5_vl")))


@pytest.mark.parametrize("bad", [-1, 151_936, 10**9])
def test_ids_that_the_model_lacks(models, bad):
    model = models("qwen2_5_vl")
    batch = mp.pad([make_sample([("text", [1, 2, 3]), ("response", [4, 5])])])
    batch.input_ids[0, 1] = bad
    batch.id_range = None
    batch.__post_init__()
    with pytest.raises(mp.ModelError, match=rf"has id {bad}, the model's ids are 0 to 151935"):
        model_inputs(batch, model)


def test_tiles_and_a_vocabulary_of_another_checkpoint():
    model = small_model("internvl")
    parts = [("text", [1]), ("image", (2, 8, 8), "x"), ("response", [3])]
    batch = mp.pack(with_pixels([make_sample(parts, family="internvl")]))
    with attach(model):
        with pytest.raises(mp.ModelError, match=r"\[8, 8\] patches.*reads \[4, 4\]"):
            packed_logprobs(model, batch)
        model.config.image_token_id = 151671  # InternVL3.5's
        with pytest.raises(mp.ModelError, match=r"image token is 151671.*151667"):
            packed_logprobs(model, batch)
