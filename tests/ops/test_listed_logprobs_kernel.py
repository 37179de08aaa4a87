"""Logprobs of lists of ids on Triton kernels, against torch.log_softmax in float64 and selected logprobs' bits."""

import pytest
import torch
from support.ranks import spawned
from torch import distributed

from mmpack.contracts import TOLERANCES, linear_logprob_bound, selected_logprob_bound
from mmpack.ops.logprobs.linear import blocks
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.listed import linear_listed_logprobs, listed_logprobs
from tests.support.kept_ids import some
from tests.support.logprob_oracle import linear_problem
from tests.support.teachers import (
    dotted,
    draw_lists,
    from_hidden,
    named,
    of_logits,
    step,
    tokens_of,
    ups,
)

pytest.importorskip("triton")

pytestmark = pytest.mark.kernel

STORED = 1 << 40  # a budget that fits anything


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, device):
    """Several blocks of rows and chunks of columns, so that their seams are in the tests."""
    if device.type == "cpu":
        monkeypatch.setattr(blocks, "MIN_COLUMNS", 128)
        monkeypatch.setattr(blocks, "MAX_BLOCKS", 2)
    monkeypatch.setattr(blocks, "MIN_ROWS", 1)


def problem(device, dtype=torch.bfloat16, num_rows=40, width=40, vocab=203, count=50):
    """Rows that repeat, rows that nobody reads and that hold NaN, two teachers, many lists without ids."""
    if device.type == "cuda":
        num_rows, width, vocab, count = num_rows * 9, width * 7, vocab * 21, count * 9
    *factors, targets, rows, unread = linear_problem(num_rows, width, vocab, count, dtype, 0.5)
    lists = {"7B": draw_lists(count, vocab, 60, 0.1), "32B": draw_lists(count, vocab, 9, 0.8)}
    lists = {name: own.to(device) for name, own in lists.items()}
    factors = [x.to(device) for x in factors]
    return factors, targets.to(device), rows.to(device), lists, unread.to(device)


