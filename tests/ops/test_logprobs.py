"""All ops of logprobs against torch.log_softmax in float64: values, gradients, hostile logits, rows that nobody reads.

Each in plain torch on the CPU, by the kernels (on a GPU, or interpreted), and on a GPU by what it chooses itself.
"""

from dataclasses import replace

import pytest
import torch
from support.kept_ids import support_of
from support.kernels import running
from support.logprobs import (
    HIDDEN,
    LOGITS,
    STORED,
    assert_gradients,
    assert_values,
    check,
    choose_route,
    dotted,
    drawn,
    entries,
    problem,
)
from support.teachers import draw_lists
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

import mmpack as mp
from mmpack.contracts import TOLERANCES, selected_logprob_bound
from mmpack.errors import BackendError
from mmpack.ops.logprobs.linear import blocks
from mmpack.ops.logprobs.linear import torch as linear_torch
from mmpack.ops.logprobs.support import Support

KINDS = (*LOGITS, *HIDDEN)
PATHS = {"torch": (), "triton": pytest.mark.kernel, "auto": pytest.mark.gpu}
FULL, HALVES = (torch.float32, torch.float64), (torch.bfloat16, torch.float16)
each_path = pytest.mark.parametrize(
    "path", [pytest.param(name, marks=mark) for name, mark in PATHS.items() if name != "auto"]
)
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def device(path, kind, monkeypatch, no_tf32) -> torch.device:
    """Where `kind` runs by `path`; in several blocks and tiles, so that seams are in the tests."""
    monkeypatch.setattr(linear_torch, "BLOCK_COLUMNS", 128)
    monkeypatch.setattr(blocks, "MIN_ROWS", 1)
    choose_route(kind, monkeypatch)
    if path == "auto":
        monkeypatch.delenv("MMPACK_BACKEND", raising=False)
        return torch.device("cuda")
    device = running(path, monkeypatch)
    if device.type == "cpu":
        monkeypatch.setattr(blocks, "MIN_COLUMNS", 128)
        monkeypatch.setattr(blocks, "MAX_BLOCKS", 2)
    if path == "triton" and device.type == "cpu":
        from mmpack.ops.logprobs import triton as of_logits
        from mmpack.ops.logprobs.lists import sum_kernels
        from mmpack.ops.logprobs.lists import triton as of_lists

        for module, sizes in (
            (of_logits, {"LANES": 64, "DEPTH": 2, "BLOCK": 128}),
            (of_lists, {"LANES": 16, "LONG_LANES": 16}),
            (sum_kernels, {"PIECE": 4, "DEPTH": 16, "COLUMNS": 16}),
        ):
            for name, size in sizes.items():
                monkeypatch.setattr(module, name, size)
    return device


def dtype_of(path, kind):
    """What every kind takes by the kernels."""
    return torch.bfloat16 if path == "triton" and kind in HIDDEN else torch.float32


def takes(path, kind, dtype):
    if path != "triton":
        return dtype != torch.float64 or kind in LOGITS
    return dtype in HALVES or (dtype == torch.float32 and kind not in ("hidden", "listed"))


def of_logits():
    ways = ("every row", "repeated", "counted", "distinct")
    for path, kind in ((p, k) for p in PATHS for k in LOGITS):
        for dtype in filter(lambda d, p=path, k=kind: takes(p, k, d), (*FULL, *HALVES)):
            for way in ways:
                forms = ("dense",) if way == "repeated" else ("dense", "compact", "inplace")
                for form in forms:
                    yield pytest.param(path, kind, dtype, way, form, marks=PATHS[path])


