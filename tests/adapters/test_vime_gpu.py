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

from mmpack.adapters.vime.objective import loss
from mmpack.contracts import gradient_fp32_bound

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
