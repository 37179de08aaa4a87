"""Logprobs over kept ids against torch.log_softmax in float64 with -inf at all other ids, and their bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import spawned
from torch import distributed
from torch.utils.checkpoint import checkpoint

from mmpack.contracts import (
    TOLERANCES,
    gradient_fp32_bound,
    linear_logprob_bound,
    selected_logprob_bound,
)
from mmpack.errors import ArgumentError
from mmpack.ops import invariance
from mmpack.ops.logprobs.autograd import Incoming
from mmpack.ops.logprobs.call import runtime_scalar
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.lists import hidden as op_of_hidden
from mmpack.ops.logprobs.lists import torch as module
from mmpack.ops.logprobs.lists.call import Lists
from mmpack.ops.logprobs.lists.products import by_products, can_multiply
from mmpack.ops.logprobs.selected import selected_logprobs
from mmpack.ops.logprobs.support import Support
from tests.support.kept_ids import draw_support, from_hidden, some, step, support_of, values
from tests.support.logprob_oracle import assert_same_bits_in_any_batch, linear_problem

CPU = torch.device("cpu")


@pytest.fixture(params=["gather", "products"])
def route(request, monkeypatch):
    force(request.param, monkeypatch)
    return request.param


def force(route, monkeypatch):
    monkeypatch.setattr(op_of_hidden, "by_products", lambda *_: route == "products")


def problem(
    num_rows=80, width=48, vocab=1003, count=150, dtype=torch.float32, scale=0.5, longest=40
):
    *factors, targets, rows, unread = linear_problem(num_rows, width, vocab, count, dtype, scale)
    return factors, targets, rows, draw_support(targets, vocab, longest), unread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.5, 20.0])
@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_values_and_gradients_hold_the_contract(dtype, scale, unique, softcap, route):
    factors, targets, rows, support, unread = problem(dtype=dtype, scale=scale)
    keywords = {}
    if unique:
        distinct, inverse = rows.unique(return_inverse=True)
        keywords = {"rows_unique": distinct, "row_inverse": inverse}
    up = torch.randn(2, len(rows))
    options = {"temperature": 0.8, "softcap": softcap, **keywords}
    lp, h, grads = step(factors, targets, rows, support, up, **options)
    expected, entropy, wide, peak = from_hidden(factors, targets, rows, support, 0.8, softcap)
    assert lp.dtype == h.dtype == torch.float32
    assert (lp - expected).abs().max() <= linear_logprob_bound(peak)
    assert (h - entropy).abs().max() <= linear_logprob_bound(peak)
    (expected @ up[0].double() + entropy @ up[1].double()).backward()
    assert torch.equal(grads[0][unread], torch.zeros_like(factors[0][unread]))
    for got, want in zip(grads, wide, strict=True):
        assert got.dtype == dtype
        keep = ~unread if want is wide[0] else slice(None)
        difference, want_grad = got.double()[keep] - want.grad[keep], want.grad[keep]
        if dtype == torch.float32:
            tolerance = gradient_fp32_bound(want_grad.abs().max())
            assert difference.abs().max() <= tolerance * max(1.0, peak / 50)
        else:
            assert difference.norm() <= TOLERANCES["gradient_bf16"].value * want_grad.norm()


def test_gradcheck_in_float64(route):
    hidden, weight = (torch.randn(n, 3).double().requires_grad_() for n in (4, 11))
    bias = torch.randn(11).double().requires_grad_()
    targets, rows = torch.tensor([1, 3, 3, 10, 0]), torch.tensor([3, 0, 0, 0, 2])
    support = draw_support(targets, 11, 9)

    def run(h, w, b):
        keywords = {"entropy": True, "softcap": 4.0, "support": support}
        return linear_selected_logprobs(h, w, targets, rows, b, 1.3, **keywords)

    assert torch.autograd.gradcheck(run, (hidden, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["all", "repeated", "counted", "distinct"])
@pytest.mark.parametrize("gradient", ["dense", "compact", "inplace"])
def test_from_logits(dtype, kind, gradient):
    if gradient != "dense" and kind == "repeated":
        pytest.skip("refused")
    vocab = 501
    logits = (torch.randn(20, vocab) * 4).to(dtype)
    rows = torch.randperm(20)[:13] if kind == "distinct" else torch.randint(0, 20, (33,))
    keywords = {"rows": rows}
    if kind == "all":
        rows, keywords = torch.arange(20), {}
    elif kind != "repeated":
        unique, inverse = rows.unique(return_inverse=True)
        keywords |= {"rows_unique": unique, "row_inverse": inverse}
    targets = torch.randint(0, vocab, (len(rows),))
    support = draw_support(targets, vocab, 60)
    wide = logits.double().requires_grad_()
    expected, entropy = values(wide[rows] / 0.7, targets, support)
    up = torch.randn(2, len(rows), dtype=torch.float64)
    (want,) = torch.autograd.grad(expected @ up[0] + entropy @ up[1], wide)

    leaf = logits.clone().requires_grad_()
    lp, h = selected_logprobs(
        leaf, targets, temperature=0.7, entropy=True, gradient=gradient, support=support, **keywords
    )
    assert ((lp - expected).abs() <= selected_logprob_bound(expected)).all()
    assert (h - entropy).abs().max() <= TOLERANCES["linear_logprob"].value
    (grad,) = torch.autograd.grad([lp, h], leaf, [x.to(lp.dtype) for x in up])
    assert grad.dtype == dtype
    assert (grad.layout == torch.sparse_coo) == (gradient == "compact")
    error = (grad.to_dense().double() - want).abs().max()
    if dtype == torch.bfloat16:
        assert error <= 2**-8 * want.abs().max()
    else:
        assert error <= gradient_fp32_bound(want.abs().max())
    assert not grad.to_dense()[want == 0].any()


def test_the_rest_of_the_head_is_not_touched(monkeypatch):
    """NaN in every row of the weight that no list names changes nothing, and those rows' gradient is 0."""
    force("gather", monkeypatch)
    factors, targets, rows, support, _ = problem(vocab=3000, longest=8)
    up = torch.randn(2, len(rows))
    expected = step(factors, targets, rows, support, up)
    other = torch.ones(3000, dtype=torch.bool).index_fill(0, support.ids, False)
    factors[1][other] = torch.nan
    got = step(factors, targets, rows, support, up)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    for a, b in zip(got[2], expected[2], strict=True):
        assert torch.equal(a, b)
    assert not got[2][1][other].any()


