"""policy_loss against TRL's own GRPO loss on padded rectangles, and against formulas of the papers, in float64."""

import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import policy_oracle

from mmpack.errors import ArgumentError
from mmpack.losses.policy.loss import VARIANTS, policy_loss

LENGTHS = [3, 0, 7, 1, 12]
CU = torch.tensor([0, *LENGTHS]).cumsum(0).int()
N, B, WIDTH = sum(LENGTHS), len(LENGTHS), max(LENGTHS)


def columns(spread=0.3, seed=0):
    g = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(N, generator=g)
    lp, ref, rollout = (old + spread * torch.randn(N, generator=g) for _ in range(3))
    return SimpleNamespace(
        lp=lp, old=old, ref=ref, rollout=rollout, adv=torch.randn(B, generator=g)
    )


def padded(column, lengths=LENGTHS):
    """[N] -> [B, WIDTH] float64; what lies in the padding must not matter."""
    rows = [
        torch.cat([x, x.new_full((max(lengths) - len(x),), -3.0)]) for x in column.split(lengths)
    ]
    return torch.stack(rows).double()


def trl_loss(
    c,
    loss_type,
    level="token",
    low=0.2,
    high=0.2,
    beta=0.0,
    max_tokens=WIDTH,
    weights=None,
    total=N,
    delta=None,
):
    """(loss, gradient to the logprobs [N], metrics) of TRL's GRPOTrainer, in float64."""
    from trl.trainer.grpo_trainer import GRPOTrainer  # not on every GPU machine

    lp = padded(c.lp).requires_grad_()
    mask = torch.tensor(
        [[float(t < n) for t in range(WIDTH)] for n in LENGTHS], dtype=torch.float64
    )
    metrics = defaultdict(list)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (lp, torch.zeros_like(lp), None),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=delta, steps_per_generation=1),
        accelerator=SimpleNamespace(
            num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x
        ),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _entropy_bonus_enabled=False,
        importance_sampling_level=level,
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        beta=beta,
        max_completion_length=max_tokens,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=True,
        _metrics={"train": metrics},
    )
    ids = torch.zeros(B, WIDTH, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": c.adv.double(),
        "old_per_token_logps": padded(c.old),
        "ref_per_token_logps": padded(c.ref),
        "num_items_in_batch": torch.tensor(float(total)),
        "importance_sampling_ratio": weights,
    }
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    loss.backward()
    assert torch.equal(lp.grad[mask == 0], torch.zeros_like(lp.grad[mask == 0]))
    return loss.detach(), lp.grad[mask == 1], metrics


def run(c, **keywords):
    leaf = c.lp.clone().requires_grad_()
    out = policy_loss(leaf, c.adv, CU, c.old, **keywords)
    out.loss.backward()
    return out.loss.detach(), leaf.grad, out.metrics


