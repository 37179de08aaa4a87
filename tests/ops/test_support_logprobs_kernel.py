"""The Triton path of logprobs over kept ids against torch.log_softmax in float64, and its bits."""

import pytest
import torch
from support.ranks import spawned
from torch import distributed

from mmpack.contracts import TOLERANCES, linear_logprob_bound, selected_logprob_bound
from mmpack.ops.logprobs.autograd import Incoming
from mmpack.ops.logprobs.call import runtime_scalar
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.lists import hidden as op_of_hidden
from mmpack.ops.logprobs.lists import products
from mmpack.ops.logprobs.lists.call import Lists, runs_by
from mmpack.ops.logprobs.selected import selected_logprobs
from mmpack.ops.logprobs.support import Support
from tests.support.kept_ids import draw_support, from_hidden, some, step, support_of, values
from tests.support.logprob_oracle import assert_same_bits_in_any_batch, linear_problem

pytest.importorskip("triton")
from mmpack.ops.logprobs.lists import sum_kernels
from mmpack.ops.logprobs.lists import triton as module

pytestmark = pytest.mark.kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch, device, no_tf32):
    """Runs of several pieces and several chunks, so that their seams are in the tests."""
    monkeypatch.setattr(sum_kernels, "PIECE", 4 if device.type == "cpu" else 16)
    monkeypatch.setattr(sum_kernels, "COLUMNS", 32 if device.type == "cpu" else 256)
    monkeypatch.setattr(sum_kernels, "DEPTH", 32 if device.type == "cpu" else 512)
    monkeypatch.setattr(products, "ROWS_GPU", 256)


@pytest.fixture(params=["gather", "products"])
def route(request, monkeypatch):
    force(request.param, monkeypatch)
    return request.param


def force(route, monkeypatch):
    monkeypatch.setattr(op_of_hidden, "by_products", lambda *_: route == "products")


def problem(device, dtype=torch.bfloat16, num_rows=40, width=40, vocab=61, count=30, longest=12):
    """Rows that repeat, rows that nobody reads and that hold NaN, ids that many lists have."""
    if device.type == "cuda":
        num_rows, width, vocab, count = num_rows * 9, width * 15, vocab * 21, count * 9
    *factors, targets, rows, unread = linear_problem(num_rows, width, vocab, count, dtype, 0.2)
    support = draw_support(targets, vocab, longest)
    factors = [x.to(device) for x in factors]
    return factors, targets.to(device), rows.to(device), support.to(device), unread.to(device)


def bound(x):
    """Of a gradient, relative; the interpreter cuts bf16 off where a GPU rounds."""
    if x.dtype == torch.float32:
        return 1e-5
    return TOLERANCES["gradient_bf16"].value * (2 if x.device.type == "cpu" else 1)