def test_lists_of_all_ids_are_the_softmax_over_the_vocabulary(route):
    factors, targets, rows, _, _ = problem(vocab=67, count=20)
    everything = support_of([torch.arange(67)] * 20)
    lp, h, _ = step(factors, targets, rows, everything, torch.ones(2, 20))
    full = torch.log_softmax(
        factors[0].double()[rows] @ factors[1].double().T + factors[2].double(), -1
    )
    bound = linear_logprob_bound(20.0)
    assert (lp - full.gather(1, targets[:, None])[:, 0]).abs().max() <= bound
    assert (h + (full.exp() * full).sum(-1)).abs().max() <= bound


def test_a_list_of_one_has_logprob_0_and_no_gradient(route):
    factors, targets, rows, _, _ = problem(count=40)
    alone = support_of([t[None] for t in targets])
    lp, h, grads = step(factors, targets, rows, alone, torch.randn(2, 40))
    assert torch.equal(lp, torch.zeros(40))
    assert torch.equal(h, torch.zeros(40))
    for grad in grads:
        assert not grad.any()


@pytest.mark.parametrize("name", ["huge", "masked", "ties"])
def test_adversarial_logits(name, route):
    (hidden, weight, bias), targets, rows, support, _ = problem()
    if name == "huge":
        bias = torch.where(bias > 0, 1e4, -1e4)
    elif name == "masked":
        bias = bias.masked_fill(bias < -0.5, -torch.inf)
        bias[targets[::2]] = 0.3
    else:
        weight, bias = torch.zeros_like(weight), torch.full_like(bias, 3.0)
    factors = [hidden, weight, bias]
    expected, entropy, _, peak = from_hidden(factors, targets, rows, support, 0.7)
    whole = ~expected.isnan()
    assert whole.any()
    finite = expected.isfinite()
    up = torch.where(finite, torch.randn(2, len(rows)), 0.0)
    lp, h, grads = step(factors, targets, rows, support, up, temperature=0.7)
    assert torch.equal(lp.isneginf(), expected.isneginf())
    assert torch.equal(lp.isnan(), expected.isnan())
    assert (lp - expected)[finite].abs().max() <= linear_logprob_bound(peak)
    assert (h - entropy)[whole].abs().max() <= linear_logprob_bound(peak)
    assert all(grad.isfinite().all() for grad in grads)


