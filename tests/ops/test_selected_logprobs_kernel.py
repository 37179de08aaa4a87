"""The selected_logprobs kernels against torch.log_softmax in float64, on inputs chosen to hurt, and their bits."""

import pytest
import torch

from mmpack.contracts import TOLERANCES, gradient_fp32_bound, selected_logprob_bound
from mmpack.errors import BackendError
from mmpack.ops.logprobs.autograd import Incoming
from mmpack.ops.logprobs.call import Call, runtime_scalar
from mmpack.ops.logprobs.selected import selected_logprobs
from tests.support.logprob_oracle import from_logits

pytestmark = pytest.mark.kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCAB = 8201  # one whole tile and an odd rest


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that nobody has written yet holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def problem(device, kind="repeated", dtype=torch.float32, vocab=VOCAB, num_rows=9, count=14):
    """Logits with NaN in the rows that nobody reads, targets with repeats, and how rows are named."""
    logits = torch.randn(num_rows, vocab) * 4
    if kind == "all":
        rows, keywords = torch.arange(num_rows), {}
    else:
        count = num_rows - 3 if kind == "distinct" else count
        rows = torch.randperm(num_rows - 2)[:count] if kind == "distinct" else None
        rows = torch.randint(0, num_rows - 2, (count,)) if rows is None else rows
        keywords = {"rows": rows.int().to(device)}
        if kind != "repeated":
            unique, inverse = rows.unique(return_inverse=True)
            keywords |= {"rows_unique": unique.int().to(device), "row_inverse": inverse.to(device)}
    unread = torch.ones(num_rows, dtype=torch.bool).index_fill(0, rows, False)
    logits[unread] = torch.nan
    targets = torch.randint(0, vocab, (len(rows),))
    targets[1::3] = vocab - 1
    return logits.to(device, dtype), targets.to(device), rows.to(device), keywords, unread


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("kind", ["all", "distinct", "repeated", "repeated, counted"])
def test_values_hold_the_contract(device, dtype, temperature, kind):
    logits, targets, rows, keywords, _ = problem(device, kind, dtype)
    lp, h = selected_logprobs(logits, targets, temperature=temperature, entropy=True, **keywords)
    expected, entropy, _ = from_logits(logits, targets, rows, temperature)
    assert lp.dtype == h.dtype == torch.float32
    assert ((lp - expected).abs() <= selected_logprob_bound(expected)).all()
    assert (h - entropy).abs().max() <= TOLERANCES["linear_logprob"].value
    alone = selected_logprobs(logits, targets, temperature=temperature, **keywords)
    assert torch.equal(alone, lp)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("kind", ["all", "distinct", "repeated", "repeated, counted"])
@pytest.mark.parametrize("gradient", ["dense", "compact", "inplace"])
def test_gradient_holds_the_contract(device, dtype, with_entropy, kind, gradient):
    if gradient != "dense" and kind == "repeated":
        pytest.skip("refused")
    logits, targets, rows, keywords, unread = problem(device, kind, dtype)
    up, up_entropy = torch.randn(2, len(rows), device=device)
    expected, entropy, want = from_logits(logits, targets, rows, 0.8)
    (expected @ up.double() + with_entropy * (entropy @ up_entropy.double())).backward()

    leaf = logits.clone().requires_grad_()
    lp, h = selected_logprobs(
        leaf, targets, temperature=0.8, entropy=True, gradient=gradient, **keywords
    )
    (grad,) = torch.autograd.grad(
        [lp, h][: 1 + with_entropy], leaf, [up, up_entropy][: 1 + with_entropy]
    )
    assert grad.dtype == dtype
    assert grad.shape == logits.shape
    assert grad.is_sparse == (gradient == "compact")
    assert (grad.data_ptr() == leaf.data_ptr()) if gradient == "inplace" else True
    if gradient == "compact":
        assert grad._values().shape[0] == len(rows.unique())
        grad = grad.to_dense()
    assert torch.equal(grad[unread], torch.zeros_like(grad[unread]))
    got, want = grad.double()[~unread], want.grad[~unread]
    if dtype == torch.float32:
        assert (got - want).abs().max() <= gradient_fp32_bound(want.abs().max())
    else:
        assert (got - want).norm() <= TOLERANCES["gradient_bf16"].value * want.norm()