@pytest.mark.few(30)
@pytest.mark.parametrize(("path", "kind", "dtype", "way", "gradient"), list(of_logits()))
def test_logits_hold_the_contract(device, kind, dtype, way, gradient):
    p = problem(kind, device, dtype, temperature=0.7, gradient=gradient)
    count = len(p.leaves[0])
    if way == "every row":
        p = p.of(torch.arange(count, device=device))
        p.leaves[0].nan_to_num_()
        p.rows = torch.arange(len(p.leaves[0]), device=device)
    elif way == "distinct":
        p = p.of(torch.arange(count // 2, device=device))
        p.rows = torch.randperm(count, device=device)[: count // 2]
        p.leaves[0].nan_to_num_()
        p.leaves[0][p.unread] = torch.nan
    p = p if way in ("every row", "repeated") else p.counted()
    options = {"rows": None} if way == "every row" else {}
    leaf = p.leaves[0].clone().requires_grad_()
    _, (grad,), up = check(p, **({"gradient": "dense"} if gradient == "inplace" else {}), **options)
    if gradient == "compact":
        assert grad.is_sparse and len(grad._values()) == len(p.rows.unique())
    if gradient == "inplace":
        found = p.values([leaf], **options)
        (written,) = torch.autograd.grad(dotted(found, up), leaf, retain_graph=True)
        assert torch.equal(written, grad) and written.data_ptr() == leaf.data_ptr()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            dotted(found, up).backward()


def of_hidden():
    for path, kind in ((p, k) for p in PATHS for k in HIDDEN):
        for dtype in filter(lambda d, p=path, k=kind: takes(p, k, d), (torch.float32, *HALVES)):
            if path == "torch" and dtype == torch.float16:
                continue
            for scale in (0.5, 20.0) if path == "torch" else (0.2,):
                for softcap, unique in ((None, False), (5.0, True)):
                    budgets = (None,) if path == "torch" or kind in HIDDEN[1:3] else (None, STORED)
                    for budget in budgets:
                        options = {"softcap": softcap, "memory_budget": budget}
                        yield pytest.param(
                            path, kind, dtype, scale, unique, options, marks=PATHS[path]
                        )


@pytest.mark.few(20)
@pytest.mark.parametrize(("path", "kind", "dtype", "scale", "unique", "options"), list(of_hidden()))
def test_hidden_states_hold_the_contract(device, kind, dtype, scale, unique, options):
    p = problem(kind, device, dtype, scale, temperature=0.8, **options)
    check(p.counted() if unique else p)


HOSTILE = ("huge", "scaled", "masked", "masked tiles", "lowest", "ties", "one winner")


@pytest.mark.few(25)
@each_path
@each_kind
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_logits(path, kind, device, name):
    p = problem(kind, device, dtype_of(path, kind), temperature=0.3)
    x = p.leaves[-1]  # logits, or the bias
    x.nan_to_num_()
    if name == "huge":
        x.copy_(torch.where(x > 0, 1e4, -1e4))
    elif name == "scaled":
        x.mul_(1e4)
    elif name in ("masked", "lowest"):
        x.masked_fill_(x < 0.5, -torch.inf if name == "masked" else -1e38)
    elif name == "masked tiles":
        x[..., : x.shape[-1] // 2] = x[..., x.shape[-1] // 2 + 20 :] = -torch.inf
    elif name == "ties":
        x.fill_(3.0)
        for weight in p.leaves[1:-1]:
            weight.zero_()
    else:
        x.fill_(-torch.inf)[..., 7] = 2.0
        p.targets[:5] = 7
        if p.support is not None:
            p.support = support_of([torch.tensor(sorted({7, int(t)})) for t in p.targets], device)
    if name == "lowest" and kind in HIDDEN:
        pytest.skip("as masked: a product can't tell them apart")
    made, *_ = check(p)
    if name == "one winner":
        assert not made[""][
            made[""].isfinite()
        ].any()  # exactly 0: the same bits from both products


@pytest.mark.parametrize("path", ["torch"])
@each_kind
def test_gradcheck_in_float64(kind, device):
    p = problem(kind, device, torch.float64, sizes=(12, 3, 11, 5), temperature=1.3).counted()
    p.leaves[0].nan_to_num_()
    if kind in HIDDEN:
        p.options["softcap"] = 4.0
    leaves = [x.requires_grad_() for x in p.leaves]
    assert torch.autograd.gradcheck(
        lambda *x: tuple(p.values(list(x)).values()), leaves, fast_mode=True
    )


@each_path
@each_kind
def test_rows_without_gradient_are_not_read(path, kind, device):
    """NaN in a row stays with its tokens; where nothing comes in, gradients are exactly 0."""
    p = problem(kind, device, dtype_of(path, kind))
    dead = torch.isin(p.rows, p.rows[::3])
    p.leaves[0][p.rows[::3]] = torch.nan
    found = p.values([x.requires_grad_() for x in p.leaves])
    assert torch.equal(found[""].isnan(), dead)
    alive = p.of((~dead).nonzero().flatten())
    up, at = drawn(found), entries(p, (~dead).nonzero().flatten())
    masked = {n: torch.zeros_like(x).index_copy_(0, at[n], x[at[n]]) for n, x in up.items()}
    grads = torch.autograd.grad(dotted(found, masked), p.leaves, retain_graph=True)
    want, wide, peak = alive.exact()
    exact = torch.autograd.grad(dotted(want, {n: up[n][at[n]] for n in at}), wide)
    assert_gradients(alive, list(grads), [g.nan_to_num() for g in exact], peak)
    nothing = dotted(found, {n: torch.zeros_like(x) for n, x in up.items()})
    for grad in torch.autograd.grad(nothing, p.leaves):
        assert not grad.any()


@each_path
@each_kind
@pytest.mark.parametrize("num_rows", [0, 3])
def test_no_loss_token_gives_an_empty_result_on_the_graph(path, kind, device, num_rows):
    p = problem(kind, device, dtype_of(path, kind), sizes=(20, 8, 9, 5))
    p = p.of(torch.zeros(0, dtype=torch.int64, device=device))
    p.leaves[0] = p.leaves[0][:num_rows] * torch.nan
    made, grads, _ = p.step()
    assert {tuple(x.shape) for x in made.values()} == {(0,)}
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@each_path
@pytest.mark.parametrize("kind", LOGITS[:1])
@pytest.mark.parametrize("gradient", ["dense", "compact", "inplace"])
def test_many_loss_tokens_on_one_row(path, kind, device, gradient):
    """More than the kernel takes at a time, with equal targets, with gradients that cancel, beside a row of one."""
    p = problem(kind, device, sizes=(12, 0, 50, 70), gradient=gradient)
    p.leaves[0].nan_to_num_()
    p.rows[:], p.rows[0] = 2, 0
    p.targets.copy_((torch.arange(len(p.targets), device=device) // 3) % 20)
    up = torch.randn(len(p.targets), device=device)
    up[1:] -= up[1:].mean()
    p, up = p.counted(), {"": up, "entropy": torch.zeros_like(up)}
    want, wide, _ = p.exact()
    made, (grad,), _ = p.step(up)
    assert_values(p, made, want, 0.0)
    (exact,) = torch.autograd.grad(dotted(want, up), wide)
    difference = (grad.to_dense() if grad.is_sparse else grad) - exact
    assert difference[p.rows].abs().max() <= 1e-5 * exact.abs().max()
    opposite = torch.zeros(1, 50, device=device, requires_grad=True)
    lp = mp.selected_logprobs(opposite, p.targets[[4, 9]], p.rows[:1].repeat(2) * 0)
    lp.backward(torch.tensor([1.0, -1.0], device=device))  # the row's sum is 0, its gradient is not
    assert opposite.grad.nonzero()[:, 1].tolist() == [1, 3]


@each_path
@each_kind
def test_only_wanted_gradients_are_made_and_lie_as_the_fake_kernel_says(path, kind, device):
    """Of the weight alone (or the logits), from the entropy alone; the leaf is a transposed view."""
    p = problem(kind, device, dtype_of(path, kind), sizes=(40, 37, 301, 60))
    which = 0 if kind in LOGITS else 1
    if which == 0:
        p.leaves[0].nan_to_num_()
    p.leaves[which] = p.leaves[which].T.contiguous().T
    leaves = list(p.leaves)
    leaves[which] = leaves[which].detach().requires_grad_()
    found, (want, wide, peak) = p.values(leaves), p.exact()
    assert_values(p, found, want, peak)
    up = torch.randn(len(p.targets), device=device)
    (grad,) = torch.autograd.grad(found["entropy"], leaves[which], up)
    (exact,) = torch.autograd.grad(want["entropy"], wide[which], up.double())
    cut = 2 if path == "triton" else 1
    bound = 1e-5 if grad.dtype == torch.float32 else cut * TOLERANCES["gradient_bf16"].value
    assert (grad.double() - exact).norm() <= bound * exact.norm()
    assert grad.is_contiguous() or kind in LOGITS


@each_path
@pytest.mark.parametrize("kind", ["hidden"])
@pytest.mark.parametrize("budget", [None, STORED])
def test_a_large_gradient_of_the_entropy_meets_no_probability_of_zero(path, kind, device, budget):
    """Columns beyond the vocabulary have log-probabilities that would overflow a product."""
    p = problem(kind, device, dtype_of(path, kind), memory_budget=budget)
    want, wide, peak = p.exact()
    up = {"": torch.zeros_like(want[""]), "entropy": torch.full_like(want["entropy"], 1e9)}
    exact = torch.autograd.grad(dotted(want, up), wide)
    assert_gradients(p, p.step(up)[1], [g.nan_to_num() for g in exact], peak)


# Kept ids.


@each_path
@pytest.mark.parametrize("kind", ["kept"])
def test_the_rest_of_the_head_is_not_touched(path, kind, device):
    """NaN in every row of the weight that no list names changes nothing, and those rows' gradient is 0."""
    p = problem(kind, device, dtype_of(path, kind), sizes=(40, 24, 3000, 40))
    lp, grads, up = p.step()
    other = torch.ones(len(p.leaves[1]), dtype=torch.bool, device=device)
    p.leaves[1][other.index_fill(0, p.support.ids, False)] = torch.nan
    again, others, _ = p.step(up)
    for a, b in zip([*lp.values(), *grads], [*again.values(), *others], strict=True):
        assert torch.equal(a, b)
    assert not grads[1][other.index_fill(0, p.support.ids, False)].any()


@pytest.mark.parametrize("path", ["torch"])
@pytest.mark.parametrize("kind", ["kept logits", "kept", "multiplied"])
def test_lists_of_one_of_all_and_of_narrow_integers(kind, device):
    p = problem(kind, device)
    alone = replace(p, support=support_of([t[None] for t in p.targets]))
    made, grads, _ = alone.step()
    assert not made[""].any() and not made["entropy"].any() and not any(g.any() for g in grads)
    vocab = p.leaves[-1].shape[-1]
    whole = replace(p, support=support_of([torch.arange(vocab)] * len(p.targets)))
    assert_values(p, whole.step()[0], *replace(p, support=None).exact()[::2])
    made, grads, up = p.step()
    narrow = Support(p.support.offsets.int(), p.support.ids.int())
    p = replace(p, support=narrow, targets=p.targets.int(), rows=p.rows.int())
    again, others, _ = p.step(up)
    for a, b in zip([*made.values(), *grads], [*again.values(), *others], strict=True):
        assert torch.equal(a, b)


@each_path
@pytest.mark.parametrize("kind", ["kept logits"])
def test_the_entropy_of_a_nearly_flat_list_has_an_exact_gradient(path, kind, device):
    """d H = -p · (log p + H) is as small as the logits differ; H rounded to float32 would be seen in it."""
    p = problem(kind, device, sizes=(18, 0, 101, 8))
    p.rows.copy_(torch.arange(len(p.rows), device=device) % 8)
    p.leaves[0] = (2 + 1e-3 * torch.randn(18, p.leaves[0].shape[1])).to(device)
    p.targets.clamp_(max=49)
    p.support = support_of([torch.arange(50)] * len(p.targets), device)
    want, wide, _ = p.exact()
    up = {"": torch.zeros_like(want[""]), "entropy": torch.randn(len(p.targets), device=device)}
    (exact,) = torch.autograd.grad(dotted(want, up), wide)
    assert (p.step(up)[1][0] - exact).norm() <= 1e-5 * exact.norm()


# Lists of teachers.


@each_path
@pytest.mark.parametrize("kind", ["listed logits", "listed"])
def test_values_have_the_bits_of_selected_logprobs(path, kind, device):
    p = problem(kind, device, dtype_of(path, kind), temperature=0.8)
    made = p.values(p.leaves)
    alone = replace(p, lists={})
    for name, x in alone.values(p.leaves).items():
        assert torch.equal(x, made[name])
    for name, own in p.lists.items():
        tokens = torch.repeat_interleave(own.offsets.diff())
        each = replace(alone, targets=own.ids, rows=p.rows[tokens])
        assert torch.equal(each.values(p.leaves)[""], made[name])


@pytest.mark.parametrize("path", ["torch"])
@pytest.mark.parametrize("kind", ["listed"])
def test_no_product_but_those_of_one_pass(kind, device, monkeypatch):
    """Two teachers cost no product more than the sampled token alone."""
    p, shapes, multiply = problem(kind, device).counted(), [], linear_torch.product_of

    def counted(a, b, dtype):
        shapes.append((tuple(a.shape), tuple(b.shape)))
        return multiply(a, b, dtype)

    monkeypatch.setattr(linear_torch, "product_of", counted)
    replace(p, lists={}).step()
    alone, shapes[:] = list(shapes), []
    p.step()
    assert shapes == alone and alone


@pytest.mark.parametrize("path", ["torch"])
@pytest.mark.parametrize("kind", ["listed", "listed logits"])
def test_an_id_may_be_in_a_list_twice_and_be_the_target(kind, device):
    p = problem(kind, device, sizes=(12, 8, 40, 1))
    target = int(p.targets[0])
    twice = {"a": Support(torch.tensor([0, 3]), torch.tensor([target, target, 5]))}
    once = {"a": Support(torch.tensor([0, 1]), torch.tensor([5]))}
    up = {
        "": torch.tensor([0.5]),
        "entropy": torch.tensor([0.25]),
        "a": torch.tensor([1.0, 2.0, 3.0]),
    }
    first = replace(p, lists=twice).step(up)[1]
    summed = {"": torch.tensor([3.5]), "entropy": up["entropy"], "a": torch.tensor([3.0])}
    for a, b in zip(first, replace(p, lists=once).step(summed)[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


# Only some dtypes, any temperature, and sizes of a real vocabulary.


@pytest.mark.kernel
@pytest.mark.parametrize("path", ["triton"])
@pytest.mark.parametrize("kind", ["logits", "hidden"])
def test_other_dtypes_are_refused_where_kernels_are_forced(kind, device):
    dtype = torch.float64 if kind == "logits" else torch.float32
    with pytest.raises(BackendError, match=r"float32, not in float64|its kernels take bf16"):
        problem(kind, device, dtype).step()


@pytest.mark.parametrize("path", ["torch"])
@pytest.mark.parametrize("kind", ["logits"])
def test_another_temperature_is_no_other_program(kind, device):
    torch._dynamo.reset()
    logits, targets, counter = (
        torch.randn(9, 40),
        torch.arange(5),
        CompileCounterWithBackend("aot_eager"),
    )

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(x, temperature):
        return mp.selected_logprobs(x, targets, torch.arange(5), temperature)

    for temperature in (0.7, 0.8, 0.9, 1.1, 1.3):
        expected = torch.log_softmax(logits[:5] / temperature, -1).gather(1, targets[:, None])[:, 0]
        assert (compiled(logits, temperature) - expected).abs().max() < 1e-5
    assert counter.frame_count <= 2  # the first as a constant, all others as a number


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["auto"])
@pytest.mark.parametrize("kind", ["logits", "hidden"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_gradients_are_no_worse_than_pytorchs_own(kind, device, dtype):
    targets, up = torch.randint(0, 20_011, (1111,), device=device), torch.randn(1111, device=device)
    tensors = [torch.randn(1111, 20_011, device=device).mul_(3)]
    if kind == "hidden":
        tensors = [
            torch.randn(1111, 520, device=device),
            torch.randn(20_011, 520, device=device) * 0.1,
        ]
    tensors = [x.to(dtype) for x in tensors]

    def torchs(*leaves):
        """What one writes in PyTorch: the product in the inputs' dtype, the softmax in float32 or better."""
        z = leaves[0] if len(leaves) == 1 else functional.linear(*leaves)
        z = z.to(torch.promote_types(z.dtype, torch.float32)) / 0.8
        return z.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def ours(*leaves):
        run = mp.selected_logprobs if len(leaves) == 1 else mp.linear_selected_logprobs
        return run(*leaves, targets, temperature=0.8)

    def gradients(run, leaves):
        leaves = [x.clone().requires_grad_() for x in leaves]
        lp = run(*leaves)
        return torch.autograd.grad(lp, leaves, up.to(lp.dtype))

    right = gradients(torchs, [x.double() for x in tensors])
    found = [gradients(run, tensors) for run in (ours, torchs)]
    for got, theirs, want in zip(*found, right, strict=True):
        error, own = ((x.double() - want).norm() / want.norm() for x in (got, theirs))
        assert error <= TOLERANCES["gradient_vs_torch"].value * own


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["auto"])
@pytest.mark.parametrize("kind", ["logits"])
def test_beyond_2_to_the_31_elements(kind, device):
    num_rows, vocab = 70_000, 32_003
    logits = torch.zeros(num_rows, vocab, dtype=torch.bfloat16, device=device)
    rows = torch.tensor([0, 65_535, 65_536, num_rows - 1], device=device)
    logits[rows] = torch.randn(4, vocab, device=device).bfloat16()
    targets = torch.tensor([0, 5, vocab - 1, vocab - 1], device=device)
    lp = mp.selected_logprobs(logits.requires_grad_(), targets, rows)
    lp.sum().backward()
    wide = logits.detach()[rows].double().requires_grad_()
    expected = wide.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    expected.sum().backward()
    assert ((lp - expected).abs() <= selected_logprob_bound(expected)).all()
    difference = logits.grad[rows].double() - wide.grad
    assert difference.norm() <= TOLERANCES["gradient_bf16"].value * wide.grad.norm()
    assert int(logits.grad.count_nonzero(dim=1).count_nonzero()) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["auto"])
@pytest.mark.parametrize("kind", ["listed"])
def test_lists_of_thousands_of_ids(kind, device):
    """As many ids per token as a quarter of the vocabulary has."""
    p = problem(kind, device, torch.bfloat16, 0.1, sizes=(60, 128, 8_000, 60))
    vocab, count = len(p.leaves[1]), len(p.targets)
    check(replace(p, lists={"all": draw_lists(count, vocab, vocab // 4, 0.2).to(device)}))
