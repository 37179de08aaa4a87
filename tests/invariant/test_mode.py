"""The mode: what it puts in torch's place computes the same, gives a row the same bits in any batch, and goes away."""

import threading

import pytest
import torch
from support.process import run_python
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mmpack import invariant
from mmpack.errors import ArgumentError, ModelError
from mmpack.invariant import mode
from mmpack.invariant.mode import own_norms
from mmpack.ops.attention import TREE
from mmpack.ops.invariance import is_on

# odd sizes: rows that no library likes
X = torch.randn(131, 37, generator=torch.Generator().manual_seed(0))
W = torch.randn(29, 37, generator=torch.Generator().manual_seed(1))
B = torch.randn(29, generator=torch.Generator().manual_seed(2))
PARTS = [(0, 1), (5, 6), (130, 131), (7, 24), (60, 125)]

# each computes a row from a row
BY_ROW = {
    "linear": lambda x: F.linear(x, W.to(x), B.to(x)),
    "linear without bias": lambda x: F.linear(x, W.to(x)),
    "linear of three dimensions": lambda x: F.linear(x[:, None], W.to(x), B.to(x))[:, 0],
    "addmm with factors": lambda x: torch.addmm(B.to(x), x, W.to(x).t(), beta=0.5, alpha=3),
    "bmm": lambda x: torch.bmm(x[None].expand(3, -1, -1), W.to(x).t().expand(3, -1, -1))[2],
    "baddbmm": lambda x: torch.baddbmm(B.to(x), x[None], W.to(x).t()[None], beta=2)[0],
    "mv": lambda x: torch.mv(x, W[0].to(x))[:, None],
    "sum": lambda x: x.sum(-1, keepdim=True),
    "sum of two dimensions": lambda x: x.view(-1, 1, 37).sum((1, 2))[:, None],
    "sum of experts": lambda x: x.view(-1, 37, 1).sum(1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "variance": lambda x: x.var(-1, keepdim=True),
    "deviation": lambda x: x.std(-1, correction=0)[:, None],
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "convolution": lambda x: F.conv3d(
        x[:, :36].reshape(-1, 3, 3, 2, 2), W[:, :36].reshape(-1, 3, 3, 2, 2).to(x), stride=(3, 2, 2)
    ).flatten(1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", BY_ROW)
def test_rows_are_right_and_the_same_bits_in_any_batch(name, dtype):
    call, x = BY_ROW[name], X.to(dtype)
    expected = call(X.double())
    with invariant.batch_invariant():
        whole = call(x)
        assert whole.dtype == dtype
        for a, b in PARTS:
            assert torch.equal(call(x[a:b].clone()), whole[a:b]), (a, b)
        backwards = call(x.flip(0))
        assert torch.equal(backwards.flip(0), whole)
    off = (whole.double() - expected).abs().max() / expected.abs().max()
    assert off <= {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2e-2}[dtype]


@pytest.mark.parametrize("name", BY_ROW)
def test_gradients_of_rows_too(name):
    """The gradient to a row, and no other path than torch's own autograd."""
    call, up = BY_ROW[name], torch.randn(131, 37, generator=torch.Generator().manual_seed(3))

    def gradient(x, a=0, b=None):
        x = x.clone().requires_grad_()
        out = call(x)
        return torch.autograd.grad(out, x, up[a:b, : out.shape[1]].to(x))[0]

    expected = gradient(X.double())
    with invariant.batch_invariant():
        whole = gradient(X)
        for a, b in PARTS if name != "convolution" else []:  # pixels need no gradient
            assert torch.equal(gradient(X[a:b], a, b), whole[a:b]), (a, b)
    assert (whole - expected).abs().max() <= 1e-5 * max(1, expected.abs().max())


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sum(),
        lambda x: x.sum(0),
        lambda x: x.mean((0, 1)),
        lambda x: (x > 0).sum(-1),
        lambda x: x.long().sum(1),
        lambda x: x.softmax(0),
        lambda x: x.var(0),
        lambda x: x.std(),
        lambda x: x.mean(-1, dtype=torch.float64),
        lambda x: x[:0].sum(-1),
        lambda x: x[:, :0].sum(-1),
        lambda x: torch.addmm(x.long()[:, :1], x.long(), x.long().t()),
        lambda x: torch.mm(x[:, :0], x.t()[:0]),
        lambda x: F.conv2d(x.view(1, 1, 131, 37), x[:3, :3].view(1, 1, 3, 3), padding=1),
        lambda x: torch.complex(x, x) @ torch.complex(x, x).t(),
    ],
)
def test_what_is_no_row_stays_torchs(call):
    expected = call(X)
    with invariant.batch_invariant():
        found = call(X)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert (found - expected).abs().sum() <= 1e-3


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.mm(X, W),
        lambda: F.linear(X, W.bfloat16()),
        lambda: torch.mm(X, B),
        lambda: torch.addmm(B.expand(2, 131, 29), X, W.t()),
        lambda: torch.addmm(B.double(), X, W.t()),
        lambda: torch.mv(X, B),
        lambda: torch.bmm(X[None].expand(2, -1, -1), W.t().expand(3, -1, -1)),
        lambda: torch.baddbmm(B, X[None], W[None]),
        lambda: X.sum(5),
        lambda: X.mean(-3),
        lambda: X.var(5),
        lambda: X.softmax(5),
        lambda: F.conv2d(X[:, :20].reshape(-1, 5, 2, 2), W[:, :12].reshape(-1, 3, 2, 2), stride=2),
        lambda: F.conv2d(X[:1, :36].view(1, 1, 6, 6), torch.ones(2, 1, 2, 2).half(), stride=2),
    ],
)
def test_what_does_not_fit_is_refused_as_torch_does(call):
    with pytest.raises((RuntimeError, IndexError)) as plain:
        call()
    with invariant.batch_invariant(), pytest.raises(plain.type):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: X[0, 0].sum(-1, keepdim=True),
        lambda: X[0, 0].mean(0),
        lambda: X[0, 0].softmax(0),
        lambda: X[:, :0].softmax(-1),
        lambda: X[:0].log_softmax(-1),
        lambda: X[:, :2].var(-1, correction=2),
        lambda: torch.ones(3, 1).var(-1),
        lambda: torch.addmm(torch.full((29,), torch.nan), X, W.t(), beta=0),
        lambda: torch.addmm(B[0], X, W.t()),
    ],
)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_single_numbers_and_empty_rows(call):
    expected = call()
    with invariant.batch_invariant():
        found = call()
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_groups_of_rows():
    """torch._grouped_mm and its gradients, as experts use it, against a loop in float64."""
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("torch has no grouped product")
    torch.manual_seed(0)
    x, w = torch.randn(40, 16).bfloat16(), torch.randn(3, 16, 24).bfloat16()
    ends = torch.tensor([8, 8, 40], dtype=torch.int32)
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    wide = [x.double().requires_grad_(), w.double().requires_grad_()]
    with invariant.batch_invariant():
        out = torch._grouped_mm(*leaves, offs=ends)
        out.float().square().sum().backward()
        alone = torch._grouped_mm(x[7:9], w, offs=torch.tensor([1, 1, 2], dtype=torch.int32))
    assert torch.equal(alone, out[7:9].detach())
    expected = torch.cat([wide[0][:8] @ wide[1][0], wide[0][8:] @ wide[1][2]])
    expected.square().sum().backward()
    for found, want in zip(
        [out, *(t.grad for t in leaves)], [expected, *(t.grad for t in wide)], strict=True
    ):
        assert (found.double() - want).norm() <= 1e-2 * want.norm()


