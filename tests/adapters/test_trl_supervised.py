"""MmpackDPO and MmpackSFT in TRL's real trainers, on pictures, against stock ones: losses, gradients, metrics."""

import pytest
from support.models import relative_difference
from support.trl_trainers import SETTINGS, Gradients, datasets, rows_of, small_processor, trl
from transformers import AutoModelForImageTextToText

from mmpack.adapters.trl import MmpackDPO, MmpackSFT

pytest.importorskip("trl.kernels.chunked_logprob", reason="a TRL whose fused head runs on CPUs")
ANSWERS = ("It is 5.", "The angle at the top is 40 degrees.", "There are three.", "No.")
MANY = {  # of every input that a loss may take
    "loss_type": ["sigmoid", "ipo", "nca_pair"],
    "loss_weights": [1.0, 0.5, 0.2],
    "ld_alpha": 0.5,
    "use_weighting": True,
}


def preferences():
    said = zip(ANSWERS, ANSWERS[1:] + ANSWERS[:1], strict=True)
    return [
        row | {"chosen": reply(a), "rejected": reply(b)}
        for row, (a, b) in zip(rows_of((0, 8, 3, 5)), said, strict=True)
    ]


def demonstrations():
    """Two completions of each prompt."""
    rows = [r for r in rows_of((0, 8)) for _ in range(2)]
    return [r | {"completion": reply(a)} for r, a in zip(rows, ANSWERS, strict=True)]


def reply(text):
    return [{"role": "assistant", "content": text}]


def train(mixin, name, checkpoint, folder, rows, **options):
    trainer_class = getattr(trl, f"{name}Trainer")
    cls = type("Packed", (mixin, trainer_class), {}) if mixin else trainer_class
    settings = SETTINGS | {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "learning_rate": 0.1,
        "gradient_checkpointing": False,
        "max_length": None,
    }
    args = getattr(trl, f"{name}Config")(output_dir=str(folder), **settings | options)
    trainer = cls(
        model=AutoModelForImageTextToText.from_pretrained(checkpoint),
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(rows[:2]),
        processing_class=small_processor(),
    )
    gradients = Gradients()
    trainer.add_callback(gradients)
    trainer.train()
    trainer.evaluate()
    return trainer, gradients.seen


@pytest.mark.parametrize(
    ("mixin", "name", "rows", "options"),
    [
        (MmpackDPO, "DPO", preferences, {"beta": 0.5}),
        pytest.param(MmpackDPO, "DPO", preferences, MANY, marks=pytest.mark.slow),
        (MmpackSFT, "SFT", demonstrations, {}),
    ],
)
def test_steps_are_stock_s(smallest_checkpoint, tmp_path, mixin, name, rows, options):
    (stock, theirs), (packed, ours) = (
        train(m, name, smallest_checkpoint, tmp_path, rows(), **options) for m in (None, mixin)
    )
    assert len(theirs) == len(ours) == 2
    for a, b in zip(theirs, ours, strict=True):
        assert relative_difference(b, a) < 1e-5
    logs = stock.state.log_history, packed.state.log_history
    for a, b in zip(*logs, strict=True):
        assert {k for k in b if "mmpack/" not in k} == a.keys()
        for key, value in a.items():
            if not any(word in key for word in ("time", "per_second")):
                assert b[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    stats = packed.mmpack_stats
    assert stats.tokens < stats.tokens_stock / 1.5
    assert stats.patches * 2 == stats.patches_stock
