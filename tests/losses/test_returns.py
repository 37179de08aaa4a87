"""Returns and GAE, in plain torch and as a kernel, against loops in Python floats, and scipy's recursive filter."""

import numpy as np
import pytest
import torch
from support.kernels import each_backend, poison_outputs

import mmpack as mp
from mmpack.losses.returns.returns import scan_op

LENGTHS = {"short": [3, 0, 7, 1] * 3, "blocks": [511, 512, 513, 0, 1025], "one": [1], "none": [0]}


def loop(rewards, values, after, gamma, decay):
    """Of one segment: the scan of its terms, from the end."""
    out, running, following = [], 0.0, after
    for k in range(len(rewards) - 1, -1, -1):
        if values is None:
            term = rewards[k] + (gamma * after if k == len(rewards) - 1 else 0.0)
        else:
            term, following = rewards[k] + gamma * following - values[k], values[k]
        running = term + decay * running
        out.append(running)
    return out[::-1]


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cut_off", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_against_the_loop(device, lengths, cut_off, dtype, monkeypatch):
    poison_outputs(monkeypatch, device)
    rewards, values = torch.randn(2, sum(lengths)).to(dtype).unbind()
    after = torch.randn(len(lengths))
    cu = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    end = after.to(device) if cut_off else None
    on = rewards.to(device), values.to(device).requires_grad_()
    advantages, totals = (x.cpu() for x in mp.gae(*on, cu, 0.99, 0.9, end))
    returns = mp.discounted_returns(on[0], cu, 0.97, end).cpu()
    wanted, plain = [], []
    for b, (r, v) in enumerate(zip(rewards.split(lengths), values.split(lengths), strict=True)):
        last = float(after[b]) if cut_off else 0.0
        wanted += loop(r.tolist(), v.tolist(), last, 0.99, 0.99 * 0.9)
        plain += loop(r.tolist(), None, last, 0.97, 0.97)
    wanted, plain = (torch.tensor(x, dtype=torch.float64) for x in (wanted, plain))
    for got, want in ((advantages, wanted), (totals, wanted + values.double()), (returns, plain)):
        assert got.dtype == torch.float32 and not got.requires_grad
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@each_backend
@pytest.mark.parametrize("has_values", [False, True])
def test_wide_results_are_those_before_rounding(device, has_values):
    """Whose differences of 1e-9 float32 would not tell."""
    rewards = torch.full((700,), 1.0, dtype=torch.float64)
    rewards[::3] += 1e-9
    values = rewards.flip(0) * 0.5 if has_values else None
    cu = torch.tensor([0, 0, 650, 700]).int()
    given = [x if x is None else x.to(device) for x in (rewards, values, None, cu)]
    got = scan_op(*given, 0.9, 0.9, True).cpu()
    assert got.dtype == torch.float64
    want = [
        loop(rewards[a:b].tolist(), values[a:b].tolist() if has_values else None, 0.0, 0.9, 0.9)
        for a, b in ((0, 650), (650, 700))
    ]
    want = torch.tensor(want[0] + want[1], dtype=torch.float64)
    torch.testing.assert_close(got[0], want, rtol=1e-13, atol=1e-13)
    assert torch.equal(got.float(), scan_op(*given, 0.9, 0.9, False).cpu())


def test_long_segments_against_scipy():
    from scipy.signal import lfilter

    rewards = np.random.default_rng(0).normal(size=20_000)
    got = mp.discounted_returns(torch.from_numpy(rewards), torch.tensor([0, 20_000]), 0.999)
    want = lfilter([1.0], [1.0, -0.999], rewards[::-1])[::-1]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6, atol=1e-6)


@each_backend
def test_a_segment_in_any_company(device):
    """The same bits alone and among others, and a NaN stays where it is."""
    part = torch.randn(700, device=device)
    alone = mp.discounted_returns(part, torch.tensor([0, 700], device=device), 0.97)
    others = torch.cat([torch.full((7,), torch.nan, device=device), part])
    among = mp.discounted_returns(others, torch.tensor([0, 7, 7, 707], device=device), 0.97)
    assert torch.equal(among[7:], alone) and among[:7].isnan().all()


@each_backend
def test_opcheck(device):
    cu = torch.tensor([0, 2, 2, 9], device=device)
    x, end = torch.randn(9, device=device), torch.randn(3, device=device)
    torch.library.opcheck(scan_op, (x, None, None, cu, 0.9, 0.9, False))
    torch.library.opcheck(scan_op, (x, x + 1, end, cu, 0.9, 0.8, True))


@pytest.mark.gpu
def test_a_million_tokens_in_ten_thousand_turns():
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.choice(999_999, 9_999, replace=False)) + 1
    cu = torch.from_numpy(np.concatenate([[0], cuts, [1_000_000]])).cuda()
    rewards = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    on_gpu = rewards.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = mp.discounted_returns(on_gpu, cu, 0.99)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = [loop(r.tolist(), None, 0.0, 0.99, 0.99) for r in rewards.split(cu.diff().tolist())]
    want = torch.tensor([x for one in want for x in one], dtype=torch.float64)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_captured():
    rewards, cu = (
        torch.randn(5000, device="cuda"),
        torch.tensor([0, 100, 4000, 5000], device="cuda"),
    )
    mp.discounted_returns(rewards, cu, 0.9)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mp.discounted_returns(rewards, cu, 0.9)
    rewards.normal_()
    graph.replay()
    assert torch.equal(captured, mp.discounted_returns(rewards, cu, 0.9))
