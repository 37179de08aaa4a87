"""Kept ids of a rollout_func through a real GRPOTrainer: old, reference and loss passes, beside torch's own softmax."""

import numpy as np
import pytest
import torch
from support.kept_ids import support_of, values

import mmpack as mp
from mmpack.adapters.transformers import attach, model_inputs
from mmpack.adapters.trl import to_samples
from mmpack.errors import ArgumentError

trl = pytest.importorskip("trl")
pytest.importorskip("accelerate")

from support.trl_trainers import Packed, make_trainer, rows_of, small_processor  # noqa: E402

EOS = 151645
WARM = 0.7


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from support.models import smallest_qwen2_5_vl

    path = tmp_path_factory.mktemp("model")
    smallest_qwen2_5_vl().save_pretrained(path)
    return path


def rollout(prompts, trainer):
    """Two answers with an environment's words between, where nothing was sampled; lists of 1 to 20 ids."""
    processor = mp.wrap_processor(trainer.processing_class)
    names = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "kept_ids")
    out = {name: [] for name in names}
    for i, messages in enumerate(prompts):
        rng = np.random.default_rng(i)
        parts = [([5, 6 + i, EOS], 1), ([7, 8], 0), ([*rng.integers(0, 1000, 1 + i % 2), EOS], 1)]
        row = [(int(t), m) for ids, m in parts for t in ids]
        lists = [
            sorted({t, *rng.integers(0, 150_000, rng.integers(0, 20)).tolist()}) if m else []
            for t, m in row
        ]
        made = {"prompt_ids": processor(messages, sample_id="p").input_ids.tolist()}
        made |= {"completion_ids": [t for t, _ in row], "env_mask": [m for _, m in row]}
        made |= {"logprobs": [-1.0] * len(row), "kept_ids": lists}
        for name in names:
            out[name].append(made[name])
    return out


@pytest.fixture(scope="module")
def trainer(checkpoint, tmp_path_factory):
    class Trainer(Packed):
        returned = staticmethod(rollout)

        def __init__(self, *args, **kwargs):
            super().__init__(*args, rollout_func=self.record, **kwargs)

        def record(self, prompts, trainer):
            self.rollouts = self.returned(prompts, trainer)
            return dict(self.rollouts)

    options = {"temperature": WARM, "beta": 0.05, "num_iterations": 2}
    with pytest.warns(UserWarning, match="rollout_func"):
        made = make_trainer(
            Trainer,
            checkpoint,
            tmp_path_factory.mktemp("output"),
            rows_of([0, 1]),
            small_processor(),
            **options,
        )
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made


@pytest.fixture(scope="module")
def batch(trainer):
    return trainer._generate_and_score_completions([r for r in rows_of([0, 1]) for _ in range(4)])


def over_lists(trainer, batch, b):
    """Logprobs of a row's sampled tokens over their lists, of the model's logits in float64; and where they stand."""
    (sample,) = to_samples(
        {
            n: rows_of_batch(batch, b, n)
            for n in batch
            if batch[n] is not None and n != "num_items_in_batch"
        },
        trainer.processing_class,
    )
    packed = mp.pack([sample])
    with torch.no_grad(), attach(trainer.model):
        logits = trainer.model(**model_inputs(packed, trainer.model)).logits[0]
    given = trainer.rollouts["kept_ids"][b]
    mask = np.flatnonzero(trainer.rollouts["env_mask"][b])
    support = support_of([torch.tensor(given[c]) for c in mask])
    rows = logits[packed.loss_rows.long()].double() / WARM
    return values(rows, packed.loss_targets, support)[0], mask


def rows_of_batch(batch, b, name):
    """One row of TRL's batch; its picture's patches among those of all."""
    value = batch[name]
    if name in ("pixel_values", "image_grid_thw"):
        counts = batch["num_images"]
        first, own = sum(counts[:b]), counts[b]
        grids = batch["image_grid_thw"]
        if name == "image_grid_thw":
            return grids[first : first + own]
        sizes = grids.prod(dim=1).tolist()
        return value[sum(sizes[:first]) : sum(sizes[: first + own])]
    return value[b : b + 1]


@pytest.mark.slow
def test_old_and_reference_logprobs_are_over_the_lists(trainer, batch):
    for b in range(8):
        wanted, at = over_lists(trainer, batch, b)
        for name in ("old_per_token_logps", "ref_per_token_logps"):
            assert (batch[name][b, at] - wanted).abs().max() <= 1e-5
        observed = np.flatnonzero(np.array(trainer.rollouts["env_mask"][b]) == 0)
        assert (batch["old_per_token_logps"][b, observed] == 0).all()
    assert trainer._kept_ids is None


def test_a_loss_of_shuffled_rows_reads_their_own_lists(trainer, batch):
    from trl.trainer import utils

    torch.manual_seed(3)
    shuffled = utils.shuffle_sequence_dict(utils.split_pixel_values_by_grid(batch))
    half = utils.unsplit_pixel_values_by_grid(utils.split_tensor_dict(shuffled, 2)[1])
    assert len(half["kept_ids"]) == 4
    trainer._metrics["train"].clear()
    trainer._compute_loss(trainer.model, half).backward()
    # the policy has not changed, nor the reference: only over the same lists is their KL 0
    assert trainer._metrics["train"]["kl"][0] == pytest.approx(0.0, abs=1e-8)
    trainer._metrics["train"].clear()
    trainer._compute_loss(trainer.model, {k: v for k, v in half.items() if k != "kept_ids"})
    assert trainer._metrics["train"]["kl"][0] > 1e-2
    trainer.model.zero_grad()


def test_samples_have_the_lists_and_batches_give_them_back(trainer, batch):
    samples = to_samples(batch, trainer.processing_class)
    for sample, lists in zip(samples, trainer.rollouts["kept_ids"], strict=True):
        assert mp.validate(sample) == []
        assert [x.tolist() for x in sample.kept_ids.lists()] == [x for x in lists if x]
    from mmpack.adapters.trl import from_batch

    back = from_batch(mp.pack(samples, share_prefix=True), samples)
    assert back["kept_ids"] == [mp.Ragged.of(x) for x in trainer.rollouts["kept_ids"]]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda lists: lists[:-1], "kept_ids has 7 rows, there are 8 completions"),
        (lambda lists: [lists[0][1:], *lists[1:]], r"completion 0: kept_ids has . lists for"),
        (
            lambda lists: [*lists[:3], [[], *lists[3][1:]], *lists[4:]],
            "completion 3: .* token 0, which was",
        ),
        (lambda lists: ["ids", *lists[1:]], "completion 0: Ragged.of: lists is of type str"),
        (lambda lists: 7, "kept_ids is of type int"),
    ],
)
def test_lists_that_don_t_fit_are_one_line(trainer, change, match, monkeypatch):
    def wrong(prompts, trainer):
        out = rollout(prompts, trainer)
        return out | {"kept_ids": change(out["kept_ids"])}

    monkeypatch.setattr(trainer, "returned", wrong)
    with pytest.raises(ArgumentError, match=rf"{match}.*Fix: [^\n]+$"):
        trainer._generate_and_score_completions([r for r in rows_of([0, 1]) for _ in range(4)])
