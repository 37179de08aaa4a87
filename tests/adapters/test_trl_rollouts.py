"""Rollouts of TRL, a `rollout_func`'s and its tool loop's: as trajectories, and with kept ids through a trainer."""

import numpy as np
import pytest
import torch
from PIL import Image
from support.kept_ids import support_of, values
from support.same import assert_equal
from support.trl_trainers import Packed, make_trainer, rows_of, small_processor, trl
from trl.trainer import grpo_trainer, utils

import mmpack as mp
from mmpack.adapters.loss_values import loss_columns
from mmpack.adapters.transformers import attach, model_inputs
from mmpack.adapters.trl import from_batch, to_samples, to_trajectories
from mmpack.errors import ArgumentError
from mmpack.trajectory import to_samples as samples_of

EOS = 151645
WARM = 0.7


def rollout(prompts, trainer):
    """Two answers with an environment's words between, where nothing was sampled; lists of 1 to 20 ids."""
    processor = mp.wrap_processor(trainer.processing_class)
    names = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "won", "kept_ids")
    out = {name: [] for name in names}
    for i, messages in enumerate(prompts):
        rng = np.random.default_rng(i)
        parts = [([5, 6 + i, EOS], 1), ([7, 8], 0), ([*rng.integers(0, 1000, 1 + i % 2), EOS], 1)]
        row = [(int(t), m) for ids, m in parts for t in ids]
        lists = [
            sorted({t, *rng.integers(0, 150_000, rng.integers(0, 20)).tolist()}) if m else []
            for t, m in row
        ]
        made = (
            processor(messages, sample_id="p").input_ids.tolist(),
            [t for t, _ in row],
            [float(-rng.exponential()) * m for _, m in row],
            [m for _, m in row],
            i % 2,
            lists,
        )
        for name, value in zip(names, made, strict=True):
            out[name].append(value)
    return out


class Trainer(Packed):
    returned = staticmethod(rollout)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, rollout_func=self.record, **kwargs)

    def record(self, prompts, trainer):
        self.rollouts = self.returned(prompts, trainer)
        return dict(self.rollouts)


ROWS = [r for r in rows_of([0, 1]) for _ in range(4)]


@pytest.fixture(scope="module")
def trainer(smallest_checkpoint, tmp_path_factory):
    options = {"temperature": WARM, "beta": 0.05, "num_iterations": 2}
    given = smallest_checkpoint, tmp_path_factory.mktemp("output"), rows_of([0, 1])
    with pytest.warns(UserWarning, match="rollout_func"):
        made = make_trainer(Trainer, *given, small_processor(), **options)
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made


@pytest.fixture(scope="module")
def made(trainer):
    """TRL's batch, and what the rollout returned for it."""
    batch = trainer._generate_and_score_completions(ROWS)
    return batch, trainer.rollouts


def test_old_and_reference_logprobs_are_over_the_lists(trainer, made):
    """Of the model's logits, in float64, cut to the lists by torch."""
    batch, rollouts = made
    for b, sample in enumerate(to_samples(batch, trainer.processing_class)):
        packed = mp.pack([sample])
        with torch.no_grad(), attach(trainer.model):
            logits = trainer.model(**model_inputs(packed, trainer.model)).logits[0]
        at = np.flatnonzero(rollouts["env_mask"][b])
        support = support_of([torch.tensor(rollouts["kept_ids"][b][c]) for c in at])
        rows = logits[packed.loss_rows.long()].double() / WARM
        wanted = values(rows, packed.loss_targets, support)[0]
        for name in ("old_per_token_logps", "ref_per_token_logps"):
            assert (batch[name][b, at] - wanted).abs().max() <= 1e-5
        observed = np.flatnonzero(np.array(rollouts["env_mask"][b]) == 0)
        assert (batch["old_per_token_logps"][b, observed] == 0).all()
    assert not trainer._held


def test_a_loss_of_shuffled_rows_reads_their_own_lists(trainer, made):
    torch.manual_seed(3)
    shuffled = utils.shuffle_sequence_dict(utils.split_pixel_values_by_grid(made[0]))
    half = utils.unsplit_pixel_values_by_grid(utils.split_tensor_dict(shuffled, 2)[1])
    assert len(half["kept_ids"]) == 4
    # the policy has not changed, nor the reference: only over the same lists is their KL 0
    for inputs, holds in (
        (half, lambda kl: kl == pytest.approx(0.0, abs=1e-8)),
        ({k: v for k, v in half.items() if k != "kept_ids"}, lambda kl: kl > 1e-2),
    ):
        trainer._metrics["train"].clear()
        trainer._compute_loss(trainer.model, inputs).backward()
        assert holds(trainer._metrics["train"]["kl"][0])
    trainer.model.zero_grad()


