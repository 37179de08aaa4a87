"""MmpackGRPO attaches models only in its logprob passes, with TRL's gradient checkpointing on."""

import copy

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

from mmpack.adapters.transformers.attention import is_attached
from mmpack.adapters.trl import grpo

peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smallest")
    smallest_qwen2_5_vl().save_pretrained(folder)
    return folder


@pytest.fixture
def build(checkpoint, tmp_path):
    """Four completions of a problem with one image."""
    processor, rows = small_processor(), rows_of((0,))

    def build(cls, peft_config=None, **options):
        return make_trainer(cls, checkpoint, tmp_path, rows, processor, peft_config, **options)

    return build


def assert_it_is_its_own(model):
    """`generate`, a forward with a mask and a cache, and both of a deep copy, as if mmpack were not there."""
    ids = torch.tensor([[1, 2, 3, 4], [151643, 151643, 5, 6]])
    mask = (ids != 151643).long()
    never = smallest_qwen2_5_vl()
    never.load_state_dict(model.state_dict())
    for own in (model, copy.deepcopy(model)):
        assert not is_attached(own)
        assert "mmpack" not in own.config.vision_config._attn_implementation
        own.eval()
        kwargs = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 151643}
        with torch.no_grad():
            assert torch.equal(
                own.generate(input_ids=ids, attention_mask=mask, **kwargs),
                never.generate(input_ids=ids, attention_mask=mask, **kwargs),
            )
            found, expected = (m(input_ids=ids, attention_mask=mask).logits for m in (own, never))
            assert torch.equal(found, expected)


@pytest.mark.parametrize("reentrant", [pytest.param(True, marks=pytest.mark.slow), False])
def test_models_are_their_own_before_and_after_train(build, reentrant):
    """With a reference model and two updates a generation; the run is that of stock TRL."""
    runs = []
    for cls in (trl.GRPOTrainer, Packed):
        trainer = build(
            cls,
            num_iterations=2,
            beta=0.0 if reentrant else 0.05,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        if cls is Packed:
            assert_it_is_its_own(trainer.model)
        torch.manual_seed(0)
        trainer.train()
        runs.append(trainer)
    stock, packed = runs
    assert packed.mmpack_stats.passes >= 3
    assert_it_is_its_own(packed.model)
    assert_same_steps(
        stock.model.named_parameters(),
        packed.model.named_parameters(),
        smallest_qwen2_5_vl().named_parameters(),
    )


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
    assert_it_is_its_own(trainer.model)
