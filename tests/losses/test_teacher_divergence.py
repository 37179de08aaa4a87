"""Divergences from teachers against torch's kl_div, scipy and TRL's own functions, list by list."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.losses.distillation.call import Options
from mmpack.losses.distillation.torch import divergence as in_torch
from mmpack.ops.logprobs.support import ScoredSupport
from tests.support.kept_ids import some
from tests.support.teachers import divergence, draw_lists, scored, tokens_of

CASES = [
    (kind, tail)
    for kind in ("forward_kl", "reverse_kl", "jsd")
    for tail in ("bucket", "renormalize", "ignore")
    if (kind, tail) != ("reverse_kl", "ignore")
]
each_case = pytest.mark.parametrize(("kind", "tail"), CASES)


def problem(count=60, vocab=200, longest=40, spread=2.0, seed=0, empty=0.2):
    """The policy's logprobs [M] in float32, and a teacher beside it."""
    torch.manual_seed(seed)
    teacher = torch.randn(count, vocab) * spread
    policy = teacher + torch.randn(count, vocab)
    lists = draw_lists(count, vocab, longest, empty)
    return scored(lists, policy).logprobs, scored(lists, teacher)


@each_case
@pytest.mark.parametrize("spread", [0.1, 2.0, 8.0])
@pytest.mark.parametrize("beta", [0.5, 0.1])
def test_values_and_gradients(kind, tail, spread, beta):
    logprobs, teacher = problem(spread=spread)
    leaf, wide = logprobs.clone().requires_grad_(), logprobs.double().requires_grad_()
    got = mp.teacher_divergence(leaf, teacher, kind, tail, beta=beta)
    want = divergence(wide, teacher, kind, tail, beta)
    if (kind, tail) == ("forward_kl", "ignore"):
        want = want.clamp(min=0)
    assert got.dtype == torch.float64 and got.shape == (60,)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    assert (got >= -1e-12).all() and (got[teacher.offsets.diff() == 0] == 0).all()
    up = torch.randn(60, dtype=torch.float64)
    got.backward(up)
    want.backward(up)
    assert leaf.grad.dtype == torch.float32
    peak = wide.grad.abs().max()
    assert (leaf.grad - wide.grad).abs().max() <= 1e-6 * peak


@each_case
def test_gradcheck(kind, tail):
    logprobs, teacher = problem(count=9, vocab=20, longest=6)
    leaf = (logprobs.double() - 0.1).requires_grad_()
    run = functools.partial(
        mp.teacher_divergence, teacher=teacher, kind=kind, tail=tail, min_logprob=-4.0
    )
    assert torch.autograd.gradcheck(run, (leaf,))


def test_scipy_over_the_whole_vocabulary():
    stats = pytest.importorskip("scipy.stats")
    distance = pytest.importorskip("scipy.spatial.distance")
    a, b = torch.randn(2, 5, 30, dtype=torch.float64).log_softmax(-1)
    teacher = ScoredSupport(torch.arange(6) * 30, torch.arange(30).repeat(5), b.flatten())
    p, q = a.exp().numpy(), b.exp().numpy()
    wanted = {
        "forward_kl": stats.entropy(q, p, axis=-1),
        "reverse_kl": stats.entropy(p, q, axis=-1),
        "jsd": distance.jensenshannon(p, q, axis=-1) ** 2,
    }
    for kind, want in wanted.items():
        for tail in ("bucket", "renormalize"):
            got = mp.teacher_divergence(a.flatten(), teacher, kind, tail)
            # the bucket's least mass of 1e-7 on both sides
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-9 if tail == "bucket" else 1e-14)


def top(logits, k):
    """The likeliest ids of each row, rising, [N, k]."""
    return logits.topk(k, -1).indices.sort(-1).values


def both(student, teacher, ids):
    """The student's logprobs at ids [N, k] on the graph, and the teacher's as lists."""
    count, k = ids.shape
    lists = ScoredSupport(
        torch.arange(count + 1) * k,
        ids.flatten(),
        teacher.log_softmax(-1).gather(1, ids).flatten(),
    )
    return student.log_softmax(-1).gather(1, ids).flatten(), lists


def logits(count=24, vocab=50):
    torch.manual_seed(3)
    teacher = torch.randn(count, vocab, dtype=torch.float64) * 2
    return (teacher + torch.randn_like(teacher)).requires_grad_(), teacher