def test_all_of_it_goes_away_on_leaving():
    linear = torch.nn.Linear(37, 29)
    before = linear(X), X.mean(-1), X.softmax(-1)
    with pytest.raises(RuntimeError, match="stop"), invariant.batch_invariant():
        assert is_on() and mode.installed() is not None
        assert TREE.wanted() == "fixed_blocks"
        raise RuntimeError("stop")
    assert not is_on() and mode.installed() is None and TREE.wanted() == "auto"
    after = linear(X), X.mean(-1), X.softmax(-1)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    q = torch.randn(1, 2, 5, 8)
    F.scaled_dot_product_attention(q, q, q)  # torch's own attention is back
    assert torch.compiler.is_compiling() is False


def test_other_threads_are_in_the_mode_too():
    found = []
    with invariant.batch_invariant():
        thread = threading.Thread(target=lambda: found.append(torch.mm(X[:1], W.t())))
        thread.start()
        thread.join()
        assert torch.equal(found[0], torch.mm(X, W.t())[:1])


def test_checkpoints_run_by_it_again():
    # 64 wide: on a CPU the last few numbers of silu's output may come from another function than the others
    into, out_of = torch.nn.Linear(37, 64), torch.nn.Linear(64, 37)

    def gradient(rows):
        x = X[rows].clone().requires_grad_()
        out = checkpoint(lambda x: out_of(F.silu(into(x))).softmax(-1), x, use_reentrant=False)
        (out * torch.linspace(-1, 1, 37)).sum().backward()
        return x.grad

    with invariant.batch_invariant():
        assert torch.equal(gradient(slice(0, 131))[40:57], gradient(slice(40, 57)))


