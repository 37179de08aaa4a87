"""Flat rows with a mask, as agent loops record them: ids as sampled, turns from the mask, half pictures cut."""

import numpy as np
import pytest
from support.trajectories import scored_of_samples

import mmpack as mp
from mmpack.schema.spans import Score
from mmpack.trajectory import Record, from_records, to_samples

EOS = 151645


@pytest.fixture
def row(processor, picture):
    """A prompt with a picture, two answers with a picture between, and one behind that an answer never saw."""
    shots = [picture(k, 60 + 30 * k, 56) for k in range(3)]
    media = [processor.medium(p) for p in shots]

    def seen(medium, *words):
        return [*words, 151652, *[151655] * medium.num_tokens, 151653, 9]

    prompt, first, last = (seen(m, 1, 2) for m in media)
    answers = [[5, 6, EOS], [7, EOS]]
    response = [*answers[0], *first, *answers[1], *last]
    mask = [1] * 3 + [0] * len(first) + [1] * 2 + [0] * len(last)
    logprobs = [-0.5 * m for m in mask]
    out = {"prompt": prompt, "response": response, "mask": mask, "logprobs": logprobs}
    return out | {"media": shots, "answers": answers, "last": len(last)}


def read(row, processor, **fields):
    given = {"media": row["media"], "logprobs": row["logprobs"]} | fields.pop("about", {})
    record = Record(row["prompt"], row["response"], row["mask"], **given)
    return from_records([record], processor, trajectory_id="e", group_id="g", **fields)


def test_runs_of_the_mask_are_turns(row, processor):
    trajectory = read(row, processor, rewards=[Score("task", 1.0)], sampling={"temperature": 1.0})
    assert [t.response_ids.tolist() for t in trajectory.turns] == row["answers"]
    (sample,) = to_samples(trajectory)
    kept = len(row["response"]) - row["last"]
    assert sample.input_ids.tolist() == [*row["prompt"], *row["response"][:kept]]
    # the mask, bit for bit
    mask = np.zeros(len(sample), int)
    mask[sample.loss_indices] = 1
    assert mask.tolist() == [0] * len(row["prompt"]) + row["mask"][:kept]
    assert sample.rollout_logprobs.tolist() == [-0.5] * 5 and len(sample.media) == 2
    assert sample.rewards == [Score("task", 1.0)] and mp.validate(sample) == []
    assert sample.processor_fingerprint == processor.fingerprint
    # what the processor itself makes of the same row
    spans = [mp.LossSpan(len(row["prompt"]), len(row["prompt"]) + 3, turn=0)]
    whole = processor.from_ids(
        sample.input_ids, row["media"][:2], loss_spans=spans, sample_id="x", group_id="g"
    )
    assert [m.cache_key for m in whole.media] == [m.cache_key for m in sample.media]
    assert scored_of_samples(to_samples(trajectory, merge=False)) == scored_of_samples([sample])


def test_a_row_cut_within_its_last_picture(row, processor):
    """verl cuts rows at response_length and keeps all images."""
    for cut in range(1, row["last"] - 3):  # one placeholder is left
        short = {**row, **{k: row[k][: len(row["response"]) - cut] for k in ("response", "mask")}}
        (sample,) = to_samples(read(short, processor, about={"logprobs": None}))
        assert len(sample.media) == 2 and sample.rollout_logprobs is None
        assert mp.validate(sample) == []
