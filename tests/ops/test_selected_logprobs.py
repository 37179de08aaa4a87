"""selected_logprobs against torch.log_softmax in float64, value and gradient, and its bits against any other batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmpack.contracts import TOLERANCES, gradient_fp32_bound, selected_logprob_bound
from mmpack.errors import ArgumentError
from mmpack.ops.logprobs.selected import selected_logprobs
from mmpack.ops.logprobs.torch import CHUNK_ROWS
from tests.support.logprob_oracle import assert_same_bits_in_any_batch, from_logits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def problem(num_rows=90, vocab=1003, count=150, dtype=torch.float32, scale=4.0):
    """Rows with repeats, in no order; NaN in every row that is not read."""
    logits = torch.randn(num_rows, vocab) * scale
    rows = torch.randint(0, num_rows - 10, (count,), dtype=torch.int32)
    unread = torch.ones(num_rows, dtype=torch.bool).index_fill(0, rows.long(), False)
    logits[unread] = torch.nan
    return logits.to(dtype), torch.randint(0, vocab, (count,)), rows, unread


def adversarial(name, vocab=777):
    x = torch.randn(12, vocab)
    if name == "huge":
        return torch.where(x > 0, 1e4, -1e4) + x
    if name == "masked":
        return x.masked_fill(x < 0.5, -torch.inf)
    if name == "ties":
        return torch.full_like(x, 3.0)
    if name == "one winner":
        return torch.full_like(x, -torch.inf).index_fill_(1, torch.tensor([7]), 2.0)
    return x * 1e4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_values_hold_the_contract(dtype, temperature):
    logits, targets, rows, _ = problem(dtype=dtype)
    lp, h = selected_logprobs(logits, targets, rows, temperature, entropy=True)
    expected, entropy, _ = from_logits(logits, targets, rows, temperature)
    assert lp.dtype == h.dtype == torch.float32
    assert ((lp - expected).abs() <= selected_logprob_bound(expected)).all()
    assert (h - entropy).abs().max() <= TOLERANCES["linear_logprob"].value


@pytest.mark.parametrize("name", ["huge", "masked", "ties", "one winner", "scaled"])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_adversarial_logits_hold_the_contract(name, temperature):
    logits = adversarial(name).requires_grad_()
    targets = torch.cat([torch.full((6,), 7), torch.randint(0, 777, (6,))])
    lp, h = selected_logprobs(logits, targets, None, temperature, entropy=True)
    expected, entropy, leaf = from_logits(logits, targets, torch.arange(12), temperature)
    impossible = expected == -torch.inf
    assert torch.equal(lp == -torch.inf, impossible)
    difference = torch.where(impossible, 0.0, lp - expected).abs()
    assert (difference <= selected_logprob_bound(expected)).all()
    assert (h - entropy).abs().max() <= TOLERANCES["linear_logprob"].value

    up = torch.randn(12)
    lp.backward(up)
    expected.backward(up.double())
    assert (logits.grad - leaf.grad).abs().max() <= gradient_fp32_bound(leaf.grad.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("unique", [False, True])
def test_gradient_holds_the_contract(dtype, with_entropy, unique):
    logits, targets, rows, unread = problem(dtype=dtype)
    logits.requires_grad_()
    keywords = {}
    if unique:
        distinct, inverse = rows.unique(return_inverse=True)
        keywords = {"rows_unique": distinct, "row_inverse": inverse.int()}
    up, up_entropy = torch.randn(2, len(rows))
    lp, h = selected_logprobs(logits, targets, rows, 0.8, entropy=True, **keywords)
    expected, entropy, leaf = from_logits(logits, targets, rows, 0.8)
    (lp @ up + with_entropy * (h @ up_entropy)).backward()
    (expected @ up.double() + with_entropy * (entropy @ up_entropy.double())).backward()

    assert logits.grad.dtype == dtype
    assert torch.equal(logits.grad[unread], torch.zeros_like(logits.grad[unread]))
    got, want = logits.grad.double()[~unread], leaf.grad[~unread]
    if dtype == torch.float32:
        assert (got - want).abs().max() <= gradient_fp32_bound(want.abs().max())
    else:
        assert (got - want).norm() <= TOLERANCES["gradient_bf16"].value * want.norm()


def test_gradcheck_in_float64():
    logits = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    targets, rows = torch.tensor([1, 3, 3, 10, 0]), torch.tensor([4, 0, 0, 0, 2])
    assert torch.autograd.gradcheck(
        lambda x: selected_logprobs(x, targets, rows, 1.3, entropy=True), logits
    )


@given(st.integers(1, 3 * CHUNK_ROWS), st.sampled_from([5, 32, 1003]), st.integers(0, 2**31))
def test_bits_do_not_depend_on_the_batch(count, vocab, seed):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=g) * 5
    targets = torch.randint(0, vocab, (count,), generator=g)
    up, up_entropy = torch.randn(2, count, generator=g)

    def run(order):
        leaf = logits.clone().requires_grad_()
        lp, h = selected_logprobs(leaf, targets[order], order, 0.9, entropy=True)
        (lp @ up[order] + h @ up_entropy[order]).backward()
        return lp.detach(), h.detach(), leaf.grad

    assert_same_bits_in_any_batch(run, torch.randperm(count, generator=g), (count, 1))


def test_all_ways_of_naming_rows_agree_in_bits():
    logits, targets, rows, _ = problem()
    distinct, inverse = rows.unique(return_inverse=True)
    up = torch.randn(len(rows))
    results = []
    for keywords in (
        {"rows": rows},
        {"rows_unique": distinct, "row_inverse": inverse},
        {"rows": rows, "rows_unique": distinct, "row_inverse": inverse},
    ):
        leaf = logits.clone().requires_grad_()
        lp = selected_logprobs(leaf, targets, **keywords)
        lp.backward(up)
        results.append((lp.detach(), leaf.grad))
    for lp, grad in results[1:]:
        assert torch.equal(lp, results[0][0])
        assert torch.equal(grad, results[0][1])


def test_opposite_gradients_on_one_row_keep_their_targets():
    # Two branches leave one row with advantages +1 and -1: the row's sum is 0, its gradient is not.
    logits = torch.randn(1, 50, requires_grad=True)
    selected_logprobs(logits, torch.tensor([3, 9]), torch.tensor([0, 0])).backward(
        torch.tensor([1.0, -1.0])
    )
    expected = torch.zeros(1, 50)
    expected[0, 3], expected[0, 9] = 1.0, -1.0
    assert torch.equal(logits.grad, expected)


def test_nan_in_a_selected_row_stays_there():
    logits = torch.randn(6, 40)
    logits[2, 5] = torch.nan
    logits.requires_grad_()
    lp = selected_logprobs(logits, torch.arange(6))
    assert lp.isnan().tolist() == [False, False, True, False, False, False]
    lp.backward(torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0]))
    assert torch.equal(logits.grad[2], torch.zeros(40))
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("num_rows", [0, 3])
def test_no_loss_token_gives_an_empty_result_on_the_graph(num_rows):
    logits = torch.full((num_rows, 9), torch.nan, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int64)
    lp, h = selected_logprobs(logits, empty, empty, entropy=True)
    assert lp.shape == h.shape == (0,)
    (lp.sum() + h.sum()).backward()
    assert torch.equal(logits.grad, torch.zeros(num_rows, 9))


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"logits": torch.zeros(1, 4, 9)}, "logits has shape [1, 4, 9]"),
        ({"logits": torch.zeros(4, 9, dtype=torch.int64)}, "torch.int64, expected a float"),
        ({"targets": torch.tensor([0, 9])}, "targets runs from 0 to 9, expected [0, 9)"),
        ({"targets": torch.tensor([0.0, 1.0])}, "targets has shape [2] and dtype torch.float32"),
        ({"rows": torch.tensor([-1, 0])}, "rows runs from -1 to 0, expected [0, 4)"),
        ({"rows": torch.tensor([0])}, "targets has 2 entries for 1 rows"),
        ({"rows": None}, "targets has 2 entries for 4 rows"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"rows_unique": torch.tensor([0])}, "rows_unique and row_inverse must be passed together"),
        (
            {"rows_unique": torch.tensor([0]), "row_inverse": torch.tensor([0, 1])},
            "row_inverse runs from 0 to 1, expected [0, 1)",
        ),
        (
            {"rows_unique": torch.tensor([0]), "row_inverse": torch.tensor([0])},
            "rows (2 entries) is not rows_unique[row_inverse] (1 entries)",
        ),
        (
            {"rows_unique": torch.tensor([0, 2]), "row_inverse": torch.tensor([0, 1])},
            "rows (2 entries) is not rows_unique[row_inverse] (2 entries)",
        ),
    ],
)
def test_wrong_arguments_are_named(keywords, says):
    arguments = {
        "logits": torch.zeros(4, 9),
        "targets": torch.tensor([0, 8]),
        "rows": torch.tensor([0, 3]),
    }
    with pytest.raises(ArgumentError) as error:
        selected_logprobs(**(arguments | keywords))
    assert says in str(error.value)


@pytest.mark.gpu
def test_gpu_holds_the_contract():
    for vocab in (1003, 151_936):
        logits, targets, rows, unread = problem(vocab=vocab, count=700, num_rows=400)
        leaf = logits.cuda().requires_grad_()
        up = torch.randn(len(rows))
        lp = selected_logprobs(leaf, targets.cuda(), rows.cuda(), 0.7)
        lp.backward(up.cuda())
        expected, _, want = from_logits(logits, targets, rows, 0.7)
        expected.backward(up.double())
        assert ((lp.cpu() - expected).abs() <= selected_logprob_bound(expected)).all()
        assert torch.equal(leaf.grad[unread.cuda()].cpu(), torch.zeros_like(logits[unread]))
        got, want = leaf.grad.cpu()[~unread], want.grad[~unread]
        assert (got - want).abs().max() <= gradient_fp32_bound(want.abs().max())
        order = torch.randperm(len(rows))
        again = selected_logprobs(leaf.detach(), targets[order].cuda(), rows[order].cuda(), 0.7)
        assert torch.equal(again, lp.detach()[order.cuda()])


@pytest.mark.gpu
def test_gpu_never_waits():
    logits, targets, rows, _ = problem()
    leaf, targets, rows = logits.cuda().requires_grad_(), targets.cuda(), rows.cuda()
    up = torch.randn(len(rows), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        lp, h = selected_logprobs(leaf, targets, rows, 0.7, entropy=True)
        (lp @ up + h @ up).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gpu_beyond_2_to_the_31_elements():
    num_rows, vocab = 70_000, 32_003
    logits = torch.zeros(num_rows, vocab, dtype=torch.bfloat16, device="cuda")
    rows = torch.tensor([0, 65_535, 65_536, num_rows - 1])
    logits[rows.cuda()] = torch.randn(4, vocab, device="cuda").bfloat16()
    targets = torch.tensor([0, 5, vocab - 1, vocab - 1])
    leaf = logits.requires_grad_()
    lp = selected_logprobs(leaf, targets.cuda(), rows.cuda())
    lp.sum().backward()
    read = logits.detach()[rows.cuda()].cpu()
    expected, _, want = from_logits(read, targets, torch.arange(4))
    expected.sum().backward()
    assert ((lp.detach().cpu() - expected).abs() <= selected_logprob_bound(expected)).all()
    difference = leaf.grad[rows.cuda()].cpu().double() - want.grad
    assert difference.norm() <= TOLERANCES["gradient_bf16"].value * want.grad.norm()
    assert int(leaf.grad.count_nonzero(dim=1).count_nonzero()) == 4