@settings(max_examples=40)
@given(
    st.integers(1, 150),
    st.sampled_from([1, 3, 7, 17, 64, 130]),
    st.integers(0, 2**31),
    st.sampled_from(["gather", "products"]),
)
def test_bits_do_not_depend_on_the_batch(count, width, seed, way):
    torch.manual_seed(seed)
    hidden, weight = torch.randn(count, width), torch.randn(517, width)
    targets = torch.randint(0, 517, (count,))
    support = draw_support(targets, 517, 30)
    up, up_entropy = torch.randn(2, count)

    def run(order):
        leaf = hidden.clone().requires_grad_()
        kept = some(support, order)
        lp, h = linear_selected_logprobs(
            leaf, weight, targets[order], order, entropy=True, support=kept
        )
        (lp @ up[order] + h @ up_entropy[order]).backward()
        return lp.detach(), h.detach(), leaf.grad

    with pytest.MonkeyPatch.context() as patch:
        force(way, patch)
        assert_same_bits_in_any_batch(run, torch.randperm(count), (count, 1))


def test_rows_without_gradient_are_not_read_in_backward(route):
    hidden = torch.randn(5, 8)
    hidden[1] = torch.nan
    hidden.requires_grad_()
    weight = torch.randn(30, 8, requires_grad=True)
    support = support_of([torch.tensor([n, n + 7, 20]) for n in range(5)])
    lp = linear_selected_logprobs(hidden, weight, torch.arange(5), support=support)
    assert lp.isnan().tolist() == [False, True, False, False, False]
    lp.backward(torch.tensor([1.0, 0.0, 0.0, 2.0, 1.0]))
    assert torch.equal(hidden.grad[1:3], torch.zeros(2, 8))
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    assert (hidden.grad[[0, 3, 4]] != 0).any(1).all()


def test_only_wanted_gradients_are_made(route):
    (hidden, weight, bias), targets, rows, support, _ = problem()
    weight.requires_grad_()
    _, h = linear_selected_logprobs(
        hidden, weight, targets, rows, bias, entropy=True, support=support
    )
    h.sum().backward()  # and none comes from the logprobs
    _, entropy, wide, _ = from_hidden([hidden, weight, bias], targets, rows, support)
    entropy.sum().backward()
    error = (weight.grad - wide[1].grad).abs().max()
    assert error <= gradient_fp32_bound(wide[1].grad.abs().max())


def test_registered_ops_obey_the_rules_of_torch(route):
    factors, targets, rows, support, _ = problem(num_rows=40, width=16, vocab=67, count=30)
    hidden, weight, bias = (x.requires_grad_() for x in factors)
    lists = support.offsets, support.ids, targets, runtime_scalar(0.9, CPU)
    options = False, route == "products", 5.0, True, 0, 67, ""
    torch.library.opcheck(
        torch.ops.mmpack.support_linear_logprobs.default,
        (hidden, weight, bias, *lists, rows, *options),
    )
    logits = torch.randn(40, 67, requires_grad=True)
    torch.library.opcheck(
        torch.ops.mmpack.support_logprobs.default,
        (logits, *lists, rows, rows, False, True, "dense", 40),
    )


