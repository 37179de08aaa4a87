"""A batch of no samples: what it has, where it goes, and that it is what packing nothing would be."""

import numpy as np
import pytest
import torch
from support.samples import make_sample

import mmpack as mp
from mmpack.families import FAMILIES

PACKED = [name for name, family in FAMILIES.items() if family.packing == "yes"]


@pytest.mark.parametrize("name", PACKED)
def test_it_is_padding_and_nothing_else(name):
    for multiple in (None, 8):
        batch = mp.idle_batch(name, pad_to_multiple_of=multiple)
        rows = multiple or 1
        family = FAMILIES[name]
        assert batch.input_ids.tolist() == [family.pad_token_id] * rows
        assert batch.num_tokens == batch.num_loss_tokens == len(batch.sample_ids) == 0
        assert batch.cu_loss.tolist() == [0] and batch.cu_seqlens.tolist() == [0, rows]
        assert batch.segment_offsets.tolist() == [0] and batch.segment_parent.tolist() == []
        # every row sees itself
        assert batch.visible_until.tolist() == list(range(1, rows + 1))
        assert batch.unpack_loss(torch.zeros(0)) == [] == batch.unpack_tokens(torch.zeros(rows, 3))
        assert (batch.segment_plan is not None) == family.linear_attention
        assert repr(batch.to("cpu")) == repr(batch)


def test_the_loss_is_a_zero_on_the_graph():
    batch = mp.idle_batch("qwen2_5_vl", loss_columns={"advantages": np.float32([0.5, 1])})
    values = torch.ones(3, requires_grad=True)
    for advantages in (batch.loss_columns["advantages"], torch.ones(4)[[]]):
        logprobs = values[batch.loss_targets]
        out = mp.policy_loss(
            logprobs, advantages, batch.cu_loss, total_tokens=7, total_samples=3, kind="grpo"
        )
        out.loss.backward()
        assert out.loss.item() == 0 and values.grad.tolist() == [0, 0, 0]


def test_it_has_the_columns_of_the_sample():
    sample = make_sample([("text", [1, 2]), ("response", [3, 4])])
    sample.rollout_logprobs = np.float32([-1, -2])
    sample.teachers = {"large": mp.schema.Ragged.of([[3], [4]], [[-0.5], [-0.5]])}
    given = {"advantages": np.float32([1, 2]), "old": torch.ones(2, 3, dtype=torch.float64)}
    full = mp.pack([sample], loss_columns={k: [v] for k, v in given.items()})
    idle = mp.idle_batch(sample, loss_columns=given)
    assert idle.loss_columns.keys() == full.loss_columns.keys()
    for name, column in full.loss_columns.items():
        own = idle.loss_columns[name]
        assert own.dtype == column.dtype and own.shape == (0, *column.shape[1:])
    assert idle.teachers.keys() == full.teachers.keys() and len(idle.teachers["large"]) == 0