def test_a_real_batch_comes_back_bit_for_bit(trainer, made):
    """Lists included, with pictures named by the data set, as samples that mmpack finds nothing wrong with."""
    batch, rollouts = made
    for images in ([r["images"] for r in ROWS], None):
        samples = to_samples(batch, trainer.processing_class, images=images)
        assert mp.validate(samples) == []
        for sample, lists in zip(samples, rollouts["kept_ids"], strict=True):
            assert [x.tolist() for x in sample.kept_ids.lists()] == [x for x in lists if x]
        columns = loss_columns(samples)
        assert {"old_logprobs", "ref_logprobs"} <= columns.keys()
        back = from_batch(mp.pack(samples, share_prefix=True, loss_columns=columns), samples)
        assert back["kept_ids"] == [mp.schema.Ragged.of(x) for x in rollouts["kept_ids"]]
        assert_equal(back, batch)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda lists: lists[:-1], "kept_ids has 7 rows, there are 8 completions"),
        (lambda lists: [lists[0][1:], *lists[1:]], r"completion 0: kept_ids has . lists for"),
        (lambda lists: [*lists[:7], [[], *lists[7][1:]]], "completion 7: .* token 0, which was"),
        (lambda lists: ["ids", *lists[1:]], "completion 0: Ragged.of: lists is of type str"),
        (lambda lists: 7, "kept_ids is of type int"),
    ],
)
def test_lists_that_don_t_fit_are_one_line(trainer, made, change, match, monkeypatch):
    wrong = made[1] | {"kept_ids": change(made[1]["kept_ids"])}
    monkeypatch.setattr(trainer, "returned", lambda prompts, trainer: wrong)
    with pytest.raises(ArgumentError, match=rf"{match}.*Fix: [^\n]+$"):
        trainer._generate_and_score_completions(ROWS)


def test_trajectories_are_what_trl_trains_on(made):
    batch, rollouts = made
    images = [r["images"] for r in ROWS]
    trajectories = to_trajectories(rollouts, small_processor(), images=images)
    expected = to_samples(batch, small_processor(), images=images)
    kept = (batch["completion_mask"] * batch["tool_mask"]).bool()
    for b, (trajectory, other) in enumerate(zip(trajectories, expected, strict=True)):
        (sample,) = samples_of(trajectory)
        assert np.array_equal(sample.input_ids, other.input_ids)
        # TRL's own masks, token for token
        prompt, length = (int(batch[f"{n}_mask"][b].sum()) for n in ("prompt", "completion"))
        mask = np.zeros(len(sample), bool)
        mask[sample.loss_indices] = True
        assert mask.tolist() == [False] * prompt + kept[b, :length].tolist()
        logprobs = batch["sampling_per_token_logps"][b][kept[b]]
        assert torch.equal(torch.from_numpy(sample.rollout_logprobs), logprobs.float())
        assert np.array_equal(sample.rollout_logprobs, other.rollout_logprobs)
        assert sample.media_cache_keys == other.media_cache_keys
        assert sample.kept_ids == other.kept_ids
        assert len(trajectory) == 2 and trajectory.metadata["trl"] == {"won": b % 2}
        assert sample.group_id == other.group_id and sample.trajectory_id == other.sample_id
    assert mp.validate([s for t in trajectories for s in samples_of(t, merge=False)]) == []


def small(**fields):
    out = {
        "prompt_ids": [[1, 2]],
        "completion_ids": [[3, 4, 5]],
        "logprobs": [[-1.0, 0.0, -2.0]],
        "env_mask": [[1, 0, 1]],
    }
    return out | fields


SEVERAL = small(  # as vLLM gives them: by rank, with ids
    logprobs=[[[-0.1, -1.0], [None, None], [-2.0, -3.0]]],
    logprob_token_ids=[[[9, 3], [4, 9], [5, 9]]],
)


