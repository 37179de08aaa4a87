"""linear_selected_logprobs in a model that fully_shard wraps: two ranks on the CPU."""

import pytest
import torch
from support.ranks import spawned

from mmpack.errors import ArgumentError
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from tests.support.sharded_head import Head, head_problem, train_step, train_step_sharded


def test_gradients_are_those_of_the_whole(tmp_path):
    spawned(run, 2, tmp_path)


def run(rank, ranks):
    problem = head_problem(torch.device("cpu"), torch.float32, ranks)
    model = Head(torch.float32)
    expected = train_step(model, problem)
    found = train_step_sharded(model, problem, rank, ranks)
    for name, want in expected.items():
        torch.testing.assert_close(found[name], want, atol=1e-6, rtol=1e-5)
    weight = model.lm_head.weight  # outside of the forward: this rank's rows of it
    with pytest.raises(ArgumentError, match=r"weight is a DTensor.*weight\.full_tensor\(\)$"):
        linear_selected_logprobs(torch.randn(2, weight.shape[1]), weight, torch.tensor([0, 1]))