def test_compiled_code_runs_eagerly():
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph

    compiled = torch.compile(lambda x: F.linear(x, W), backend=backend)
    with invariant.batch_invariant():
        assert torch.equal(compiled(X)[3:4], compiled(X[3:4]))
    assert calls == []
    compiled(X)
    assert len(calls) == 1


def test_torchs_own_attention_raises():
    q = torch.randn(1, 2, 5, 8)
    with invariant.batch_invariant(), pytest.raises(ModelError, match=r"attach\(model\)"):
        F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("wrong", ["a model", [torch.nn.Linear(2, 2)]])
def test_what_is_no_model(wrong):
    with pytest.raises(ArgumentError, match="expected a module"), invariant.batch_invariant(wrong):
        pass
    assert not is_on()


class QwenRMSNorm(torch.nn.Module):
    """As transformers has it."""

    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 2, width))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class GatedRMSNorm(QwenRMSNorm):
    def forward(self, hidden_states, gate=None):
        return super().forward(hidden_states)


class GemmaRMSNorm(QwenRMSNorm):
    """Multiplies by 1 + weight, and names its epsilon otherwise."""

    def __init__(self, width):
        super().__init__(width)
        self.eps = self.variance_epsilon
        del self.variance_epsilon


def test_norms_of_one_form_run_as_one_kernel():
    model = torch.nn.ModuleList([QwenRMSNorm(37), GatedRMSNorm(37), GemmaRMSNorm(37)])
    own = QwenRMSNorm(37)
    own.forward = lambda x: x  # another library's
    model.append(own)
    with own_norms(model) as count:
        assert count == 1 and "forward" in vars(model[0])
        assert (model[0](X) - F.rms_norm(X, (37,), model[0].weight, 1e-6)).abs().max() <= 1e-5
        assert torch.equal(model[3](X), X)
    assert "forward" not in vars(model[0]) and torch.equal(model[3](X), X)


def test_blocks_of_threads_end_in_any_order():
    """What was there before is back after the last of them, and stays until then."""
    model = torch.nn.ModuleList([QwenRMSNorm(37)])
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph

    first, second = invariant.batch_invariant(model), invariant.batch_invariant(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_on() and "forward" in vars(model[0])
    second.__exit__(None, None, None)
    assert not is_on() and "forward" not in vars(model[0])
    torch.compile(lambda x: F.linear(x, W), backend=backend)(X)
    assert len(calls) == 1


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_backward_outside_of_the_mode_is_refused(reentrant):
    """Of the norm that a model ends with, before any layer is computed again."""
    norm, layer = QwenRMSNorm(37), torch.nn.Linear(37, 37)
    x = X.clone().requires_grad_()
    with invariant.batch_invariant(norm):
        out = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
        loss = norm(out).square().sum()
    with pytest.raises(ModelError, match=r"call backward\(\) within the block"):
        loss.backward()


def test_float32_as_torchs_newer_setting_says():
    """torch raises an error where one was set by the newer name and is read by the older."""
    done = run_python(
        "import torch\n"
        "from mmpack.ops.tf32 import allows_tf32, allows_tf32_convolutions, float32_products\n"
        "assert not allows_tf32() and float32_products() == 'highest'\n"
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "assert allows_tf32() and 'tf32' in float32_products()\n"
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'\n"
        "assert not allows_tf32_convolutions()\n"
    )
    assert done.returncode == 0, done.stderr
