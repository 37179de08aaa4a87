"""Logprobs of logits whose columns are split over two ranks, against torch.log_softmax of the whole in float64."""

from unittest import mock

import pytest
import torch
from support.ranks import spawned
from torch import distributed

from mmpack.contracts import gradient_fp32_bound, selected_logprob_bound
from mmpack.errors import ArgumentError
from mmpack.ops.logprobs import sharded
from mmpack.ops.logprobs.sharded import sharded_selected_logprobs
from mmpack.ops.logprobs.support import Support
from tests.support.kept_ids import draw_support, restrict

T, V, N = 60, 128, 41


CASES = ("entropy", "logprobs", "kept", "float64", "none", "masked")


def test_two_ranks_are_the_whole(tmp_path):
    spawned(_rank, 2, tmp_path)


def _rank(rank, ranks):
    for case in CASES:
        _check(case, rank, ranks)


def _check(case, rank, ranks):
    torch.manual_seed(0)
    dtype = torch.float64 if case == "float64" else torch.float32
    count = 0 if case == "none" else N
    logits, targets = 8 * torch.randn(T, V, dtype=dtype), torch.randint(0, V, (count,))
    if count:  # at the edges of the shards
        targets[:4] = torch.tensor([0, V // 2 - 1, V // 2, V - 1])
    rows = torch.randperm(T)[:count]
    if (
        case == "masked"
    ):  # as with kept ids that all lie in one shard: the other rank has no id at all
        logits[rows[4:], V // 2 :], targets[4:] = -torch.inf, targets[4:] % (V // 2)
    unread = torch.ones(T, dtype=torch.bool).index_fill_(0, rows, False)
    logits[unread] = torch.nan
    support = draw_support(targets, V, 20) if case == "kept" else None
    entropy, up = case != "logprobs", torch.randn(2, count, dtype=dtype)

    whole = logits.to(torch.float64, copy=True).requires_grad_()
    read = whole[rows] if support is None else restrict(whole[rows], support)
    logs = (read / 0.7).log_softmax(-1)
    # -inf times a probability of 0 is 0
    expected = (
        logs[torch.arange(count), targets],
        -(logs.exp() * logs.clamp(min=-1e30)).sum(-1),
    )
    (expected[0] @ up[0].double() + entropy * expected[1] @ up[1].double()).backward()

    part = slice(V // ranks * rank, V // ranks * (rank + 1))
    own = logits[:, part].clone().requires_grad_()
    world = distributed.group.WORLD
    got = sharded_selected_logprobs(own, targets, rows, world, 0.7, entropy, support=support)
    got = got if entropy else (got,)
    sum((x @ g for x, g in zip(got, up, strict=False)), own.new_zeros(())).backward()

    for mine, theirs in zip(got, expected, strict=False):
        assert mine.dtype == dtype
        error = (mine.double() - theirs).abs()
        assert (error <= (1e-12 if case == "float64" else selected_logprob_bound(theirs))).all()
    gradient = whole.grad[:, part].nan_to_num()
    bound = 1e-12 if case == "float64" else gradient_fp32_bound(whole.grad.nan_to_num().abs().max())
    assert ((own.grad - gradient).abs() <= bound).all()
    assert (own.grad[unread] == 0).all()
    every = [torch.empty_like(got[0]) for _ in range(ranks)]
    distributed.all_gather(every, got[0].detach())
    assert torch.equal(every[0], every[1])
    if support is not None:
        _check_lists_that_nobody_looked_at(own.detach(), targets, rows, support)
    if count:
        with pytest.raises(ArgumentError, match="rows repeat"):
            sharded_selected_logprobs(own, targets, rows * 0, world)
        with pytest.raises(ArgumentError, match="targets runs from"):
            sharded_selected_logprobs(own, targets + V, rows, world)


def _check_lists_that_nobody_looked_at(own, targets, rows, support):
    """Lists as on a GPU, where values are not looked at: NaN, and no 0, for those that say nothing of their target."""
    offsets, ids = support.offsets.clone(), support.ids.clone()
    at = int((ids[: offsets[1]] == targets[0]).nonzero()[0])
    ids[at] = V + 7  # outside of the vocabulary, and the target is gone
    offsets[2:] -= offsets[2] - offsets[1]  # the second list is empty
    ids = torch.cat([ids[: offsets[1]], support.ids[support.offsets[2] :]])
    own = own.clone().requires_grad_()
    with mock.patch.object(sharded, "check_support"):
        lp, h = sharded_selected_logprobs(
            own, targets, rows, distributed.group.WORLD, 0.7, True, support=Support(offsets, ids)
        )
    assert lp[:2].isnan().all() and h[:2].isnan().all()
    assert not lp[2:].isnan().any() and not h[2:].isnan().any()
    lp.sum().backward()
    assert not own.grad[rows[2:]].isnan().any()
