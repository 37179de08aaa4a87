"""mmpack::policy_loss, in plain torch and as a kernel, against float64 autograd of the papers' formulas."""

from types import SimpleNamespace

import pytest
import torch
from support.kernels import each_backend, poison_outputs
from support.policy_oracle import CASES, check, columns, offsets, oracle, run

import mmpack as mp
from mmpack.losses.policy.loss import VARIANTS

SMALL = [3, 0, 300, 1, 12, 0]
LARGE = [1500, 0, 16384, 1, 255, 256, 257, 3000]


@each_backend
@pytest.mark.parametrize("case", CASES)
def test_variants(device, case):
    check(columns(SMALL), device, **CASES[case])


@each_backend
@pytest.mark.parametrize(
    ("kind", "missing"), [("grpo", "old"), ("gspo", "old"), ("grpo", "ref"), ("gspo", "rollout")]
)
def test_columns_that_are_not_given(device, kind, missing):
    c = columns(SMALL)
    setattr(c, missing, None)
    corrected = {} if missing == "rollout" else {"correction": "tis", "level": "sequence"}
    check(c, device, kind=kind, **corrected)


@each_backend
@pytest.mark.parametrize(
    ("total", "aggregation"),
    [(377.5, "token_mean"), (torch.tensor([350.5]), "sequence_mean_token_mean")],
)
def test_totals(device, aggregation, total):
    on = total.to(device) if isinstance(total, torch.Tensor) else total
    check(columns(SMALL), device, total=on, aggregation=aggregation)


@pytest.mark.gpu
@pytest.mark.parametrize("total", [torch.tensor(0), torch.tensor([0.25]), torch.tensor(-3)])
def test_totals_on_a_gpu_count_as_one_at_least(device, total):
    check(columns(SMALL), device, total=total.to(device))


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(device, dtype):
    c = columns(SMALL, dtype=dtype)
    c.adv = c.adv.double()
    if dtype == torch.float64:
        check(c, device, kl_coef=0.1, correction="tis")
        return
    loss, grad, _, _ = run(c, device, kl_coef=0.1)
    want = oracle(c, kl_coef=0.1)
    assert float(loss) == pytest.approx(float(want[0]), rel=1e-6)
    assert grad.dtype == dtype
    error = (grad.double() - want[1]).norm() / want[1].norm()
    assert error < 5e-3


@each_backend
def test_advantages_of_tokens(device):
    c = columns(SMALL)
    c.adv = torch.randn(sum(SMALL))
    check(c, device, kind="gspo", aggregation="sequence_mean_token_mean")


@each_backend
@pytest.mark.parametrize("spread", [0.0, 1e-7, 60.0])
@pytest.mark.parametrize("kind", VARIANTS)
def test_equal_and_far_policies(device, kind, spread):
    check(columns([3, 40, 7], spread), device, kind=kind, kl_coef=0.1, correction="tis")


@each_backend
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_loss_token(device, lengths):
    c = columns(lengths)
    loss, grad, _, metrics = run(c, device, kind="gspo", kl_coef=0.1)
    assert loss == 0 and grad.shape == (0,)
    assert all(value == 0 for value in metrics.values())


@each_backend
@pytest.mark.parametrize("behind", [True, False], ids=["old", "no old"])
@pytest.mark.parametrize("kind", VARIANTS)
def test_a_nan_reaches_the_loss_and_its_own_token_alone(device, kind, behind):
    """Of a logprob; other columns with one are refused where looking is free."""
    c = columns(SMALL)
    c.lp[5] = float("nan")
    c.old = c.old if behind else None
    loss, grad, _, _ = run(c, device, kind=kind)
    assert loss.isnan() and not torch.cat([grad[:5], grad[6:]]).isnan().any()
    if kind == "cispo":  # whose weight is the only one that a NaN does not stop
        assert grad[5].isnan()


