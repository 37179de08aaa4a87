"""linear_selected_logprobs against float64 logits and torch.log_softmax, value and gradients, and its bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import spawned
from torch import distributed
from torch.utils.checkpoint import checkpoint

from mmpack.contracts import TOLERANCES, gradient_fp32_bound, linear_logprob_bound
from mmpack.errors import ArgumentError
from mmpack.ops.logprobs.linear import torch as module
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.row_groups import make_row_groups
from tests.support.logprob_oracle import (
    assert_same_bits_in_any_batch,
    from_hidden,
    linear_problem,
    linear_step,
)


def problem(num_rows=80, width=48, vocab=1003, count=150, dtype=torch.float32, scale=0.5):
    return linear_problem(num_rows, width, vocab, count, dtype, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.5, 20.0])
@pytest.mark.parametrize("unique", [False, True])
def test_values_and_gradients_hold_the_contract(dtype, scale, unique, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_COLUMNS", 384)  # three blocks, the last one short
    *factors, targets, rows, unread = problem(dtype=dtype, scale=scale)
    leaves = [x.clone().requires_grad_() for x in factors]
    keywords = {}
    if unique:
        distinct, inverse = rows.unique(return_inverse=True)
        keywords = {"rows_unique": distinct, "row_inverse": inverse}
    lp, h = linear_selected_logprobs(
        leaves[0], leaves[1], targets, rows, leaves[2], 0.8, entropy=True, **keywords
    )
    expected, entropy, wide, peak = from_hidden(*factors, targets, rows, 0.8)
    assert lp.dtype == h.dtype == torch.float32
    assert (lp - expected).abs().max() <= linear_logprob_bound(peak)
    assert (h - entropy).abs().max() <= linear_logprob_bound(peak)

    up, up_entropy = torch.randn(2, len(rows))
    (lp @ up + h @ up_entropy).backward()
    (expected @ up.double() + entropy @ up_entropy.double()).backward()
    assert torch.equal(leaves[0].grad[unread], torch.zeros_like(factors[0][unread]))
    for got, want in zip(leaves, wide, strict=True):
        assert got.grad.dtype == dtype
        keep = ~unread if got is leaves[0] else slice(None)
        difference, want_grad = got.grad.double()[keep] - want.grad[keep], want.grad[keep]
        if dtype == torch.float32:
            tolerance = gradient_fp32_bound(want_grad.abs().max())
            # At logits of some hundred the products' own rounding moves every probability.
            assert difference.abs().max() <= tolerance * max(1.0, peak / 50)
        else:
            assert difference.norm() <= TOLERANCES["gradient_bf16"].value * want_grad.norm()


def test_gradcheck_in_float64():
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True)
    targets, rows = torch.tensor([1, 3, 3, 10, 0]), torch.tensor([3, 0, 0, 0, 2])
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_selected_logprobs(h, w, targets, rows, b, 1.3, entropy=True),
        (hidden, weight, bias),
    )


@settings(max_examples=60)
@given(st.integers(1, 200), st.sampled_from([1, 3, 7, 11, 17, 64, 130]), st.integers(0, 2**31))
def test_bits_do_not_depend_on_the_batch(count, width, seed):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, width, generator=g)
    weight = torch.randn(517, width, generator=g)
    targets = torch.randint(0, 517, (count,), generator=g)
    up, up_entropy = torch.randn(2, count, generator=g)

    def run(order):
        leaf = hidden.clone().requires_grad_()
        lp, h = linear_selected_logprobs(leaf, weight, targets[order], order, entropy=True)
        (lp @ up[order] + h @ up_entropy[order]).backward()
        return lp.detach(), h.detach(), leaf.grad

    assert_same_bits_in_any_batch(run, torch.randperm(count, generator=g), (count, 1))


def test_rows_without_gradient_are_not_read_in_backward():
    hidden = torch.randn(5, 8)
    hidden[1] = torch.nan
    hidden.requires_grad_()
    weight = torch.randn(30, 8, requires_grad=True)
    lp = linear_selected_logprobs(hidden, weight, torch.arange(5))
    assert lp.isnan().tolist() == [False, True, False, False, False]
    lp.backward(torch.tensor([1.0, 0.0, 0.0, 2.0, 1.0]))
    assert torch.equal(hidden.grad[1:3], torch.zeros(2, 8))
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    assert (hidden.grad[[0, 3, 4]] != 0).any(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softcap(dtype):
    *factors, targets, rows, _ = problem(dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in factors]
    lp, h = linear_selected_logprobs(
        leaves[0], leaves[1], targets, rows, leaves[2], 0.8, entropy=True, softcap=4.0
    )
    expected, entropy, wide, _ = from_hidden(*factors, targets, rows, 0.8, softcap=4.0)
    assert (lp - expected).abs().max() <= linear_logprob_bound(5.0)
    assert (h - entropy).abs().max() <= linear_logprob_bound(5.0)
    up, up_entropy = torch.randn(2, len(rows))
    (lp @ up + h @ up_entropy).backward()
    (expected @ up.double() + entropy @ up_entropy.double()).backward()
    for got, want in zip(leaves[1:], wide[1:], strict=True):
        error = (got.grad - want.grad).norm() / want.grad.norm()
        name = "gradient_fp32" if dtype == torch.float32 else "gradient_bf16"
        assert error <= TOLERANCES[name].value


def test_registered_op_obeys_the_rules_of_torch():
    *factors, targets, rows, _ = problem(num_rows=40, width=16, vocab=67, count=30)
    hidden, weight, bias = (x.requires_grad_() for x in factors)
    groups = make_row_groups(len(hidden), rows, None, None)
    arguments = (hidden, weight, bias, targets, *groups, 0.9, 5.0, True, False, 0, 0, 67, "")
    torch.library.opcheck(torch.ops.mmpack.linear_selected_logprobs.default, arguments)


def test_compiles_as_one_graph():
    *factors, targets, rows, _ = problem()
    distinct, inverse = rows.unique(return_inverse=True)

    def loss(hidden, weight, bias, temperature):
        lp, h = linear_selected_logprobs(
            hidden, weight, targets, rows, bias, temperature, entropy=True,
            rows_unique=distinct, row_inverse=inverse, softcap=30.0,
        )  # fmt: skip
        return lp.sum() + 0.1 * h.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for temperature in (1.0, 0.7):
        gradients = []
        for run in (loss, compiled):
            leaves = [x.clone().requires_grad_() for x in factors]
            run(*leaves, temperature).backward()
            gradients.append([x.grad for x in leaves])
        for a, b in zip(*gradients, strict=True):
            assert torch.equal(a, b)


def test_gradient_checkpointing_gives_the_same_bits():
    *factors, targets, rows, _ = problem()
    results = []
    for wrap in (False, True):
        leaves = [x.clone().requires_grad_() for x in factors]
        arguments = leaves[0] * 1.0, leaves[1], targets, rows, leaves[2]
        if wrap:
            lp = checkpoint(linear_selected_logprobs, *arguments, use_reentrant=False)
        else:
            lp = linear_selected_logprobs(*arguments)
        lp.sum().backward()
        results.append([x.grad for x in leaves])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_only_wanted_gradients_are_made():
    hidden, weight, bias, targets, rows, _ = problem()
    weight.requires_grad_()
    _, h = linear_selected_logprobs(hidden, weight, targets, rows, bias, entropy=True)
    h.sum().backward()  # and none comes from the logprobs
    wide = weight.detach().double().requires_grad_()
    full = torch.log_softmax(hidden.double()[rows] @ wide.T + bias.double(), -1)
    (-(full.exp() * full).sum(-1)).sum().backward()
    assert (weight.grad - wide.grad).abs().max() <= gradient_fp32_bound(wide.grad.abs().max())


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_split_vocabulary_gives_the_bits_of_the_whole(ranks, tmp_path):
    spawned(_rank, ranks, tmp_path)


def _rank(rank, ranks):
    """Values of `ranks` shards, and gradients to them, are those of one process, bit for bit."""
    torch.manual_seed(0)
    module.BLOCK_COLUMNS = 64
    *factors, targets, rows, unread = problem(vocab=512, count=90)
    shard = slice(512 // ranks * rank, 512 // ranks * (rank + 1))
    inputs = targets, rows, torch.randn(2, len(rows))
    lp, h, gradients = linear_step(factors, *inputs, temperature=0.8)
    hidden, weight, bias = factors
    part, world = (hidden, weight[shard], bias[shard]), distributed.group.WORLD
    got = linear_step(part, *inputs, temperature=0.8, group=world)
    assert torch.equal(got[0], lp)
    assert torch.equal(got[1], h)
    to_hidden, *to_shard = got[2]
    for a, b in zip(to_shard, gradients[1:], strict=True):
        assert torch.equal(a, b[shard])
    difference = (to_hidden - gradients[0]).abs().max()
    assert difference <= gradient_fp32_bound(gradients[0].abs().max())
    assert torch.equal(to_hidden[unread], torch.zeros_like(hidden[unread]))
    everywhere = [torch.empty_like(to_hidden) for _ in range(ranks)]
    distributed.all_gather(everywhere, to_hidden)
    assert all(torch.equal(other, to_hidden) for other in everywhere)


def test_autocast_does_not_lower_the_products():
    hidden, weight, bias, targets, rows, _ = problem()
    expected = linear_selected_logprobs(hidden, weight, targets, rows, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = linear_selected_logprobs(hidden, weight, targets, rows, bias)
    assert torch.equal(got, expected)


def test_no_loss_token_gives_an_empty_result_on_the_graph():
    hidden = torch.full((3, 4), torch.nan, requires_grad=True)
    weight = torch.randn(9, 4, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int64)
    lp = linear_selected_logprobs(hidden, weight, empty, empty)
    assert lp.shape == (0,)
    lp.sum().backward()
    assert torch.equal(hidden.grad, torch.zeros(3, 4))
    assert torch.equal(weight.grad, torch.zeros(9, 4))


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"hidden": torch.zeros(1, 4, 3)}, "hidden has shape [1, 4, 3]"),
        ({"weight": torch.zeros(9, 5)}, "and weight [9, 5]"),
        ({"weight": torch.zeros(9, 3, dtype=torch.int8)}, "weight torch.int8"),
        ({"bias": torch.zeros(3)}, "bias has shape [3], expected [9]"),
        ({"targets": torch.tensor([0, 9])}, "targets runs from 0 to 9, expected [0, 9)"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"memory_budget": -1}, "memory_budget is -1"),
        ({"rows": torch.tensor([0, 4])}, "rows runs from 0 to 4, expected [0, 4)"),
    ],
)
def test_wrong_arguments_are_named(keywords, says):
    arguments = {
        "hidden": torch.zeros(4, 3),
        "weight": torch.zeros(9, 3),
        "targets": torch.tensor([0, 8]),
        "rows": torch.tensor([0, 3]),
    }
    with pytest.raises(ArgumentError) as error:
        linear_selected_logprobs(**(arguments | keywords))
    assert says in str(error.value)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_holds_the_contract(dtype):
    *factors, targets, rows, unread = problem(
        num_rows=700, width=256, vocab=32_003, count=900, dtype=dtype, scale=0.1
    )
    leaves = [x.cuda().requires_grad_() for x in factors]
    up = torch.randn(len(rows))
    lp = linear_selected_logprobs(leaves[0], leaves[1], targets.cuda(), rows.cuda(), leaves[2])
    lp.backward(up.cuda())
    expected, _, wide, peak = from_hidden(*factors, targets, rows, 1.0)
    expected.backward(up.double())
    assert (lp.cpu() - expected).abs().max() <= linear_logprob_bound(peak)
    for got, want in zip(leaves, wide, strict=True):
        keep = ~unread if got is leaves[0] else slice(None)
        difference, want_grad = got.grad.cpu().double()[keep] - want.grad[keep], want.grad[keep]
        if dtype == torch.float32:
            assert difference.abs().max() <= gradient_fp32_bound(want_grad.abs().max())
        else:
            assert difference.norm() <= TOLERANCES["gradient_bf16"].value * want_grad.norm()
    order = torch.randperm(len(rows))[:5]
    again = leaves[0].detach().requires_grad_()
    alone = linear_selected_logprobs(
        again, leaves[1].detach(), targets[order].cuda(), rows[order].cuda(), leaves[2].detach()
    )
    assert torch.equal(alone, lp.detach()[order.cuda()])


@pytest.mark.gpu
def test_gpu_never_waits():
    *factors, targets, rows, _ = problem(dtype=torch.bfloat16)
    hidden, weight, bias = (x.cuda().requires_grad_() for x in factors)
    targets, rows, up = targets.cuda(), rows.cuda(), torch.randn(len(rows), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        lp, h = linear_selected_logprobs(hidden, weight, targets, rows, bias, entropy=True)
        (lp @ up + h @ up).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_gradients_lie_as_the_fake_kernel_says():
    """Inductor asserts strides: a weight that is a transposed view gets a gradient in order."""
    hidden = torch.randn(5, 8)
    weight, bias = torch.randn(8, 50).t().requires_grad_(), torch.randn(100)[::2].requires_grad_()
    logprobs = linear_selected_logprobs(hidden, weight, torch.arange(5), bias=bias)
    grads = torch.autograd.grad(logprobs.sum(), (weight, bias))
    assert [g.is_contiguous() for g in grads] == [True, True]