def agrees(values, want, student, rtol=1e-9):
    """Values and gradients to the student's logits."""
    torch.testing.assert_close(values, want, rtol=rtol, atol=1e-12)
    up = torch.randn(values.shape, dtype=torch.float64)
    grads = [torch.autograd.grad(x, student, up, retain_graph=True)[0] for x in (values, want)]
    torch.testing.assert_close(*grads, rtol=1e-7, atol=1e-10)


KIND_OF_BETA = {0.0: "forward_kl", 0.3: "jsd", 0.5: "jsd", 1.0: "reverse_kl"}


@pytest.mark.parametrize("beta", KIND_OF_BETA)
def test_trl_over_the_whole_vocabulary(beta):
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    student, teacher = logits()
    own, lists = both(student, teacher, torch.arange(50).expand(24, 50))
    want = gkd.GKDTrainer.generalized_jsd_loss(
        student[None], teacher[None], beta=beta, reduction="none"
    )
    options = {"beta": beta} if 0 < beta < 1 else {}
    got = mp.teacher_divergence(own, lists, KIND_OF_BETA[beta], "renormalize", **options)
    agrees(got, want[0].sum(-1), student)


@pytest.mark.parametrize("beta", KIND_OF_BETA)
@pytest.mark.parametrize("add_tail", [True, False])
@pytest.mark.parametrize("k", [1, 5])
def test_trl_over_top_k(beta, add_tail, k):
    """TRL takes the teacher's ids for the forward KL, the student's for the reverse, and both for the JSD."""
    trl = pytest.importorskip("trl.experimental.iw_opd.iw_opd_trainer")
    student, teacher = logits()
    want = trl.IWOPDTrainer.generalized_jsd_loss(
        student[None], teacher[None], beta=beta, reduction="none", top_k=k, add_tail=add_tail
    )[0].sum(-1)
    of_teacher, of_student = top(teacher, k), top(student.detach(), k)
    ids = [
        {0.0: a, 1.0: b}.get(beta, torch.cat([a, b]).unique())
        for a, b in zip(of_teacher, of_student, strict=True)
    ]
    offsets = torch.tensor([0, *map(len, ids)]).cumsum(0)
    rows, ids = torch.repeat_interleave(offsets.diff()), torch.cat(ids)
    own = student.log_softmax(-1)[rows, ids]
    lists = ScoredSupport(offsets, ids, teacher.log_softmax(-1)[rows, ids])
    tail = "bucket" if add_tail else "renormalize"
    options = {"beta": beta} if 0 < beta < 1 else {}
    got = mp.teacher_divergence(own, lists, KIND_OF_BETA[beta], tail, **options)
    agrees(got, want, student, 1e-8)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("add_tail", [True, False])
def test_trl_self_distillation(alpha, add_tail):
    sdpo = pytest.importorskip("trl.experimental.sdpo.loss_utils")
    student, teacher = logits()
    want = sdpo.compute_topk_self_distillation_loss(
        student,
        teacher,
        distillation_topk=6,
        distillation_alpha=alpha,
        distillation_add_tail=add_tail,
    )
    own, lists = both(student, teacher, top(student.detach(), 6))
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(alpha, "jsd")
    tail = "bucket" if add_tail else "renormalize"
    got = (
        mp.teacher_divergence(own, lists, kind, tail, beta=alpha or 0.5)
        if kind == "jsd"
        else (mp.teacher_divergence(own, lists, kind, tail))
    )
    agrees(got, want, student, 1e-8)


def test_a_policy_that_is_its_teacher_has_no_divergence():
    _, teacher = problem()
    for kind, tail in CASES:
        leaf = teacher.logprobs.clone().requires_grad_()
        out = mp.teacher_divergence(leaf, teacher, kind, tail)
        assert out.abs().max() <= 1e-12
        out.sum().backward()
        if kind != "forward_kl":  # that one's sum of derivatives is cancelled by the softmax
            assert leaf.grad.abs().max() <= 1e-6