def test_logprobs_of_several_tokens_and_fields():
    for given in (SEVERAL, small(logprobs=[[[-1.0], [None], [-2.0]]])):
        (trajectory,) = to_trajectories(given, small_processor())
        assert [t.logprobs.tolist() for t in trajectory.turns] == [[-1.0], [-2.0]]
    bare = {k: v for k, v in small(logprobs=None).items() if k != "env_mask"}
    (trajectory,) = to_trajectories(bare, small_processor(), group_ids=["g"])
    assert [t.response_ids.tolist() for t in trajectory.turns] == [[3, 4, 5]]
    assert (trajectory.group_id, trajectory.trajectory_id) == ("g", "g/0")
    odd = to_trajectories(small(env=[object()]), small_processor())
    assert odd[0].metadata["trl"] == {"left_out": ["env"]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (small(logprobs=SEVERAL["logprobs"]), "which one is the sampled id's"),
        (SEVERAL | {"logprob_token_ids": [[[9, 8], [4, 9], [5, 9]]]}, "which one is the sampled"),
        (small(tool_mask=[[1, 0, 1]]), "env_mask and tool_mask"),
        ({"prompt_ids": [[1]]}, "no completion_ids"),
        ([], "rollouts is of type list"),
        (small(env_mask=[[1, 0]]), "mask has shape"),
        (small(prompt_ids=[]), "prompt_ids has 0 entries"),
        (small(logprobs=[[None, None, None]]), "nan"),
        (small(kept_ids=[[[3], [4]]]), "kept_ids has 2 lists for 3 response tokens"),
        (small(kept_ids=[[[], [], [5]]]), "kept_ids is empty at response id 0"),
    ],
)
def test_rollouts_that_can_t_be_read_are_refused(given, message):
    with pytest.raises(ArgumentError, match=message):
        to_trajectories(given, small_processor())


def drawn(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_the_tool_loop_s_ids_masks_and_pictures(smallest_checkpoint, tmp_path, monkeypatch):
    """TRL's own tool loop over two prompts with scripted answers; the tool replies with a picture."""
    shot = drawn(7)

    def look(box: str) -> list:
        """Look closer.

        Args:
            box: where.
        """
        return [{"type": "image", "image": shot}, {"type": "text", "text": "closer"}]

    rows = rows_of([0, 1])
    trainer = make_trainer(trl.GRPOTrainer, smallest_checkpoint, tmp_path, rows, small_processor())
    trainer.tools, trainer.chat_template = [look], small_processor().chat_template
    trainer._sync_tool_dicts, trainer._async_tool_dicts = [{"look": look}] * 2, [{}] * 2
    trainer.max_tool_calling_iterations, trainer.max_completion_length = 3, 500
    later = [[[11, 12, EOS]], [[-0.5, -0.25, -0.125]]]
    monkeypatch.setattr(trainer, "_generate_single_turn", lambda ids, *a, **k: (*later,))
    answer = {"role": "assistant", "content": "done"}
    monkeypatch.setattr(grpo_trainer, "parse_response", lambda *args, **kwargs: answer)
    processor = mp.wrap_processor(small_processor())
    prompts = [
        [{"role": "user", "content": [{"type": "image", "image": i} for i in r["images"]]}]
        for r in rows
    ]
    prompt_ids = [processor(p, sample_id="p").input_ids.tolist() for p in prompts]
    call = {"type": "function", "function": {"name": "look", "arguments": {"box": "a"}}}
    asked = [[{"role": "assistant", "content": "", "tool_calls": [call]}], [dict(answer)]]
    sampled = [[5, 6, EOS], [9, EOS]]
    images = [list(r["images"]) for r in rows]
    tool_mask, _, completion_ids, logprobs, *_, tool_images = trainer._tool_call_loop(
        prompts, prompt_ids, sampled, asked, [[-1.0] * 3, [-2.0] * 2], images, {}
    )
    rollouts = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}
    rollouts |= {"tool_mask": tool_mask}
    rollouts["images"] = [a + b for a, b in zip(images, tool_images, strict=True)]

    called, plain = to_trajectories(rollouts, small_processor())
    assert [t.response_ids.tolist() for t in called.turns] == [[5, 6, EOS], [11, 12, EOS]]
    assert [t.response_ids.tolist() for t in plain.turns] == [[9, EOS]]
    assert called.turns[1].logprobs.tolist() == [-0.5, -0.25, -0.125]
    (sample,) = samples_of(called)
    assert sample.input_ids.tolist() == prompt_ids[0] + completion_ids[0]
    mask = np.zeros(len(sample), int)
    mask[sample.loss_indices] = 1
    assert mask.tolist() == [0] * len(prompt_ids[0]) + tool_mask[0]
    # the tool's picture stands in the observation
    (seen,) = sample.observation_spans
    assert sample.media[-1].cache_key == processor.medium(shot).cache_key
    assert seen.start < sample.modality_spans[-1].start < seen.stop
    assert mp.validate(sample) == []
