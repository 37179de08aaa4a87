"""On a GPU too: per-turn samples and one long sample are the same step, and that of the CPU."""

import pytest
import torch
from support.models import relative_difference, small_model, with_pixels
from support.trajectories import episode, grown
from support.trajectory_step import step

from mmpack.trajectory import to_samples

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_per_turn_samples_and_one_long_sample_are_the_same_step(family, no_tf32):
    episodes = [episode(grown(3, family, seed), f"e{seed}", family) for seed in range(2)]
    model = small_model(family)

    def made(merge):
        return with_pixels([s for t in episodes for s in to_samples(t, merge=merge)])

    expected = step(model, made(True), False)
    model = model.to("cuda")
    for merge, share in ((True, False), (True, True), (False, False), (False, True)):
        batch, logprobs, loss, gradients = step(model, made(merge), share)
        assert logprobs.is_cuda and batch.loss_targets.tolist() == expected[0].loss_targets.tolist()
        assert (logprobs.cpu() - expected[1]).abs().max() <= 1e-4
        assert torch.allclose(loss.cpu(), expected[2], atol=1e-5, rtol=1e-4)
        on_cpu = {n: g.cpu() for n, g in gradients.items()}
        assert relative_difference(on_cpu, expected[3]) <= 1e-4
