"""Logprobs of lists on a GPU: a real vocabulary, no waiting, CUDA graphs, and more ids than tiles take at once."""

import pytest
import torch

import mmpack as mp
from mmpack.contracts import TOLERANCES, linear_logprob_bound
from tests.support.logprob_oracle import linear_problem
from tests.support.teachers import (
    dotted,
    draw_lists,
    from_hidden,
    named,
    step,
    tokens_of,
    ups,
)

pytestmark = pytest.mark.gpu

STORED = 1 << 40  # a budget that fits anything


def problem(dtype=torch.bfloat16, num_rows=700, width=256, vocab=32_003, count=900):
    *factors, targets, rows, unread = linear_problem(num_rows, width, vocab, count, dtype, 0.1)
    lists = {"7B": draw_lists(count, vocab, 200, 0.1), "32B": draw_lists(count, vocab, 30, 0.8)}
    lists = {name: own.to("cuda") for name, own in lists.items()}
    factors = [x.cuda() for x in factors]
    return factors, targets.cuda(), rows.cuda(), lists, unread.cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("budget", [None, STORED])
def test_values_and_gradients_hold_the_contract(dtype, budget, no_tf32):
    factors, targets, rows, lists, unread = problem(dtype)
    options = {"temperature": 0.8, "softcap": 30.0, "memory_budget": budget}
    got, grads, up = step(factors, targets, rows, lists, **options)
    want, wide, peak = from_hidden(factors, targets, rows, lists, 0.8, 30.0)
    for name, x in got.items():
        assert (x - want[name]).abs().max() <= linear_logprob_bound(peak), name
    dotted(want, up).backward()
    limit = 1e-5 if dtype == torch.float32 else TOLERANCES["gradient_bf16"].value
    for i, (a, b) in enumerate(zip(grads, wide, strict=True)):
        keep = ~unread if i == 0 else slice(None)
        assert (a.double()[keep] - b.grad[keep]).norm() <= limit * b.grad[keep].norm(), i
    assert torch.equal(grads[0][unread], torch.zeros_like(grads[0][unread]))
    _, again, _ = step(factors, targets, rows, lists, up, **options)
    for a, b in zip(grads, again, strict=True):
        assert torch.equal(a, b)


def test_values_have_the_bits_of_selected_logprobs():
    factors, targets, rows, lists, _ = problem()
    hidden, weight, bias = factors
    out = mp.linear_listed_logprobs(hidden, weight, targets, lists, rows, bias, 0.8)
    alone = mp.linear_selected_logprobs(hidden, weight, targets, rows, bias, 0.8)
    assert torch.equal(out.targets, alone)
    for name, own in lists.items():
        read = rows[tokens_of(own)]
        wanted = mp.linear_selected_logprobs(hidden, weight, own.ids, read, bias, 0.8)
        assert torch.equal(out.lists[name], wanted)


@pytest.mark.parametrize("source", ["hidden", "logits"])
def test_never_waits_and_replays_as_a_graph(source):
    factors, targets, rows, lists, _ = problem()
    distinct, inverse = rows.unique(return_inverse=True)
    known = {"rows_unique": distinct, "row_inverse": inverse}
    if source == "logits":
        factors = [torch.randn(700, 32_003, device="cuda")]
    leaves = [x.clone().requires_grad_() for x in factors]

    def values():
        if source == "logits":
            return named(mp.listed_logprobs(leaves[0], targets, lists, rows, **known))
        hidden, weight, bias = leaves
        out = mp.linear_listed_logprobs(
            hidden, weight, targets, lists, rows, bias, entropy=True, **known
        )
        return named(out)

    up = ups(values())

    def run():
        found = values()
        grads = torch.autograd.grad(dotted(found, up), leaves)
        return [*(x.detach() for x in found.values()), *grads]

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


def test_lists_of_thousands_of_ids():
    """As many ids per token as a quarter of the vocabulary has."""
    hidden = torch.randn(60, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(8_000, 128, device="cuda", dtype=torch.bfloat16) * 0.1
    bias = torch.randn(8_000, device="cuda", dtype=torch.bfloat16)
    targets, rows = (torch.arange(60, device="cuda") for _ in range(2))
    lists = {"all": draw_lists(60, 8_000, 2_000, 0.2).to("cuda")}
    got, grads, up = step([hidden, weight, bias], targets, rows, lists)
    want, wide, peak = from_hidden([hidden, weight, bias], targets, rows, lists)
    assert (got["all"] - want["all"]).abs().max() <= linear_logprob_bound(peak)
    dotted(want, up).backward()
    for a, b in zip(grads, wide, strict=True):
        error = (a.double() - b.grad).norm() / b.grad.norm()
        assert error <= TOLERANCES["gradient_bf16"].value


def test_compiles_as_one_graph():
    factors, targets, rows, lists, _ = problem()

    def loss(hidden, weight, bias):
        out = mp.linear_listed_logprobs(hidden, weight, targets, lists, rows, bias, entropy=True)
        return out.targets.sum() + out.lists["7B"].sum() + 0.1 * out.entropy.sum()

    gradients = []
    for run in (loss, torch.compile(loss, fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in factors]
        run(*leaves).backward()
        gradients.append([x.grad for x in leaves])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
