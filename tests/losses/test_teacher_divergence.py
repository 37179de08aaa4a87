"""Divergences from teachers, in plain torch and as a kernel, against torch's kl_div, scipy and TRL, list by list."""

import functools

import numpy as np
import pytest
import torch
from support.kernels import each_backend

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.losses.distillation.divergence import divergence_op
from mmpack.ops.logprobs.support import ScoredSupport
from tests.support.kept_ids import some
from tests.support.offline_compile import compiled_size, each_target
from tests.support.teachers import divergence, draw_lists, scored, tokens_of

CASES = [
    (kind, tail)
    for kind in ("forward_kl", "reverse_kl", "jsd")
    for tail in ("bucket", "renormalize", "ignore")
    if (kind, tail) != ("reverse_kl", "ignore")
]
each_case = pytest.mark.parametrize(("kind", "tail"), CASES)
NONE = -float("inf")


def problem(device="cpu", count=40, vocab=200, longest=100, spread=2.0, empty=0.2):
    """The policy's logprobs [M] in float32, and a teacher beside it: lists of none to a hundred ids."""
    if torch.device(device).type == "cuda":
        count = 700
    teacher = torch.randn(count, vocab) * spread
    lists = draw_lists(count, vocab, longest, empty)
    own = scored(lists, teacher + torch.randn(count, vocab)).logprobs
    return own.to(device), scored(lists, teacher).to(device)


@each_backend
@each_case
@pytest.mark.parametrize(("spread", "beta"), [(0.1, 0.5), (8.0, 0.1)])
def test_values_masses_and_gradients(device, kind, tail, spread, beta):
    logprobs, teacher = problem(device, spread=spread)
    leaf, wide = logprobs.clone().requires_grad_(), logprobs.double().requires_grad_()
    got = mp.losses.teacher_divergence(leaf, teacher, kind, tail, beta=beta)
    want = divergence(wide, teacher, kind, tail, beta)
    if (kind, tail) == ("forward_kl", "ignore"):
        want = want.clamp(min=0)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    assert (got >= -1e-12).all() and (got[teacher.offsets.diff() == 0] == 0).all()
    up = torch.randn(got.shape, dtype=torch.float64, device=device)
    got.backward(up)
    want.backward(up)
    assert leaf.grad.dtype == torch.float32
    assert (leaf.grad - wide.grad).abs().max() <= 1e-6 * wide.grad.abs().max()
    masses = divergence_op(logprobs, teacher.logprobs, teacher.offsets, kind, tail, beta, NONE)[1]
    for mass, column in zip(masses, (logprobs, teacher.logprobs), strict=True):
        sums = torch.zeros(len(got), dtype=torch.float64, device=device)
        sums.index_add_(0, tokens_of(teacher), column.double().exp())
        torch.testing.assert_close(mass, sums, rtol=1e-12, atol=0)


@each_case
def test_gradcheck(kind, tail):
    logprobs, teacher = problem(count=9, vocab=20, longest=6)
    leaf = (logprobs.double() - 0.1).requires_grad_()
    run = functools.partial(
        mp.losses.teacher_divergence, teacher=teacher, kind=kind, tail=tail, min_logprob=-4.0
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
            got = mp.losses.teacher_divergence(a.flatten(), teacher, kind, tail)
            # the bucket's least mass of 1e-7 on both sides
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-9 if tail == "bucket" else 1e-14)


def top(logits, k):
    """The likeliest ids of each row, rising, [N, k]."""
    return logits.topk(k, -1).indices.sort(-1).values


