"""Gradients of linear_selected_logprobs at |z / temperature| of 1 to thousands, by random search.

A logit of some hundreds is itself rounded by 1e-5 and more, in our product and in torch's, and so are all
probabilities. With products that are exact nothing of it is left.
"""

import math
import random

import pytest
import torch
from support.kernels import device_of_kernels, running
from support.logprobs import STORED, Problem, dotted

from mmpack.contracts import TOLERANCES, gradient_fp32_bound, linear_gradient_fp32_bound
from mmpack.ops.logprobs.linear import blocks
from mmpack.ops.logprobs.linear import torch as module

few_and_many = pytest.mark.parametrize(
    "tries", [100, pytest.param(2000, marks=pytest.mark.slow)], ids=["few", "many"]
)


def draw(seed, exact=False, dtype=torch.float32, most=120):
    """A problem and what comes in. `exact`: small whole numbers, of which every product is exact."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    width, vocab = r.choice([1, 3, 8, 16, 48, 64, 200]), r.choice([6, 18, 100, 516, 1002])
    num_rows, count = r.randint(1, most), r.randint(1, most)
    temperature = 10 ** r.uniform(-2, 1)
    scale = 10 ** r.uniform(0, 3.2) * temperature / width**0.5
    softcap = None if exact else r.choice([None, None, None, 4.0, 30.0, 50.0])
    if exact:
        power = 2.0 ** round(math.log2(scale / 100))
        hidden = torch.randint(-15, 16, (num_rows, width), generator=g) / 8
        weight = torch.randint(-40, 41, (vocab, width), generator=g) * power
        bias = torch.randint(-40, 41, (vocab,), generator=g) * power
    else:
        hidden = torch.randn(num_rows, width, generator=g)
        weight = torch.randn(vocab, width, generator=g) * scale
        bias = torch.randn(vocab, generator=g) * scale * r.choice([0, 1])
    leaves = [x.to(dtype) for x in (hidden, weight, bias)]
    rows = torch.randint(0, num_rows, (count,), generator=g)
    targets = torch.randint(0, vocab, (count,), generator=g)
    if r.random() < 0.3:  # what greedy sampling takes
        targets = (leaves[0][rows].float() @ leaves[1].float().T + leaves[2].float()).argmax(-1)
    options = {"temperature": temperature, "softcap": softcap}
    up = dict(zip(("", "entropy"), torch.randn(2, count, generator=g), strict=True))
    up["entropy"] *= r.random() < 0.5
    return Problem("hidden", leaves, targets, rows, options=options), up, r


def gradients(p, up, dtype):
    """By autograd in `dtype`."""
    found, leaves, _ = p.exact(dtype)
    return torch.autograd.grad(dotted(found, up), leaves)


def sums_of_terms(p, up):
    """Of each gradient's entries, what the tokens add without their signs; the largest |z / temperature|. float64.

    A token adds g·(onehot - p) and, of the entropy, -u·p·(log p + H) to its logits; a slope of softcap counts as 1.
    """
    hidden, weight, bias = (x.double() for x in p.leaves)
    temperature, softcap = p.options["temperature"], p.options["softcap"]
    raw = hidden[p.rows] @ weight.T + bias
    capped = raw if softcap is None else softcap * torch.tanh(raw / softcap)
    full = torch.log_softmax(capped / temperature, -1)
    share, (g, u) = full.exp(), (x.double().abs()[:, None] for x in up.values())
    terms = (g * share).scatter_add(1, p.targets[:, None], g)
    entropy = -(share * full).sum(-1, keepdim=True)
    terms = (terms + u * share * (1 + (full + entropy).abs())) / temperature
    to_hidden = torch.zeros_like(hidden).index_add_(0, p.rows, terms @ weight.abs())
    sums = [to_hidden, terms.T @ hidden[p.rows].abs(), terms.sum(0)]
    return sums, float(raw.abs().max()) / temperature


def errors(monkeypatch, tries, exact):
    """(ours, torch's, largest sum of |terms|, largest |z / T|) of each gradient of each try."""
    for seed in range(tries):
        p, up, r = draw(seed, exact)
        monkeypatch.setattr(module, "BLOCK_COLUMNS", r.choice([64, 384, 16384]))
        monkeypatch.setattr(module, "CHUNK_ROWS_CPU", r.choice([16, 64]))
        sums, largest = sums_of_terms(p, up)
        found = p.step(up)[1], gradients(p, up, torch.float64), gradients(p, up, torch.float32)
        for got, want, plain, terms in zip(*found, sums, strict=True):
            off = (float((x.double() - want).abs().max()) for x in (got, plain))
            yield *off, float(terms.max()), largest


@few_and_many
def test_gradients_hold_the_contract_and_are_as_good_as_those_of_torch(monkeypatch, tries):
    ratios = []
    for error, of_torch, terms, largest in errors(monkeypatch, tries, exact=False):
        assert error <= linear_gradient_fp32_bound(terms, largest)
        if min(error, of_torch) > 1e-9 * terms:  # both see the rounding
            ratios.append(math.log(error / of_torch))
    assert len(ratios) > tries
    assert math.exp(sum(ratios) / len(ratios)) <= TOLERANCES["gradient_vs_torch"].value


@few_and_many
def test_exact_products_leave_the_bound_of_any_gradient(monkeypatch, tries):
    """What is ours, the softmax and its gradient, is as good at logits of thousands as at small ones."""
    largest_seen = 0.0
    for error, _, terms, largest in errors(monkeypatch, tries, exact=True):
        assert error <= gradient_fp32_bound(terms)
        largest_seen = max(largest, largest_seen)
    assert largest_seen > 1000


@pytest.mark.kernel
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(1000), marks=pytest.mark.gpu)])
def test_gradients_in_bf16_by_kernels(seeds, stored, monkeypatch):
    """Rounding to bf16 hides that of the logits, but where softcap is flat and leaves next to no gradient."""
    running("triton", monkeypatch)
    monkeypatch.setattr(blocks, "MIN_ROWS", 1)
    device = device_of_kernels()
    cut = 2 if device.type == "cpu" else 1  # the interpreter cuts bf16 off where a GPU rounds
    for seed in seeds:
        p, up, _ = draw(seed, dtype=torch.bfloat16, most=40)
        (terms, _), want = sums_of_terms(p, up), gradients(p, up, torch.float64)
        leaves, p.targets, p.rows = p.leaves, p.targets.to(device), p.rows.to(device)
        p.leaves = [x.to(device) for x in leaves]
        moved = {name: x.to(device) for name, x in up.items()}
        got = p.step(moved, memory_budget=STORED if stored else None)[1]
        for a, b, sizes in zip(got, want, terms, strict=True):
            bound = TOLERANCES["gradient_bf16"].value * cut * sizes.norm()
            assert (a.cpu().double() - b).norm() <= bound, seed
