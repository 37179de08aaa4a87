"""MmpackGRPO attaches models inside its logprob passes alone, with TRL's gradient checkpointing on."""

import copy
from pathlib import Path

import pytest
import torch
from support.models import smallest_qwen2_5_vl
from transformers import Qwen2_5_VLForConditionalGeneration

from mmpack.adapters.transformers import is_attached
from mmpack.adapters.trl import MmpackGRPO, grpo
from mmpack.smoke.datasets import load_exercises
from mmpack.smoke.qwen_processor import qwen_vl_processor

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "geo3k_style"


class Packed(MmpackGRPO, trl.GRPOTrainer):
    pass


def build(cls, folder, peft_config=None, **options):
    """Four completions of a problem with one picture; three steps. A reference model is read from disk."""
    smallest_qwen2_5_vl().save_pretrained(folder)
    args = trl.GRPOConfig(
        output_dir=str(folder),
        **{
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 6,
            "max_steps": 3,
            "learning_rate": 0.5,
            "optim": "sgd",
            "logging_steps": 1,
            "use_cpu": True,
            "bf16": False,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        }
        | options,
    )
    exercise = load_exercises(FIXTURE)[0]
    row = {"prompt": [{"role": "user", "content": exercise.prompt}], "images": [exercise.images[0]]}
    return cls(
        model=Qwen2_5_VLForConditionalGeneration.from_pretrained(folder),
        reward_funcs=lambda completion_ids, **columns: [sum(i) % 11 / 11 for i in completion_ids],
        args=args,
        train_dataset=datasets.Dataset.from_list([row]),
        processing_class=qwen_vl_processor(min_pixels=28 * 28, max_pixels=6 * 28 * 28),
        peft_config=peft_config,
    )


def assert_it_is_its_own(model):
    """`generate`, a forward with a mask and a cache, and both of a deep copy, as if mmpack were not there."""
    ids = torch.tensor([[1, 2, 3, 4], [151643, 151643, 5, 6]])
    mask = (ids != 151643).long()
    never = smallest_qwen2_5_vl()
    never.load_state_dict(model.state_dict())
    for own in (model, copy.deepcopy(model)):
        assert not is_attached(own)
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
def test_models_are_their_own_before_and_after_train(tmp_path, reentrant):
    """With a reference model and two updates a generation; the run is that of stock TRL."""
    runs = []
    for cls in (trl.GRPOTrainer, Packed):
        trainer = build(
            cls,
            tmp_path / cls.__name__,
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
    assert packed.mmpack_work.passes >= 3
    assert_it_is_its_own(packed.model)
    before = dict(smallest_qwen2_5_vl().named_parameters())
    for (name, a), b in zip(stock.model.named_parameters(), packed.model.parameters(), strict=True):
        moved = (a - before[name]).norm()
        assert (a - b).norm() <= 1e-4 * moved + 1e-7, name


def test_a_trained_copy_of_the_head_is_trained_as_stock_trl_does(tmp_path):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    runs = []
    for cls in (trl.GRPOTrainer, Packed):
        trainer = build(cls, tmp_path / cls.__name__, config, beta=0.05, max_steps=1)
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        trainer.train()
        runs.append(dict(trainer.model.named_parameters()))
    moved = 0
    for name, stock in runs[0].items():
        step = (stock - before[name]).norm()
        assert (runs[1][name] - stock).norm() <= 1e-4 * step + 1e-7, name
        moved += bool(step) and "lm_head" in name
    assert moved


def test_it_is_detached_after_an_error(tmp_path, monkeypatch):
    trainer = build(Packed, tmp_path)

    def broken(model, *args, **kwargs):
        assert is_attached(model)
        raise ZeroDivisionError

    monkeypatch.setattr(grpo, "packed_logprobs", broken)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert_it_is_its_own(trainer.model)