@pytest.mark.parametrize("source", ["hidden", "logits"])
def test_compiles_as_one_graph(source):
    factors, targets, rows, support, _ = problem()
    factors[0].nan_to_num_()  # logits of all rows are made
    distinct, inverse = rows.unique(return_inverse=True)
    known = {"rows_unique": distinct, "row_inverse": inverse, "entropy": True, "support": support}

    def loss(hidden, weight, bias, temperature):
        if source == "hidden":
            lp, h = linear_selected_logprobs(
                hidden, weight, targets, rows, bias, temperature, softcap=30.0, **known
            )
        else:
            logits = hidden @ weight.T + bias
            lp, h = selected_logprobs(logits, targets, rows, temperature, **known)
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


def test_gradient_checkpointing_gives_the_same_bits(route):
    factors, targets, rows, support, _ = problem()

    def run(hidden, weight, bias):
        return linear_selected_logprobs(hidden, weight, targets, rows, bias, support=support)

    results = []
    for wrap in (False, True):
        leaves = [x.clone().requires_grad_() for x in factors]
        lp = checkpoint(run, *leaves, use_reentrant=False) if wrap else run(*leaves)
        lp.sum().backward()
        results.append([x.grad for x in leaves])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_autocast_does_not_lower_the_products(route):
    (hidden, weight, bias), targets, rows, support, _ = problem()
    expected = linear_selected_logprobs(hidden, weight, targets, rows, bias, support=support)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = linear_selected_logprobs(hidden, weight, targets, rows, bias, support=support)
    assert torch.equal(got, expected)


def test_no_loss_token_gives_an_empty_result_on_the_graph(route):
    hidden = torch.full((3, 4), torch.nan, requires_grad=True)
    weight = torch.randn(9, 4, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int64)
    nothing = Support(torch.zeros(1, dtype=torch.int64), empty)
    lp, h = linear_selected_logprobs(hidden, weight, empty, empty, entropy=True, support=nothing)
    assert lp.shape == h.shape == (0,)
    (lp.sum() + h.sum()).backward()
    assert torch.equal(hidden.grad, torch.zeros(3, 4))
    assert torch.equal(weight.grad, torch.zeros(9, 4))
    logits = torch.randn(3, 9, requires_grad=True)
    selected_logprobs(logits, empty, empty, support=nothing).sum().backward()
    assert torch.equal(logits.grad, torch.zeros(3, 9))


@pytest.mark.parametrize("way", ["gather", "products", "chosen"])
def test_a_split_vocabulary_gives_what_the_whole_gives(way, tmp_path):
    spawned(_rank, 2, tmp_path, way)


