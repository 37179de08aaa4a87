"""The kernels of mmpack::group_advantages against Python's statistics module, group by group."""

import statistics
from fractions import Fraction

import numpy as np
import pytest
import torch

import mmpack as mp

pytestmark = pytest.mark.kernel

BOUND = 1e-6
KINDS = ["grpo", "rloo", "dr_grpo", "lite_ppo", "reinforce_pp"]


def oracle(rewards, groups, kind, eps=1e-6):
    rewards, groups = [Fraction(float(r)) for r in rewards], groups.tolist()
    members: dict[int, list[Fraction]] = {}
    for r, g in zip(rewards, groups, strict=True):
        members.setdefault(g, []).append(r)

    def std(values):
        return float(statistics.variance(values)) ** 0.5 if len(values) > 1 else 0.0

    def scaled(distance, spread):
        return float(distance) / (spread + eps) if spread else 0.0

    means = {g: sum(v) / len(v) for g, v in members.items()}
    spreads = {g: std(v) for g, v in members.items()}
    everyone = std(rewards)
    baselined = [
        r - means[g] if len(members[g]) > 1 else r for r, g in zip(rewards, groups, strict=True)
    ]
    middle, spread = sum(baselined) / max(len(baselined), 1), std(baselined)
    out = []
    for r, g, a in zip(rewards, groups, baselined, strict=True):
        n, d = len(members[g]), r - means[g]
        out.append(
            {
                "grpo": lambda d=d, g=g: scaled(d, spreads[g]),
                "dr_grpo": lambda d=d: float(d),
                "rloo": lambda d=d, n=n: float(d * n / max(n - 1, 1)),
                "lite_ppo": lambda d=d: scaled(d, everyone),
                "reinforce_pp": lambda a=a: scaled(a - middle, spread),
            }[kind]()
        )
    return torch.tensor(out, dtype=torch.float64)


def batch(count, groups, seed=0, spread=1.0, centre=0.0):
    g = torch.Generator().manual_seed(seed)
    index = torch.randint(0, groups, (count,), generator=g) * 7_000_000_007 - 3
    return centre + spread * torch.randn(count, generator=g), index


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("count", "groups"), [(1, 1), (2, 1), (5, 5), (129, 9), (300, 1), (257, 200)]
)
def test_kinds(device, kind, count, groups):
    rewards, index = batch(count, groups)
    got = mp.group_advantages(rewards.to(device), index.to(device), kind)
    want = oracle(rewards, index, kind)
    torch.testing.assert_close(got.cpu().double(), want, rtol=BOUND, atol=BOUND)


def whitened_over_tokens(rewards, index, counts, eps):
    """Each sample's value written once per loss token, and whitened by numpy, which counts with n - 1."""
    r = rewards.double().numpy()
    means = {g: r[index.numpy() == g].mean() for g in index.tolist()}
    sizes = {g: int((index == g).sum()) for g in index.tolist()}
    a = np.array(
        [x - means[g] if sizes[g] > 1 else x for x, g in zip(r, index.tolist(), strict=True)]
    )
    tokens = np.repeat(a, counts.numpy())
    return torch.from_numpy((a - tokens.mean()) / (tokens.std(ddof=1) + eps))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("count", "groups"),
    [(2, 1), (129, 9), (257, 200), pytest.param(5000, 9, marks=pytest.mark.gpu)],
)
def test_reinforce_pp_over_tokens(device, count, groups, dtype):
    rewards, index = batch(count, groups)
    g = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 400, (count,), generator=g).to(dtype)
    on = [x.to(device) for x in (rewards, index, counts)]
    got = mp.group_advantages(*on[:2], "reinforce_pp", num_tokens=on[2]).cpu().double()
    want = whitened_over_tokens(rewards, index, counts, 1e-6)
    torch.testing.assert_close(got, want, rtol=BOUND, atol=BOUND)
    by_samples = mp.group_advantages(*on[:2], "reinforce_pp").cpu().double()
    assert (got - by_samples).abs().max() > 1e-3
    ones = mp.group_advantages(*on[:2], "reinforce_pp", num_tokens=torch.ones_like(on[2]))
    torch.testing.assert_close(ones.cpu().double(), by_samples, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_far_from_zero(device, kind):
    rewards, index = batch(64, 8, spread=1e-2, centre=1e4)
    got = mp.group_advantages(rewards.to(device), index.to(device), kind)
    want = oracle(rewards, index, kind)
    torch.testing.assert_close(got.cpu().double(), want, rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_dtypes(device, dtype):
    rewards, _ = batch(50, 1)
    index = torch.arange(50).remainder(7).sub(3).to(dtype)
    for values in (rewards.half(), rewards.bfloat16(), rewards.double()):
        got = mp.group_advantages(values.to(device), index.to(device))
        want = oracle(values, index, "grpo")
        torch.testing.assert_close(got.cpu().double(), want, rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize("kind", KINDS)
def test_bits(device, kind):
    """Equal rewards of a group get equal bits, all-equal ones 0, and every launch gives the same."""
    rewards, index = batch(150, 11)
    rewards = rewards.round(decimals=0)
    on = rewards.to(device), index.to(device)
    got = mp.group_advantages(*on, kind).cpu()
    for group in index.unique():
        for reward in rewards.unique():
            alike = got[(index == group) & (rewards == reward)]
            assert (alike == alike[:1]).all()
    again = mp.group_advantages(*on, kind)
    assert torch.equal(got, again.cpu())
    same = mp.group_advantages(torch.full_like(on[0], 0.1), on[1] * 0, kind)
    assert torch.equal(same.cpu(), torch.zeros(150))


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_a_group_in_any_company(device, kind):
    rewards, index = batch(40, 4)
    whole = mp.group_advantages(rewards.to(device), index.to(device), kind).cpu()
    more = torch.cat([rewards, torch.randn(200)]), torch.cat([index, torch.arange(200)])
    company = mp.group_advantages(more[0].to(device), more[1].to(device), kind)
    assert torch.equal(whole, company[:40].cpu())


def test_nothing_and_opcheck(device):
    none = torch.zeros(0, device=device)
    assert mp.group_advantages(none, none.long()).shape == (0,)
    rewards, index = (x.to(device) for x in batch(20, 3))
    for kind in ("grpo", "reinforce_pp"):
        op = torch.ops.mmpack.group_advantages.default
        torch.library.opcheck(op, (rewards, index, None, kind, 1e-6))
    torch.library.opcheck(op, (rewards, index, index.abs(), "reinforce_pp", 1e-6))
    fast = torch.compile(
        lambda r, g: mp.group_advantages(r, g) * 2, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(fast(rewards, index), mp.group_advantages(rewards, index) * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "groups"), [(1025, 100), (4096, 512), (5000, 1)])
def test_large(device, kind, count, groups):
    rewards, index = batch(count, groups)
    got = mp.group_advantages(rewards.cuda(), index.cuda(), kind)
    want = oracle(rewards, index, kind)
    torch.testing.assert_close(got.cpu().double(), want, rtol=BOUND, atol=BOUND)


@pytest.mark.gpu
def test_cuda_graph(device):
    rewards, index = (x.cuda() for x in batch(600, 70))
    mp.group_advantages(rewards, index, "reinforce_pp")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mp.group_advantages(rewards, index, "reinforce_pp", check=False)
    for _ in range(3):
        rewards.normal_()
        graph.replay()
        assert torch.equal(captured, mp.group_advantages(rewards, index, "reinforce_pp"))
