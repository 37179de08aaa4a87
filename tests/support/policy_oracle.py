"""The policy loss sample by sample in float64 with autograd's derivatives, read off the papers' formulas."""

from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch

import mmpack as mp
from mmpack.contracts import gradient_fp32_bound, loss_bound
from mmpack.losses.aggregate import Aggregation
from mmpack.losses.policy.variants import VARIANTS


def clipped_exp(x):
    return x.clamp(-20, 20).exp()


def ppo(lp, d, a, low, high):
    return minimum(clipped_exp(d), a, low, high)


def gspo(lp, d, a, low, high):
    return minimum(clipped_exp(d.mean().detach() + lp - lp.detach()), a, low, high)


def minimum(ratio, a, low, high):
    terms = torch.maximum(-ratio * a, -ratio.clamp(1 - low, 1 + high) * a)
    return terms, ratio, (ratio > 1 + high) & (a > 0) | (ratio < 1 - low) & (a < 0)


def cispo(lp, d, a, low, high):
    ratio = clipped_exp(d).detach()
    bounded = ratio.clamp(1 - low, 1 + high)
    return -bounded * a * lp, ratio, bounded != ratio


def gmpo(lp, d, a, low, high):
    within = torch.where(a > 0, d.clamp(max=high), d.clamp(min=-low))
    # the mean's value, and of each token's logprob the gradient, n times that of the mean
    ratio = clipped_exp(within.mean().detach() + within - within.detach())
    return -ratio * a, ratio, within != d


# Of one sample: logprobs, log-ratios and advantages [n], and the clip; to the terms, the ratios and what is clipped.
FORMULAS = {"gspo": gspo, "cispo": cispo, "gmpo": gmpo}


def oracle(
    c,
    kind="grpo",
    aggregation="token_mean",
    total=None,
    scale=1.0,
    max_tokens=None,
    clip=(0.2, 0.2),
    kl_coef=0.0,
    kl_kind="k3",
    entropy_coef=0.0,
    correction=None,
    level="token",
    bounds=(0.0, 2.0),
    dual_clip=None,
):
    """Columns c: lengths, lp, adv ([B] or [N]), old, ref, rollout, entropy (any of the last four None).

    Returns loss, gradients to lp and entropy, metrics, and the allowed error's sum of |terms| / denominator.
    """
    lengths, count = list(c.lengths), sum(c.lengths)
    leaf = c.lp.detach().cpu().double().requires_grad_()
    bonus = torch.zeros(count, dtype=torch.float64) if c.entropy is None else c.entropy
    bonus = bonus.detach().cpu().double().requires_grad_()
    columns = [None if x is None else x.cpu().double() for x in (c.old, c.ref, c.rollout)]
    adv = c.adv.cpu().double()
    if len(adv) == len(lengths):
        adv = adv.repeat_interleave(torch.tensor(lengths))

    samples, seen = [], {name: [] for name in ("ratio", "clip", "d", "w", "cut", "kl", "dual")}
    for start, length in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):
        if length == 0:
            continue
        of = slice(int(start), int(start) + length)
        lp, a = leaf[of], adv[of]
        old, ref, rollout = (None if x is None else x[of] for x in columns)
        old = lp.detach() if old is None else old
        d = lp - old
        terms, ratio, cut_ratio = FORMULAS.get(kind, ppo)(lp, d, a, *clip)
        if dual_clip is not None:  # arXiv 1912.09729 eq. 5, of a loss
            seen["dual"].append(((a < 0) & (terms > -dual_clip * a)).double())
            terms = torch.where(a < 0, torch.minimum(terms, -dual_clip * a), terms)
        weights = ratio.detach()
        outside = torch.zeros(length, dtype=torch.bool)
        if correction:
            gap = old.detach() - rollout
            gap = {"token": gap, "sequence": gap.sum(), "geometric": gap.mean()}[level]
            weights = clipped_exp(gap).expand(length)
            outside = (weights < bounds[0]) | (weights > bounds[1])
            weights = weights.clamp(*bounds) if correction == "tis" else weights * ~outside
            terms = terms * weights
        if ref is not None:
            gap = lp - ref
            value = {"k1": gap, "k2": gap**2 / 2, "k3": torch.expm1(-gap.clamp(-20, 20)) + gap}
            seen["kl"].append(value[kl_kind].detach())
            if kl_coef:
                terms = terms + kl_coef * (value[kl_kind].detach() + gap**2 / 2)
                terms = terms - kl_coef * (gap**2 / 2).detach()
        if entropy_coef:
            terms = terms - entropy_coef * bonus[of]
        samples.append(terms)
        for name, x in (("ratio", ratio), ("clip", cut_ratio), ("d", d), ("w", weights)):
            seen[name].append(x.detach().double())
        seen["cut"].append(outside.double())

    denominator = {
        "token_mean": count if total is None else total,
        "token_sum": 1,
    }.get(aggregation, len(lengths) if total is None else total)
    denominator = max(denominator, 1) * (max_tokens or 1)
    per_sample = aggregation == "sequence_mean_token_mean"
    zero = leaf.sum() * 0 + bonus.sum() * 0
    parts = [(x.mean() if per_sample else x.sum()) for x in samples]
    sizes = [(x.abs().mean() if per_sample else x.abs().sum()) for x in samples]
    loss = scale * (sum(parts) + zero) / denominator
    loss.backward()

    def mean(name):
        return float(torch.cat(seen[name]).mean()) if seen[name] else 0.0

    w = torch.cat(seen["w"]).numpy() if seen["w"] else np.zeros(0)
    d = torch.cat(seen["d"]) if seen["d"] else torch.zeros(0)
    metrics = {
        "tokens": count,
        "ratio": mean("ratio"),
        "clip_fraction": mean("clip"),
        "kl_old": float((torch.expm1(d.clamp(-20, 20)) - d).mean()) if count else 0.0,
        "ess": float(w.sum() ** 2 / (len(w) * (w**2).sum())) if w.any() else 0.0,
    }
    if correction:
        metrics |= {"correction": mean("w"), "correction_fraction": mean("cut")}
    if c.ref is not None:
        metrics["kl_ref"] = mean("kl")
    if dual_clip is not None:
        metrics["dual_clip_fraction"] = mean("dual")
    if c.entropy is not None:
        metrics["entropy"] = float(bonus.detach().mean()) if count else 0.0
    magnitude = float(sum(sizes, torch.zeros(())).detach()) * abs(scale) / denominator
    return loss.detach(), leaf.grad, bonus.grad, metrics, magnitude


