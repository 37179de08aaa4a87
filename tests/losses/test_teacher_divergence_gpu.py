"""Losses from teachers on a GPU: large batches, no waiting, CUDA graphs, wrong lists that nobody looks at."""

import pytest
import torch

import mmpack as mp
from mmpack.losses.distillation import torch as in_torch
from mmpack.losses.distillation.call import Columns, Options
from mmpack.ops.logprobs.support import ScoredSupport
from tests.support.teachers import draw_lists, scored

pytest.importorskip("triton")
from mmpack.losses.distillation import triton as module

pytestmark = pytest.mark.gpu

CASES = [
    ("forward_kl", "bucket"),
    ("forward_kl", "ignore"),
    ("reverse_kl", "bucket"),
    ("reverse_kl", "renormalize"),
    ("jsd", "bucket"),
    ("jsd", "ignore"),
]


def problem(count=3000, vocab=500, longest=300):
    teacher = torch.randn(count, vocab) * 2
    lists = draw_lists(count, vocab, longest, 0.2)
    own = scored(lists, teacher + torch.randn(count, vocab)).logprobs
    return own.cuda(), scored(lists, teacher).to("cuda")


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_the_plain_version(case):
    own, teacher = problem()
    columns = Columns(own, teacher.logprobs, teacher.offsets)
    options = Options(*case, 0.3, -12.0)
    for a, b in zip(
        module.divergence(columns, options), in_torch.divergence(columns, options), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_never_waits_and_replays_as_a_graph():
    own, teacher = problem()
    targets = torch.randint(0, 500, (3000,), device="cuda")
    sampled = ScoredSupport(
        torch.arange(3001, device="cuda"), targets, -torch.rand(3000, device="cuda")
    )
    cu_loss = torch.tensor([0, 1000, 3000], dtype=torch.int32, device="cuda")
    mask = torch.rand(3000, device="cuda")
    leaf = own.clone().requires_grad_()
    logprobs = (-torch.rand(3000, device="cuda")).requires_grad_()

    def run():
        distilled = mp.distillation_loss(
            {"7B": leaf}, {"7B": teacher}, cu_loss, "jsd",
            weights={"7B": 0.5}, token_weights=mask, max_divergence=5.0,
        )  # fmt: skip
        advantages = mp.teacher_advantages(logprobs, targets, {"7B": sampled}, max_advantage=1.0)
        reference = mp.teacher_logprobs(sampled, targets, otherwise=logprobs)
        policy = mp.policy_loss(
            logprobs, advantages, cu_loss, ref_logprobs=reference, kl_coef=0.1, per="token"
        )
        loss = distilled.loss + policy.loss
        grads = torch.autograd.grad(loss, (leaf, logprobs))
        return [loss.detach(), *distilled.metrics.values(), *grads]

    expected = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for x in got:
        x.fill_(torch.nan)
    graph.replay()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_a_list_without_its_target_gives_nan():
    teacher = ScoredSupport(
        torch.tensor([0, 1, 1, 2]), torch.tensor([3, 4]), torch.tensor([-0.5, -1.0])
    ).to("cuda")
    targets = torch.tensor([3, 5, 6], device="cuda")
    found = mp.teacher_logprobs(teacher, targets, otherwise=torch.zeros(3, device="cuda"))
    assert found.tolist()[:2] == [-0.5, 0.0] and found[2].isnan()
    logprobs = torch.zeros(3, device="cuda")
    advantages = mp.teacher_advantages(logprobs, targets, {"7B": teacher})
    assert advantages.tolist()[:2] == [-0.5, 0.0] and advantages[2].isnan()
