"""All ops of logprobs: the same bits in any batch, however rows are named, and for any number of ranks."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kept_ids import draw_support
from support.kernels import device_of_kernels, running
from support.logprobs import (
    HIDDEN,
    LOGITS,
    STORED,
    choose_route,
    dotted,
    drawn,
    entries,
    problem,
)
from support.ranks import here, spawned
from torch import distributed, nn

import mmpack as mp
from mmpack.contracts import (
    TOLERANCES,
    gradient_fp32_bound,
    linear_logprob_bound,
    selected_logprob_bound,
)
from mmpack.errors import ArgumentError
from mmpack.ops.logprobs import sharded
from mmpack.ops.logprobs.linear import torch as linear_torch
from mmpack.ops.logprobs.lists import hidden as op_of_hidden
from mmpack.ops.logprobs.lists.products import by_products
from mmpack.ops.logprobs.sharded import sharded_selected_logprobs

CPU = torch.device("cpu")
KINDS = (*LOGITS, *HIDDEN)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_path = pytest.mark.parametrize(
    "path", ["torch", pytest.param("triton", marks=pytest.mark.kernel)]
)


def in_order(kind, device, count, width, vocab, dtype=torch.float32):
    """`count` tokens, of which token n reads row n."""
    p = problem(kind, device, dtype, sizes=(count + 10, width, vocab, count), temperature=0.9)
    p.leaves[0] = torch.randn_like(p.leaves[0])
    p.rows = torch.arange(count, device=device)
    return p


def assert_same_bits_in_any_batch(p, sizes):
    values, grads, up = p.step()
    order = torch.randperm(len(p.rows), device=p.rows.device)
    for size in sizes:
        tokens = order[:size]
        part, at = p.of(tokens), entries(p, tokens)
        own = {name: x[at[name]] for name, x in up.items()}
        known = {"rows_unique": tokens.sort()[0], "row_inverse": tokens.argsort().argsort()}
        for other in (part, replace(part, options=part.options | known)):
            found, (grad, *_), _ = other.step(own)
            assert all(torch.equal(x, values[name][at[name]]) for name, x in found.items())
            assert torch.equal(grad[tokens], grads[0][tokens])
        if p.kind == "logits":  # as a batch of their own
            apart = replace(part, leaves=[p.leaves[0][tokens]])
            found, (grad,), _ = apart.step(own, rows=None)
            assert torch.equal(found[""], values[""][tokens]) and torch.equal(
                grad, grads[0][tokens]
            )


@each_kind
@settings(max_examples=12)
@given(st.integers(1, 150), st.sampled_from([1, 3, 11, 17, 64, 130]), st.integers(0, 2**20))
def test_in_any_batch(kind, count, width, seed):
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        choose_route(kind, patch)
        vocab = width if kind in LOGITS else 517
        assert_same_bits_in_any_batch(in_order(kind, CPU, count, width, max(vocab, 5)), (count, 1))


@pytest.mark.kernel
@each_kind
def test_in_any_batch_by_kernels(kind, monkeypatch, no_tf32):
    device = running("triton", monkeypatch)
    choose_route(kind, monkeypatch)
    dtype = torch.bfloat16 if kind in HIDDEN else torch.float32
    sizes, width, vocab = (1, 7, 31, 32, 33), 40, 203
    if device.type == "cuda":
        sizes, width, vocab = (1, 127, 128, 129, 4096), 256, 8201
    assert_same_bits_in_any_batch(in_order(kind, device, sizes[-1], width, vocab, dtype), sizes)


@each_path
@each_kind
def test_however_rows_are_named_and_whatever_is_kept(path, kind, monkeypatch, no_tf32):
    device = running(path, monkeypatch)
    choose_route(kind, monkeypatch)
    dtype = torch.bfloat16 if path == "triton" and kind in HIDDEN else torch.float32
    p = problem(kind, device, dtype)
    values, grads, up = p.step()
    others = [p.counted().step(up), p.counted().step(up, rows=None)]
    if kind in LOGITS:
        others += [p.counted().step(up, gradient=form) for form in ("compact", "inplace")]
    for found, own, _ in others:
        assert all(torch.equal(x, values[name]) for name, x in found.items())
        for a, b in zip(own, grads, strict=True):
            assert torch.equal(a.to_dense() if a.is_sparse else a, b)
    if kind in HIDDEN:
        stored, _, _ = p.step(up, memory_budget=STORED)
        assert all(torch.equal(x, values[name]) for name, x in stored.items())


# Several ranks.


@pytest.mark.parametrize(
    ("path", "on", "ranks"),
    [
        ("torch", "cpu", 2),
        pytest.param("torch", "cpu", 4, marks=pytest.mark.slow),
        pytest.param("triton", "cpu", 2, marks=pytest.mark.kernel),
        pytest.param("triton", "cuda", 2, marks=[pytest.mark.gpu, pytest.mark.kernel]),
        pytest.param("triton", "cuda", 4, marks=[pytest.mark.gpu, pytest.mark.kernel]),
    ],
)
def test_a_split_vocabulary_gives_what_the_whole_gives(path, on, ranks, tmp_path):
    if on == "cpu" and path == "triton" and device_of_kernels().type == "cuda":
        pytest.skip("gloo gathers on the CPU")
    spawned(_rank, ranks, tmp_path, path, on=on)


def _rank(rank, ranks, path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMPACK_BACKEND", path)
        patch.setattr(linear_torch, "BLOCK_COLUMNS", 64)
        for kind in (*HIDDEN, "chosen"):
            _check_split(rank, ranks, path, kind, patch)
        _check_fully_sharded(rank, ranks, torch.bfloat16 if path == "triton" else torch.float32)
        if path == "torch":
            for case in ("entropy", "logprobs", "kept", "float64", "none", "masked"):
                _check_logits(case, rank, ranks)


def _check_split(rank, ranks, path, kind, patch):
    """Values and gradients to shards have one process's bits, where products of fewer columns have the same ones."""
    torch.manual_seed(0)
    dtype, vocab = (torch.bfloat16 if path == "triton" else torch.float32), 512
    vocab = 4096 if here().type == "cuda" else vocab
    sizes = (300, 192, vocab, 300) if here().type == "cuda" else (40, 24, vocab, 60)
    p = problem(
        "kept" if kind == "chosen" else kind,
        here(),
        dtype,
        sizes=sizes,
        temperature=0.8,
        softcap=9.0,
    )
    choose_route(kind, patch)
    if kind == "chosen":  # lists that are short beside V, and long beside a shard
        p.support = draw_support(p.targets.cpu(), vocab, 8).to(here())
        shape = len(p.targets), len(p.support.ids)
        chosen = [by_products(*shape, v, CPU, torch.float32) for v in (vocab, vocab // ranks)]
        assert chosen == [False, True] or here().type == "cuda"
        patch.setattr(op_of_hidden, "by_products", by_products)
    values, grads, up = p.step()
    part = slice(vocab // ranks * rank, vocab // ranks * (rank + 1))
    shard = replace(p, leaves=[p.leaves[0], *(x[part] for x in p.leaves[1:])])
    found, (to_hidden, *own), _ = shard.step(up, group=distributed.group.WORLD)
    exactly = kind != "multiplied"
    for name, x in found.items():
        assert (x - values[name]).abs().max() <= (0 if exactly else linear_logprob_bound(12.0)), (
            name
        )
    cut = 1 if here().type == "cuda" else 2
    for i, (a, whole) in enumerate(zip([to_hidden, *own], grads, strict=True)):
        b = (whole if i == 0 else whole[part]).double()
        if dtype == torch.bfloat16:
            assert (a.double() - b).norm() <= cut * TOLERANCES["gradient_bf16"].value * b.norm()
        else:
            most = 0 if exactly and i else gradient_fp32_bound(whole.abs().max())
            assert (a.double() - b).abs().max() <= most
    assert not to_hidden[p.unread].any()
    everywhere = [torch.empty_like(to_hidden) for _ in range(ranks)]
    distributed.all_gather(everywhere, to_hidden)
    assert all(torch.equal(other, to_hidden) for other in everywhere)


def _check_logits(case, rank, ranks):
    """Logits whose columns are split, against torch.log_softmax of the whole in float64."""
    torch.manual_seed(0)
    double, entropy, vocab, world = (
        case == "float64",
        case != "logprobs",
        128,
        distributed.group.WORLD,
    )
    p = problem("logits", CPU, torch.float64 if double else torch.float32, 1.0, (60, 0, vocab, 41))
    p.options = {"temperature": 0.7}
    p.rows, p.leaves = torch.randperm(60)[:41], [torch.randn_like(p.leaves[0]) * 8]
    p.targets[:4] = torch.tensor([0, vocab // 2 - 1, vocab // 2, vocab - 1])  # edges of the shards
    if case == "none":
        p = p.of(torch.zeros(0, dtype=torch.int64))
    if case == "kept":
        p.support = draw_support(p.targets, vocab, 20)
    if (
        case == "masked"
    ):  # as with kept ids that all lie in one shard: the other rank has no id at all
        p.leaves[0][p.rows[4:], vocab // 2 :] = -torch.inf
        p.targets[4:] %= vocab // 2
    p.leaves[0][p.unread] = torch.nan
    part = slice(vocab // ranks * rank, vocab // ranks * (rank + 1))
    own = p.leaves[0][:, part].clone().requires_grad_()
    arguments = p.targets, p.rows, world, 0.7, entropy
    made = sharded_selected_logprobs(own, *arguments, support=p.support)
    got = {"": made[0], "entropy": made[1]} if entropy else {"": made}
    want, (whole,), _ = p.exact()
    want = {name: want[name] for name in got}
    up = drawn(got)
    for named in (got, want):
        dotted(named, up).backward()
    for name, x in got.items():
        bound = 1e-12 if double else selected_logprob_bound(want[name])
        assert x.dtype == own.dtype and ((x.double() - want[name]).abs() <= bound).all()
    gradient = whole.grad.nan_to_num()
    bound = 1e-12 if double else gradient_fp32_bound(gradient.abs().max())
    assert ((own.grad - gradient[:, part]).abs() <= bound).all() and not own.grad[p.unread].any()
    every = [torch.empty_like(got[""]) for _ in range(ranks)]
    distributed.all_gather(every, got[""].detach())
    assert torch.equal(every[0], every[1])
    if case == "kept":
        _check_lists_that_nobody_looked_at(own.detach(), p, world)
    if case == "entropy":
        with pytest.raises(ArgumentError, match="rows repeat"):
            sharded_selected_logprobs(own, p.targets, p.rows * 0, world)
        with pytest.raises(ArgumentError, match="targets runs from"):
            sharded_selected_logprobs(own, p.targets + vocab, p.rows, world)


def _check_lists_that_nobody_looked_at(own, p, world):
    """Lists as on a GPU, where values are not looked at: NaN, and no 0, for those that say nothing of their target."""
    offsets, ids = p.support.offsets.clone(), p.support.ids.clone()
    ids[int((ids[: offsets[1]] == p.targets[0]).nonzero()[0])] = (
        1000  # beyond V, and the target is gone
    )
    offsets[2:] -= offsets[2] - offsets[1]  # the second list is empty
    ids = torch.cat([ids[: offsets[1]], p.support.ids[p.support.offsets[2] :]])
    own.requires_grad_()
    with mock.patch.object(sharded, "check_support"):
        lp, h = sharded_selected_logprobs(
            own, p.targets, p.rows, world, 0.7, True, support=mp.ops.Support(offsets, ids)
        )
    for x in (lp, h):
        assert x[:2].isnan().all() and not x[2:].isnan().any()
    lp.sum().backward()
    assert not own.grad[p.rows[2:]].isnan().any()


class Head(nn.Module):
    """ids [T] -> logprobs [N] of `targets` at `rows`; the output weight is read in the module's own forward."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(512, 48, dtype=dtype)
        self.body = nn.Linear(48, 48, dtype=dtype)
        self.lm_head = nn.Linear(48, 512, bias=False, dtype=dtype)

    def forward(self, ids, targets, rows):
        hidden = self.body(self.embed(ids)).tanh()
        return mp.linear_selected_logprobs(hidden, self.lm_head.weight, targets, rows)


def _check_fully_sharded(rank, ranks, dtype):
    """Gradients of the mean over the ranks under FSDP2 are those of the whole model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    inputs = [[x.to(here()) for x in torch.randint(0, 512, (2, 64))] for _ in range(ranks)]
    rows, up = torch.randperm(64).to(here()), torch.randn(64).to(here())
    model = Head(dtype).to(here())
    for own in inputs:
        (model(*own, rows) @ up / ranks).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    mesh = init_device_mesh(here().type, (ranks,))
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    (model(*inputs[rank], rows) @ up).backward()
    bound = TOLERANCES["gradient_bf16"].value * 2 if dtype == torch.bfloat16 else 1e-5
    for name, parameter in model.named_parameters():
        found, want = parameter.grad.full_tensor().double(), expected[name].double()
        assert (found - want).norm() <= bound * want.norm(), name
    weight = model.lm_head.weight  # outside of the forward: this rank's rows of it
    with pytest.raises(ArgumentError, match=r"weight is a DTensor.*weight\.full_tensor\(\)$"):
        x = torch.randn(2, 48, device=here(), dtype=dtype)
        mp.linear_selected_logprobs(x, weight, torch.tensor([0, 1], device=here()))