@pytest.mark.parametrize("name", ["huge", "masked", "lowest", "ties", "one winner", "scaled"])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_adversarial_logits_hold_the_contract(device, name, temperature):
    vocab = 777
    x = torch.randn(12, vocab)
    if name == "huge":
        x = torch.where(x > 0, 1e4, -1e4) + x
    elif name == "masked":
        x = x.masked_fill(x < 0.5, -torch.inf)
    elif name == "lowest":
        x = x.masked_fill(x < 0.5, -1e38)
    elif name == "ties":
        x = torch.full_like(x, 3.0)
    elif name == "one winner":
        x = torch.full_like(x, -torch.inf).index_fill_(1, torch.tensor([7]), 2.0)
    else:
        x = x * 1e4
    logits = x.to(device).requires_grad_()
    targets = torch.cat([torch.full((6,), 7), torch.randint(0, vocab, (6,))]).to(device)
    lp, h = selected_logprobs(logits, targets, None, temperature, entropy=True)
    expected, entropy, leaf = from_logits(
        logits, targets, torch.arange(12, device=device), temperature
    )
    impossible = expected == -torch.inf
    assert torch.equal(lp == -torch.inf, impossible)
    difference = torch.where(impossible, 0.0, lp - expected).abs()
    assert (difference <= selected_logprob_bound(expected)).all()
    assert (h - entropy).abs().max() <= TOLERANCES["linear_logprob"].value

    up = torch.randn(12, device=device)
    lp.backward(up)
    expected.backward(up.double())
    assert (logits.grad - leaf.grad).abs().max() <= gradient_fp32_bound(leaf.grad.abs().max())


@pytest.mark.parametrize("gradient", ["dense", "compact", "inplace"])
def test_many_loss_tokens_on_one_row(device, gradient):
    # More than the kernel takes at a time, with equal targets, with gradients that cancel, beside a row of one token.
    vocab, inverse = 50, torch.tensor([1] + [0] * 69).to(device)
    logits = torch.randn(3, vocab, device=device)
    targets = (torch.arange(70, device=device) // 3) % 20
    up = torch.randn(70, device=device)
    up[1:] -= up[1:].mean()
    unique = torch.tensor([0, 2], device=device)
    expected, _, want = from_logits(logits, targets, unique[inverse])
    expected.backward(up.double())
    leaf = logits.clone().requires_grad_()
    lp = selected_logprobs(
        leaf, targets, rows_unique=unique, row_inverse=inverse, gradient=gradient
    )
    assert ((lp - expected).abs() <= selected_logprob_bound(expected)).all()
    (grad,) = torch.autograd.grad(lp, leaf, up)
    difference = (grad.to_dense() if gradient == "compact" else grad) - want.grad
    assert difference.abs().max() <= gradient_fp32_bound(want.grad.abs().max())


def test_opposite_gradients_on_one_row_keep_their_targets(device):
    logits = torch.randn(1, 50, device=device, requires_grad=True)
    rows = torch.zeros(2, dtype=torch.int64, device=device)
    lp = selected_logprobs(logits, torch.tensor([3, 9], device=device), rows)
    lp.backward(torch.tensor([1.0, -1.0], device=device))
    expected = torch.zeros(1, 50, device=device)
    expected[0, 3], expected[0, 9] = 1.0, -1.0
    assert torch.equal(logits.grad, expected)


def run(logits, targets, rows, up, up_entropy, **keywords):
    leaf = logits.clone().requires_grad_()
    lp, h = selected_logprobs(leaf, targets, rows, 0.9, True, **keywords)
    (lp @ up + h @ up_entropy).backward()
    return lp.detach(), h.detach(), leaf.grad


def counts(device):
    return (1, 127, 128, 129, 4096, 13107) if device.type == "cuda" else (1, 7, 16, 33)


@pytest.mark.parametrize("vocab", [5, 1003, VOCAB])
def test_bits_do_not_depend_on_the_batch(device, vocab):
    most = counts(device)[-1]
    logits = torch.randn(most, vocab, device=device) * 5
    targets = torch.randint(0, vocab, (most,), device=device)
    up, up_entropy = torch.randn(2, most, device=device)
    every = torch.arange(most, device=device)
    lp, h, grad = run(logits, targets, every, up, up_entropy)
    for count in counts(device):
        some = torch.randperm(most, device=device)[:count]
        got = run(logits, targets[some], some, up[some], up_entropy[some])
        assert torch.equal(got[0], lp[some])
        assert torch.equal(got[1], h[some])
        assert torch.equal(got[2][some], grad[some])
        # As a batch of their own, and as rows that are known not to repeat.
        got = run(logits[some], targets[some], None, up[some], up_entropy[some])
        assert all(torch.equal(a, b[some]) for a, b in zip(got, (lp, h, grad), strict=True))
        got = run(
            logits,
            targets[some],
            some,
            up[some],
            up_entropy[some],
            rows_unique=some.sort()[0],
            row_inverse=some.argsort().argsort(),
        )
        assert torch.equal(got[0], lp[some])
        assert torch.equal(got[2][some], grad[some])


def test_all_ways_of_naming_rows_agree_in_bits(device):
    logits, targets, rows, _, unread = problem(device)
    distinct, inverse = rows.unique(return_inverse=True)
    up, up_entropy = torch.randn(2, len(rows), device=device)
    first = run(logits, targets, rows, up, up_entropy)
    for keywords in (
        {"rows_unique": distinct, "row_inverse": inverse},
        {"rows_unique": distinct, "row_inverse": inverse, "gradient": "compact"},
        {"rows_unique": distinct, "row_inverse": inverse, "gradient": "inplace"},
    ):
        again = run(logits, targets, None, up, up_entropy, **keywords)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])
        grad = again[2].to_dense() if again[2].is_sparse else again[2]
        assert torch.equal(grad[~unread], first[2][~unread])