@each_backend
@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_a_sample_in_any_company(device, kind):
    c = columns([5, 300, 0, 64, 1])
    options = {
        "kind": kind,
        "aggregation": "sequence_mean_token_mean",
        "total_samples": 9,
        "correction": "tis",
        "correction_level": "geometric",
        "kl_coef": 0.1,
    }
    _, whole, _, _ = run(c, device, **options)
    starts = [0, *torch.tensor(c.lengths).cumsum(0).tolist()]
    names = ("lp", "old", "ref", "rollout", "entropy")
    for order in ([1], [3], [4, 1], [3, 0, 2, 1, 4], [1] * 9):
        chosen = [torch.arange(starts[b], starts[b + 1]) for b in order]
        picked = {name: getattr(c, name)[torch.cat(chosen)] for name in names}
        part = SimpleNamespace(lengths=[c.lengths[b] for b in order], adv=c.adv[order], **picked)
        _, grad, _, _ = run(part, device, **options)
        assert torch.equal(grad, whole[torch.cat(chosen)])


@each_backend
def test_outputs_are_written_whole_and_twice_the_same(device, monkeypatch):
    poison_outputs(monkeypatch, device)
    c = columns(SMALL)
    options = {"kl_coef": 0.1, "entropy_coef": 0.1, "correction": "mis"}
    first = run(c, device, **options)
    again = run(c, device, **options)
    for a, b in ((first[0], again[0]), (first[1], again[1]), (first[2].grad, again[2].grad)):
        assert a.isfinite().all() and torch.equal(a, b)
    assert first[3] == again[3]


@each_backend
def test_opcheck(device):
    from mmpack.losses.policy.loss import policy_loss_op

    c = columns([3, 0, 5])
    lp, entropy, adv, old, ref, rollout = (
        x.to(device) for x in (c.lp, c.entropy, c.adv, c.old, c.ref, c.rollout)
    )
    cu = offsets(c.lengths, device)
    texts = (3.0, "k3", 0.1, 0.2, "tis", "sequence", 0.0, 2.0)
    arguments = (lp, entropy, adv, cu, old, ref, rollout, None, 1.0, True, "gspo", 0.8, 1.2, *texts)
    torch.library.opcheck(policy_loss_op, arguments)


@each_backend
def test_compile(device):
    c = columns([3, 0, 5])
    adv, old, ref = (x.to(device) for x in (c.adv, c.old, c.ref))
    cu = offsets(c.lengths, device)

    def step(lp, total):
        out = mp.policy_loss(lp * 1.5, adv, cu, old, ref, kl_coef=0.1, total_tokens=total)
        return out.loss, out.metrics["ess"]

    total = torch.tensor(9, device=device)
    eager, compiled = (c.lp.to(device).clone().requires_grad_() for _ in range(2))
    loss, ess = step(eager, total)
    loss.backward()
    fast = torch.compile(step, fullgraph=True, backend="aot_eager")
    loss_again, ess_again = fast(compiled, total)
    loss_again.backward()
    assert torch.equal(loss, loss_again) and torch.equal(ess, ess_again)
    assert torch.equal(eager.grad, compiled.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["grpo", "gspo", "gspo mis sequence", "everything"])
@pytest.mark.parametrize("lengths", [LARGE, [32] * 4096, [100] * 700, [131072]])
def test_large(device, case, lengths):
    check(columns(lengths, spread=0.02), device, **CASES[case])


@pytest.mark.gpu
def test_cuda_graph(device):
    c, other = columns(LARGE), columns(LARGE, seed=1)
    adv, old = c.adv.cuda(), c.old.cuda()
    cu = offsets(LARGE, "cuda")
    lp = c.lp.cuda().requires_grad_()

    def step():
        out = mp.policy_loss(lp, adv, cu, old, kind="gspo")
        return out.loss.detach(), *torch.autograd.grad(out.loss, lp), out.metrics["ess"]

    step()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for values in (other.lp, c.lp, other.lp):
        with torch.no_grad():
            lp.copy_(values)
        graph.replay()
        for x, y in zip(captured, step(), strict=True):
            assert torch.equal(x, y)
