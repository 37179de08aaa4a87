"""The loss from several teachers and the advantages of sampled tokens, against sums by hand and TRL's IW-OPD."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import mmpack as mp
from mmpack.losses.kl import kl_divergence
from mmpack.ops.logprobs.support import ScoredSupport
from tests.support.kept_ids import some
from tests.support.teachers import divergence, draw_lists, scored, tokens_of

LENGTHS = [4, 0, 9, 1, 6]
CU = torch.tensor([0, *LENGTHS]).cumsum(0).int()
N, B, VOCAB = sum(LENGTHS), len(LENGTHS), 90


def problem(seed=0):
    """Two teachers: one of all tokens, one of the first samples only."""
    torch.manual_seed(seed)
    logits = torch.randn(N, VOCAB) * 2
    everywhere, here = draw_lists(N, VOCAB, 12, 0.1), draw_lists(N, VOCAB, 6, 0.0)
    offsets = here.offsets.clamp(max=int(here.offsets[7]))
    here = ScoredSupport(offsets, here.ids[: int(offsets[-1])], here.ids)
    teachers = {
        "7B": scored(everywhere, logits + torch.randn(N, VOCAB)),
        "maths": scored(here, logits + torch.randn(N, VOCAB)),
    }
    full = logits.log_softmax(-1)
    logprobs = {name: full[tokens_of(own), own.ids] for name, own in teachers.items()}
    return logprobs, teachers


def leaves(logprobs, dtype=None):
    return {n: x.clone().to(dtype or x.dtype).requires_grad_() for n, x in logprobs.items()}


def by_hand(values, aggregation):
    """[N] to a number, sample by sample."""
    parts = values.split(LENGTHS)
    means = sum(x.mean() for x in parts if len(x))
    return {
        "token_mean": values.sum() / N,
        "sequence_mean_token_mean": means / B,
        "sequence_mean_token_sum": values.sum() / B,
    }[aggregation]


@pytest.mark.parametrize(
    ("kind", "tail", "aggregation"),
    [
        ("forward_kl", "bucket", "token_mean"),
        ("reverse_kl", "renormalize", "sequence_mean_token_mean"),
        ("jsd", "bucket", "sequence_mean_token_sum"),
    ],
)
def test_several_teachers(kind, tail, aggregation):
    logprobs, teachers = problem()
    weights, mask = {"7B": 0.5, "maths": 2.0, "code": 9.0}, torch.rand(N)
    ours, wide = leaves(logprobs), leaves(logprobs, torch.float64)
    out = mp.distillation_loss(
        ours, teachers, CU, kind, tail, aggregation,
        scale=3.0, beta=0.2, weights=weights, token_weights=mask,
    )  # fmt: skip
    values = [weights[n] * divergence(wide[n], teachers[n], kind, tail, 0.2) for n in teachers]
    want = 3.0 * by_hand(sum(values) * mask.double(), aggregation)
    assert out.loss.dtype == torch.float32
    assert float(out.loss.detach()) == pytest.approx(float(want.detach()), rel=1e-6)
    out.loss.backward()
    want.backward()
    for name, leaf in ours.items():
        assert (leaf.grad - wide[name].grad).abs().max() <= 1e-6 * wide[name].grad.abs().max()
    said = teachers["maths"].offsets.diff() > 0
    assert int(out.metrics["maths/tokens"]) == int(said.sum()) == 7
    exact = divergence(logprobs["maths"].double(), teachers["maths"], kind, tail, 0.2)
    assert float(out.metrics["maths/divergence"]) == pytest.approx(
        float(exact[said].mean()), rel=1e-6
    )
    mass = torch.zeros(N).index_add_(0, tokens_of(teachers["7B"]), teachers["7B"].logprobs.exp())
    said = teachers["7B"].offsets.diff() > 0
    assert float(out.metrics["7B/teacher_mass"]) == pytest.approx(
        float(mass[said].mean()), rel=1e-6
    )


def test_parts_of_a_batch_add_up_to_the_whole():
    logprobs, teachers = problem(1)
    whole = mp.distillation_loss(logprobs, teachers, CU)
    parts = 0.0
    for first, last in ((0, 2), (2, 5)):
        tokens = torch.arange(int(CU[first]), int(CU[last]))
        own, values = {}, {}
        for name, teacher in teachers.items():
            names = ScoredSupport(teacher.offsets, torch.arange(len(teacher.ids)), teacher.logprobs)
            at = some(names, tokens)
            own[name] = ScoredSupport(at.offsets, teacher.ids[at.ids], teacher.logprobs[at.ids])
            values[name] = logprobs[name][at.ids]
        cu = (CU[first : last + 1] - CU[first]).int()
        parts += float(mp.distillation_loss(values, own, cu, total_tokens=N).loss)
    assert parts == pytest.approx(float(whole.loss), rel=1e-6)


def test_teachers_that_say_nothing():
    empty = torch.zeros(0, dtype=torch.int64)
    none = ScoredSupport(torch.zeros(N + 1, dtype=torch.int64), empty, torch.zeros(0))
    leaf = torch.zeros(0, requires_grad=True)
    out = mp.distillation_loss({"a": leaf}, {"a": none}, CU)
    out.loss.backward()
    assert out.loss == 0 and leaf.grad.shape == (0,)
    assert {float(x) for x in out.metrics.values()} == {0.0}
    nobody = mp.distillation_loss({}, {}, CU, weights={"a": 1.0})
    assert nobody.loss == 0 and nobody.metrics == {}


def test_what_has_weight_0_is_left_out_even_where_it_is_infinite():
    low = float("-inf")
    teacher = ScoredSupport(
        torch.tensor([0, 2, 3]), torch.tensor([3, 4, 7]), torch.tensor([-0.5, low, -1.0])
    )
    cu = torch.tensor([0, 2], dtype=torch.int32)
    own = torch.tensor([low, -0.7, -0.2], requires_grad=True)
    for kind in ("forward_kl", "reverse_kl"):
        whole = mp.distillation_loss({"a": own}, {"a": teacher}, cu, kind)
        assert whole.loss == torch.inf
        mask = torch.tensor([0.0, 1.0])
        masked = mp.distillation_loss({"a": own}, {"a": teacher}, cu, kind, token_weights=mask)
        last = ScoredSupport(torch.tensor([0, 0, 1]), teacher.ids[2:], teacher.logprobs[2:])
        want = mp.distillation_loss({"a": own[2:]}, {"a": last}, cu, kind)
        assert torch.equal(masked.loss, want.loss) and want.loss > 0
        (grad,) = torch.autograd.grad(masked.loss, own)
        assert (grad[:2] == 0).all() and grad[2] != 0 and grad[2].isfinite()
        none = mp.distillation_loss({"a": own}, {"a": teacher}, cu, kind, weights={"a": 0.0})
        (grad,) = torch.autograd.grad(none.loss, own)
        assert none.loss == 0 and (grad == 0).all()
    logprobs, targets = torch.tensor([-1.0, -2.0]), torch.tensor([4, 7])
    for weight, want in ((0.0, [0.0, 0.0]), (2.0, [low, 2.0])):
        found = mp.losses.teacher_advantages(
            logprobs, targets, {"a": teacher}, weights={"a": weight}
        ).tolist()
        assert found == want


def test_teacher_logprobs_and_advantages():
    _, teachers = problem(2)
    targets = torch.tensor([own[-1] if len(own) else 0 for own in lists(teachers["maths"])])
    own = -torch.rand(N) * 3
    found = mp.losses.teacher_logprobs(teachers["maths"], targets)
    said = teachers["maths"].offsets.diff() > 0
    want = torch.stack([x[-1] for x in scores(teachers["maths"])[:7]])
    assert torch.equal(found[said], want) and found[~said].isnan().all()
    filled = mp.losses.teacher_logprobs(teachers["maths"], targets, otherwise=own.requires_grad_())
    assert torch.equal(filled[said], want) and torch.equal(filled[~said], own.detach()[~said])
    assert not filled.requires_grad
    assert (kl_divergence(own, filled)[~said] == 0).all()
    out = mp.losses.teacher_advantages(
        own, targets, {"maths": teachers["maths"]}, weights={"maths": 0.5}, max_advantage=1.0
    )
    gap = 0.5 * (want - own.detach()[said]).clamp(-1.0, 1.0)
    torch.testing.assert_close(out[said], gap)
    assert out.dtype == torch.float32 and not out.requires_grad
    assert torch.equal(out[~said], torch.zeros(N - 7))
    twice = mp.losses.teacher_advantages(
        own, targets, {"a": teachers["maths"], "b": teachers["maths"]}
    )
    torch.testing.assert_close(twice[said], 2 * (want - own.detach()[said]))


def lists(teacher):
    return [teacher.ids[a:b] for a, b in pairs(teacher)]


def scores(teacher):
    return [teacher.logprobs[a:b] for a, b in pairs(teacher)]


def pairs(teacher):
    return pairwise(teacher.offsets.tolist())


def test_the_advantages_are_those_of_trl():
    """IW-OPD with a gamma of 0: the sampled-token loss of on-policy distillation, weighed evenly."""
    trainer = pytest.importorskip("trl.experimental.iw_opd.iw_opd_trainer")
    torch.manual_seed(5)
    logits = torch.randn(1, N, VOCAB, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, VOCAB, (N,))
    given = (torch.randn(N, VOCAB)).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    like = SimpleNamespace(
        temperature=0.7, iw_opd_gamma=0.0, iw_opd_epsilon=1e-8,
        model=SimpleNamespace(training=True),
        _metrics={"train": {f"iw_opd/{x}": [] for x in (
            "mean_advantage", "mean_abs_advantage", "mean_weight", "min_weight", "max_weight"
        )}},
    )  # fmt: skip
    want = trainer.IWOPDTrainer._compute_iw_opd_loss(
        like, logits, targets[None], targets[None], given[None].double()
    )
    teacher = ScoredSupport(torch.arange(N + 1), targets, given)
    logprobs = mp.selected_logprobs(logits[0], targets, temperature=0.7)
    advantages = mp.losses.teacher_advantages(logprobs, targets, {"teacher": teacher})
    out = mp.policy_loss(logprobs, advantages, CU, kind="ppo", per="token")
    grads = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (out.loss, want)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-9)
