"""MmpackGRPO with a tower that is not trained: each picture goes through it once for old, reference and loss passes."""

import pytest
import torch
from support.models import smallest_qwen2_5_vl
from support.trl_trainers import (
    Packed,
    assert_same_steps,
    make_trainer,
    rows_of,
    small_processor,
    trl,
)

from mmpack.adapters.transformers.tower import takes_encoded_media, tower_and_projector

pytestmark = pytest.mark.skipif(
    not takes_encoded_media(smallest_qwen2_5_vl()), reason="transformers before 5.19"
)


class Forgetful(Packed):
    feature_bytes = 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    smallest_qwen2_5_vl().save_pretrained(folder)
    return folder


@pytest.fixture
def trained(checkpoint, tmp_path):
    """Train a model whose tower is frozen; patches of each forward of the policy's and the reference's tower."""

    def train(cls, frozen=True, **options):
        settings = {"beta": 0.05, "num_iterations": 2, "max_steps": 4} | options
        trainer = make_trainer(
            cls, checkpoint, tmp_path, rows_of((0,)), small_processor(), **settings
        )
        seen = []

        def note(module, args):  # one hook: the models share features
            seen.append(len(args[0]))

        for model in (trainer.model, trainer.ref_model):
            for parameter in tower_and_projector(model).parameters():
                parameter.requires_grad_(not frozen)
            tower = model.model.visual
            tower.register_forward_pre_hook(note)
        torch.manual_seed(0)
        trainer.train()
        return trainer, sum(seen)

    return train


@pytest.mark.slow
def test_pictures_are_encoded_once_for_all_passes(trained):
    stock, _ = trained(trl.GRPOTrainer)
    packed, kept = trained(Packed)
    forgetful, ran = trained(Forgetful)
    before = smallest_qwen2_5_vl().named_parameters()
    assert_same_steps(stock.model.named_parameters(), packed.model.named_parameters(), before)
    picture = packed.mmpack_stats.patches
    (store,) = set(packed._mmpack_stores.values())
    assert store.stats.patches_encoded == picture  # of one picture, in all four steps
    assert forgetful.mmpack_stats.patches == packed.mmpack_stats.passes * picture
    # what generates encodes for itself
    assert ran - kept == forgetful.mmpack_stats.patches - picture
    assert len(packed._mmpack_stores) == 2 and not forgetful._mmpack_stores


def test_a_reference_that_is_synced_has_a_store_of_its_own(trained):
    """TRL moves it towards the policy by rounding, also where the two are equal."""
    trainer, _ = trained(
        Packed,
        num_iterations=1,
        sync_ref_model=True,
        ref_model_sync_steps=1,
        ref_model_mixup_alpha=0.3,
    )
    stats = trainer.mmpack_stats
    assert stats.passes >= 8 and 0 < stats.patches < stats.passes * stats.patches_stock / 8


def test_a_trained_tower_is_encoded_each_time(trained):
    trainer, _ = trained(Packed, frozen=False, max_steps=1)
    assert not trainer._mmpack_stores and trainer.mmpack_stats.patches > 0