def both(student, teacher, ids):
    """The student's logprobs at ids [N, k] on the graph, and the teacher's as lists."""
    count, k = ids.shape
    lists = ScoredSupport(
        torch.arange(count + 1) * k, ids.flatten(), teacher.log_softmax(-1).gather(1, ids).flatten()
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


KIND_OF_BETA = {0.0: "forward_kl", 0.3: "jsd", 1.0: "reverse_kl"}


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
    got = mp.losses.teacher_divergence(own, lists, KIND_OF_BETA[beta], tail, **options)
    agrees(got, want, student, 1e-8)


@each_case
def test_a_list_of_probability_1(kind, tail):
    """All of the mass is on the list, as far as float32 says: the bucket holds its least."""
    sure = ScoredSupport(torch.tensor([0, 1]), torch.tensor([3]), torch.tensor([0.0]))
    for own in (0.0, 5e-8, -1e-8, -3.0):
        leaf = torch.tensor([own], requires_grad=True)
        out = mp.losses.teacher_divergence(leaf, sure, kind, tail)
        out.backward(torch.ones(1, dtype=torch.float64))
        assert out.isfinite() and leaf.grad.isfinite()
        assert (float(out.detach()) > 0.02) == (own == -3.0 and tail != "renormalize")
        if (kind, tail) == ("forward_kl", "bucket") and own > -1.0:
            assert float(leaf.grad) == -1.0  # the bucket's least mass passes no gradient on


@each_backend
def test_impossible_ids_and_nan(device):
    low = float("-inf")
    teacher = ScoredSupport(
        torch.tensor([0, 2, 4]), torch.tensor([1, 2, 1, 2]), torch.tensor([-0.5, -1.5, -0.5, low])
    ).to(device)
    own = torch.tensor([-0.5, low, -0.5, -2.0], device=device, requires_grad=True)
    forward = mp.losses.teacher_divergence(own, teacher, "forward_kl")
    assert forward[0] == torch.inf and forward[1].isfinite()
    reverse = mp.losses.teacher_divergence(own, teacher, "reverse_kl")
    assert reverse[0].isfinite() and reverse[1] == torch.inf
    both = mp.losses.teacher_divergence(own, teacher, "jsd")
    assert both.isfinite().all()
    both.sum().backward()
    assert own.grad.isfinite().all()
    for kind, tail in CASES:
        leaf = torch.tensor([-0.5, -1.0, torch.nan, -2.0], device=device, requires_grad=True)
        out = mp.losses.teacher_divergence(leaf, teacher, kind, tail)
        assert out.isnan().tolist() == [False, True]
        out.backward(torch.tensor([1.0, 0.0], dtype=torch.float64, device=device))
        assert leaf.grad.isfinite().all()


@each_backend
def test_clamps(device):
    logprobs, teacher = problem(device, spread=8.0)
    lifted = ScoredSupport(teacher.offsets, teacher.ids, teacher.logprobs.clamp(min=-6.0))
    wide = logprobs.double().requires_grad_()
    want = divergence(wide.clamp(min=-6.0), lifted, "forward_kl", "ignore").clamp(0, 0.02)
    leaf = logprobs.clone().requires_grad_()
    got = mp.losses.teacher_divergence(
        leaf, teacher, "forward_kl", "ignore", min_logprob=-6.0, max_divergence=0.02
    )
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-5, atol=1e-8)
    assert (got == 0.02).any() and (got == 0).any() and (leaf.grad == 0).any()


