"""linear_selected_logprobs over several GPUs: a split vocabulary on 1, 2 and 4 ranks, and under FSDP2."""

import os

import pytest
import torch
from torch import distributed

from mmpack.contracts import TOLERANCES
from mmpack.ops.logprobs.linear.selected import linear_selected_logprobs
from mmpack.ops.logprobs.listed import linear_listed_logprobs
from tests.support.kept_ids import draw_support
from tests.support.sharded_head import Head, head_problem, train_step, train_step_sharded
from tests.support.teachers import draw_lists

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
ROWS, WIDTH, VOCAB = 300, 192, 4096  # shards of whole tiles


def start(work, tmp_path, ranks):
    torch.multiprocessing.spawn(run, (work, ranks, str(tmp_path / "rendezvous")), nprocs=ranks)


def run(rank, work, ranks, rendezvous):
    os.environ["MMPACK_BACKEND"] = "triton"
    torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks,
        device_id=torch.device("cuda", rank),
    )  # fmt: skip
    torch.manual_seed(0)
    try:
        work(rank, ranks)
    finally:
        distributed.destroy_process_group()


def test_a_split_vocabulary_gives_the_bits_of_the_whole(tmp_path):
    start(split_vocabulary, tmp_path, 4 if torch.cuda.device_count() >= 4 else 2)


def split_vocabulary(rank, ranks):
    device = torch.device("cuda", rank)
    hidden = torch.randn(ROWS, WIDTH).to(device, torch.bfloat16)
    weight = torch.randn(VOCAB, WIDTH).to(device, torch.bfloat16)
    targets = torch.randint(0, VOCAB, (ROWS,)).to(device)
    up = torch.randn(ROWS).to(device)

    def step(group, part, budget):
        leaves = hidden.clone().requires_grad_(), weight[part].clone().requires_grad_()
        lp, h = linear_selected_logprobs(
            *leaves, targets, temperature=0.8, entropy=True, memory_budget=budget, group=group
        )
        (lp @ up + h @ up).backward()
        return lp.detach(), h.detach(), leaves[0].grad, leaves[1].grad

    groups = {n: distributed.new_group(list(range(n))) for n in (1, 2, 4) if n <= ranks}
    for budget in (None, 1 << 40):
        lp, h, to_hidden, to_weight = step(None, slice(0, VOCAB), budget)
        for size, group in groups.items():
            if rank >= size:
                continue
            part = slice(rank * VOCAB // size, (rank + 1) * VOCAB // size)
            got = step(group, part, budget)
            assert torch.equal(got[0], lp)
            assert torch.equal(got[1], h)
            for a, b in ((got[2], to_hidden), (got[3], to_weight[part])):
                difference = (a.double() - b.double()).norm() / b.double().norm()
                assert difference <= TOLERANCES["gradient_bf16"].value
            everyone = [torch.empty_like(got[2]) for _ in range(size)]
            distributed.all_gather(everyone, got[2], group=group)
            assert all(torch.equal(x, got[2]) for x in everyone)
            again = step(group, part, budget)
            assert all(torch.equal(a, b) for a, b in zip(again, got, strict=True))


def test_a_split_vocabulary_with_kept_ids_gives_the_bits_of_the_whole(tmp_path):
    start(split_vocabulary_of_lists, tmp_path, 4 if torch.cuda.device_count() >= 4 else 2)


def split_vocabulary_of_lists(rank, ranks):
    device = torch.device("cuda", rank)
    hidden = torch.randn(ROWS, WIDTH).to(device, torch.bfloat16)
    weight = torch.randn(VOCAB, WIDTH).to(device, torch.bfloat16)
    targets = torch.randint(0, VOCAB, (ROWS,))
    support = draw_support(targets, VOCAB, 200).to(device)
    targets, up = targets.to(device), torch.randn(2, ROWS).to(device)

    def step(part, group):
        leaves = hidden.clone().requires_grad_(), weight[part].clone().requires_grad_()
        lp, h = linear_selected_logprobs(
            *leaves, targets, temperature=0.8, entropy=True, group=group, support=support
        )
        (lp @ up[0] + h @ up[1]).backward()
        return lp.detach(), h.detach(), leaves[0].grad, leaves[1].grad

    lp, h, to_hidden, to_weight = step(slice(0, VOCAB), None)
    part = slice(rank * VOCAB // ranks, (rank + 1) * VOCAB // ranks)
    got = step(part, distributed.group.WORLD)
    assert torch.equal(got[0], lp)
    assert torch.equal(got[1], h)
    assert torch.equal(got[3], to_weight[part])
    difference = (got[2].double() - to_hidden.double()).norm() / to_hidden.double().norm()
    assert difference <= TOLERANCES["gradient_bf16"].value
    everyone = [torch.empty_like(got[2]) for _ in range(ranks)]
    distributed.all_gather(everyone, got[2])
    assert all(torch.equal(x, got[2]) for x in everyone)


def test_a_split_vocabulary_with_teachers_gives_the_bits_of_the_whole(tmp_path):
    start(split_vocabulary_of_teachers, tmp_path, 4 if torch.cuda.device_count() >= 4 else 2)


def split_vocabulary_of_teachers(rank, ranks):
    device = torch.device("cuda", rank)
    hidden = torch.randn(ROWS, WIDTH).to(device, torch.bfloat16)
    weight = torch.randn(VOCAB, WIDTH).to(device, torch.bfloat16)
    targets = torch.randint(0, VOCAB, (ROWS,)).to(device)
    lists = {"7B": draw_lists(ROWS, VOCAB, 64, 0.2).to(device)}
    up = torch.randn(len(lists["7B"].ids)).to(device)

    def step(part, group):
        leaves = hidden.clone().requires_grad_(), weight[part].clone().requires_grad_()
        out = linear_listed_logprobs(*leaves, targets, lists, temperature=0.8, group=group)
        (out.lists["7B"] @ up + out.targets.sum()).backward()
        return out.targets.detach(), out.lists["7B"].detach(), leaves[0].grad, leaves[1].grad

    targets_whole, listed, *gradients = step(slice(0, VOCAB), None)
    part = slice(rank * VOCAB // ranks, (rank + 1) * VOCAB // ranks)
    got = step(part, distributed.group.WORLD)
    assert torch.equal(got[0], targets_whole)
    assert torch.equal(got[1], listed)
    for a, b in ((got[2], gradients[0]), (got[3], gradients[1][part])):
        difference = (a.double() - b.double()).norm() / b.double().norm()
        assert difference <= TOLERANCES["gradient_bf16"].value
    everyone = [torch.empty_like(got[2]) for _ in range(ranks)]
    distributed.all_gather(everyone, got[2])
    assert all(torch.equal(x, got[2]) for x in everyone)


def test_fully_sharded_gradients_are_those_of_the_whole(tmp_path):
    start(fully_sharded, tmp_path, 2)


def fully_sharded(rank, ranks):
    device = torch.device("cuda", rank)
    problem = head_problem(device, torch.bfloat16, ranks)
    model = Head(torch.bfloat16).to(device)
    expected = train_step(model, problem)
    found = train_step_sharded(model, problem, rank, ranks)
    for name, want in expected.items():
        difference = (found[name].double() - want.double()).norm() / want.double().norm()
        assert difference <= TOLERANCES["gradient_bf16"].value, name
