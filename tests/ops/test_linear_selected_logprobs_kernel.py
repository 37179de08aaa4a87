"""The Triton path of linear_selected_logprobs against float64 logits and torch.log_softmax, and its bits."""

import functools

import pytest
import torch
from support.ranks import spawned
from torch import distributed

from mmpack.contracts import TOLERANCES, linear_logprob_bound
from mmpack.errors import BackendError
from mmpack.ops.logprobs.linear import blocks
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.row_groups import make_row_groups
from tests.support.logprob_oracle import (
    assert_same_bits_in_any_batch,
    from_hidden,
    linear_problem,
    linear_step,
)

pytest.importorskip("triton")
from mmpack.ops.logprobs.linear import forward_kernel as kernels
from mmpack.ops.logprobs.linear.tiles import tiles_of

pytestmark = pytest.mark.kernel

STORED = 1 << 40  # a budget that fits anything


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, device):
    """Several blocks of rows and chunks of columns, so that their seams are in the tests."""
    if device.type == "cpu":
        monkeypatch.setattr(blocks, "MIN_COLUMNS", 128)
        monkeypatch.setattr(blocks, "MAX_BLOCKS", 2)
    monkeypatch.setattr(blocks, "MIN_ROWS", 1)


def problem(device, dtype=torch.bfloat16, num_rows=60, width=40, vocab=203, count=70, scale=0.5):
    """Rows that repeat, rows that nobody reads and that hold NaN, a ragged vocabulary."""
    if device.type == "cuda":
        num_rows, width, vocab, count = num_rows * 9, width * 7, vocab * 21, count * 9
    tensors = linear_problem(num_rows, width, vocab, count, dtype, scale)
    return tuple(x.to(device) for x in tensors)


def bound(x):
    """Of a gradient, relative; the interpreter cuts bf16 off where a GPU rounds."""
    return TOLERANCES["gradient_bf16"].value * (2 if x.device.type == "cpu" else 1)