@each_backend
@each_case
def test_bits_do_not_depend_on_the_batch(device, kind, tail):
    logprobs, teacher = problem(device)
    count, places = len(teacher), torch.arange(len(teacher.ids), device=device)

    def run(order):
        own = some(ScoredSupport(teacher.offsets, places, logprobs), order)
        part = ScoredSupport(own.offsets, teacher.ids[own.ids], teacher.logprobs[own.ids])
        leaf = logprobs[own.ids].requires_grad_()
        out = mp.losses.teacher_divergence(leaf, part, kind, tail)
        out.sum().backward()
        return out.detach(), own.ids, leaf.grad

    whole, _, grad = run(torch.arange(count))
    order = torch.randperm(count)[: count // 2 + 1]
    out, ids, part = run(order)
    assert torch.equal(out, whole[order.to(device)]) and torch.equal(part, grad[ids])


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(device, dtype):
    logprobs, teacher = problem(device)
    leaf = logprobs.to(dtype).requires_grad_()
    wide = leaf.detach().double().requires_grad_()
    out, want = (mp.losses.teacher_divergence(x, teacher) for x in (leaf, wide))
    assert torch.equal(out, want)
    out.sum().backward()
    want.sum().backward()
    assert leaf.grad.dtype == dtype
    torch.testing.assert_close(leaf.grad, wide.grad.to(dtype), rtol=1e-2, atol=1e-3)


@each_backend
def test_offsets_beyond_the_ids_are_not_followed(device):
    own, teacher = problem(device)
    wild = teacher.offsets.clone()
    wild[3:] += len(own)
    values, *_ = divergence_op(own, teacher.logprobs, wild, "forward_kl", "bucket", 0.5, NONE)
    assert torch.equal(values[4:], torch.zeros_like(values[4:]))


@each_backend
@pytest.mark.parametrize("offsets", [[0], [0, 0, 0]])
def test_no_list_and_no_token(device, offsets):
    none, leaf = torch.zeros(2, 0, device=device)
    offsets, ids = torch.tensor(offsets, device=device), none.long()
    leaf.requires_grad_()
    for kind, tail in CASES:
        out = mp.losses.teacher_divergence(leaf, ScoredSupport(offsets, ids, none), kind, tail)
        assert out.shape == (len(offsets) - 1,) and not out.any()
        out.sum().backward()


@each_backend
def test_registered_op_obeys_the_rules_of_torch(device):
    logprobs, teacher = problem(device, count=7)
    arguments = logprobs, teacher.logprobs, teacher.offsets, "jsd", "bucket", 0.5, -10.0
    torch.library.opcheck(divergence_op, arguments)


def test_a_second_derivative_is_refused():
    logprobs, teacher = problem(count=5)
    out = mp.losses.teacher_divergence(logprobs.requires_grad_(), teacher)
    with pytest.raises(ArgumentError, match="a second derivative"):
        torch.autograd.grad(out.sum(), logprobs, create_graph=True)


def pair(ids, probability):
    """Nothing of the first token, two ids of the second."""
    logprobs = torch.tensor([probability, probability]).log()
    return ScoredSupport(torch.tensor([0, 0, 2]), torch.tensor(ids), logprobs)


def test_lists_need_not_rise():
    own = torch.tensor([-1.0, -2.0])
    falling, rising = pair([7, 3], 0.4), pair([3, 7], 0.4)
    out = mp.losses.teacher_divergence(own, falling)
    assert torch.equal(out, mp.losses.teacher_divergence(own.flip(0), rising)) and out[1] > 0


@pytest.mark.parametrize(
    ("teacher", "says"),
    [
        (pair([3, 3], 0.4), "list of loss token 1 in teacher has id 3 twice"),
        (pair([7, 3], 0.9), "list of loss token 1 in teacher holds 1.8 of prob"),
        (pair([7, 3], float("nan")), r"teacher.logprobs\[0\] is nan"),
    ],
)
def test_lists_that_are_no_distribution(teacher, says):
    with pytest.raises(ArgumentError, match=says):
        mp.losses.teacher_divergence(-torch.ones(2), teacher)


SIGNATURE = {
    **dict.fromkeys(("logprobs", "teacher", "slopes"), "*fp32"),
    "offsets": "*i64",
    **dict.fromkeys(("values", "masses"), "*fp64"),
    **dict.fromkeys(("count", "num_entries"), "i32"),
    **dict.fromkeys(("least", "least_rest", "beta", "log_beta", "log_rest"), "fp64"),
}


@pytest.mark.compile
@each_target
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("tail", ["bucket", "renormalize", "ignore"])
def test_the_kernel_is_compiled(target, kind, tail):
    from mmpack.losses.distillation import triton as m

    constants = {"KIND": kind, "TAIL": tail, "LANES": m.LANES}
    for dtype in ("fp32", "bf16"):
        signature = SIGNATURE | {"logprobs": f"*{dtype}"}
        assert compiled_size(m.divergence_kernel, signature, constants, target, num_warps=1) > 0


def on_gpu(count=3000, vocab=500, longest=300):
    teacher = torch.randn(count, vocab) * 2
    lists = draw_lists(count, vocab, longest, 0.2)
    own = scored(lists, teacher + torch.randn(count, vocab)).logprobs
    return own.cuda(), scored(lists, teacher).to("cuda")


@pytest.mark.gpu
def test_never_waits_and_replays_as_a_graph():
    own, teacher = on_gpu()
    targets = torch.randint(0, 500, (3000,), device="cuda")
    sampled = ScoredSupport(
        torch.arange(3001, device="cuda"), targets, -torch.rand(3000, device="cuda")
    )
    cu_loss = torch.tensor([0, 1000, 3000], dtype=torch.int32, device="cuda")
    mask = torch.rand(3000, device="cuda")
    leaf = own.clone().requires_grad_()
    logprobs = (-torch.rand(3000, device="cuda")).requires_grad_()

    def run():
        distilled = mp.distillation_loss(
            {"7B": leaf}, {"7B": teacher}, cu_loss, "jsd",
            weights={"7B": 0.5}, token_weights=mask, max_divergence=5.0,
        )  # fmt: skip
        advantages = mp.losses.teacher_advantages(
            logprobs, targets, {"7B": sampled}, max_advantage=1.0
        )
        reference = mp.losses.teacher_logprobs(sampled, targets, otherwise=logprobs)
        policy = mp.policy_loss(
            logprobs, advantages, cu_loss, ref_logprobs=reference, kl_coef=0.1, per="token"
        )
        loss = distilled.loss + policy.loss
        grads = torch.autograd.grad(loss, (leaf, logprobs))
        return [loss.detach(), *distilled.metrics.values(), *grads]

    expected = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for x in got:
        x.fill_(torch.nan)
    graph.replay()
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_a_list_without_its_target_gives_nan():
    teacher = ScoredSupport(
        torch.tensor([0, 1, 1, 2]), torch.tensor([3, 4]), torch.tensor([-0.5, -1.0])
    ).to("cuda")
    targets = torch.tensor([3, 5, 6], device="cuda")
    found = mp.losses.teacher_logprobs(teacher, targets, otherwise=torch.zeros(3, device="cuda"))
    assert found.tolist()[:2] == [-0.5, 0.0] and found[2].isnan()
    logprobs = torch.zeros(3, device="cuda")
    advantages = mp.losses.teacher_advantages(logprobs, targets, {"7B": teacher})
    assert advantages.tolist()[:2] == [-0.5, 0.0] and advantages[2].isnan()
