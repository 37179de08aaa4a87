"""group_advantages, in plain torch and as a kernel, against loops over groups in Python numbers, and TRL."""

import itertools
import math
import statistics
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.kernels import each_backend

import mmpack as mp
from mmpack.contracts import TOLERANCES

BOUND = TOLERANCES["advantage"].value
CLOSE = {"rtol": BOUND, "atol": BOUND}
KINDS = ["grpo", "rloo", "dr_grpo", "lite_ppo", "reinforce_pp"]
each_kind = pytest.mark.parametrize("kind", KINDS)


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


@each_backend
@each_kind
@pytest.mark.parametrize(
    ("count", "groups"), [(1, 1), (2, 1), (5, 5), (129, 9), (300, 1), (257, 200)]
)
def test_kinds(device, kind, count, groups):
    rewards, index = batch(count, groups)
    got = mp.group_advantages(rewards.to(device), index.to(device), kind)
    want = oracle(rewards, index, kind)
    torch.testing.assert_close(got.cpu().double(), want, **CLOSE)


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


@each_backend
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("count", "groups"), [(2, 1), (257, 200)])
def test_reinforce_pp_over_tokens(device, count, groups, dtype):
    rewards, index = batch(count, groups)
    g = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 400, (count,), generator=g).to(dtype)
    on = [x.to(device) for x in (rewards, index, counts)]
    got = mp.group_advantages(*on[:2], "reinforce_pp", num_tokens=on[2]).cpu().double()
    want = whitened_over_tokens(rewards, index, counts, 1e-6)
    torch.testing.assert_close(got, want, **CLOSE)
    by_samples = mp.group_advantages(*on[:2], "reinforce_pp").cpu().double()
    assert (got - by_samples).abs().max() > 1e-3


@each_backend
@each_kind
def test_rewards_far_from_zero(device, kind):
    rewards, index = batch(64, 8, spread=1e-2, centre=1e4)
    got = mp.group_advantages(rewards.to(device), index.to(device), kind)
    want = oracle(rewards, index, kind)
    torch.testing.assert_close(got.cpu().double(), want, **CLOSE)


@each_backend
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_dtypes(device, dtype):
    rewards, _ = batch(50, 1)
    index = torch.arange(50).remainder(7).sub(3).to(dtype)
    for values in (rewards.half(), rewards.bfloat16(), rewards.double()):
        got = mp.group_advantages(values.to(device), index.to(device))
        want = oracle(values, index, "grpo")
        torch.testing.assert_close(got.cpu().double(), want, **CLOSE)


@each_backend
@each_kind
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


@each_backend
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_a_group_in_any_company(device, kind):
    rewards, index = batch(40, 4)
    whole = mp.group_advantages(rewards.to(device), index.to(device), kind).cpu()
    more = torch.cat([rewards, torch.randn(200)]), torch.cat([index, torch.arange(200)])
    company = mp.group_advantages(more[0].to(device), more[1].to(device), kind)
    assert torch.equal(whole, company[:40].cpu())


@each_backend
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
@each_kind
@pytest.mark.parametrize(("count", "groups"), [(1025, 100), (4096, 512), (5000, 1)])
def test_large(device, kind, count, groups):
    rewards, index = batch(count, groups)
    got = mp.group_advantages(rewards.cuda(), index.cuda(), kind)
    want = oracle(rewards, index, kind)
    torch.testing.assert_close(got.cpu().double(), want, **CLOSE)


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


