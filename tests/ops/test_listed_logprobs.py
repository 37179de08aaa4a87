"""Logprobs of lists of ids against torch.log_softmax in float64, and the bits of selected logprobs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import spawned
from torch import distributed

import mmpack as mp
from mmpack.contracts import (
    TOLERANCES,
    gradient_fp32_bound,
    linear_logprob_bound,
    selected_logprob_bound,
)
from mmpack.errors import ArgumentError
from mmpack.ops.logprobs.linear import torch as linear_module
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.listed import linear_listed_logprobs, listed_logprobs
from mmpack.ops.logprobs.selected import selected_logprobs
from mmpack.ops.logprobs.support import Support
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


def problem(num_rows=80, width=48, vocab=1003, count=150, dtype=torch.float32, scale=0.5):
    """Rows that repeat, and the lists of two teachers, of which the second often says nothing."""
    *factors, targets, rows, unread = linear_problem(num_rows, width, vocab, count, dtype, scale)
    lists = {"7B": draw_lists(count, vocab, 40, 0.1), "32B": draw_lists(count, vocab, 9, 0.8)}
    return factors, targets, rows, lists, unread


def check_gradients(grads, wide, unread, dtype, peak):
    for got, want in zip(grads, wide, strict=True):
        assert got.dtype == dtype
        keep = ~unread if want is wide[0] else slice(None)
        difference, want_grad = got.double()[keep] - want.grad[keep], want.grad[keep]
        if dtype == torch.float32:
            tolerance = gradient_fp32_bound(want_grad.abs().max())
            assert difference.abs().max() <= tolerance * max(1.0, peak / 50)
        else:
            assert difference.norm() <= TOLERANCES["gradient_bf16"].value * want_grad.norm()
    assert torch.equal(grads[0][unread], torch.zeros_like(grads[0][unread]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.5, 20.0])
@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_values_and_gradients_hold_the_contract(dtype, scale, unique, softcap):
    factors, targets, rows, lists, unread = problem(dtype=dtype, scale=scale)
    options = {"temperature": 0.8, "softcap": softcap}
    if unique:
        distinct, inverse = rows.unique(return_inverse=True)
        options |= {"rows_unique": distinct, "row_inverse": inverse}
    got, grads, up = step(factors, targets, rows, lists, **options)
    want, wide, peak = from_hidden(factors, targets, rows, lists, 0.8, softcap)
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert x.dtype == torch.float32 and x.shape == want[name].shape
        assert (x - want[name]).abs().max() <= linear_logprob_bound(peak), name
    dotted(want, up).backward()
    check_gradients(grads, wide, unread, dtype, peak)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["all", "repeated", "counted", "distinct"])
@pytest.mark.parametrize("gradient", ["dense", "compact", "inplace"])
def test_from_logits(dtype, kind, gradient):
    logits = (torch.randn(60, 203) * 3).to(dtype)
    rows = {"all": None, "distinct": torch.randperm(60)[:40]}.get(kind, torch.randint(0, 60, (90,)))
    keywords = {} if rows is None else {"rows": rows}
    if kind in ("counted", "distinct"):
        unique, inverse = rows.unique(return_inverse=True)
        keywords |= {"rows_unique": unique, "row_inverse": inverse}
    elif kind == "repeated" and gradient != "dense":
        return
    count = 60 if rows is None else len(rows)
    targets = torch.randint(0, 203, (count,))
    lists = {"a": draw_lists(count, 203), "b": draw_lists(count, 203, 30, 0.7)}
    leaf = logits.clone().requires_grad_()
    source = leaf * 1.0 if gradient == "inplace" else leaf
    out = listed_logprobs(
        source, targets, lists, temperature=0.7, entropy=True, gradient=gradient, **keywords
    )
    wide = logits.double().requires_grad_()
    read = wide if rows is None else wide[rows]
    want = of_logits(read / 0.7, targets, lists)
    got = named(out)
    up = ups(got)
    for name, x in got.items():
        error = (x.double() - want[name]).abs()
        assert (error <= selected_logprob_bound(want[name])).all(), name
    dotted(got, up).backward()
    dotted(want, up).backward()
    found = leaf.grad.to_dense().double()
    if dtype == torch.bfloat16:
        difference = (found - wide.grad).norm() / wide.grad.norm()
        assert difference <= TOLERANCES["gradient_bf16"].value
    else:
        assert (found - wide.grad).abs().max() <= gradient_fp32_bound(wide.grad.abs().max())


def test_values_have_the_bits_of_selected_logprobs():
    factors, targets, rows, lists, _ = problem()
    hidden, weight, bias = factors
    out = linear_listed_logprobs(hidden, weight, targets, lists, rows, bias, 0.8, True)
    alone, entropy = linear_selected_logprobs(hidden, weight, targets, rows, bias, 0.8, True)
    assert torch.equal(out.targets, alone) and torch.equal(out.entropy, entropy)
    logits = torch.randn(80, 1003)
    from_logits = listed_logprobs(logits, targets, lists, rows)
    assert torch.equal(from_logits.targets, selected_logprobs(logits, targets, rows))
    for name, own in lists.items():
        read = rows[tokens_of(own)]
        wanted = linear_selected_logprobs(hidden, weight, own.ids, read, bias, 0.8)
        assert torch.equal(out.lists[name], wanted)
        assert torch.equal(from_logits.lists[name], selected_logprobs(logits, own.ids, read))


def test_the_whole_vocabulary_is_a_list_too():
    hidden, weight, targets = torch.randn(7, 16), torch.randn(30, 16), torch.arange(7)
    every = Support(torch.arange(8) * 30, torch.arange(30).repeat(7))
    out = linear_listed_logprobs(hidden, weight, targets, {"all": every})
    want = (hidden.double() @ weight.double().T).log_softmax(-1)
    assert (out.lists["all"].view(7, 30) - want).abs().max() <= 1e-5


def test_an_id_may_be_in_a_list_twice_and_be_the_target():
    factors, targets, _, _, _ = problem(count=1, num_rows=20)
    hidden, weight, bias = (x[:1] if x is factors[0] else x for x in factors)
    hidden = torch.randn_like(hidden)
    target = int(targets[0])
    twice = {"a": Support(torch.tensor([0, 3]), torch.tensor([target, target, 5]))}
    once = {"a": Support(torch.tensor([0, 1]), torch.tensor([5]))}
    up = {
        "": torch.tensor([0.5]),
        "entropy": torch.tensor([0.25]),
        "a": torch.tensor([1.0, 2.0, 3.0]),
    }
    _, first, _ = step([hidden, weight, bias], targets, None, twice, up)
    summed = {"": torch.tensor([3.5]), "entropy": up["entropy"], "a": torch.tensor([3.0])}
    _, second, _ = step([hidden, weight, bias], targets, None, once, summed)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_gradcheck_in_float64():
    hidden = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True)
    rows, targets = torch.tensor([3, 0, 3, 5]), torch.tensor([1, 9, 1, 0])
    lists = {"a": draw_lists(4, 11, 6), "b": draw_lists(4, 11, 3, 0.5)}

    def run(hidden, weight, bias):
        out = linear_listed_logprobs(
            hidden, weight, targets, lists, rows, bias, 0.7, True, softcap=4.0
        )
        return out.targets, out.entropy, *out.lists.values()

    assert torch.autograd.gradcheck(run, (hidden, weight, bias))


@settings(max_examples=15)
@given(count=st.integers(1, 90), width=st.sampled_from([1, 8, 33]), seed=st.integers(0, 2**20))
def test_bits_do_not_depend_on_the_batch(count, width, seed):
    torch.manual_seed(seed)
    hidden, weight = torch.randn(count, width), torch.randn(517, width)
    targets, lists = torch.randint(0, 517, (count,)), {"a": draw_lists(count, 517, 20)}
    up, up_list = torch.randn(2, count)
    up_entropy = torch.randn(count)

    def run(order):
        leaf = hidden.clone().requires_grad_()
        own = {"a": some(lists["a"], order)}
        out = linear_listed_logprobs(leaf, weight, targets[order], own, order, entropy=True)
        dotted(
            named(out),
            {"": up[order], "entropy": up_entropy[order], "a": up_list[order][tokens_of(own["a"])]},
        ).backward()
        return out, leaf.grad

    whole, grad = run(torch.arange(count))
    order = torch.randperm(count)[: count // 2 + 1]
    part, part_grad = run(order)
    assert torch.equal(part.targets, whole.targets[order])
    assert torch.equal(part.entropy, whole.entropy[order])
    scores = Support(lists["a"].offsets, lists["a"].ids)
    places = Support(scores.offsets, torch.arange(len(scores.ids)))
    assert torch.equal(part.lists["a"], whole.lists["a"][some(places, order).ids])
    assert torch.equal(part_grad[order], grad[order])


def test_no_product_but_those_of_one_pass(monkeypatch):
    """Two teachers cost no product more than the sampled token alone."""
    factors, targets, rows, lists, _ = problem()
    hidden, weight, bias = (x.requires_grad_() for x in factors)
    distinct, inverse = rows.unique(return_inverse=True)
    known = {"rows_unique": distinct, "row_inverse": inverse}
    shapes = []
    product = linear_module.product_of

    def counted(a, b, dtype):
        shapes.append((tuple(a.shape), tuple(b.shape)))
        return product(a, b, dtype)

    monkeypatch.setattr(linear_module, "product_of", counted)
    linear_selected_logprobs(hidden, weight, targets, rows, bias, **known).sum().backward()
    alone, shapes[:] = list(shapes), []
    out = linear_listed_logprobs(hidden, weight, targets, lists, rows, bias, **known)
    dotted(named(out), ups(named(out))).backward()
    assert shapes == alone and alone


def test_rows_without_gradient_are_not_read_in_backward():
    hidden = torch.randn(5, 8)
    hidden[1] = torch.nan
    hidden.requires_grad_()
    weight = torch.randn(30, 8, requires_grad=True)
    lists = {"a": draw_lists(5, 30, 6, 0.0)}
    out = linear_listed_logprobs(hidden, weight, torch.arange(5), lists)
    assert out.targets.isnan().tolist() == [False, True, False, False, False]
    up = (tokens_of(lists["a"]) == 3).float()
    out.lists["a"].backward(up)
    assert torch.equal(hidden.grad[[0, 1, 2, 4]], torch.zeros(4, 8))
    assert weight.grad.isfinite().all() and (hidden.grad[3] != 0).any()


def test_compiles_as_one_graph():
    factors, targets, rows, lists, _ = problem(num_rows=40, count=50)

    def loss(hidden, weight, bias):
        out = linear_listed_logprobs(hidden, weight, targets, lists, rows, bias, entropy=True)
        return out.targets.sum() + out.lists["7B"].sum() + 0.1 * out.entropy.sum()

    gradients = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in factors]
        run(*leaves).backward()
        gradients.append([x.grad for x in leaves])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_no_loss_token_gives_an_empty_result_on_the_graph():
    hidden = torch.full((3, 4), torch.nan, requires_grad=True)
    weight = torch.randn(9, 4, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int64)
    lists = {"a": Support(torch.zeros(1, dtype=torch.int64), empty)}
    out = linear_listed_logprobs(hidden, weight, empty, lists, empty, entropy=True)
    assert out.targets.shape == out.lists["a"].shape == out.entropy.shape == (0,)
    (out.targets.sum() + out.lists["a"].sum()).backward()
    assert torch.equal(hidden.grad, torch.zeros(3, 4))


def test_without_lists_it_is_selected_logprobs():
    hidden, weight, targets = torch.randn(6, 8), torch.randn(20, 8), torch.arange(6)
    out = linear_listed_logprobs(hidden, weight, targets, {})
    assert out.lists == {} and out.entropy is None
    assert torch.equal(out.targets, linear_selected_logprobs(hidden, weight, targets))


def test_a_split_vocabulary_gives_the_bits_of_the_whole(tmp_path):
    spawned(_rank, 2, tmp_path)


def _rank(rank, ranks):
    torch.manual_seed(0)
    linear_module.BLOCK_COLUMNS = 64
    factors, targets, rows, lists, _ = problem(vocab=512, count=90)
    values, gradients, up = step(factors, targets, rows, lists, temperature=0.8)
    part = slice(512 // ranks * rank, 512 // ranks * (rank + 1))
    shards = [factors[0], factors[1][part], factors[2][part]]
    world = distributed.group.WORLD
    got, grads, _ = step(shards, targets, rows, lists, up, temperature=0.8, group=world)
    for name, x in got.items():
        assert torch.equal(x, values[name])
    for a, b in zip(grads[1:], gradients[1:], strict=True):
        assert torch.equal(a, b[part])
    difference = (grads[0] - gradients[0]).abs().max()
    assert difference <= gradient_fp32_bound(gradients[0].abs().max())


INT = torch.int64
BAD = {
    "a list": ([1], "lists is of type list"),
    "numbers as names": ({1: Support(torch.tensor([0, 1, 1]), torch.tensor([3]))}, "lists is"),
    "tensors": ({"a": torch.arange(3)}, "lists['a'] is of type Tensor"),
    "few": ({"a": Support(torch.tensor([0, 1]), torch.tensor([3]))}, "has 1 lists for 2 targets"),
    "none": ({"a": Support(torch.zeros(0, dtype=INT), torch.zeros(0, dtype=INT))}, "0 offsets"),
    "falling": ({"a": Support(torch.tensor([0, 2, 1]), torch.tensor([3]))}, "expected to rise"),
    "short": (
        {"a": Support(torch.tensor([0, 1, 1]), torch.tensor([3, 4]))},
        "from 0 to 1 for 2 ids",
    ),
    "beyond": ({"a": Support(torch.tensor([0, 1, 1]), torch.tensor([9]))}, "expected [0, 9)"),
    "floats": ({"a": Support(torch.tensor([0, 1, 1]), torch.tensor([3.0]))}, "dtype torch.float32"),
    "numbers": ({"a": Support([0, 1, 1], torch.tensor([3]))}, "offsets is of type list"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("source", ["hidden", "logits"])
def test_wrong_lists_are_named(name, source):
    lists, says = BAD[name]
    targets = torch.tensor([0, 8])
    with pytest.raises(ArgumentError) as error:
        if source == "hidden":
            mp.linear_listed_logprobs(torch.zeros(2, 3), torch.zeros(9, 3), targets, lists)
        else:
            mp.listed_logprobs(torch.zeros(2, 9), targets, lists)
    assert says in str(error.value) and "Fix: " in str(error.value)


def test_other_arguments_are_those_of_selected_logprobs():
    logits, targets = torch.zeros(4, 9), torch.tensor([0, 8])
    lists = {"a": Support(torch.tensor([0, 1, 1]), torch.tensor([3]))}
    for keywords, says in (
        ({"rows": torch.tensor([0, 3]), "gradient": "compact"}, "rows may repeat"),
        ({"rows": torch.tensor([0, 3]), "temperature": 0.0}, "temperature is 0.0"),
        ({"rows": torch.tensor([0, 3]), "entropy": "yes"}, "entropy is of type str"),
        ({"rows": torch.tensor([0, 4])}, "rows runs from 0 to 4"),
    ):
        with pytest.raises(ArgumentError, match="listed_logprobs") as error:
            mp.listed_logprobs(logits, targets, lists, **keywords)
        assert says in str(error.value)
    with pytest.raises(ArgumentError, match="softcap is -1"):
        mp.linear_listed_logprobs(torch.zeros(2, 3), torch.zeros(9, 3), targets, lists, softcap=-1)