def test_nan_in_a_selected_row_stays_there(device):
    logits = torch.randn(6, 40, device=device)
    logits[2, 5] = torch.nan
    logits[4] = -torch.inf
    logits.requires_grad_()
    lp, h = selected_logprobs(logits, torch.arange(6, device=device), entropy=True)
    assert lp.isnan().tolist() == h.isnan().tolist() == [False, False, True, False, True, False]
    lp.backward(torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0], device=device))
    assert torch.equal(logits.grad[2], torch.zeros(40, device=device))
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("num_rows", [0, 3])
@pytest.mark.parametrize("gradient", ["dense", "compact", "inplace"])
def test_no_loss_token_gives_an_empty_result_on_the_graph(device, num_rows, gradient):
    leaf = torch.full((num_rows, 9), torch.nan, device=device, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    lp, h = selected_logprobs(
        leaf, empty, entropy=True, rows_unique=empty, row_inverse=empty, gradient=gradient
    )
    assert lp.shape == h.shape == (0,)
    (grad,) = torch.autograd.grad(lp.sum() + h.sum(), leaf)
    grad = grad.to_dense() if gradient == "compact" else grad
    assert torch.equal(grad, torch.zeros(num_rows, 9, device=device))


@pytest.mark.parametrize("gradient", ["dense", "inplace"])
def test_logits_may_be_any_view(device, gradient):
    view = torch.randn(200, 6, device=device).T[:, 3:103]
    targets, up = torch.arange(6, device=device), torch.randn(6, device=device)
    leaf = view.detach().requires_grad_()
    lp = selected_logprobs(leaf, targets, gradient=gradient)
    expected, _, want = from_logits(view, targets, torch.arange(6, device=device))
    expected.backward(up.double())
    assert ((lp - expected).abs() <= selected_logprob_bound(expected)).all()
    (grad,) = torch.autograd.grad(lp, leaf, up)
    assert (grad - want.grad).abs().max() <= gradient_fp32_bound(want.grad.abs().max())


def test_slots_that_no_loss_token_uses_get_no_gradient(device):
    from mmpack.ops.logprobs.triton import backward, forward

    logits = torch.randn(9, 40, device=device)
    rows = torch.tensor([2, 5, 6], device=device)
    order, offsets = torch.arange(4, device=device), torch.tensor([0, 2, 2, 4], device=device)
    targets, up = torch.arange(4, device=device), torch.randn(4, device=device)
    one = runtime_scalar(1.0, device)
    call = Call(logits, targets, rows, order, offsets, one, False, "compact")
    grad = backward(Incoming(up, None), call, forward(call))
    expected, _, want = from_logits(logits, targets, rows[[0, 0, 2, 2]])
    expected.backward(up.double())
    assert torch.equal(grad[1], torch.zeros_like(grad[1]))
    assert (grad[[0, 2]] - want.grad[[2, 6]]).abs().max() <= gradient_fp32_bound(want.grad.max())


def test_a_target_out_of_range_gives_nan_where_nobody_looks(device):
    from mmpack.ops.logprobs.triton import forward

    targets = torch.tensor([0, 9, -1], device=device)
    logits, one = torch.zeros(3, 9, device=device), runtime_scalar(1.0, device)
    found = forward(Call(logits, targets, None, None, None, one, False, "dense"))
    assert found.logprobs.isnan().tolist() == [False, True, True]


def test_float64_is_refused(device):
    with pytest.raises(BackendError, match="float32, not in float64"):
        selected_logprobs(
            torch.zeros(2, 5, dtype=torch.float64, device=device),
            torch.zeros(2, dtype=torch.int64, device=device),
        )