def check_gradients(got, wide, unread):
    for i, (a, leaf) in enumerate(zip(got, wide, strict=True)):
        keep = ~unread if i == 0 else slice(None)
        error = (a.double()[keep] - leaf.grad[keep]).norm() / leaf.grad[keep].norm()
        assert error <= bound(a), i
    assert torch.equal(got[0][unread], torch.zeros_like(got[0][unread]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("unique", [False, True])
def test_values_and_gradients_hold_the_contract(device, dtype, softcap, unique, route):
    factors, targets, rows, support, unread = problem(device, dtype)
    keywords = {}
    if unique:
        distinct, inverse = rows.unique(return_inverse=True)
        keywords = {"rows_unique": distinct, "row_inverse": inverse}
    up = torch.randn(2, len(rows), device=device)
    options = {"temperature": 0.8, "softcap": softcap, **keywords}
    lp, h, grads = step(factors, targets, rows, support, up, **options)
    expected, entropy, wide, peak = from_hidden(factors, targets, rows, support, 0.8, softcap)
    assert lp.dtype == h.dtype == torch.float32
    assert (lp - expected).abs().max() <= linear_logprob_bound(peak)
    assert (h - entropy).abs().max() <= linear_logprob_bound(peak)
    (expected @ up[0].double() + entropy @ up[1].double()).backward()
    check_gradients(grads, wide, unread)


def test_distinct_rows_have_the_bits_of_rows_that_may_repeat(device, monkeypatch):
    force("gather", monkeypatch)
    factors, targets, _, support, _ = problem(device)
    rows = torch.randperm(len(factors[0]), device=device)[: len(targets)]
    factors[0].nan_to_num_()
    up = torch.randn(2, len(rows), device=device)
    inverse = torch.arange(len(rows), device=device)
    known = {"rows_unique": rows, "row_inverse": inverse}
    results = [step(factors, targets, rows, support, up, **k) for k in ({}, known)]
    for a, b in zip(*(([lp, h, *grads]) for lp, h, grads in results), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("length", [1, 4, 5, 11, 12, 13, 64])
def test_runs_of_any_length_are_cut_and_joined(device, length):
    """Sums over runs that begin at any place among the pieces, against index_add in float64."""
    keys = torch.cat([torch.zeros(3), torch.full((length,), 2), torch.full((length + 3,), 5)])
    keys = keys[torch.randperm(len(keys))].long().to(device)
    source = torch.randn(9, 70, device=device).bfloat16()
    index = torch.randint(0, 9, keys.shape, device=device)
    scale = torch.randn(len(keys), device=device)
    out = torch.full((7, 70), torch.nan, device=device)
    module.sum_runs(out, None, source, index, scale, runs_by(keys, 7))
    want = torch.zeros(7, 70, dtype=torch.float64, device=device)
    want.index_add_(0, keys, source[index].double() * scale.double()[:, None])
    assert (out - want).abs().max() <= 1e-6 * want.abs().max()
    assert torch.equal(out[want.abs().sum(1) == 0], torch.zeros(4, 70, device=device))


def test_the_rest_of_the_head_is_not_touched(device, monkeypatch):
    force("gather", monkeypatch)
    factors, targets, rows, support, _ = problem(device, longest=3)
    up = torch.randn(2, len(rows), device=device)
    expected = step(factors, targets, rows, support, up)
    vocab = len(factors[1])
    other = torch.ones(vocab, dtype=torch.bool, device=device).index_fill(0, support.ids, False)
    assert other.any()
    factors[1][other] = torch.nan
    lp, h, grads = step(factors, targets, rows, support, up)
    assert torch.equal(lp, expected[0])
    assert torch.equal(h, expected[1])
    for a, b in zip(grads, expected[2], strict=True):
        assert torch.equal(a, b)
    assert not grads[1][other].any()


def test_bits_do_not_depend_on_the_batch(device, route):
    sizes = (1, 127, 700) if device.type == "cuda" else (1, 9, 30)
    count = sizes[-1]
    width, vocab = (256, 5003) if device.type == "cuda" else (40, 203)
    hidden = torch.randn(count, width, device=device).bfloat16()
    weight = torch.randn(vocab, width, device=device).bfloat16()
    targets = torch.randint(0, vocab, (count,), device=device)
    support = draw_support(targets, vocab, 12 if device.type == "cpu" else 100)
    up, up_entropy = torch.randn(2, count, device=device)

    def run(order):
        leaf = hidden.clone().requires_grad_()
        kept = some(support, order)
        lp, h = linear_selected_logprobs(
            leaf, weight, targets[order], order, entropy=True, support=kept
        )
        (lp @ up[order] + h @ up_entropy[order]).backward()
        return lp.detach(), h.detach(), leaf.grad

    assert_same_bits_in_any_batch(run, torch.randperm(count, device=device), sizes)


def test_the_gradient_to_the_head_is_the_same_bits_again(device, route):
    """One id that all lists have: its row's gradient is a sum over all tokens."""
    factors, targets, rows, _, _ = problem(device)
    lists = [torch.tensor(sorted({7, 11, t})) for t in targets.tolist()]
    support = support_of(lists, device)
    up = torch.randn(2, len(rows), device=device)
    first, again = (step(factors, targets, rows, support, up)[2] for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)


def test_rows_without_gradient_are_dropped(device, route):
    factors, targets, rows, support, unread = problem(device)
    up = torch.randn(2, len(rows), device=device)
    dead_rows = rows[::3]
    dead = torch.isin(rows, dead_rows)
    up[:, dead] = 0.0
    factors[0][dead_rows] = torch.nan
    leaves = [x.clone().requires_grad_() for x in factors]
    lp = linear_selected_logprobs(leaves[0], leaves[1], targets, rows, leaves[2], support=support)
    assert lp[dead].isnan().all()
    assert lp[~dead].isfinite().all()
    lp.backward(up[0])
    alive = (~dead).nonzero().flatten()
    kept = some(support, alive)
    expected, _, wide, _ = from_hidden(factors, targets[alive], rows[alive], kept)
    expected.backward(up[0, alive].double())
    unread[dead_rows] = True
    check_gradients([x.grad for x in leaves], wide, unread)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gradient", ["dense", "compact", "inplace"])
def test_from_logits(device, dtype, gradient):
    vocab = 501
    logits = (torch.randn(20, vocab) * 4).to(device, dtype)
    rows = torch.randint(0, 20, (33,), device=device)
    unique, inverse = rows.unique(return_inverse=True)
    targets = torch.randint(0, vocab, (33,), device=device)
    support = draw_support(targets, vocab, 100)
    wide = logits.double().requires_grad_()
    expected, entropy = values(wide[rows] / 0.7, targets, support)
    up = torch.randn(2, 33, dtype=torch.float64, device=device)
    (want,) = torch.autograd.grad(expected @ up[0] + entropy @ up[1], wide)
    leaf = logits.clone().requires_grad_()
    lp, h = selected_logprobs(
        leaf, targets, rows, 0.7, True, rows_unique=unique, row_inverse=inverse,
        gradient=gradient, support=support,
    )  # fmt: skip
    assert ((lp - expected).abs() <= selected_logprob_bound(expected)).all()
    assert (h - entropy).abs().max() <= TOLERANCES["linear_logprob"].value
    (grad,) = torch.autograd.grad([lp, h], leaf, [x.float() for x in up])
    error = (grad.to_dense().double() - want).norm()
    assert error <= bound(grad) * want.norm()
    assert not grad.to_dense()[want == 0].any()


@pytest.mark.parametrize("name", ["huge", "masked", "ties", "one winner"])
def test_adversarial_logits(device, name, route):
    (hidden, weight, bias), targets, rows, support, _ = problem(device)
    if name == "huge":
        bias = torch.where(bias > 0, 1e4, -1e4).to(bias.dtype)
    elif name == "masked":
        bias = bias.masked_fill(bias < -0.5, -torch.inf)
        bias[targets[::2]] = 0.3
    elif name == "ties":
        weight, bias = torch.zeros_like(weight), torch.full_like(bias, 3.0)
    else:
        bias = torch.full_like(bias, -torch.inf).index_fill_(0, targets[:3], 2.0)
    factors = [hidden, weight, bias]
    expected, entropy, _, peak = from_hidden(factors, targets, rows, support, 0.7)
    whole, finite = ~expected.isnan(), expected.isfinite()
    up = torch.where(finite, torch.randn(2, len(rows), device=device), 0.0)
    lp, h, grads = step(factors, targets, rows, support, up, temperature=0.7)
    assert torch.equal(lp.isneginf(), expected.isneginf())
    assert torch.equal(lp.isnan(), expected.isnan())
    assert (lp - expected)[finite].abs().max() <= linear_logprob_bound(peak)
    assert (h - entropy)[whole].abs().max() <= linear_logprob_bound(peak)
    assert all(grad.isfinite().all() for grad in grads)


WRONG = {
    "empty": ([0, 2, 2], [1, 4], [1]),
    "lacks": ([0, 2, 4], [1, 4, 2, 5], [1]),
    "unsorted": ([0, 2, 4], [4, 1, 3, 5], [0]),
    "twice": ([0, 2, 5], [1, 4, 3, 3, 5], [1]),
    "short": ([0, 2, 3], [1, 4, 3, 5], [0, 1]),
    "late": ([1, 2, 4], [1, 4, 3, 5], [0, 1]),
    "beyond": ([0, 2, 9], [1, 4, 3, 5], [0, 1]),
}


def test_offsets_beyond_the_ids_are_not_followed(device, monkeypatch):
    """As on a GPU, where nobody looks: NaN everywhere, and no address out of bounds."""
    force("gather", monkeypatch)
    monkeypatch.setattr("mmpack.ops.logprobs.arguments.can_look_at", lambda _: False)
    hidden, weight = (torch.randn(n, 24, device=device).requires_grad_() for n in (2, 9))
    offsets, ids = (torch.tensor(x, device=device) for x in ([0, 2, 1 << 40], [1, 4, 3, 5]))
    targets = torch.tensor([1, 3], device=device)
    lp = linear_selected_logprobs(hidden, weight, targets, support=Support(offsets, ids))
    lp.sum().backward()
    assert lp.isnan().all()
    assert hidden.grad.isnan().all()
    assert weight.grad[[1, 4]].isnan().all()


@pytest.mark.parametrize("name", WRONG)
def test_wrong_lists_give_nan(device, name):
    offsets, ids, wrong = WRONG[name]
    tensors = (torch.tensor(x, device=device) for x in (offsets, ids, [1, 3]))
    lists = Lists(*tensors, runtime_scalar(1.0, device))
    made = module.statistics(lists, torch.zeros(len(ids), device=device), True)
    assert made.logprobs.isnan().nonzero().flatten().tolist() == wrong
    assert made.entropies.isnan().nonzero().flatten().tolist() == wrong
    ones = torch.ones(2, device=device)
    slopes = module.slopes(lists, Incoming(ones, ones), made, None)
    right = torch.isin(lists.tokens.cpu(), torch.tensor(wrong)).logical_not()
    assert slopes.cpu()[right].isfinite().all()


def test_the_entropy_of_a_nearly_flat_list_has_an_exact_gradient(device):
    logits = (2 + 1e-3 * torch.randn(8, 101)).to(device).requires_grad_()
    targets, up = torch.arange(8, device=device), torch.randn(8, device=device)
    support = support_of([torch.arange(50)] * 8, device)
    _, h = selected_logprobs(logits, targets, entropy=True, support=support)
    wide = logits.detach().double().requires_grad_()
    (h @ up).backward()
    (values(wide, targets, support)[1] @ up.double()).backward()
    assert (logits.grad - wide.grad).norm() <= bound(logits) * wide.grad.norm()


def test_every_output_is_written(device, route, monkeypatch):
    """With NaN in all memory that is handed out uninitialised, nothing changes."""
    factors, targets, rows, support, _ = problem(device)
    up = torch.randn(2, len(rows), device=device)
    expected = step(factors, targets, rows, support, up)

    def poisoned(make):
        def empty(*sizes, **keywords):
            x = make(*sizes, **keywords)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        return empty

    with monkeypatch.context() as patch:
        for where, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(where, name, poisoned(getattr(where, name)))
        got = step(factors, targets, rows, support, up)
    for a, b in zip([*got[:2], *got[2]], [*expected[:2], *expected[2]], strict=True):
        assert torch.equal(a, b)


def test_any_strides(device, route):
    (hidden, weight, bias), targets, rows, support, unread = problem(device, width=37)
    weight = weight.T.contiguous().T
    bias = torch.stack([bias, bias], 1)[:, 0]
    up = torch.randn(2, len(rows), device=device)
    leaves = [hidden.clone().requires_grad_(), weight.detach().requires_grad_()]
    lp = linear_selected_logprobs(*leaves, targets, rows, bias, support=support)
    grads = torch.autograd.grad(lp, leaves, up[0])
    assert grads[1].is_contiguous()  # as the fake kernel says
    expected, _, wide, peak = from_hidden([hidden, weight, bias], targets, rows, support)
    expected.backward(up[0].double())
    assert (lp - expected).abs().max() <= linear_logprob_bound(peak)
    check_gradients(grads, wide[:2], unread)


def test_registered_op_obeys_the_rules_of_torch(device, route):
    factors, targets, rows, support, _ = problem(device, num_rows=20, width=16, vocab=67, count=12)
    hidden, weight, bias = (x.nan_to_num().requires_grad_() for x in factors)
    lists = support.offsets, support.ids, targets, runtime_scalar(0.9, device)
    options = False, route == "products", None, True, 0, len(weight), ""
    torch.library.opcheck(
        torch.ops.mmpack.support_linear_logprobs.default,
        (hidden, weight, bias, *lists, rows, *options),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo gathers on the CPU")
def test_a_split_vocabulary_gives_the_bits_of_the_whole(device, tmp_path):
    spawned(_rank, 2, tmp_path)


def _rank(rank, ranks):
    torch.manual_seed(0)
    sum_kernels.PIECE = 4
    device = torch.device("cpu")
    factors, targets, rows, support, unread = problem(device, vocab=256, count=40, num_rows=40)
    part = slice(128 * rank, 128 * (rank + 1))
    inputs = targets, rows, support, torch.randn(2, len(rows))
    hidden, weight, bias = factors
    for whole in (False, True):
        op_of_hidden.by_products = lambda *_, whole=whole: whole
        lp, h, gradients = step(factors, *inputs)
        world = distributed.group.WORLD
        got = step([hidden, weight[part], bias[part]], *inputs, group=world)
        assert torch.equal(got[0], lp)
        assert torch.equal(got[1], h)
        for a, b in zip(got[2][1:], gradients[1:], strict=True):
            assert torch.equal(a, b[part])
        a, b = got[2][0].double(), gradients[0].double()
        assert (a - b).norm() <= bound(hidden) * b.norm()
        assert torch.equal(got[2][0][unread], torch.zeros_like(hidden[unread]))


@pytest.mark.gpu
def test_never_waits_and_replays_as_a_graph(device, route):
    factors, targets, rows, support, _ = problem(device, longest=200)
    leaves = [x.clone().requires_grad_() for x in factors]
    up = torch.randn(len(rows), device=device)

    def run():
        lp, h = linear_selected_logprobs(
            leaves[0], leaves[1], targets, rows, leaves[2], entropy=True, support=support
        )
        return [lp.detach(), *torch.autograd.grad(lp @ up + h @ up, leaves)]

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
@pytest.mark.parametrize("gradient", ["dense", "compact", "inplace"])
def test_logits_never_wait(device, gradient):
    logits = torch.randn(60, 3001, device=device)
    targets = torch.randint(0, 3001, (60,), device=device)
    support = draw_support(targets, 3001, 100)
    torch.cuda.set_sync_debug_mode("error")
    try:
        leaf = logits.clone().requires_grad_()
        lp = selected_logprobs(leaf, targets, gradient=gradient, support=support)
        torch.autograd.grad(lp.sum(), leaf)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_compiles_as_one_graph(device):
    factors, targets, rows, support, _ = problem(device)

    def loss(hidden, weight, bias):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            lp, h = linear_selected_logprobs(
                hidden, weight, targets, rows, bias, 0.7, True, support=support
            )
        return lp.sum() + 0.1 * h.sum()

    gradients = []
    for run in (loss, torch.compile(loss, fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in factors]
        run(*leaves).backward()
        gradients.append([x.grad for x in leaves])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