@each_case
def test_a_list_of_probability_1(kind, tail):
    """All of the mass is on the list, as far as float32 says: the bucket holds its least."""
    sure = ScoredSupport(torch.tensor([0, 1]), torch.tensor([3]), torch.tensor([0.0]))
    for own in (0.0, 5e-8, -1e-8, -3.0):
        leaf = torch.tensor([own], requires_grad=True)
        out = mp.teacher_divergence(leaf, sure, kind, tail)
        out.backward(torch.ones(1, dtype=torch.float64))
        assert out.isfinite() and leaf.grad.isfinite()
        assert (float(out.detach()) > 0.02) == (own == -3.0 and tail != "renormalize")


def test_impossible_ids():
    low = float("-inf")
    teacher = ScoredSupport(
        torch.tensor([0, 2, 4]), torch.tensor([1, 2, 1, 2]), torch.tensor([-0.5, -1.5, -0.5, low])
    )
    own = torch.tensor([-0.5, low, -0.5, -2.0], requires_grad=True)
    forward = mp.teacher_divergence(own, teacher, "forward_kl")
    assert forward[0] == torch.inf and forward[1].isfinite()
    reverse = mp.teacher_divergence(own, teacher, "reverse_kl")
    assert reverse[0].isfinite() and reverse[1] == torch.inf
    both = mp.teacher_divergence(own, teacher, "jsd")
    assert both.isfinite().all()
    both.sum().backward()
    assert own.grad.isfinite().all()


def test_clamps():
    logprobs, teacher = problem(spread=8.0)
    lifted = ScoredSupport(teacher.offsets, teacher.ids, teacher.logprobs.clamp(min=-6.0))
    wide = logprobs.double().requires_grad_()
    want = divergence(wide.clamp(min=-6.0), lifted, "forward_kl", "ignore").clamp(0, 0.02)
    leaf = logprobs.clone().requires_grad_()
    got = mp.teacher_divergence(
        leaf, teacher, "forward_kl", "ignore", min_logprob=-6.0, max_divergence=0.02
    )
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-5, atol=1e-8)
    assert (got == 0.02).any() and (got == 0).any() and (leaf.grad == 0).any()


@settings(max_examples=20)
@given(count=st.integers(1, 40), case=st.sampled_from(CASES), seed=st.integers(0, 2**20))
def test_bits_do_not_depend_on_the_batch(count, case, seed):
    logprobs, teacher = problem(count=count, seed=seed)

    def run(order):
        own = some(ScoredSupport(teacher.offsets, torch.arange(len(teacher.ids)), logprobs), order)
        part = ScoredSupport(own.offsets, teacher.ids[own.ids], teacher.logprobs[own.ids])
        leaf = logprobs[own.ids].requires_grad_()
        out = mp.teacher_divergence(leaf, part, *case)
        out.sum().backward()
        return out.detach(), own.ids, leaf.grad

    whole, _, grad = run(torch.arange(count))
    for draw in range(5):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(draw))
        order = order[: count // 2 + 1]
        out, places, part = run(order)
        assert torch.equal(out, whole[order]) and torch.equal(part, grad[places])


def test_a_nan_stays_in_its_token():
    logprobs, teacher = problem()
    first = int(teacher.offsets.diff().argmax())
    logprobs[teacher.offsets[first]] = torch.nan
    for kind, tail in CASES:
        leaf = logprobs.clone().requires_grad_()
        out = mp.teacher_divergence(leaf, teacher, kind, tail)
        assert out.isnan().nonzero().flatten().tolist() == [first]
        up = torch.ones(len(out), dtype=torch.float64)
        up[first] = 0.0
        out.backward(up)
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    logprobs, teacher = problem()
    leaf = logprobs.to(dtype).requires_grad_()
    out = mp.teacher_divergence(leaf, teacher)
    wide = leaf.detach().double().requires_grad_()
    want = mp.teacher_divergence(wide, teacher)
    assert torch.equal(out, want) and out.dtype == torch.float64
    out.sum().backward()
    want.sum().backward()
    assert leaf.grad.dtype == dtype
    torch.testing.assert_close(leaf.grad, wide.grad.to(dtype), rtol=1e-2, atol=1e-3)


def test_registered_op_obeys_the_rules_of_torch():
    from mmpack.losses.distillation.autograd import divergence_op

    logprobs, teacher = problem(count=7)
    arguments = logprobs, teacher.logprobs, teacher.offsets, "jsd", "bucket", 0.5, -10.0
    torch.library.opcheck(divergence_op, arguments)


def test_compiles_as_one_graph():
    logprobs, teacher = problem()

    def loss(x):
        return mp.teacher_divergence(x * 1.5, teacher, "reverse_kl").sum()

    grads = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf = logprobs.clone().requires_grad_()
        run(leaf).backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_a_second_derivative_is_refused():
    logprobs, teacher = problem(count=5)
    out = mp.teacher_divergence(logprobs.requires_grad_(), teacher)
    with pytest.raises(ArgumentError, match="a second derivative"):
        torch.autograd.grad(out.sum(), logprobs, create_graph=True)


def test_no_loss_token():
    none = torch.zeros(0)
    teacher = ScoredSupport(
        torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), none
    )
    leaf = none.clone().requires_grad_()
    for kind, tail in CASES:
        out = mp.teacher_divergence(leaf, teacher, kind, tail)
        assert out.shape == (0,)
        out.sum().backward()