def _rank(rank, ranks, way):
    """Values of `ranks` shards, and gradients to them, are those of one process: bit for bit where lists are gathered.

    Of a product with fewer columns some CPUs give other bits.
    """
    torch.manual_seed(0)
    if way != "chosen":
        op_of_hidden.by_products = lambda *_: way == "products"
    longest = {"longest": 8} if way == "chosen" else {}
    factors, targets, rows, support, unread = problem(vocab=512, count=90, **longest)
    if way == "chosen":  # lists that are short beside V, and long beside a shard
        shape = len(targets), len(support.ids)
        chosen = [by_products(*shape, v, CPU, torch.float32) for v in (512, 512 // ranks)]
        assert chosen == [False, True]
    part = slice(512 // ranks * rank, 512 // ranks * (rank + 1))
    inputs = targets, rows, support, torch.randn(2, len(rows))
    lp, h, gradients = step(factors, *inputs, temperature=0.8, softcap=9.0)
    hidden, weight, bias = factors
    world = {"temperature": 0.8, "softcap": 9.0, "group": distributed.group.WORLD}
    got = step([hidden, weight[part], bias[part]], *inputs, **world)
    exactly = way == "gather"
    for a, b in ((got[0], lp), (got[1], h)):
        assert (a - b).abs().max() <= (0 if exactly else linear_logprob_bound(9.0))
    to_hidden, *to_shard = got[2]
    for a, b in zip(to_shard, gradients[1:], strict=True):
        assert (a - b[part]).abs().max() <= (0 if exactly else gradient_fp32_bound(b.abs().max()))
    difference = (to_hidden - gradients[0]).abs().max()
    assert difference <= gradient_fp32_bound(gradients[0].abs().max())
    assert torch.equal(to_hidden[unread], torch.zeros_like(hidden[unread]))
    everywhere = [torch.empty_like(to_hidden) for _ in range(ranks)]
    distributed.all_gather(everywhere, to_hidden)
    assert all(torch.equal(other, to_hidden) for other in everywhere)


BAD_LISTS = {
    "empty": ([0, 2, 2], [1, 4], "list of loss token 1 in support is empty"),
    "lacks": ([0, 2, 4], [1, 4, 2, 5], "list of loss token 1 in support lacks its target, id 3"),
    "unsorted": ([0, 2, 4], [4, 1, 3, 5], "list of loss token 0 in support has 1 after 4"),
    "twice": ([0, 2, 5], [1, 4, 3, 3, 5], "list of loss token 1 in support has 3 after 3"),
    "beyond": ([0, 2, 4], [1, 9, 3, 5], "support.ids runs from 1 to 9, expected [0, 9)"),
    "negative": ([0, 2, 4], [-1, 1, 3, 5], "support.ids runs from -1 to 5, expected [0, 9)"),
    "short": ([0, 2, 3], [1, 4, 3, 5], "support.offsets run from 0 to 3 for 4 ids"),
    "late": ([1, 2, 4], [1, 4, 3, 5], "support.offsets run from 1 to 4 for 4 ids"),
    "falling": ([0, 5, 4], [1, 4, 3, 5], "run from 0 to 4 and fall in between"),
    "few": ([0, 4], [1, 3, 4, 5], "support has 2 offsets and 4 ids for 2 targets"),
}


@pytest.mark.parametrize("name", BAD_LISTS)
@pytest.mark.parametrize("source", ["hidden", "logits"])
def test_wrong_lists_are_named(name, source):
    offsets, ids, says = BAD_LISTS[name]
    support = Support(torch.tensor(offsets), torch.tensor(ids))
    with pytest.raises(ArgumentError) as error:
        call(source, support)
    assert says in str(error.value)
    assert ". Fix: " in str(error.value)
    assert "\n" not in str(error.value)


def call(source, support):
    targets = torch.tensor([1, 3])
    if source == "hidden":
        hidden, weight = torch.zeros(2, 3), torch.zeros(9, 3)
        return linear_selected_logprobs(hidden, weight, targets, support=support)
    return selected_logprobs(torch.zeros(2, 9), targets, support=support)


@pytest.mark.parametrize(
    ("support", "says"),
    [
        ([[1], [3]], "support is of type list, expected a Support"),
        ((torch.tensor([0, 1, 2]), torch.tensor([1, 3])), "support is of type tuple"),
        (Support([0, 1, 2], torch.tensor([1, 3])), "support.offsets is of type list"),
        (Support(torch.tensor([0, 1, 2]), None), "support.ids is None"),
        (Support(torch.tensor([0.0, 1, 2]), torch.tensor([1, 3])), "dtype torch.float32"),
        (Support(torch.tensor([0, 1, 2]), torch.tensor([[1, 3]])), "shape [1, 2]"),
        (Support(torch.tensor([0, 1, 2]), torch.tensor([1, 3], device="meta")), "on meta"),
        (Support(torch.zeros(0, dtype=torch.int64), torch.tensor([1, 3])), "0 offsets and 2 ids"),
    ],
)
@pytest.mark.parametrize("source", ["hidden", "logits"])
def test_wrong_supports_are_named(support, says, source):
    with pytest.raises(ArgumentError) as error:
        call(source, support)
    assert says in str(error.value)
    assert ". Fix: " in str(error.value)


@pytest.mark.parametrize("name", [n for n in BAD_LISTS if n not in ("few", "beyond", "negative")])
def test_wrong_lists_that_nobody_looks_at_give_nan(name):
    """As on a GPU, where a look would wait: no number where a list is wrong, in values and gradients."""
    offsets, ids, says = BAD_LISTS[name]
    lists = Lists(
        torch.tensor(offsets), torch.tensor(ids), torch.tensor([1, 3]), runtime_scalar(1.0, CPU)
    )
    made = module.statistics(lists, torch.zeros(len(ids)), True)
    wrong = [0, 1] if "offsets" in says or name == "falling" else [int(says.split("token ")[1][0])]
    assert made.logprobs.isnan().nonzero().flatten().tolist() == wrong
    assert made.entropies.isnan().nonzero().flatten().tolist() == wrong
    given = Incoming(torch.ones(2), torch.ones(2))
    slopes = module.slopes(lists, given, made, None)
    right = torch.isin(lists.tokens, torch.tensor(wrong)).logical_not()
    assert slopes[right].isfinite().all()
    assert slopes[~right].isnan().all()


def test_the_route_follows_from_the_mean_length():
    h200 = torch.device("cuda")
    tokens, vocab = 13_107, 152_064
    with pytest.MonkeyPatch.context() as patch:
        for length, whole in ((8, False), (1230, False), (1240, True)):
            entries = tokens * length
            assert by_products(tokens, entries, vocab, h200, torch.bfloat16) == whole
        assert by_products(tokens, tokens * 5000, vocab, h200, torch.float32)
        assert not by_products(tokens, tokens * 4000, vocab, h200, torch.float32)
        patch.setattr(invariance, "is_on", lambda: True)
        assert not by_products(tokens, tokens * 1240, vocab, h200, torch.bfloat16)
        patch.setattr("mmpack.ops.backend._why_not", lambda *_: None)
        assert can_multiply(h200, torch.bfloat16)
        patch.setenv("MMPACK_BACKEND", "torch")
        assert not can_multiply(h200, torch.bfloat16) and can_multiply(CPU, torch.float32)
    assert by_products(10, 10_000, 2000, CPU, torch.float32)
    assert not by_products(10, 100, 2000, CPU, torch.float32)


def test_both_routes_run_by_themselves():
    """Short lists gather, long ones multiply; both are right."""
    for longest in (2, 400):
        factors, targets, rows, support, _ = problem(longest=longest)
        lp, h, _ = step(factors, targets, rows, support, torch.ones(2, len(rows)))
        expected, entropy, _, peak = from_hidden(factors, targets, rows, support)
        assert (lp - expected).abs().max() <= linear_logprob_bound(peak)
        assert (h - entropy).abs().max() <= linear_logprob_bound(peak)


def test_a_support_is_read_at_any_integer_width(route):
    factors, targets, rows, support, _ = problem()
    up = torch.randn(2, len(rows))
    expected = step(factors, targets, rows, support, up)
    narrow = Support(support.offsets.int(), support.ids.int())
    got = step(factors, targets.int(), rows.int(), narrow, up)
    assert torch.equal(got[0], expected[0])
    for a, b in zip(got[2], expected[2], strict=True):
        assert torch.equal(a, b)


def test_a_second_derivative_is_refused():
    logits = torch.randn(2, 9, requires_grad=True)
    support = support_of([torch.tensor([1, 2]), torch.tensor([3, 4])])
    lp = selected_logprobs(logits, torch.tensor([1, 3]), support=support)
    (grad,) = torch.autograd.grad(lp.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        grad.square().sum().backward()


def test_the_entropy_of_a_nearly_flat_list_has_an_exact_gradient():
    """d H = -p · (log p + H) is as small as the logits differ; H rounded to float32 would be seen in it."""
    logits = (2 + 1e-3 * torch.randn(8, 101)).requires_grad_()
    targets = torch.arange(8)
    support = support_of([torch.arange(50)] * 8)
    _, h = selected_logprobs(logits, targets, entropy=True, support=support)
    wide = logits.detach().double().requires_grad_()
    up = torch.randn(8)
    (h @ up).backward()
    (values(wide, targets, support)[1] @ up.double()).backward()
    assert h.dtype == torch.float32
    assert (logits.grad - wide.grad).norm() <= 1e-6 * wide.grad.norm()
