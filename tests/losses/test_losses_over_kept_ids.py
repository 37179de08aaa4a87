"""An unchanged policy that was sampled with top-k and top-p: its ratio, KL, weights and gradients over the kept ids."""

import pytest
import torch

import mmpack as mp
from mmpack.contracts import gradient_fp32_bound
from mmpack.losses.policy.loss import VARIANTS
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.selected import selected_logprobs
from tests.support.kept_ids import restrict, support_of

transformers = pytest.importorskip("transformers")
stats = pytest.importorskip("scipy.stats")

COUNT, WIDTH, VOCAB = 1200, 32, 300
TEMPERATURE = 0.9
EXACT = 2e-5


class Rollout:
    """Ids drawn from what transformers' warpers leave of the model's logits, with the engine's own logprobs."""

    def __init__(self):
        torch.manual_seed(0)
        self.hidden = torch.randn(COUNT, WIDTH)
        self.weight = torch.randn(VOCAB, WIDTH) * 0.9
        logits = self.hidden.double() @ self.weight.double().T / TEMPERATURE
        kept = transformers.TopKLogitsWarper(50)(None, logits)
        kept = transformers.TopPLogitsWarper(0.8)(None, kept)
        p = kept.softmax(-1)
        self.targets = torch.multinomial(p, 1)[:, 0]
        self.logprobs = p.log().gather(1, self.targets[:, None])[:, 0].float()
        self.entropy = torch.from_numpy(stats.entropy(p.numpy(), axis=-1))
        self.support = support_of([row.isfinite().nonzero()[:, 0] for row in kept])
        # exp(log p - log q) of an id that was kept is the mass of all that were.
        self.mass = float((logits.softmax(-1) * kept.isfinite()).sum(-1).mean())
        self.cu_loss = torch.tensor([0, 200, 500, 800, COUNT], dtype=torch.int32)
        self.advantages = torch.tensor([1.0, -0.5, 0.25, -1.0])

    def scored(self, support=None, weight=None):
        weight = self.weight if weight is None else weight
        return linear_selected_logprobs(
            self.hidden,
            weight,
            self.targets,
            temperature=TEMPERATURE,
            entropy=True,
            support=support,
        )

    def loss(self, logprobs, **options):
        return mp.policy_loss(logprobs, self.advantages, self.cu_loss, **options)


@pytest.fixture(scope="module")
def rollout():
    return Rollout()


def test_the_ratio_is_1_over_the_kept_ids_and_the_kept_mass_without(rollout):
    assert 0.86 < rollout.mass < 0.94
    for support, ratio in ((rollout.support, 1.0), (None, rollout.mass)):
        lp, _ = rollout.scored(support)
        metrics = rollout.loss(lp, old_logprobs=rollout.logprobs).metrics
        assert float(metrics["ratio"]) == pytest.approx(ratio, abs=EXACT)
        logits = rollout.hidden @ rollout.weight.T
        lp = selected_logprobs(logits, rollout.targets, temperature=TEMPERATURE, support=support)
        metrics = rollout.loss(lp, old_logprobs=rollout.logprobs).metrics
        assert float(metrics["ratio"]) == pytest.approx(ratio, abs=EXACT)


def test_the_entropy_is_that_of_the_sampler(rollout):
    _, entropy = rollout.scored(rollout.support)
    assert (entropy - rollout.entropy).abs().max() <= 1e-4
    assert float(rollout.scored()[1].mean()) > float(entropy.mean()) + 0.2


@pytest.mark.parametrize("kind", VARIANTS)
def test_every_loss_sees_an_unchanged_policy(rollout, kind):
    """No clip, no KL, all weights 1; its gradient is that of float64 over the kept ids."""
    weight = rollout.weight.clone().requires_grad_()
    lp, entropy = rollout.scored(rollout.support, weight)
    out = rollout.loss(
        lp, kind=kind, old_logprobs=rollout.logprobs, rollout_logprobs=rollout.logprobs,
        correction="tis", entropy=entropy, entropy_coef=0.01,
    )  # fmt: skip
    assert float(out.metrics["ratio"]) == pytest.approx(1.0, abs=EXACT)
    assert float(out.metrics["clip_fraction"]) == 0.0
    assert float(out.metrics["kl_old"]) == pytest.approx(0.0, abs=1e-8)
    out.loss.backward()

    wide = rollout.weight.double().requires_grad_()
    logits = rollout.hidden.double() @ wide.T / TEMPERATURE
    full = torch.log_softmax(restrict(logits, rollout.support), -1)
    chosen = full.gather(1, rollout.targets[:, None])[:, 0]
    finite = full.clamp(min=-1e30)
    h = -(full.exp() * finite).sum(-1)
    per_token = rollout.advantages.double().repeat_interleave(rollout.cu_loss.diff().long())
    # At a ratio of 1 each kind's surrogate has the slope -A in the logprob.
    (-(per_token * chosen + 0.01 * h).mean()).backward()
    error = (weight.grad - wide.grad).abs().max()
    assert error <= 10 * gradient_fp32_bound(wide.grad.abs().max())


@pytest.mark.parametrize(("correction", "level"), [("tis", "sequence"), ("mis", "token")])
def test_weights_between_engine_and_trainer_are_1_only_over_the_kept_ids(
    rollout, correction, level
):
    found = []
    for support in (rollout.support, None):
        old, _ = rollout.scored(support)
        out = rollout.loss(
            old, rollout_logprobs=rollout.logprobs, correction=correction, correction_level=level,
            correction_low=0.5 if correction == "mis" else 0.0,
        )  # fmt: skip
        found.append(float(out.metrics["correction"]))
    assert found[0] == pytest.approx(1.0, abs=2e-3 if level == "sequence" else EXACT)
    assert found[1] < 0.96
