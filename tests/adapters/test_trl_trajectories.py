"""TRL's rollouts as trajectories, beside the batch that a real GRPOTrainer makes of the same rollout_func."""

import numpy as np
import pytest
import torch

import mmpack as mp
from mmpack.adapters.trl import to_samples, to_trajectories
from mmpack.errors import ArgumentError
from mmpack.trajectory import to_samples as samples_of

trl = pytest.importorskip("trl")
pytest.importorskip("accelerate")

from support.trl_trainers import make_trainer, rows_of, small_processor  # noqa: E402

EOS = 151645


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from support.models import smallest_qwen2_5_vl

    path = tmp_path_factory.mktemp("model")
    smallest_qwen2_5_vl().save_pretrained(path)
    return path


def rollout(prompts, trainer):
    """Two answers with an environment's words between; prompts by the trainer's own processor, expanded."""
    processor = mp.wrap_processor(trainer.processing_class)
    out = {name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", "won")}
    for i, messages in enumerate(prompts):
        rng = np.random.default_rng(i)
        parts = [([5, 6 + i, EOS], 1), ([7, 8], 0), ([*rng.integers(0, 1000, 1 + i % 2), EOS], 1)]
        completion = [int(t) for ids, _ in parts for t in ids]
        mask = [m for ids, m in parts for _ in ids]
        out["prompt_ids"].append(processor(messages, sample_id="p").input_ids.tolist())
        out["completion_ids"].append(completion)
        out["env_mask"].append(mask)
        out["logprobs"].append([float(-rng.exponential()) * m for m in mask])
        out["won"].append(i % 2)
    return out


@pytest.fixture(scope="module")
def made(checkpoint, tmp_path_factory):
    """What the rollout returned, the images of its rows, and TRL's batch."""
    kept = {}

    class Trainer(trl.GRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, rollout_func=self.record, **kwargs)

        def record(self, prompts, trainer):
            kept["rollouts"] = rollout(prompts, trainer)
            return dict(kept["rollouts"])

    rows = rows_of([0, 1])
    output = tmp_path_factory.mktemp("output")
    with pytest.warns(UserWarning, match="rollout_func"):
        trainer = make_trainer(Trainer, checkpoint, output, rows, small_processor())
    given = [r for r in rows for _ in range(4)]
    batch = trainer._generate_and_score_completions(given)
    return kept["rollouts"], [r["images"] for r in given], batch


def test_samples_are_what_trl_trains_on(made):
    rollouts, images, batch = made
    trajectories = to_trajectories(rollouts, small_processor(), images=images)
    expected = to_samples(batch, small_processor(), images=images)
    kept = (batch["completion_mask"] * batch["tool_mask"]).bool()
    for b, (trajectory, other) in enumerate(zip(trajectories, expected, strict=True)):
        (sample,) = samples_of(trajectory)
        assert np.array_equal(sample.input_ids, other.input_ids)
        # TRL's own masks, token for token
        prompt = int(batch["prompt_mask"][b].sum())
        length = int(batch["completion_mask"][b].sum())
        mask = np.zeros(len(sample), bool)
        mask[sample.loss_indices] = True
        assert mask.tolist() == [False] * prompt + kept[b, :length].tolist()
        assert np.array_equal(sample.rollout_logprobs, other.rollout_logprobs)
        logprobs = batch["sampling_per_token_logps"][b][kept[b]]
        assert torch.equal(torch.from_numpy(sample.rollout_logprobs), logprobs.float())
        assert sample.media_cache_keys == other.media_cache_keys
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


def test_logprobs_of_several_tokens_are_those_of_the_sampled_one():
    """As vLLM gives them: by rank, with ids."""
    several = small(
        logprobs=[[[-0.1, -1.0], [None, None], [-2.0, -3.0]]],
        logprob_token_ids=[[[9, 3], [4, 9], [5, 9]]],
    )
    (trajectory,) = to_trajectories(several, small_processor())
    assert [t.logprobs.tolist() for t in trajectory.turns] == [[-1.0], [-2.0]]
    one = small(logprobs=[[[-1.0], [None], [-2.0]]])
    (trajectory,) = to_trajectories(one, small_processor())
    assert [t.logprobs.tolist() for t in trajectory.turns] == [[-1.0], [-2.0]]
    for wrong in (
        small(logprobs=several["logprobs"]),
        several | {"logprob_token_ids": [[[9, 8], [4, 9], [5, 9]]]},
    ):
        with pytest.raises(ArgumentError, match="which one is the sampled id's"):
            to_trajectories(wrong, small_processor())


def test_the_lists_of_a_rollout_func_stay_with_their_turns():
    (trajectory,) = to_trajectories(small(kept_ids=[[[3, 9], [], [8, 5]]]), small_processor())
    assert [x.tolist() for t in trajectory.turns for x in t.kept_ids.lists()] == [[3, 9], [5, 8]]
    (sample,) = samples_of(trajectory)
    assert sample.kept_ids == mp.Ragged.of([[3, 9], [5, 8]]) and mp.validate(sample) == []


def test_masks_and_fields():
    bare = {k: v for k, v in small(logprobs=None).items() if k != "env_mask"}
    (trajectory,) = to_trajectories(bare, small_processor(), group_ids=["g"])
    assert [t.response_ids.tolist() for t in trajectory.turns] == [[3, 4, 5]]
    assert (trajectory.group_id, trajectory.trajectory_id) == ("g", "g/0")
    tools = {**small(), "tool_mask": [[1, 0, 1]]}
    for given, message in [
        (tools, "env_mask and tool_mask"),
        ({"prompt_ids": [[1]]}, "no completion_ids"),
        ([], "rollouts is of type list"),
        (small(env_mask=[[1, 0]]), "mask has shape"),
        (small(prompt_ids=[]), "prompt_ids has 0 entries"),
        (small(logprobs=[[None, None, None]]), "nan"),
        (small(kept_ids=[[[3], [4]]]), "kept_ids has 2 lists for 3 response tokens"),
        (small(kept_ids=[[[], [], [5]]]), "kept_ids is empty at response id 0"),
        (small(kept_ids=[]), "kept_ids has 0 entries"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            to_trajectories(given, small_processor())
    odd = to_trajectories(small(env=[object()]), small_processor())
    assert odd[0].metadata["trl"] == {"left_out": ["env"]}


@pytest.fixture
def looped(checkpoint, tmp_path, monkeypatch):
    """TRL's own tool loop over two prompts with scripted answers; the tool replies with a picture."""
    from trl.trainer import grpo_trainer

    shot = drawn(7)

    def look(box: str) -> list:
        """Look closer.

        Args:
            box: where.
        """
        return [{"type": "image", "image": shot}, {"type": "text", "text": "closer"}]

    rows = rows_of([0, 1])
    trainer = make_trainer(trl.GRPOTrainer, checkpoint, tmp_path, rows, small_processor())
    trainer.tools, trainer.chat_template = [look], TOOLS_TEMPLATE
    trainer._sync_tool_dicts, trainer._async_tool_dicts = [{"look": look}] * 2, [{}] * 2
    trainer.max_tool_calling_iterations, trainer.max_completion_length = 3, 500
    later = [[[11, 12, EOS]], [[-0.5, -0.25, -0.125]]]
    monkeypatch.setattr(
        trainer, "_generate_single_turn", lambda ids, *args, **kwargs: (*later,), raising=True
    )
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
    out = trainer._tool_call_loop(
        prompts, prompt_ids, sampled, asked, [[-1.0] * 3, [-2.0] * 2], images, {}
    )
    tool_mask, _, completion_ids, logprobs, *_, tool_images = out
    rollouts = {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": logprobs,
        "tool_mask": tool_mask,
        "images": [a + b for a, b in zip(images, tool_images, strict=True)],
    }
    return rollouts


def drawn(seed):
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


TOOLS_TEMPLATE = small_processor().chat_template


def test_the_tool_loop_s_ids_masks_and_pictures(looped):
    called, plain = to_trajectories(looped, small_processor())
    assert [t.response_ids.tolist() for t in called.turns] == [[5, 6, EOS], [11, 12, EOS]]
    assert [t.response_ids.tolist() for t in plain.turns] == [[9, EOS]]
    assert called.turns[1].logprobs.tolist() == [-0.5, -0.25, -0.125]
    (sample,) = samples_of(called)
    assert sample.input_ids.tolist() == looped["prompt_ids"][0] + looped["completion_ids"][0]
    mask = np.zeros(len(sample), int)
    mask[sample.loss_indices] = 1
    assert mask.tolist() == [0] * len(looped["prompt_ids"][0]) + looped["tool_mask"][0]
    # the tool's picture stands in the observation
    (seen,) = sample.observation_spans
    own = mp.wrap_processor(small_processor()).medium(drawn(7))
    assert sample.media[-1].cache_key == own.cache_key
    assert seen.start < sample.modality_spans[-1].start < seen.stop
    assert mp.validate(sample) == []
