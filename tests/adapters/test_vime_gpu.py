"""vime's and slime's policy loss on a GPU: the same cases, kernels instead of torch, and a split vocabulary."""

import sys

import pytest
import torch
from support.vime_steps import (
    CASES,
    micro_batch,
    options,
    reference,
    sample_mean_reducer,
    stub_megatron,
)
from torch import distributed

from mmpack.adapters.vime import loss
from mmpack.contracts import gradient_fp32_bound, selected_logprob_bound
from mmpack.ops.logprobs.sharded import sharded_selected_logprobs

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def moved(value):
    if isinstance(value, torch.Tensor):
        return value.to(CUDA)
    return [moved(x) for x in value] if isinstance(value, list) else value


@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_metrics(case, monkeypatch):
    for name, module in stub_megatron().items():
        monkeypatch.setitem(sys.modules, name, module)
    args = options(case)
    batch, logits = micro_batch(case)
    whole = logits.double().clone().requires_grad_()
    expected, theirs = reference(args, batch, whole)
    expected.backward()
    kept = {k: v for k, v in batch.items() if k.startswith("rollout_top_p")}  # stays on the host
    batch = {k: moved(v) for k, v in batch.items()} | kept
    logits = logits.to(CUDA).requires_grad_()
    out, metrics = loss(args, batch, logits, sample_mean_reducer(args, batch))
    out.backward()
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out.detach().cpu().double(), expected.detach(), **near)
    error = (logits.grad.cpu() - whole.grad).abs()
    assert (error <= gradient_fp32_bound(whole.grad.abs().max())).all()
    for name, value in theirs.items():
        torch.testing.assert_close(metrics[name].cpu().double(), value.detach(), **near, msg=name)


def test_an_empty_list_of_a_loss_token_gives_nan(monkeypatch):
    for name, module in stub_megatron().items():
        monkeypatch.setitem(sys.modules, name, module)
    args, (batch, logits) = options("kept_ids"), micro_batch("kept_ids")
    ids, ends = batch["rollout_top_p_token_ids"], batch["rollout_top_p_token_offsets"]
    count = int(ends[3][1])
    lists = {
        "rollout_top_p_token_ids": [*ids[:3], ids[3][count:]],
        "rollout_top_p_token_offsets": [*ends[:3], torch.cat([ends[3][:1], ends[3][1:] - count])],
    }
    batch = {k: moved(v) for k, v in batch.items()} | lists
    out, _ = loss(args, batch, logits.to(CUDA), sample_mean_reducer(args, batch))
    assert out.isnan()
    batch["loss_masks"][3] = torch.tensor([0, 1, 1], device=CUDA)
    out, _ = loss(args, batch, logits.to(CUDA), sample_mean_reducer(args, batch))
    assert out.isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
def test_a_split_vocabulary_of_one_rank(dtype, entropy, tmp_path):
    """The kernels' statistics, combined over a group of one: what a rank of many does, without the others."""
    distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    try:
        torch.manual_seed(0)
        logits = (8 * torch.randn(300, 5000)).to(dtype)
        rows, targets = torch.randperm(300)[:250], torch.randint(0, 5000, (250,))
        up = torch.randn(2, 250)
        whole = logits.double().requires_grad_()
        logs = (whole[rows] / 0.7).log_softmax(-1)
        lp, h = logs[torch.arange(250), targets], -(logs.exp() * logs).sum(-1)
        (lp @ up[0].double() + entropy * (h @ up[1].double())).backward()
        own = logits.to(CUDA).requires_grad_()
        given = targets.to(CUDA), rows.to(CUDA), distributed.group.WORLD, 0.7, entropy
        got = sharded_selected_logprobs(own, *given)
        got = got if entropy else (got,)
        sum(x @ g.to(CUDA) for x, g in zip(got, up, strict=False)).backward()
        for mine, theirs in zip(got, (lp, h), strict=False):
            error = (mine.detach().cpu().double() - theirs.detach()).abs()
            assert (error <= selected_logprob_bound(theirs.detach())).all()
        bound = gradient_fp32_bound(whole.grad.abs().max())
        if dtype == torch.bfloat16:  # the gradient is rounded to the dtype of the logits
            bound = bound + 2.0**-8 * whole.grad.abs()
        assert ((own.grad.cpu().double() - whole.grad).abs() <= bound).all()
    finally:
        distributed.destroy_process_group()
