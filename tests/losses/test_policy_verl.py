"""policy_loss and group_advantages beside verl's own functions, on padded rectangles in float64."""

from types import SimpleNamespace

import pytest
import torch

from mmpack.losses.policy.loss import policy_loss

pytestmark = pytest.mark.verl

LENGTHS = [3, 1, 7, 2, 12]
CU = torch.tensor([0, *LENGTHS]).cumsum(0).int()
N, B, WIDTH = sum(LENGTHS), len(LENGTHS), max(LENGTHS)
MASK = torch.tensor([[float(t < n) for t in range(WIDTH)] for n in LENGTHS], dtype=torch.float64)


def padded(column):
    """[N] -> [B, WIDTH] float64."""
    out = torch.full((B, WIDTH), -3.0, dtype=torch.float64)
    out[MASK == 1] = column.double()
    return out


def columns(spread, seed):
    g = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(N, generator=g)
    lp, rollout = (old + spread * torch.randn(N, generator=g) for _ in range(2))
    return SimpleNamespace(lp=lp, old=old, rollout=rollout, adv=torch.randn(B, generator=g))


def ours(c, **options):
    leaf = c.lp.clone().requires_grad_()
    out = policy_loss(leaf, c.adv, CU, c.old, **options)
    out.loss.backward()
    return float(out.loss.detach()), leaf.grad.double(), out.metrics


def agrees(got, want, leaf):
    """The loss, and the gradients that it leaves in verl's rectangle."""
    want.backward()
    assert got[0] == pytest.approx(float(want.detach()), rel=1e-6)
    torch.testing.assert_close(got[1], leaf.grad[MASK == 1], rtol=2e-6, atol=1e-9)


AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean_token_mean": "seq-mean-token-mean",
    "sequence_mean_token_sum": "seq-mean-token-sum",
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("c_ratio", [1.05, 1.5, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_dual_clip(aggregation, c_ratio, seed):
    from verl.trainer.ppo.core_algos import compute_policy_loss

    c = columns(0.8, seed)
    c.lp[-12:] += 0.6
    c.adv[-1] = -1.0  # of the longest sample: something is cut
    options = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": c_ratio}
    got = ours(c, aggregation=aggregation, **options)
    leaf = padded(c.lp).requires_grad_()
    want, cut, _, cut_lower = compute_policy_loss(
        padded(c.old),
        leaf,
        c.adv.double()[:, None].expand(B, WIDTH),
        MASK,
        cliprange_low=0.2,
        cliprange_high=0.28,
        clip_ratio_c=c_ratio,
        loss_agg_mode=AGGREGATIONS[aggregation],
    )
    agrees(got, want, leaf)
    assert float(got[2]["clip_fraction"]) == pytest.approx(float(cut), abs=1e-6)
    assert float(got[2]["dual_clip_fraction"]) == pytest.approx(float(cut_lower), abs=1e-6)
    assert cut_lower > 0


def test_gspo_with_weights_of_tokens():
    from verl.trainer.ppo.core_algos import compute_policy_loss_gspo
    from verl.workers.config import ActorConfig

    c = columns(0.6, 2)
    options = {"correction": "tis", "correction_high": 1.2, "rollout_logprobs": c.rollout}
    clip = {"clip_low": 0.5, "clip_high": 1.0}
    got = ours(c, kind="gspo", aggregation="sequence_mean_token_mean", **clip, **options)
    leaf = padded(c.lp).requires_grad_()
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.5,
        clip_ratio_high=1.0,
    )  # fmt: skip
    want, _ = compute_policy_loss_gspo(
        padded(c.old),
        leaf,
        c.adv.double()[:, None].expand(B, WIDTH),
        MASK,
        config=config,
        rollout_is_weights=(padded(c.old) - padded(c.rollout)).exp().clamp(max=1.2),
    )
    agrees(got, want, leaf)


@pytest.mark.parametrize("spread", [0.1, 0.6, 2.0])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", [None, "sequence", "geometric"])
def test_gmpo(spread, seed, level):
    from verl.trainer.ppo.core_algos import compute_policy_loss_geo_mean

    c = columns(spread, seed)
    options = {"clip_low": 0.4, "clip_high": 0.3, "aggregation": "sequence_mean_token_mean"}
    weights = None
    if level:
        options |= {"rollout_logprobs": c.rollout, "correction": "tis", "correction_level": level}
        gap = ((padded(c.old) - padded(c.rollout)) * MASK).sum(1, keepdim=True)
        gap = gap if level == "sequence" else gap / MASK.sum(1, keepdim=True)
        weights = gap.exp().clamp(max=2.0).expand(B, WIDTH)
    got = ours(c, kind="gmpo", **options)
    leaf = padded(c.lp).requires_grad_()
    want, metrics = compute_policy_loss_geo_mean(
        padded(c.old),
        leaf,
        c.adv.double()[:, None].expand(B, WIDTH),
        MASK,
        config=SimpleNamespace(clip_ratio=0.2, clip_ratio_low=0.4, clip_ratio_high=0.3),
        rollout_is_weights=weights,
    )
    agrees(got, want, leaf)
    # verl also counts tokens beyond the bound on which the minimum is not cut
    cut = metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"]
    assert 0 <= float(got[2]["clip_fraction"]) <= cut + 1e-6
    assert spread < 0.5 or float(got[2]["clip_fraction"]) > 0