def pair(ids, probability):
    """Nothing of the first token, two ids of the second."""
    logprobs = torch.tensor([probability, probability]).log()
    return ScoredSupport(torch.tensor([0, 0, 2]), torch.tensor(ids), logprobs)


def test_lists_need_not_rise():
    own = torch.tensor([-1.0, -2.0])
    falling, rising = pair([7, 3], 0.4), pair([3, 7], 0.4)
    out = mp.teacher_divergence(own, falling)
    assert torch.equal(out, mp.teacher_divergence(own.flip(0), rising)) and out[1] > 0


def test_wrong_arguments_are_named():
    logprobs, teacher = problem(count=5)
    offsets, ids, scores = teacher.offsets, teacher.ids, teacher.logprobs
    nan = scores.clone()
    nan[1] = torch.nan
    for keywords, says in (
        ({"logprobs": logprobs[1:]}, f"logprobs has shape [{len(ids) - 1}]"),
        ({"logprobs": logprobs.tolist()}, "logprobs is of type list"),
        ({"logprobs": ids}, "dtype torch.int64"),
        ({"teacher": (offsets, ids)}, "teacher is of type tuple, expected a ScoredSupport"),
        ({"teacher": ScoredSupport(offsets, ids, nan)}, "teacher.logprobs[1] is nan"),
        (
            {"teacher": ScoredSupport(offsets, ids, scores.exp())},
            "expected the log of a probability",
        ),
        ({"teacher": ScoredSupport(offsets[:-1], ids, scores)}, "teacher.offsets run from 0"),
        ({"teacher": ScoredSupport(offsets, ids, scores[1:])}, "teacher.logprobs has shape"),
        ({"logprobs": logprobs + 40}, "expected the log of a probability"),
        ({"teacher": pair([3, 3], 0.4)}, "list of loss token 1 in teacher has id 3 twice"),
        ({"teacher": pair([7, 3], 0.9)}, "list of loss token 1 in teacher holds 1.8 of prob"),
        ({"kind": "kl"}, "kind is 'kl'. Fix: use one of forward_kl, reverse_kl, jsd"),
        ({"tail": "drop"}, "tail is 'drop'. Fix: use one of bucket, renormalize, ignore"),
        ({"kind": "reverse_kl", "tail": "ignore"}, "lowers the loss by leaving"),
        ({"beta": 0.0}, "beta is 0.0"),
        ({"beta": 1}, "beta is 1"),
        ({"beta": float("nan")}, "beta is nan"),
        ({"min_logprob": 1.0}, "min_logprob is 1.0"),
        ({"max_divergence": 0.0}, "max_divergence is 0.0"),
    ):
        with pytest.raises(ArgumentError) as error:
            given = {"logprobs": logprobs, "teacher": teacher} | keywords
            if isinstance(given["teacher"], ScoredSupport) and len(given["teacher"].ids) == 2:
                given["logprobs"] = logprobs[:2]
            mp.teacher_divergence(**given)
        assert says in str(error.value) and "Fix: " in str(error.value), keywords


def test_masses():
    logprobs, teacher = problem()
    options = Options("jsd", "bucket", 0.5, -float("inf"))
    from mmpack.losses.distillation.call import Columns

    _, masses, _ = in_torch(Columns(logprobs, teacher.logprobs, teacher.offsets), options)
    tokens = tokens_of(teacher)
    for got, column in zip(masses, (logprobs, teacher.logprobs), strict=True):
        want = torch.zeros(60, dtype=torch.float64).index_add_(0, tokens, column.double().exp())
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
