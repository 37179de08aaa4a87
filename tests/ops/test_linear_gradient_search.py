"""Gradients of linear_selected_logprobs in fp32 at |z / temperature| of 1 to thousands, by random search.

A logit of some hundreds is itself rounded by 1e-5 and more, in our product and in torch's, and so are all
probabilities. With products that are exact nothing of it is left.
"""

import math

import pytest
import torch
from support.linear_oracle import by_torch, draw, ours, sums_of_terms
from support.ranks import spawned
from torch import distributed

from mmpack.contracts import TOLERANCES, gradient_fp32_bound, linear_gradient_fp32_bound
from mmpack.ops.logprobs.linear import torch as module

few_and_many = pytest.mark.parametrize(
    "tries", [120, pytest.param(2000, marks=pytest.mark.slow)], ids=["few", "many"]
)


def errors(monkeypatch, seeds, exact):
    """(ours, torch's, largest sum of |terms|, largest |z / T|) of each gradient of each try."""
    for seed in seeds:
        problem = draw(seed, exact)
        monkeypatch.setattr(module, "BLOCK_COLUMNS", problem.block_columns)
        monkeypatch.setattr(module, "CHUNK_ROWS_CPU", problem.chunk_rows)
        sums, largest = sums_of_terms(problem)
        found = ours(problem), by_torch(problem, torch.float64), by_torch(problem, torch.float32)
        for got, want, plain, terms in zip(*found, sums, strict=True):
            off = (float((x.double() - want).abs().max()) for x in (got, plain))
            yield *off, float(terms.max()), largest


@few_and_many
def test_gradients_hold_the_contract_and_are_as_good_as_those_of_torch(monkeypatch, tries):
    ratios = []
    for error, of_torch, terms, largest in errors(monkeypatch, range(tries), exact=False):
        assert error <= linear_gradient_fp32_bound(terms, largest)
        if min(error, of_torch) > 1e-9 * terms:  # both see the rounding
            ratios.append(math.log(error / of_torch))
    assert len(ratios) > tries
    assert math.exp(sum(ratios) / len(ratios)) <= TOLERANCES["gradient_vs_torch"].value


@few_and_many
def test_exact_products_leave_the_bound_of_any_gradient(monkeypatch, tries):
    """What is ours, the softmax and its gradient, is as good at logits of thousands as at small ones."""
    largest_seen = 0.0
    for error, _, terms, largest in errors(monkeypatch, range(tries), exact=True):
        assert error <= gradient_fp32_bound(terms)
        largest_seen = max(largest, largest_seen)
    assert largest_seen > 1000


@pytest.mark.slow
def test_a_split_vocabulary_holds_it_too(tmp_path):
    spawned(_rank, 2, tmp_path, 400)


def _rank(rank, ranks, tries):
    for seed in range(tries):
        problem = draw(seed)
        module.BLOCK_COLUMNS, module.CHUNK_ROWS_CPU = problem.block_columns, problem.chunk_rows
        sums, largest = sums_of_terms(problem)
        columns = len(problem.factors[1]) // ranks
        shard = slice(columns * rank, columns * (rank + 1))
        got = ours(problem, shard, group=distributed.group.WORLD)
        to_hidden, *rest = by_torch(problem, torch.float64)
        want = [to_hidden, *(x[shard] for x in rest)]
        for a, b, terms in zip(got, want, sums, strict=True):
            error = float((a.double() - b).abs().max())
            assert error <= linear_gradient_fp32_bound(float(terms.max()), largest), seed