CASES = {
    "grpo": ({"aggregation": "sequence_mean_token_mean"}, {"loss_type": "grpo"}),
    "ppo": ({"clip_low": 0.1, "clip_high": 0.3}, {"loss_type": "bnpo", "low": 0.1, "high": 0.3}),
    "dapo": ({"total_tokens": 100}, {"loss_type": "dapo", "high": 0.28, "total": 100}),
    "dr_grpo": (
        {"aggregation": "sequence_mean_token_sum_norm", "max_tokens": 20},
        {"loss_type": "dr_grpo", "max_tokens": 20},
    ),
    "gspo": (
        {"aggregation": "sequence_mean_token_mean"},
        {"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4},
    ),
    "cispo": ({"clip_high": 0.2}, {"loss_type": "cispo", "high": 1.2}),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("spread", [1e-4, 0.3, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_kinds_against_trl(kind, spread, seed):
    ours, theirs = CASES[kind]
    c = columns(spread, seed)
    loss, grad, metrics = run(c, kind=kind, **ours)
    want, want_grad, want_metrics = trl_loss(c, **theirs)
    # Well within the contract: the terms and their sum are float64, only the loss is rounded.
    assert float(loss) == pytest.approx(float(want), rel=1e-7)
    torch.testing.assert_close(grad.double(), want_grad, rtol=2e-6, atol=1e-9)
    if kind not in ("cispo", "gspo"):
        share = want_metrics["clip_ratio/region_mean"][0]
        assert float(metrics["clip_fraction"]) == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize("case", policy_oracle.CASES)
def test_each_variant_is_its_formula(case):
    policy_oracle.check(
        policy_oracle.columns([3, 0, 70, 1, 12]), "cpu", **policy_oracle.CASES[case]
    )


def test_gmpo_is_of_whole_samples():
    c = columns()
    with pytest.raises(
        ArgumentError, match=r"per loss token, but gmpo .* Fix: pass one per sample"
    ):
        policy_loss(c.lp, c.adv.repeat_interleave(torch.tensor(LENGTHS)), CU, kind="gmpo")
    with pytest.raises(ArgumentError, match="but gmpo bounds a sample's ratio"):
        policy_loss(c.lp, c.adv, CU, kind="gmpo", dual_clip=3.0)


@pytest.mark.parametrize("kind", ["grpo", "ppo", "dapo", "gspo"])
@pytest.mark.parametrize("seed", range(3))
def test_dual_clip_against_the_delta_of_trl(kind, seed):
    ours, theirs = CASES[kind]
    c = columns(0.9, seed)
    c.lp[-12:] += 0.2
    c.adv[-1] = -1.0  # of the longest sample: something is cut
    options = {"grpo": 1.3, "ppo": 1.5, "dapo": 3.0, "gspo": 1.05}
    loss, grad, metrics = run(c, kind=kind, dual_clip=options[kind], **ours)
    want, want_grad, _ = trl_loss(c, delta=options[kind], **theirs)
    assert float(loss) == pytest.approx(float(want), rel=1e-7)
    torch.testing.assert_close(grad.double(), want_grad, rtol=2e-6, atol=1e-9)
    without, _, plain = run(c, kind=kind, **ours)
    cut = float(metrics["dual_clip_fraction"])
    assert cut > 0 and float(without) != float(loss)
    assert metrics.keys() - plain.keys() == {"dual_clip_fraction"}


def test_dual_clip_stops_what_is_pushed_down_and_far_too_likely():
    """By hand: of ratios 4 and 2 and an advantage of -1, a c of 3 cuts the first, and so it does at +1 the clip."""
    old = torch.zeros(4)
    leaf = torch.log(torch.tensor([4.0, 2.0, 4.0, 2.0])).requires_grad_()
    advantages, cu = torch.tensor([-1.0, -1.0, 1.0, 1.0]), torch.tensor([0, 2, 4]).int()
    out = policy_loss(leaf, advantages, cu, old, dual_clip=3.0)
    out.loss.backward()
    assert float(out.loss.detach()) == pytest.approx((3 + 2 - 1.2 - 1.2) / 4)
    torch.testing.assert_close(leaf.grad, torch.tensor([0.0, 2.0, 0.0, 0.0]) / 4)
    assert float(out.metrics["dual_clip_fraction"]) == 0.25
    assert float(out.metrics["clip_fraction"]) == 0.5  # as verl counts them


def test_gspo_with_weights_of_tokens_has_the_value_of_trl_and_gradients_of_its_own():
    """TRL's ratio is one number per sample, so it weighs each gradient by the mean of the sample's weights."""
    c = columns(spread=0.6, seed=2)
    weights, _, _ = correction_oracle(c, "tis", "token", 0.0, 1.2)
    ours, theirs = CASES["gspo"]
    clip = {"clip_low": 0.5, "clip_high": 1.0}
    options = {"rollout_logprobs": c.rollout, "correction": "tis", "correction_high": 1.2}
    loss, grad, _ = run(c, kind="gspo", **clip, **options, **ours)
    want, want_grad, _ = trl_loss(c, weights=weights, **(theirs | {"low": 0.5, "high": 1.0}))
    assert float(loss) == pytest.approx(float(want), rel=1e-7)
    means = [x.mean().expand(len(x)) for x in grad.double().split(LENGTHS)]
    torch.testing.assert_close(torch.cat(means), want_grad, rtol=2e-6, atol=1e-9)
    assert (grad - want_grad).abs().max() > 1e-3 * want_grad.abs().max()


def test_the_kl_term_is_that_of_trl():
    c = columns()
    with_kl, _, metrics = run(c, ref_logprobs=c.ref, kl_coef=0.7)
    want, _, want_metrics = trl_loss(c, "bnpo", beta=0.7)
    assert float(with_kl) == pytest.approx(float(want), abs=2e-6)
    assert float(metrics["kl_ref"]) == pytest.approx(want_metrics["kl"][0], abs=1e-7)


def correction_oracle(c, kind, level, low, high):
    """Weights on the padded rectangle, in float64."""
    mask = torch.tensor([[t < n for t in range(WIDTH)] for n in LENGTHS])
    gap = (padded(c.old) - padded(c.rollout)) * mask
    if level != "token":
        gap = gap.sum(1, keepdim=True)
        if level == "geometric":
            gap = gap / mask.sum(1, keepdim=True).clamp(min=1)
        gap = gap.expand(B, WIDTH)
    w = gap.exp()
    outside = (w < low) | (w > high)
    return (w.clamp(low, high) if kind == "tis" else w.masked_fill(outside, 0.0)), outside, mask


@pytest.mark.parametrize("kind", ["tis", "mis"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.2), (0.8, 1.3)])
def test_correction_against_trl(kind, level, low, high):
    c = columns(spread=0.6, seed=2)  # some weights within the bounds, some outside
    weights, outside, mask = correction_oracle(c, kind, level, low, high)
    loss, grad, metrics = run(
        c,
        rollout_logprobs=c.rollout,
        correction=kind,
        correction_level=level,
        correction_low=low,
        correction_high=high,
    )
    want, want_grad, _ = trl_loss(c, "bnpo", weights=weights)
    assert float(loss) == pytest.approx(float(want), rel=1e-7)
    torch.testing.assert_close(grad.double(), want_grad, rtol=2e-6, atol=1e-9)
    assert float(metrics["correction"]) == pytest.approx(float(weights[mask].mean()), rel=1e-6)
    assert 0 < float(outside[mask].double().mean()) < 1
    share = float(outside[mask].double().mean())
    assert float(metrics["correction_fraction"]) == pytest.approx(share, abs=1e-7)


def test_defaults_are_the_old_policy_and_an_all_token_mean():
    c = columns()
    leaf = c.lp.clone().requires_grad_()
    out = policy_loss(leaf, c.adv, CU)
    out.loss.backward()
    per_token = c.adv.double().repeat_interleave(torch.tensor(LENGTHS))
    assert float(out.loss.detach()) == pytest.approx(-float(per_token.mean()), abs=1e-7)
    torch.testing.assert_close(leaf.grad.double(), -per_token / N, rtol=1e-6, atol=0)
    assert float(out.metrics["ratio"]) == 1.0
    assert float(out.metrics["clip_fraction"]) == float(out.metrics["kl_old"]) == 0.0
    assert float(out.metrics["tokens"]) == N
    assert not any(m.requires_grad for m in out.metrics.values())


def test_advantages_of_tokens():
    c = columns()
    c.adv = c.adv.repeat_interleave(torch.tensor(LENGTHS))
    per_token = run(c)
    assert c.adv.shape == (N,)
    c.adv = columns().adv
    per_sample = run(c)
    assert torch.equal(per_token[0], per_sample[0])
    assert torch.equal(per_token[1], per_sample[1])


def test_advantages_per_token_where_as_many_samples_as_tokens():
    # two samples, one without a loss token: [2] may be either
    cu_loss, advantages = torch.tensor([0, 0, 2], dtype=torch.int32), torch.tensor([1.0, -2.0])
    with pytest.raises(
        ArgumentError, match=r"both are 2, and a sample has no loss token\. Fix: .*per='token'"
    ):
        policy_loss(torch.tensor([-1.0, -2.0]), advantages, cu_loss)
    gradients = {}
    for per in ("token", "sample"):
        leaf = torch.tensor([-1.0, -2.0], requires_grad=True)
        policy_loss(leaf, advantages, cu_loss, per=per).loss.backward()
        gradients[per] = leaf.grad.tolist()
    assert gradients == {"token": [-0.5, 1.0], "sample": [1.0, 1.0]}
    # one token each: both are the same, and nothing has to be said
    policy_loss(torch.tensor([-1.0, -2.0]), advantages, torch.tensor([0, 1, 2], dtype=torch.int32))


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=7),
    st.sampled_from(list(VARIANTS)),
    st.sampled_from(
        [
            "token_mean",
            "sequence_mean_token_mean",
            "sequence_mean_token_sum",
            "sequence_mean_token_sum_norm",
            "token_sum",
        ]
    ),
    st.integers(0, 2**31),
)
def test_micro_batches_add_up(lengths, kind, aggregation, seed):
    g = torch.Generator().manual_seed(seed)
    count, samples = sum(lengths), len(lengths)
    lp, old, ref, rollout = torch.randn(4, count, generator=g)
    adv = torch.randn(samples, generator=g)
    options = {
        "kind": kind,
        "aggregation": aggregation,
        "total_tokens": count,
        "total_samples": torch.tensor(samples),
        "max_tokens": 8 if aggregation == "sequence_mean_token_sum_norm" else None,
        "kl_coef": 0.1,
        "correction": "tis",
        "correction_level": "sequence",
        "scale": 2.0,
        "per": "sample",
    }

    def part(first, last):
        cu = torch.tensor([0, *lengths]).cumsum(0)[first : last + 1]
        tokens = slice(int(cu[0]), int(cu[-1]))
        leaf = lp[tokens].clone().requires_grad_()
        out = policy_loss(
            leaf,
            adv[first:last],
            (cu - cu[0]).int(),
            old[tokens],
            ref[tokens],
            rollout[tokens],
            **options,
        )
        out.loss.backward()
        return out.loss.detach(), leaf.grad

    whole, grad = part(0, samples)
    parts = [part(b, b + 1) for b in range(samples)]
    magnitude = max(1.0, max(float(x.abs()) for x, _ in parts)) * samples
    assert abs(sum(x for x, _ in parts) - whole) <= 1e-6 * magnitude
    torch.testing.assert_close(torch.cat([g for _, g in parts]), grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("gap", [-100.0, 100.0])
def test_extreme_ratios_stay_finite(kind, gap):
    c = columns()
    c.old = c.lp - gap
    loss, grad, metrics = run(
        c,
        kind=kind,
        ref_logprobs=c.old,
        kl_coef=0.1,
        rollout_logprobs=c.old + 90,
        correction="tis",
        correction_level="sequence",
    )
    assert loss.isfinite()
    assert grad.isfinite().all()
    assert all(m.isfinite() for m in metrics.values())


def test_a_ratio_beyond_the_bound_has_no_gradient():
    c = columns()
    c.old, c.adv = c.lp - 100, -torch.ones(B)
    loss, grad, metrics = run(c)
    assert float(metrics["ratio"]) == pytest.approx(math.exp(20), rel=1e-6)
    assert float(loss) == pytest.approx(math.exp(20), rel=1e-6)
    assert torch.equal(grad, torch.zeros(N))


@pytest.mark.parametrize("kind", VARIANTS)
def test_no_loss_token_gives_a_zero_on_the_graph(kind):
    lp = torch.zeros(0, requires_grad=True)
    out = policy_loss(lp, torch.ones(2), torch.zeros(3, dtype=torch.int32), kind=kind)
    assert float(out.loss.detach()) == 0.0
    assert out.loss.requires_grad
    out.loss.backward()
    assert lp.grad.shape == (0,)
    assert all(float(m) == 0.0 for m in out.metrics.values())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CASES)
def test_gpu_agrees_and_never_waits(kind):
    c = columns()
    options = {
        "kind": kind,
        "aggregation": "sequence_mean_token_mean",
        "kl_coef": 0.1,
        "correction": "mis",
        "correction_level": "geometric",
        "correction_low": 0.9,
    }
    inputs = (c.lp, c.adv, CU, c.old, c.ref, c.rollout)
    want = policy_loss(*inputs, **options)
    leaf, *rest = (x.cuda() for x in inputs)
    leaf.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = policy_loss(leaf, *rest, **options)
        out.loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(out.loss.detach()) == pytest.approx(float(want.loss), rel=1e-6)
    for name, metric in want.metrics.items():
        assert float(out.metrics[name]) == pytest.approx(float(metric), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        (
            {"advantages": torch.zeros(3)},
            f"advantages has shape [3], expected [{B}] (one per sample)",
        ),
        ({"old_logprobs": torch.zeros(N, 1)}, f"old_logprobs has shape [{N}, 1]"),
        ({"ref_logprobs": torch.zeros(N - 1)}, f"ref_logprobs has shape [{N - 1}]"),
        ({"cu_loss": CU[:-1]}, f"cu_loss runs from 0 to 11 for {N} loss tokens"),
        ({"cu_loss": CU.float()}, "dtype torch.float32, expected [B+1] int32"),
        ({"kind": "reinforce"}, "kind is 'reinforce'. Fix: use one of grpo"),
        ({"aggregation": "mean"}, "aggregation is 'mean'. Fix: use one of token_mean"),
        ({"aggregation": "sequence_mean_token_sum_norm"}, "max_tokens None"),
        ({"max_tokens": 5}, "aggregation is 'token_mean' and max_tokens 5"),
        ({"kl_coef": 0.1}, "kl_coef is 0.1, but ref_logprobs is None"),
        ({"entropy_coef": 0.1}, "entropy_coef is 0.1, but entropy is None"),
        ({"correction": "tis"}, "correction is 'tis', but rollout_logprobs is None"),
        (
            {"correction": "is", "rollout_logprobs": torch.zeros(N)},
            "correction_weights: kind is 'is'. Fix: use one of tis, mis",
        ),
        (
            {"correction": "tis", "rollout_logprobs": torch.zeros(N), "correction_low": 3.0},
            "low is 3.0, high is 2.0",
        ),
        (
            {"ref_logprobs": torch.zeros(N), "kl_kind": "k4"},
            "kind is 'k4'. Fix: use one of k1, k2, k3",
        ),
        ({"total_tokens": 0}, f"total_tokens is 0, expected a finite number of {N} or more"),
        ({"total_tokens": -3}, "total_tokens is -3, expected"),
        ({"total_tokens": N - 1}, f"total_tokens is {N - 1}, expected"),
        ({"total_tokens": torch.tensor(N - 1)}, f"total_tokens is {N - 1}, expected"),
        ({"total_tokens": torch.ones(2)}, "total_tokens has shape [2], expected one number"),
        ({"total_tokens": float("nan")}, "total_tokens is nan, expected"),
        ({"total_tokens": math.inf}, "total_tokens is inf, expected"),
        ({"total_samples": B - 1}, f"total_samples is {B - 1}, expected"),
        ({"total_samples": "5"}, "total_samples is of type str, expected"),
        (
            {"max_tokens": -3, "aggregation": "sequence_mean_token_sum_norm"},
            "max_tokens is -3, expected a finite number of 1 or more",
        ),
        ({"max_tokens": 0, "aggregation": "sequence_mean_token_sum_norm"}, "max_tokens is 0"),
        ({"scale": float("nan")}, "scale is nan, expected a finite number of 0 or more"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"scale": math.inf}, "scale is inf"),
        ({"scale": torch.tensor(2.0)}, "scale is of type Tensor"),
        ({"clip_low": -0.2}, "clip_low is -0.2, expected a number of 0 or more"),
        ({"clip_high": -0.2}, "clip_high is -0.2"),
        ({"clip_high": float("nan")}, "clip_high is nan"),
        ({"kl_coef": float("nan"), "ref_logprobs": torch.zeros(N)}, "kl_coef is nan"),
        ({"kl_coef": -0.1, "ref_logprobs": torch.zeros(N)}, "kl_coef is -0.1"),
        ({"entropy_coef": math.inf, "entropy": torch.zeros(N)}, "entropy_coef is inf"),
        (
            {"correction": "tis", "rollout_logprobs": torch.zeros(N), "correction_high": math.nan},
            "high is nan",
        ),
        ({"dual_clip": 1.0}, "dual_clip is 1.0, expected a finite number above 1"),
        ({"dual_clip": math.nan}, "dual_clip is nan"),
        ({"dual_clip": 3.0, "kind": "cispo"}, "dual_clip is 3.0, but cispo has no minimum"),
        ({"logprobs": np.zeros(N)}, "logprobs is a numpy array, expected a tensor"),
        ({"logprobs": None}, "logprobs is None, expected a tensor"),
        ({"advantages": [0.0] * B}, "advantages is of type list, expected a tensor"),
        (
            {"per": "token"},
            f"advantages has shape [{B}], expected [{N}] (one per loss token)",
        ),
        ({"per": "turn"}, "per is 'turn'. Fix: use one of sample, token"),
        ({"cu_loss": tuple(CU.tolist())}, "cu_loss is of type tuple, expected a tensor"),
        ({"old_logprobs": [0.0] * N}, "old_logprobs is of type list, expected a tensor"),
        ({"kl_kind": "k1"}, "kl_kind is 'k1', but ref_logprobs is None"),
        ({"correction_high": 7.0}, "('token', 0.0, 7.0), but correction is None"),
        ({"correction_level": "sequence"}, "but correction is None"),
        ({"advantages": torch.tensor([0.0, math.inf, *[0.0] * (B - 2)])}, "advantages[1] is inf"),
        ({"old_logprobs": torch.full((N,), math.nan)}, "old_logprobs[0] is nan"),
    ],
)
def test_wrong_arguments_are_named(keywords, says):
    arguments = {"logprobs": torch.zeros(N), "advantages": torch.zeros(B), "cu_loss": CU}
    with pytest.raises(ArgumentError) as error:
        policy_loss(**(arguments | keywords))
    message = str(error.value)
    assert says in message and "Fix: " in message and "\n" not in message


def test_a_global_batch_without_a_loss_token_has_a_total_of_nothing():
    none = torch.zeros(0, requires_grad=True)
    out = policy_loss(none, torch.zeros(2), torch.zeros(3).int(), total_tokens=0, total_samples=2)
    assert float(out.loss.detach()) == 0.0