def check_gradients(got, want, unread):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        keep = ~unread if i == 0 else slice(None)
        error = (a.grad.double()[keep] - b.grad[keep]).norm() / b.grad[keep].norm()
        assert error <= bound(a), i
    assert torch.equal(got[0].grad[unread], torch.zeros_like(got[0][unread]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("budget", [None, STORED])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_values_and_gradients_hold_the_contract(device, dtype, budget, softcap):
    *factors, targets, rows, unread = problem(device, dtype)
    leaves = [x.clone().requires_grad_() for x in factors]
    lp, h = linear_selected_logprobs(
        leaves[0], leaves[1], targets, rows, leaves[2], 0.8, True,
        softcap=softcap, memory_budget=budget,
    )  # fmt: skip
    expected, entropy, wide, peak = from_hidden(*factors, targets, rows, 0.8, softcap)
    assert lp.dtype == h.dtype == torch.float32
    assert (lp - expected).abs().max() <= linear_logprob_bound(peak)
    assert (h - entropy).abs().max() <= linear_logprob_bound(peak)
    up, up_entropy = torch.randn(2, len(rows), device=device)
    (lp @ up + h @ up_entropy).backward()
    (expected @ up.double() + entropy @ up_entropy.double()).backward()
    check_gradients(leaves, wide, unread)


@pytest.mark.parametrize("budget", [None, STORED])
def test_repeated_rows_are_read_once(device, budget):
    *factors, targets, rows, unread = problem(device)
    distinct, inverse = rows.unique(return_inverse=True)
    up = torch.randn(len(rows), device=device)
    results = []
    for keywords in ({}, {"rows_unique": distinct, "row_inverse": inverse}):
        leaves = [x.clone().requires_grad_() for x in factors]
        lp = linear_selected_logprobs(
            leaves[0], leaves[1], targets, rows, leaves[2], memory_budget=budget, **keywords
        )
        lp.backward(up)
        results.append((lp.detach(), leaves[0].grad, leaves[1].grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    expected, _, wide, _ = from_hidden(*factors, targets, rows)
    expected.backward(up.double())
    check_gradients(leaves, wide, unread)


@pytest.mark.parametrize("budget", [None, STORED])
def test_rows_without_gradient_are_dropped(device, budget):
    *factors, targets, rows, unread = problem(device)
    up = torch.randn(len(rows), device=device)
    dead_rows = rows[::3]
    dead = torch.isin(rows, dead_rows)
    up[dead] = 0.0
    factors[0][dead_rows] = torch.nan
    leaves = [x.clone().requires_grad_() for x in factors]
    lp = linear_selected_logprobs(
        leaves[0], leaves[1], targets, rows, leaves[2], memory_budget=budget
    )
    assert lp[dead].isnan().all()
    assert lp[~dead].isfinite().all()
    lp.backward(up)
    expected, _, wide, _ = from_hidden(*factors, targets[~dead], rows[~dead])
    expected.backward(up[~dead].double())
    unread[dead_rows] = True
    check_gradients(leaves, wide, unread)


@pytest.mark.parametrize("budget", [None, STORED])
def test_no_row_with_gradient_gives_zeros(device, budget):
    *factors, targets, rows, _ = problem(device)
    leaves = [x.clone().requires_grad_() for x in factors]
    lp = linear_selected_logprobs(
        leaves[0], leaves[1], targets, rows, leaves[2], memory_budget=budget
    )
    lp.backward(torch.zeros_like(lp))
    for leaf in leaves:
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("name", ["huge", "masked", "masked tiles", "ties", "one winner"])
@pytest.mark.parametrize("budget", [None, STORED])
def test_adversarial_logits(device, name, budget):
    hidden, weight, bias, targets, rows, _ = problem(device)
    vocab = len(weight)
    if name == "huge":
        bias = torch.where(bias > 0, 1e4, -1e4).to(bias.dtype)
    elif name == "masked":
        bias = bias.masked_fill(bias < 0.5, -torch.inf)
    elif name == "masked tiles":
        bias = torch.full_like(bias, -torch.inf)
        bias[vocab // 2 : vocab // 2 + 20] = 1.0
    elif name == "ties":
        weight, bias = torch.zeros_like(weight), torch.full_like(bias, 3.0)
    else:
        bias = torch.full_like(bias, -torch.inf).index_fill_(
            0, torch.tensor([7], device=device), 2.0
        )
        targets[:5] = 7
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    lp, h = linear_selected_logprobs(
        leaves[0], leaves[1], targets, rows, leaves[2], 0.7, True, memory_budget=budget
    )
    expected, entropy, wide, peak = from_hidden(hidden, weight, bias, targets, rows, 0.7)
    finite = expected.isfinite()
    assert torch.equal(lp.isneginf(), expected.isneginf())
    assert (lp - expected)[finite].abs().max() <= linear_logprob_bound(peak)
    assert (h - entropy).abs().max() <= linear_logprob_bound(peak)
    if name == "one winner":
        # the same bits from both products
        assert torch.equal(lp[finite], torch.zeros_like(lp[finite]))
    up = torch.where(finite, torch.randn(len(rows), device=device), 0.0)
    lp.backward(up)
    expected.backward(up.double())
    error = (leaves[1].grad.double() - wide[1].grad).norm()
    if name == "one winner":
        assert error == 0
    else:
        assert error <= bound(hidden) * wide[1].grad.norm()


def test_bits_do_not_depend_on_the_batch(device):
    sizes = (1, 127, 128, 129, 4096, 13107) if device.type == "cuda" else (1, 31, 32, 33, 70)
    count = sizes[-1]
    width, vocab = (256, 5003) if device.type == "cuda" else (40, 203)
    hidden = torch.randn(count, width, device=device).bfloat16()
    weight = torch.randn(vocab, width, device=device).bfloat16()
    targets = torch.randint(0, vocab, (count,), device=device)
    up, up_entropy = torch.randn(2, count, device=device)

    def run(chosen, **keywords):
        leaf = hidden.clone().requires_grad_()
        lp, h = linear_selected_logprobs(
            leaf, weight, targets[chosen], chosen, entropy=True, **keywords
        )
        (lp @ up[chosen] + h @ up_entropy[chosen]).backward()
        return lp.detach(), h.detach(), leaf.grad

    for budget in (None, STORED):
        in_budget = functools.partial(run, memory_budget=budget)
        assert_same_bits_in_any_batch(in_budget, torch.randperm(count, device=device), sizes)


def test_values_are_the_same_bits_in_both_modes(device):
    hidden, weight, bias, targets, rows, _ = problem(device)
    hidden.requires_grad_()
    values = [
        linear_selected_logprobs(
            hidden, weight, targets, rows, bias, entropy=True, memory_budget=budget
        )
        for budget in (None, STORED)
    ]
    assert torch.equal(values[0][0], values[1][0])
    assert torch.equal(values[0][1], values[1][1])


@pytest.mark.parametrize("width", [37, 8])
def test_any_width_and_strides(device, width):
    hidden, weight, bias, targets, rows, unread = problem(device, width=width)
    weight = weight.T.contiguous().T  # columns contiguous
    leaves = [hidden.clone().requires_grad_(), weight.detach().requires_grad_(), bias]
    lp = linear_selected_logprobs(leaves[0], leaves[1], targets, rows, bias)
    up = torch.randn(len(rows), device=device)
    lp.backward(up)
    expected, _, wide, peak = from_hidden(hidden, weight, bias, targets, rows)
    expected.backward(up.double())
    assert (lp - expected).abs().max() <= linear_logprob_bound(peak)
    check_gradients(leaves[:2], wide[:2], unread)


def test_no_loss_token_gives_an_empty_result_on_the_graph(device):
    hidden = torch.full((3, 8), torch.nan, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(9, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    lp, h = linear_selected_logprobs(hidden, weight, empty, empty, entropy=True)
    (lp.sum() + h.sum()).backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_float32_is_refused_when_forced(device):
    x = torch.zeros(2, 8, device=device)
    with pytest.raises(BackendError, match="its kernels take bf16 and fp16"):
        linear_selected_logprobs(x, x, torch.zeros(2, dtype=torch.int64, device=device))


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_give_the_bits_of_the_whole(device, ranks):
    """Tiles of shards, one below the other, are the tiles of the whole; so is the merge."""
    hidden, weight, bias, *_ = problem(device)
    tile = tiles_of(device).columns
    shard = len(weight) // tile // ranks * tile or tile
    repeats = -(-ranks * shard // len(weight))
    weight, bias = (x.repeat(repeats, *[1] * (x.ndim - 1))[: ranks * shard] for x in (weight, bias))
    x = hidden.nan_to_num()
    whole, _ = kernels.statistics(x, weight, bias, 0.9, None, True, False)
    parts = [
        kernels.statistics(x, w, b, 0.9, None, True, False)[0]
        for w, b in zip(weight.split(shard), bias.split(shard), strict=True)
    ]
    gathered = kernels.Partials(*(torch.cat(part) for part in zip(*parts, strict=True)))
    for a, b in zip(kernels.merge(whole, True), kernels.merge(gathered, True), strict=True):
        assert torch.equal(a, b)


def test_every_output_is_written(device, monkeypatch):
    """With NaN in all memory that is handed out uninitialised, nothing changes."""
    *factors, targets, rows, _ = problem(device)
    up = torch.randn(len(rows), device=device)

    def run(budget):
        leaves = [x.clone().requires_grad_() for x in factors]
        lp, h = linear_selected_logprobs(
            leaves[0], leaves[1], targets, rows, leaves[2], entropy=True, memory_budget=budget
        )
        (lp @ up + h.sum()).backward()
        return lp.detach(), h.detach(), *(x.grad for x in leaves)

    def poisoned(make):
        def empty(*sizes, **keywords):
            x = make(*sizes, **keywords)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        return empty

    for budget in (None, STORED):
        expected = run(budget)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", poisoned(torch.empty))
            patch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
            got = run(budget)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


def test_a_budget_widens_the_chunks():
    headline = 13_107, 3584, 151_936, (128, 256)
    logits = 13_107 * 151_936 * 2

    def taken(rows, columns):
        return rows * (6 * 3584 + 2 * columns)

    default = blocks.plan_blocks(*headline, stored=False, budget=0)
    assert taken(*default) <= logits / 20
    for share in (1 / 4, 1 / 8):
        rows, columns = blocks.plan_blocks(*headline, stored=False, budget=int(logits * share))
        assert rows >= 13_107
        assert logits * share * 0.95 <= taken(13_107, columns) <= logits * share
    for count in (4096, 5000, 131_072):
        assert blocks.plan_blocks(count, *headline[1:], stored=False, budget=0)[1] == default[1]


def test_registered_op_obeys_the_rules_of_torch(device):
    *factors, targets, rows, _ = problem(device, num_rows=20, width=16, vocab=67, count=12)
    hidden, weight, bias = (x.nan_to_num().requires_grad_() for x in factors)
    groups = make_row_groups(len(hidden), rows, None, None)
    for store in (False, True):
        arguments = hidden, weight, bias, targets, *groups, 0.9, None, True, store, 0, 0
        torch.library.opcheck(
            torch.ops.mmpack.linear_selected_logprobs.default, (*arguments, len(weight), "")
        )


@pytest.mark.gpu
def test_never_waits_and_replays_as_a_graph(device):
    *factors, targets, rows, _ = problem(device)
    leaves = [x.clone().requires_grad_() for x in factors]
    up = torch.randn(len(rows), device=device)

    def step(budget):
        lp, h = linear_selected_logprobs(
            leaves[0], leaves[1], targets, rows, leaves[2], entropy=True, memory_budget=budget
        )
        return [lp.detach(), *torch.autograd.grad(lp @ up + h @ up, leaves)]

    for budget in (None, STORED):
        expected = step(budget)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(budget)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = step(budget)
        for x in got:
            x.fill_(torch.nan)
        graph.replay()
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_compiles_as_one_graph(device):
    *factors, targets, rows, _ = problem(device)

    def loss(hidden, weight, bias):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            lp, h = linear_selected_logprobs(hidden, weight, targets, rows, bias, 0.7, True)
        return lp.sum() + 0.1 * h.sum()

    gradients = []
    for run in (loss, torch.compile(loss, fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in factors]
        run(*leaves).backward()
        gradients.append([x.grad for x in leaves])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo gathers on the CPU")
def test_a_split_vocabulary_gives_the_bits_of_the_whole(device, tmp_path):
    spawned(_rank, 2, tmp_path)


def _rank(rank, ranks):
    torch.manual_seed(0)
    device = torch.device("cpu")
    *factors, targets, rows, unread = problem(device, vocab=256, count=40, num_rows=40)
    shard = slice(128 * rank, 128 * (rank + 1))
    inputs = targets, rows, torch.randn(len(rows)).expand(2, -1)
    lp, h, gradients = linear_step(factors, *inputs)
    hidden, weight, bias = factors
    part, world = (hidden, weight[shard], bias[shard]), distributed.group.WORLD
    got = linear_step(part, *inputs, group=world)
    assert torch.equal(got[0], lp)
    assert torch.equal(got[1], h)
    for i, (a, b) in enumerate(zip(got[2], gradients, strict=True)):
        a, b = (a.double(), b.double()) if i == 0 else (a.double(), b[shard].double())
        assert (a - b).norm() <= bound(hidden) * b.norm()
    assert torch.equal(got[2][0][unread], torch.zeros_like(hidden[unread]))


@pytest.mark.parametrize("budget", [None, STORED])
def test_a_large_gradient_of_the_entropy_meets_no_probability_of_zero(device, budget):
    """Columns beyond the vocabulary have log-probabilities that would overflow a product."""
    hidden, weight, bias, targets, rows, unread = problem(device)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    _, entropies = linear_selected_logprobs(
        leaves[0], leaves[1], targets, rows, leaves[2], entropy=True, memory_budget=budget
    )
    (entropies * 1e9).sum().backward()
    _, entropy, wide, _ = from_hidden(hidden, weight, bias, targets, rows)
    (entropy * 1e9).sum().backward()
    error = (leaves[1].grad.double() - wide[1].grad).norm() / wide[1].grad.norm()
    assert error <= bound(hidden)
    assert torch.isfinite(leaves[0].grad[~unread]).all()
