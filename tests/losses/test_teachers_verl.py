"""Losses from teachers beside verl's own: its logits processor, its policy loss and its aggregation, in float64."""

import pytest
import torch

import mmpack as mp
from mmpack.ops.logprobs.support import ScoredSupport

pytestmark = pytest.mark.verl

PROMPTS, RESPONSES, VOCAB, TOP = [2, 1, 3, 2], [3, 1, 7, 4], 40, 6
LENGTHS = [a + b for a, b in zip(PROMPTS, RESPONSES, strict=True)]
CU = torch.tensor([0, *RESPONSES]).cumsum(0).int()
N, B = sum(RESPONSES), len(RESPONSES)


class Problem:
    """Logits of whole sequences, one after the other; the rows that predict responses; a teacher's logprobs."""

    def __init__(self, seed=0, spread=1.0):
        torch.manual_seed(seed)
        count = sum(LENGTHS)
        self.teacher = (torch.randn(count, VOCAB, dtype=torch.float64) * 2).log_softmax(-1)
        self.logits = self.teacher + spread * torch.randn_like(self.teacher)
        self.logits.requires_grad_()
        self.ids = self.teacher.topk(TOP, -1).indices
        self.targets = torch.randint(0, VOCAB, (count,))
        ends = torch.tensor(LENGTHS).cumsum(0).tolist()
        rows = [range(end - n - 1, end - 1) for end, n in zip(ends, RESPONSES, strict=True)]
        self.rows = torch.tensor([row for own in rows for row in own])
        self.old = torch.randn(count, dtype=torch.float64) * 0.2
        self.advantages = torch.randn(N, dtype=torch.float64)

    @property
    def own(self):
        """Of the sampled ids, [all rows]."""
        return self.logits.log_softmax(-1).gather(1, self.targets[:, None])[:, 0]

    def lists(self):
        """The teacher's top ids of loss tokens, rising, with the sampled id where it is one more."""
        lists, scores = [], []
        for row in self.rows.tolist():
            ids = torch.cat([self.ids[row], self.targets[row : row + 1]]).unique()
            lists.append(ids)
            scores.append(self.teacher[row, ids])
        return offsets_of(lists), torch.cat(lists), torch.cat(scores)

    def top(self):
        ids = self.ids[self.rows].sort(-1).values
        scores = self.teacher[self.rows].gather(1, ids)
        return ScoredSupport(torch.arange(N + 1) * TOP, ids.flatten(), scores.flatten())

    def sampled(self):
        scores = self.teacher[self.rows].gather(1, self.targets[self.rows][:, None])[:, 0]
        return ScoredSupport(torch.arange(N + 1), self.targets[self.rows], scores)

    def data(self, **more):
        from tensordict import TensorDict

        prompts = nested([torch.zeros(n, dtype=torch.int64) for n in PROMPTS])
        of_responses = {
            "responses": torch.zeros(N, dtype=torch.int64),
            "response_mask": torch.ones(N),
            "old_log_probs": self.own.detach()[self.rows] + self.old[self.rows],
            "advantages": self.advantages,
        }
        tensors = {name: nested(x.split(RESPONSES)) for name, x in of_responses.items()}
        tensors |= {name: nested(x.split(LENGTHS)) for name, x in more.items()}
        data = TensorDict({"prompts": prompts, **tensors}, batch_size=[B])
        totals = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}
        for name, value in totals.items():
            data.set_non_tensor(name, value)
        return data


def nested(parts):
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def offsets_of(lists):
    return torch.tensor([0, *map(len, lists)]).cumsum(0)


def configs(aggregation="token-mean", **options):
    from verl.workers.config import ActorConfig, DistillationConfig, DistillationLossConfig

    actor = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=aggregation
    )
    loss = DistillationLossConfig(**options)
    return actor, DistillationConfig(enabled=False, distillation_loss=loss)


def theirs(problem, actor, config, data):
    """verl's two calls: as logits processor where the loss reads top-k, and as the final loss."""
    from verl.trainer.distillation.losses import distillation_ppo_loss

    output = {"log_probs": problem.own}
    if config.distillation_loss.loss_settings.use_topk:
        given = {"student_logits": problem.logits[None], "data_format": "thd"}
        made = distillation_ppo_loss(actor, config, data=data, **given)
        output |= {name: x[0] for name, x in made.items()}
    return distillation_ppo_loss(actor, config, output, data)


def agrees(problem, got, want):
    grads = [torch.autograd.grad(x, problem.logits, retain_graph=True)[0] for x in (got, want)]
    assert float(got.detach()) == pytest.approx(float(want.detach()), rel=2e-6)
    peak = float(grads[1].abs().max())
    assert peak > 1e-4
    # verl's divergence is in float32, whatever comes in
    torch.testing.assert_close(*grads, rtol=0, atol=1e-6 * peak)


AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean_token_mean": "seq-mean-token-mean",
    "sequence_mean_token_sum": "seq-mean-token-sum",
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("clamps", [(None, None), (-10.0, 10.0), (-2.5, 0.3)])
@pytest.mark.parametrize("seed", range(2))
def test_forward_kl_over_top_k(aggregation, clamps, seed):
    problem = Problem(seed)
    actor, config = configs(
        AGGREGATIONS[aggregation],
        loss_mode="forward_kl_topk",
        use_policy_gradient=False,
        use_task_rewards=False,
        log_prob_min_clamp=clamps[0],
        loss_max_clamp=clamps[1],
    )
    data = problem.data(
        teacher_logprobs=problem.teacher.gather(1, problem.ids), teacher_ids=problem.ids
    )
    want, metrics = theirs(problem, actor, config, data)
    teachers = {"teacher": problem.top()}
    out = mp.ops.listed_logprobs(
        problem.logits, problem.targets[problem.rows], teachers, problem.rows
    )
    got = mp.distillation_loss(
        out.lists, teachers, CU, "forward_kl", "ignore", aggregation,
        min_logprob=clamps[0], max_divergence=clamps[1],
    )  # fmt: skip
    agrees(problem, got.loss, want)
    for ours, name in (("policy_mass", "student_mass"), ("teacher_mass", "teacher_mass")):
        mass = metrics[f"distillation/{name}"]
        assert float(got.metrics[f"teacher/{ours}"]) == pytest.approx(mass, rel=1e-6)


@pytest.mark.parametrize("spread", [1.0, 6.0])
@pytest.mark.parametrize("task", [False, True])
def test_k1_as_a_reward(spread, task):
    problem = Problem(3, spread)
    actor, config = configs(
        loss_mode="k1", use_policy_gradient=True, use_task_rewards=task, distillation_loss_coef=0.5
    )
    scores = problem.teacher.gather(1, problem.targets[:, None])
    want, _ = theirs(problem, actor, config, problem.data(teacher_logprobs=scores))
    targets = problem.targets[problem.rows]
    teachers = {"teacher": problem.sampled()}
    logprobs = mp.ops.listed_logprobs(problem.logits, targets, {}, problem.rows).targets
    advantages = mp.losses.teacher_advantages(logprobs, targets, teachers, max_advantage=10.0)
    old = logprobs.detach() + problem.old[problem.rows]
    options = {"kind": "ppo", "dual_clip": 3.0, "per": "token"}
    got = mp.policy_loss(logprobs, advantages, CU, old, **options).loss
    if task:
        got = 0.5 * got + mp.policy_loss(logprobs, problem.advantages, CU, old, **options).loss
    agrees(problem, got, want)
