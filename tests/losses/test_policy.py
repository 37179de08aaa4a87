"""policy_loss against TRL's own GRPO loss on padded rectangles, and its totals over micro-batches, in float64."""

from collections import defaultdict
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmpack.errors import ArgumentError
from mmpack.losses.aggregate import Aggregation
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
    c, loss_type, level="token", low=0.2, high=0.2, beta=0.0, max_tokens=WIDTH, total=N, delta=None
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
        use_vllm=False,
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
        "importance_sampling_ratio": None,
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
@pytest.mark.parametrize(("spread", "seed"), [(1e-4, 0), (0.3, 1), (2.0, 2)])
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


@pytest.mark.parametrize("kind", ["grpo", "ppo", "dapo", "gspo"])
def test_dual_clip_against_the_delta_of_trl(kind):
    ours, theirs = CASES[kind]
    c = columns(0.9, 0)
    c.lp[-12:] += 0.2
    c.adv[-1] = -1.0  # of the longest sample: something is cut
    options = {"grpo": 1.3, "ppo": 1.5, "dapo": 3.0, "gspo": 1.05}
    loss, grad, metrics = run(c, kind=kind, dual_clip=options[kind], **ours)
    want, want_grad, _ = trl_loss(c, delta=options[kind], **theirs)
    assert float(loss) == pytest.approx(float(want), rel=1e-7)
    torch.testing.assert_close(grad.double(), want_grad, rtol=2e-6, atol=1e-9)
    assert float(metrics["dual_clip_fraction"]) > 0


def test_the_kl_term_is_that_of_trl():
    c = columns()
    with_kl, _, metrics = run(c, ref_logprobs=c.ref, kl_coef=0.7)
    want, _, want_metrics = trl_loss(c, "bnpo", beta=0.7)
    assert float(with_kl) == pytest.approx(float(want), abs=2e-6)
    assert float(metrics["kl_ref"]) == pytest.approx(want_metrics["kl"][0], abs=1e-7)


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


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=7),
    st.sampled_from(list(VARIANTS)),
    st.sampled_from(get_args(Aggregation)),
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


def test_a_global_batch_without_a_loss_token_has_a_total_of_nothing():
    none = torch.zeros(0, requires_grad=True)
    out = policy_loss(none, torch.zeros(2), torch.zeros(3).int(), total_tokens=0, total_samples=2)
    assert float(out.loss.detach()) == 0.0