def columns(lengths, spread=0.3, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    old = -2 * torch.rand(count, generator=g)
    lp, ref, rollout = (old + spread * torch.randn(count, generator=g) for _ in range(3))
    return SimpleNamespace(
        lengths=lengths,
        lp=lp.to(dtype),
        old=old.to(dtype),
        ref=ref.to(dtype),
        rollout=rollout.to(dtype),
        entropy=torch.rand(count, generator=g).to(dtype),
        adv=torch.randn(len(lengths), generator=g),
    )


def offsets(lengths, device):
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


def run(c, device, **options):
    def on(x):
        return None if x is None else x.to(device)

    leaf = on(c.lp).detach().clone().requires_grad_()
    entropy = None if c.entropy is None else on(c.entropy).detach().clone().requires_grad_()
    out = mp.policy_loss(
        leaf,
        on(c.adv),
        offsets(c.lengths, device),
        on(c.old),
        on(c.ref),
        on(c.rollout),
        entropy=entropy,
        **options,
    )
    out.loss.backward()
    metrics = {name: float(x) for name, x in out.metrics.items()}
    return out.loss.detach().cpu(), leaf.grad.cpu(), entropy, metrics


CASES = {
    **{kind: {"kind": kind} for kind in VARIANTS},
    **{
        f"{kind} {aggregation}": {"kind": kind, "aggregation": aggregation}
        for kind in ("ppo", "gspo", "cispo")
        for aggregation in get_args(Aggregation)[1:]
    },
    **{
        f"{kind} {correction} {level}": {"kind": kind, "correction": correction, "level": level}
        for kind in ("dr_grpo", "gspo")
        for correction in ("tis", "mis")
        for level in ("token", "sequence", "geometric")
    },
    **{
        f"{kl} {coefficient}": {"kl_kind": kl, "kl_coef": coefficient}
        for kl in ("k1", "k2", "k3")
        for coefficient in (0.0, 0.7)
    },
    **{
        f"{kind} dual clip": {"kind": kind, "dual_clip": c}
        for kind, c in (("grpo", 1.05), ("dapo", 1.5), ("gspo", 1.0001))
    },
    "entropy bonus": {"entropy_coef": 0.05},
    "everything": {
        "kind": "gspo",
        "aggregation": "sequence_mean_token_mean",
        "correction": "tis",
        "level": "geometric",
        "kl_coef": 0.3,
        "entropy_coef": 0.05,
        "scale": 4.0,
        "dual_clip": 1.001,
    },
}


def check(c, device, total=None, **options):
    """Against the oracle, by the contract."""
    if options.get("aggregation") == "sequence_mean_token_sum_norm":
        options["max_tokens"] = 40
    names = {"level": "correction_level"}
    bounds = (0.8, 1.3) if options.get("correction") else (0.0, 2.0)
    keywords = {names.get(name, name): value for name, value in options.items()}
    keywords |= {"correction_low": bounds[0], "correction_high": bounds[1]}
    if total is not None:
        keywords |= {"total_tokens": total, "total_samples": total}
    clip = VARIANTS[options.get("kind", "grpo")].clip
    number = None if total is None else float(total)
    want = oracle(c, total=number, clip=clip, bounds=bounds, **options)
    loss, grad, entropy, metrics = run(c, device, **keywords)
    assert abs(float(loss) - float(want[0])) <= loss_bound(want[4], 1) + 2**-24 * abs(
        float(want[0])
    )
    peak = float(want[1].abs().max()) if len(grad) else 0.0
    assert ((grad.double() - want[1]).abs() <= gradient_fp32_bound(peak)).all()
    if options.get("entropy_coef"):
        torch.testing.assert_close(entropy.grad.cpu().double(), want[2], rtol=1e-6, atol=0)
    elif entropy is not None:
        assert entropy.grad is None
    assert metrics.keys() == want[3].keys()
    for name, value in want[3].items():
        assert metrics[name] == pytest.approx(value, rel=2e-6, abs=1e-9), name