def bound(x):
    """Of a gradient, relative; the interpreter cuts bf16 off where a GPU rounds."""
    return TOLERANCES["gradient_bf16"].value * (2 if x.device.type == "cpu" else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("budget", [None, STORED])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("unique", [False, True])
def test_values_and_gradients_hold_the_contract(device, dtype, budget, softcap, unique):
    factors, targets, rows, lists, unread = problem(device, dtype)
    options = {"temperature": 0.8, "softcap": softcap, "memory_budget": budget}
    if unique:
        distinct, inverse = rows.unique(return_inverse=True)
        options |= {"rows_unique": distinct, "row_inverse": inverse}
    got, grads, up = step(factors, targets, rows, lists, **options)
    want, wide, peak = from_hidden(factors, targets, rows, lists, 0.8, softcap)
    for name, x in got.items():
        assert (x - want[name]).abs().max() <= linear_logprob_bound(peak), name
    dotted(want, up).backward()
    for i, (a, b) in enumerate(zip(grads, wide, strict=True)):
        keep = ~unread if i == 0 else slice(None)
        assert (a.double()[keep] - b.grad[keep]).norm() <= bound(a) * b.grad[keep].norm(), i
    assert torch.equal(grads[0][unread], torch.zeros_like(grads[0][unread]))


def test_values_have_the_bits_of_selected_logprobs(device):
    factors, targets, rows, lists, _ = problem(device)
    hidden, weight, bias = factors
    out = linear_listed_logprobs(hidden, weight, targets, lists, rows, bias, 0.8, True)
    alone, entropy = linear_selected_logprobs(hidden, weight, targets, rows, bias, 0.8, True)
    assert torch.equal(out.targets, alone) and torch.equal(out.entropy, entropy)
    for name, own in lists.items():
        read = rows[tokens_of(own)]
        wanted = linear_selected_logprobs(hidden, weight, own.ids, read, bias, 0.8)
        assert torch.equal(out.lists[name], wanted)


def test_bits_do_not_depend_on_the_batch(device):
    factors, targets, _, lists, _ = problem(device)
    hidden, weight, bias = torch.randn(len(targets), factors[0].shape[1]), *factors[1:]
    hidden = hidden.to(factors[0])
    up = {name: torch.randn(len(own.ids), device=device) for name, own in lists.items()}
    places = {
        n: own.__class__(own.offsets, torch.arange(len(own.ids), device=device))
        for n, own in lists.items()
    }

    def run(order):
        leaf = hidden.clone().requires_grad_()
        own = {name: some(x, order) for name, x in lists.items()}
        at = {name: some(x, order).ids for name, x in places.items()}
        out = linear_listed_logprobs(leaf, weight, targets[order], own, order, bias)
        sum(x @ up[name][at[name]] for name, x in out.lists.items()).backward()
        return out, at, leaf.grad

    whole, _, grad = run(torch.arange(len(targets), device=device))
    order = torch.randperm(len(targets), device=device)[: len(targets) // 2]
    part, at, part_grad = run(order)
    assert torch.equal(part.targets, whole.targets[order])
    for name, x in part.lists.items():
        assert torch.equal(x, whole.lists[name][at[name]])
    assert torch.equal(part_grad[order], grad[order])


@pytest.mark.parametrize("budget", [None, STORED])
def test_the_gradient_to_the_head_is_the_same_bits_again(device, budget):
    factors, targets, rows, lists, _ = problem(device)
    _, first, up = step(factors, targets, rows, lists, memory_budget=budget)
    _, second, _ = step(factors, targets, rows, lists, up, memory_budget=budget)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradient", ["dense", "compact", "inplace"])
def test_from_logits(device, dtype, gradient):
    """Lists of more ids than the kernels take at once."""
    logits = (torch.randn(50, 203, device=device) * 3).to(dtype)
    rows = torch.randint(0, 50, (60,), device=device)
    unique, inverse = rows.unique(return_inverse=True)
    targets = torch.randint(0, 203, (60,), device=device)
    lists = {"a": draw_lists(60, 203, 150).to(device), "b": draw_lists(60, 203, 9, 0.7).to(device)}
    leaf = logits.clone().requires_grad_()
    out = listed_logprobs(
        leaf * 1.0 if gradient == "inplace" else leaf, targets, lists, rows, 0.7, True,
        rows_unique=unique, row_inverse=inverse, gradient=gradient,
    )  # fmt: skip
    wide = logits.double().requires_grad_()
    want, got = of_logits(wide[rows] / 0.7, targets, lists), named(out)
    up = ups(got)
    for name, x in got.items():
        assert ((x - want[name]).abs() <= selected_logprob_bound(want[name])).all(), name
    dotted(got, up).backward()
    dotted(want, up).backward()
    difference = leaf.grad.to_dense().double() - wide.grad
    limit = 1e-5 if dtype == torch.float32 else bound(leaf)
    assert difference.norm() <= limit * wide.grad.norm()


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo gathers on the CPU")
def test_a_split_vocabulary_gives_the_bits_of_the_whole(device, tmp_path):
    spawned(_rank, 2, tmp_path)


def _rank(rank, ranks):
    torch.manual_seed(0)
    device = torch.device("cpu")
    factors, targets, rows, lists, unread = problem(device, vocab=256, count=40)
    part = slice(128 * rank, 128 * (rank + 1))
    values, gradients, up = step(factors, targets, rows, lists)
    shards = [factors[0], factors[1][part], factors[2][part]]
    got, grads, _ = step(shards, targets, rows, lists, up, group=distributed.group.WORLD)
    for name, x in got.items():
        assert torch.equal(x, values[name])
    for a, b in zip(grads[1:], gradients[1:], strict=True):
        assert (a.double() - b[part].double()).norm() <= bound(a) * b[part].double().norm()
    a, b = grads[0].double(), gradients[0].double()
    assert (a - b).norm() <= bound(grads[0]) * b.norm()
    assert torch.equal(grads[0][unread], torch.zeros_like(grads[0][unread]))
