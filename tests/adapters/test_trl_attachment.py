"""MmpackGRPO beside its models: attached only in its passes, and a tower that is not trained runs once a picture."""

import pytest
import torch
from support.models import needs_encoded_media, smallest_qwen2_5_vl
from support.trl_trainers import (
    Packed,
    assert_it_is_its_own,
    assert_same_steps,
    make_trainer,
    rows_of,
    small_processor,
    trl,
)

from mmpack.adapters.transformers.attention import is_attached
from mmpack.adapters.transformers.tower import tower_and_projector
from mmpack.adapters.trl import grpo

peft = pytest.importorskip("peft")


class Forgetful(Packed):
    feature_bytes = 0


@pytest.fixture
def build(smallest_checkpoint, tmp_path):
    """Four completions of a problem with one image."""

    def build(cls, peft_config=None, frozen=False, **options):
        torch.manual_seed(0)  # TRL before 1.15 makes adapters without a seed of its own
        given = smallest_checkpoint, tmp_path, rows_of((0,)), small_processor(), peft_config
        trainer = make_trainer(cls, *given, **options)
        if frozen:
            for model in (trainer.model, trainer.ref_model):
                for parameter in tower_and_projector(model).parameters():
                    parameter.requires_grad_(False)
        torch.manual_seed(0)
        return trainer

    return build


def test_a_trained_copy_of_the_head_is_trained_as_stock_trl_does(build):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    runs = []
    for cls in (trl.GRPOTrainer, Packed):
        trainer = build(cls, config, beta=0.05, max_steps=1)
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        trainer.train()
        runs.append(dict(trainer.model.named_parameters()))
    stock, packed = runs
    assert_same_steps(stock.items(), packed.items(), before.items())
    assert any("lm_head" in name and not torch.equal(p, before[name]) for name, p in stock.items())


def test_it_is_detached_after_an_error(build, monkeypatch):
    trainer = build(Packed)

    def broken(model, *args, **kwargs):
        assert is_attached(model)
        raise ZeroDivisionError

    monkeypatch.setattr(grpo, "packed_logprobs", broken)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert_it_is_its_own(trainer.model, smallest_qwen2_5_vl())


@needs_encoded_media
@pytest.mark.slow
def test_pictures_are_encoded_once_for_all_passes(build):
    runs = []
    for cls in (trl.GRPOTrainer, Packed, Forgetful):
        trainer = build(cls, frozen=True, beta=0.05, num_iterations=2, max_steps=4)
        trainer.train()
        runs.append(trainer)
    stock, packed, forgetful = runs
    before = smallest_qwen2_5_vl().named_parameters()
    assert_same_steps(stock.model.named_parameters(), packed.model.named_parameters(), before)
    picture = packed.mmpack_stats.patches
    (store,) = set(packed._mmpack_stores.values())
    assert store.stats.patches_encoded == picture  # of one picture, in all four steps
    assert forgetful.mmpack_stats.patches == packed.mmpack_stats.passes * picture
    assert len(packed._mmpack_stores) == 2 and not forgetful._mmpack_stores


@needs_encoded_media
def test_a_reference_that_is_synced_has_a_store_of_its_own(build):
    """TRL moves it towards the policy by rounding, also where the two are equal."""
    synced = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.3}
    trainer = build(Packed, frozen=True, beta=0.05, max_steps=2, **synced)
    trainer.train()
    stats = trainer.mmpack_stats
    assert stats.passes >= 4 and 0 < stats.patches < stats.passes * stats.patches_stock / 4
