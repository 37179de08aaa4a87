"""The FLOPs of a step, against torch's own counter over a real forward and backward."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.step.models import MODELS
from benchmarks.step.padded import padded
from benchmarks.step.step import Options, case_of
from benchmarks.step.work import Work, step_flops

CPU = torch.device("cpu")


def counted(call):
    """FLOPs of attention and of all other products, as torch counts what runs."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    by_op = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = by_op.pop("aten.bmm")
    return attention, sum(by_op.values())


@pytest.mark.parametrize(
    ("name", "workload"),
    [
        ("qwen2.5-vl-7b", "video"),
        pytest.param("qwen3-vl-8b", "pictures", marks=pytest.mark.slow),
    ],
)
def test_flops_are_those_that_torch_counts(name, workload):
    case = case_of(Options([name], [workload], ["padded"], tiny=True), name, workload, CPU)
    model, members = case.build(), case.job.groups()[0]
    work = padded(model, case.job, members).work
    attention, products = counted(lambda: padded(model, case.job, members).loss.backward())
    flops = step_flops(model, [work], head_again=False)
    assert products == flops.layers + flops.head + flops.tower - flops.left_out
    # plain attention computes what causal rows do not see, and does not make its scores again
    pairs = work.rows**2 // len(members)
    every = step_flops(model, [Work(0, pairs, 0, work.grids)])
    assert attention * 4.5 / 4 == every.attention + every.tower_attention


@pytest.mark.parametrize("name", MODELS)
def test_the_real_shapes_have_their_names_parameters(name):
    from benchmarks.step.models import build

    billions = sum(p.numel() for p in build(name, torch.device("meta")).parameters()) / 1e9
    assert billions == pytest.approx({"7b": 8.29, "3b": 4.07, "8b": 8.77}[name[-2:]], abs=0.01)
