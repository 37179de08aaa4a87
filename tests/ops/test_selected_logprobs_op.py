"""selected_logprobs as a custom op: opcheck, torch.compile, CUDA graphs, autocast, checkpoints, forms of the gradient.

Each runs on the CPU through the torch path, and on a GPU, where there is one, through the kernels.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from mmpack.errors import ArgumentError
from mmpack.ops.logprobs.call import runtime_scalar
from mmpack.ops.logprobs.row_groups import make_row_groups
from mmpack.ops.logprobs.selected import selected_logprobs

DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES, ids=str)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def problem(device, repeated, num_rows=9, vocab=40):
    logits = torch.randn(num_rows, vocab, device=device)
    rows = torch.tensor([7, 1, 1, 0, 7] if repeated else [7, 1, 3, 0, 4], device=device)
    unique, inverse = rows.unique(return_inverse=True)
    targets = torch.randint(0, vocab, (5,), device=device)
    return logits, targets, {"rows_unique": unique, "row_inverse": inverse}


def value_and_grad(function, logits, *arguments):
    leaf = logits.clone().requires_grad_()
    lp, h = function(leaf, *arguments)
    weight = torch.arange(1.0, len(lp) + 1, device=lp.device)
    (grad,) = torch.autograd.grad((lp @ weight) + 0.3 * (h @ weight), leaf)
    return lp.detach(), h.detach(), grad


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_opcheck(device, repeated, entropy):
    logits, targets, keywords = problem(device, repeated)
    groups = make_row_groups(len(logits), None, *keywords.values())
    ops, options = torch.ops.mmpack, (runtime_scalar(0.7, device), entropy)
    leaf = logits.clone().requires_grad_()
    forward = ops.selected_logprobs.default
    torch.library.opcheck(forward, (leaf, targets, *groups, *options, "dense"))

    statistics = forward(logits, targets, *groups, *options, "dense")
    gradients = torch.randn(5, device=device), torch.randn(5, device=device) if entropy else None
    for gradient in ("dense", "compact", "inplace"):
        arguments = (*gradients, logits, targets, *groups, *options, gradient, *statistics)
        name = "selected_logprobs_backward" + "_" * (gradient == "inplace")
        torch.library.opcheck(getattr(ops, name).default, arguments)


@pytest.mark.parametrize("gradient", ["dense", "inplace"])
@pytest.mark.parametrize("repeated", [False, True])
def test_compiles_into_one_graph(device, gradient, repeated):
    logits, targets, keywords = problem(device, repeated)

    def function(x):
        return selected_logprobs(x * 2, targets, None, 0.7, True, gradient=gradient, **keywords)

    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for got, expected in zip(
        value_and_grad(compiled, logits), value_and_grad(function, logits), strict=True
    ):
        assert torch.equal(got, expected)


def test_another_temperature_is_no_other_program(device):
    logits, targets, _ = problem(device, False)
    counter = CompileCounterWithBackend("inductor" if device.type == "cuda" else "aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(x, temperature):
        return selected_logprobs(x, targets, torch.arange(5, device=device), temperature)

    for temperature in (0.7, 0.8, 0.9, 1.1, 1.3):
        expected = torch.log_softmax(logits[:5] / temperature, -1).gather(1, targets[:, None])[:, 0]
        assert (compiled(logits, temperature) - expected).abs().max() < 1e-5
    assert counter.frame_count <= 2  # the first as a constant, all others as a number


def test_checkpointing_gives_the_same_bits(device):
    logits, targets, keywords = problem(device, True)

    def function(x):
        return selected_logprobs(x * 2, targets, None, 0.7, True, **keywords)

    def again(x):
        return checkpoint(function, x, use_reentrant=False)

    for got, expected in zip(
        value_and_grad(again, logits), value_and_grad(function, logits), strict=True
    ):
        assert torch.equal(got, expected)


def test_autocast_changes_nothing(device):
    logits, targets, keywords = problem(device, True)

    def function(x):
        return selected_logprobs(x, targets, None, 0.7, True, **keywords)

    expected = value_and_grad(function, logits)
    with torch.autocast(device.type, torch.bfloat16):
        lp, h = function(logits)
    assert torch.equal(lp, expected[0])
    assert torch.equal(h, expected[1])


@pytest.mark.parametrize("repeated", [False, True])
def test_forms_of_the_gradient_agree(device, repeated):
    logits, targets, keywords = problem(device, repeated)

    def in_form(gradient):
        return value_and_grad(
            lambda x: selected_logprobs(x, targets, None, 0.7, True, gradient=gradient, **keywords),
            logits,
        )[2]

    dense, compact = in_form("dense"), in_form("compact")
    assert compact.is_sparse
    assert compact._values().shape == (len(keywords["rows_unique"]), logits.shape[1])
    assert torch.equal(compact.to_dense(), dense)
    assert torch.equal(in_form("inplace"), dense)


def test_the_gradient_takes_the_place_of_the_logits_once(device):
    logits, targets, _ = problem(device, False)
    leaf = logits.clone().requires_grad_()
    lp = selected_logprobs(leaf[:5], targets, gradient="inplace")
    (grad,) = torch.autograd.grad(lp.sum(), leaf, retain_graph=True)
    assert torch.equal(leaf.detach()[:5], grad[:5])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        lp.sum().backward()


@pytest.mark.parametrize("gradient", ["compact", "inplace"])
def test_rows_that_may_repeat_are_refused(device, gradient):
    logits, targets, keywords = problem(device, False)
    rows = keywords["rows_unique"]
    with pytest.raises(ArgumentError, match=f"gradient is '{gradient}', but rows may repeat"):
        selected_logprobs(logits, targets, rows, gradient=gradient)
    with pytest.raises(ArgumentError, match="gradient is 'none'"):
        selected_logprobs(logits, targets, rows, gradient="none")


def test_rows_that_nobody_reads_are_refused_where_one_may_look(device):
    if device.type != "cpu":
        pytest.skip("looking would wait for the GPU")
    unique, inverse = torch.tensor([2, 5, 6]), torch.tensor([0, 2, 2])
    with pytest.raises(ArgumentError, match="row_inverse names 2 of 3 rows"):
        selected_logprobs(torch.zeros(9, 4), inverse, rows_unique=unique, row_inverse=inverse)


@pytest.mark.parametrize("repeated", [False, True])
def test_a_cuda_graph_replays_it(device, repeated):
    if device.type != "cuda":
        pytest.skip("only on CUDA")
    logits, targets, keywords = problem(device, repeated)

    def function(x):
        return selected_logprobs(x, targets, None, 0.7, True, **keywords)

    expected = value_and_grad(function, logits)
    still = torch.zeros_like(logits)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        value_and_grad(function, still)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = value_and_grad(function, still)
    still.copy_(logits)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
