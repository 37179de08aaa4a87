"""Micro-batches of a step, cut again by group, against stock TRL's own: losses, gradients of each step, what is run."""

import pytest
from support.models import relative_difference
from support.trl_ranks import Drawn, Stock
from support.trl_trainers import Gradients, make_trainer, rows_of, small_processor, trl

from mmpack.adapters.trl import MmpackGRPO, MmpackRLOO

STEP = {  # two groups of four, of which TRL's micro-batches hold two rows each
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_steps": 2,
    "num_iterations": 2,
    "beta": 0.05,
    "gradient_checkpointing": False,
}
CASES = {
    "dapo": {},
    "grpo": {"loss_type": "grpo", "steps_per_generation": 8},
    "dr_grpo": {
        "loss_type": "dr_grpo",
        "steps_per_generation": 6,
    },  # a generation ends within a step
    "vespo": {"loss_type": "vespo"},
    "cispo": {"loss_type": "cispo"},
    "sapo": {"loss_type": "sapo", "mask_truncated_completions": True},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "an odd end": {"gradient_accumulation_steps": 3, "steps_per_generation": 4},
    "bnpo": {"loss_type": "bnpo"},
    "an entropy bonus": {"entropy_coef": 0.1},
}
# losses of whole groups (4 of both steps), olds and references
PASSES = {"grpo": 2 + 1 + 1, "sapo": 2 + 1 + 1, "dr_grpo": 10, "an odd end": 9}
PASSES |= {"bnpo": 8 + 2 + 2, "an entropy bonus": 8 + 2 + 2}  # TRL's micro-batches
QUICK = ("dapo", "bnpo")


class DrawnAlone(Drawn):
    """RLOO takes no logprobs of the sampler."""

    def _generate_single_turn(self, *args, **kwargs):
        return super()._generate_single_turn(*args, **kwargs)[0]


class Ours(Drawn, MmpackGRPO, trl.GRPOTrainer):
    pass


class StockRLOO(DrawnAlone, trl.RLOOTrainer):
    pass


class OursRLOO(DrawnAlone, MmpackRLOO, trl.RLOOTrainer):
    pass


class Wide(Ours):
    max_tokens = 10_000


def trained(cls, checkpoint, folder, **options):
    trainer = make_trainer(
        cls, checkpoint, folder, rows_of((0, 8, 3, 5)), small_processor(), **options
    )
    gradients = Gradients()
    trainer.add_callback(gradients)
    trainer.train()
    return trainer, gradients.seen


def assert_same(stock, packed):
    (stock, theirs), (packed, ours) = stock, packed
    logs = [[x for x in t.state.log_history if "loss" in x] for t in (stock, packed)]
    assert len(logs[0]) == len(logs[1]) == len(theirs) == len(ours) == 2
    for a, b in zip(*logs, strict=True):
        for key in {"loss", "grad_norm", "reward"} & a.keys():
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=2e-6), key
    for a, b in zip(theirs, ours, strict=True):
        assert relative_difference(b, a) < 1e-5
    assert max(g.abs().max() for g in theirs[-1].values()) > 1e-3


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_a_step_s_groups_meet_and_its_gradients_are_stock_s(smallest_checkpoint, tmp_path, name):
    both = Stock, (Wide if name == "grpo" else Ours)
    options = STEP | CASES[name]
    runs = [trained(cls, smallest_checkpoint, tmp_path, **options) for cls in both]
    assert_same(*runs)
    stats = runs[1][0].mmpack_stats
    assert stats.passes == PASSES.get(name, 4 + 2 + 2)
    assert name in PASSES or stats.patches * 4 == stats.patches_stock  # a picture once per group


@pytest.mark.slow
def test_rloo_is_stock_s(smallest_checkpoint, tmp_path):
    runs = [trained(cls, smallest_checkpoint, tmp_path, **STEP) for cls in (StockRLOO, OursRLOO)]
    assert_same(*runs)
    assert runs[1][0].mmpack_stats.passes == 4 + 2 + 2  # losses; olds and references