@each_backend
@pytest.mark.parametrize("kind", [*KINDS, "tokens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_have_no_advantage_without_eps_too(device, kind, dtype):
    """0.1 + 0.1 + 0.1 is not 0.3: what rounding leaves is not scaled to a std of 1."""
    for size in (2, 3, 7, 11):
        rewards = torch.tensor([0.1] * size + [-1e6 / 3] * size, dtype=dtype).to(device)
        groups = torch.arange(2).repeat_interleave(size).to(device)
        tokens = {"num_tokens": 7 * groups + 1} if kind == "tokens" else {}
        name = "reinforce_pp" if kind == "tokens" else kind
        assert not mp.group_advantages(rewards, groups, name, eps=0.0, **tokens).any()


def test_against_trl():
    from trl.trainer.utils import nanstd  # not on every GPU machine

    rewards = torch.randn(24, 2).double()
    groups = torch.arange(4).repeat_interleave(6)
    grouped = rewards.view(4, 6, 2)
    centred = grouped - grouped.mean(1, keepdim=True)
    normal = (centred / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)).view(24, 2)
    got = mp.group_advantages(rewards[:, 0], groups, "grpo", eps=1e-4)
    torch.testing.assert_close(got.double(), normal[:, 0], **CLOSE)
    want = centred[..., 0].flatten() / (nanstd(rewards[:, 0]) + 1e-4)
    got = mp.group_advantages(rewards[:, 0], groups, "lite_ppo", eps=1e-4)
    torch.testing.assert_close(got.double(), want, **CLOSE)
    total = normal @ torch.tensor([1.0, 0.25]).double()
    want = (total - total.mean()) / (nanstd(total) + 1e-4)
    named = {"a": rewards[:, 0], "b": rewards[:, 1]}
    got = mp.group_advantages(named, groups, "gdpo", 1e-4, weights={"a": 1.0, "b": 0.25})
    torch.testing.assert_close(got.double(), want, **CLOSE)


def test_gdpo_of_groups_of_any_size():
    (a, groups), (b, _) = batch(40, 15), batch(40, 1, seed=1)
    b[groups == groups[0]] = 1.0
    total = oracle(a, groups, "grpo") - 2 * oracle(b, groups, "grpo")
    want = (total - total.mean()) / (total.std() + 1e-6)
    got = mp.group_advantages({"a": a, "b": b}, groups, "gdpo", weights={"a": 1, "b": -2.0})
    torch.testing.assert_close(got.double(), want, **CLOSE)


def drawn(seed, values):
    """24 rewards in five groups: normal ones, or of `values`."""
    g = torch.Generator().manual_seed(seed)
    groups = torch.randint(0, 5, (24,), generator=g)
    if values is None:
        return torch.randn(24, generator=g), groups
    return torch.tensor(values)[torch.randint(0, len(values), (24,), generator=g)], groups


def members(groups, b):
    return [i for i in range(len(groups)) if groups[i] == groups[b]]


@pytest.mark.parametrize("values", [None, [0.0, 1.0], [0.1]])
def test_leave_one_out(values):
    rewards, groups = drawn(0, values)
    groups[3] = 9  # alone
    want = []
    for b in range(24):
        others = [float(rewards[i]) for i in members(groups, b) if i != b]
        distance = float(rewards[b]) - statistics.mean(others) if others else 0.0
        std = statistics.stdev(others) if len(others) > 1 else 0.0
        want.append(distance / (std + 1e-6) if std else distance)
    got = mp.group_advantages(rewards, groups, "loo_std")
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), **CLOSE)


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("values", [None, [0.0, 1.0], [0.3]])
def test_best_of_k_by_all_groups_of_k(values, k):
    rewards, groups = drawn(0, values)
    want = []
    for b in range(24):
        mine = members(groups, b)
        best = {c: max(float(rewards[i]) for i in c) for c in itertools.combinations(mine, k)}
        std = np.std(list(best.values())) if len(best) > 1 else 0.0
        with_it = [value for chosen, value in best.items() if b in chosen]
        mean = np.mean(list(best.values())) if best else 0.0
        want.append((np.mean(with_it) - mean) / (std + 1e-6) if std > 1e-12 else 0.0)
    got = mp.group_advantages(rewards, groups, "pass_at_k", k=k)
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), **CLOSE)
    assert not mp.group_advantages(rewards, groups, "pass_at_k", k=10**30).any()


@pytest.mark.parametrize("k", [2, 8])
def test_pass_at_k_of_right_and_wrong_is_the_papers(k, n=33):
    """With c of n right, rho = 1 - C(n-c, k) / C(n, k): a right one gets (1 - rho) / sigma, and a wrong one
    (1 - rho - C(n-c-1, k-1) / C(n-1, k-1)) / sigma, sigma² = rho (1 - rho) (arXiv 2508.10751)."""
    for c in range(n + 1):
        rho = 1 - math.comb(n - c, k) / math.comb(n, k)
        sigma = math.sqrt(rho * (1 - rho)) + 1e-6
        wrong = 1 - rho
        if c < n:
            wrong -= math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1)
        want = [(1 - rho) / sigma] * c + [wrong / sigma] * (n - c)
        want = torch.tensor(want if 0 < rho < 1 else [0.0] * n, dtype=torch.float64)
        rewards = torch.tensor([1.0] * c + [0.0] * (n - c))
        got = mp.group_advantages(rewards.flip(0), torch.zeros(n).long(), "pass_at_k", k=k)
        torch.testing.assert_close(got.double(), want.flip(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [*KINDS, "loo_std"])
def test_samples_of_one_unit_count_once(kind):
    rewards, groups = drawn(0, None)
    repeats = torch.arange(24) % 3 + 1
    unit = torch.arange(24).repeat_interleave(repeats) * 7 - 9
    order = torch.randperm(len(unit), generator=torch.Generator().manual_seed(1))
    inverse = ((unit + 9) // 7)[order]
    got = mp.group_advantages(rewards[inverse], groups[inverse], kind, unit_index=unit[order])
    torch.testing.assert_close(got, mp.group_advantages(rewards, groups, kind)[inverse], **CLOSE)
    by_sample = mp.group_advantages(rewards[inverse], groups[inverse], kind)
    assert (by_sample - got).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["loo_std", "gdpo", "pass_at_k"])
def test_no_samples_and_equal_ones(kind):
    k = {"k": 2} if kind == "pass_at_k" else {}
    for count in (0, 5):
        rewards = torch.full((count,), 0.1)
        given = {"a": rewards, "b": rewards} if kind == "gdpo" else rewards
        got = mp.group_advantages(given, torch.zeros(count).long(), kind, eps=0.0, **k)
        assert torch.equal(got, torch.zeros(count))


def test_one_sample_a_prompt():
    rewards, groups = torch.tensor([0.0, 1.0, 3.0]), torch.arange(3)
    with pytest.warns(UserWarning, match="each of 3 samples is alone in its group.*Fix: "):
        assert torch.equal(mp.group_advantages(rewards, groups), torch.zeros(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mp.group_advantages(rewards, groups, "reinforce_pp")
        # one of several groups may have one sample
        mp.group_advantages(rewards, torch.tensor([0, 0, 1]))
        mp.group_advantages(rewards, groups, check=False)


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_reward_that_is_no_number_is_named(value):
    rewards, groups = torch.arange(40.0), torch.arange(40) // 4
    rewards[[7, 9]] = value
    with pytest.raises(mp.ArgumentError, match=rf"rewards\[7\] is {value}, .*\(2 of 40"):
        mp.group_advantages(rewards, groups)
    assert not mp.group_advantages(rewards, groups, check=False)[4:12].isfinite().all()
